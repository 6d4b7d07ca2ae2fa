//! Which entries are not as they are stored any more, for whoever finds what is stored when this process was killed.
//!
//! A front end's message is lost with the process that has read it, and its front end may wait for an answer for ever. So the control plane's thread sets an
//! entry's mark before it serves the entry, and clears it afterwards if nothing has changed of what is stored. A mark is a word in memory that outlives the process.

use std::collections::BTreeMap;

use ringferry_memory::Counters;

use super::table::{EntryId, Generation};

/// A mark for each entry of which a state is stored.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    words: Option<Counters>,
    /// The word of each entry, and the generation that is stored.
    entries: BTreeMap<EntryId, (usize, (u64, u64))>,
}

impl Marks {
    /// Marks for entries that are stored with these generations, each of which has a word.
    pub(crate) fn new(words: Counters, stored: impl IntoIterator<Item = (Generation, usize)>) -> Marks {
        let entries = stored.into_iter().map(|((entry, generation), word)| (entry, (word, generation)));
        Marks { words: Some(words), entries: entries.collect() }
    }

    /// Says that an entry is served from now on.
    pub(super) fn begin(&self, entry: EntryId) {
        if let (Some(words), Some((word, _))) = (&self.words, self.entries.get(&entry)) {
            words.set(*word, 1);
        }
    }

    /// Says that an entry was served, and which state it has now.
    pub(super) fn end(&self, entry: EntryId, generation: (u64, u64)) {
        if let (Some(words), Some((word, stored))) = (&self.words, self.entries.get(&entry))
            && *stored == generation
        {
            words.clear(*word, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_marked_while_it_is_served_and_once_it_has_changed() {
        let memory = ringferry_memory::SharedMem::new("marks", 4096).unwrap();
        let words = Counters::new(memory.map_at(0).unwrap());
        let [first, second] = [EntryId::nth(1), EntryId::nth(2)];
        let marks = Marks::new(words.clone(), [((first, (0, 5)), 7), ((second, (2, 1)), 8)]);
        let state = || [words.load(7), words.load(8)];
        marks.begin(first);
        assert_eq!(state(), [1, 0]);
        marks.end(first, (0, 5));
        assert_eq!(state(), [0, 0]);
        marks.begin(second);
        marks.end(second, (2, 2));
        assert_eq!(state(), [0, 1]);
        // Of an entry that is not stored nothing is known.
        marks.begin(EntryId::nth(3));
        marks.end(EntryId::nth(3), (0, 0));
        assert_eq!(state(), [0, 1]);
    }
}
