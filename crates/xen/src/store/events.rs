//! A client's queue of watch events: FIFO, without duplicates, and bounded whatever others write.
//! It belongs to a [`Client`](super::Client), which pushes events as they arrive and pops them for
//! its owner.

use std::collections::{HashSet, VecDeque};

use super::path;

/// Most events kept for one client. A back end watches a handful of nodes for each of some hundred
/// devices, and equal events merge, so only a flood in trees that are watched as a whole reaches
/// this.
pub const MAX_EVENTS: usize = 4096;

/// An event of a client's watches, returned by [`Client::event`](super::Client::event).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The node, or one below it, was written, created or removed; or the watch is new.
    Changed {
        /// Path of the node that changed, which is the watched node or one below it; relative if
        /// the watch is.
        path: String,
        /// Token that was given to the watch.
        token: u64,
    },
    /// Too much changed to keep a list: read everything that is watched.
    Flood,
}

/// The queue of events. Equal events merge, because each means no more than "read again".
#[derive(Debug, Default)]
pub(super) struct Events {
    queue: VecDeque<Event>,
    queued: HashSet<Event>,
}

impl Events {
    pub(super) fn push(&mut self, event: Event) {
        if self.queued.contains(&Event::Flood) || self.queued.contains(&event) {
            return;
        }
        if self.queue.len() >= MAX_EVENTS {
            *self = Events::default();
            return self.push(Event::Flood);
        }
        self.queued.insert(event.clone());
        self.queue.push_back(event);
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        let event = self.queue.pop_front()?;
        self.queued.remove(&event);
        Some(event)
    }

    /// Removes the events of a watch that was ended.
    pub(super) fn forget(&mut self, base: &str, ended: u64) {
        let of_it = |event: &Event| matches!(event, Event::Changed { path, token } if *token == ended && path::is_within(path, base));
        self.queue.retain(|event| !of_it(event));
        self.queued.retain(|event| !of_it(event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(path: &str, token: u64) -> Event {
        Event::Changed { path: path.into(), token }
    }

    #[test]
    fn equal_events_merge_until_they_are_taken() {
        let mut events = Events::default();
        for path in ["/a", "/b", "/a"] {
            events.push(changed(path, 1));
        }
        assert_eq!(
            (events.pop(), events.pop(), events.pop()),
            (Some(changed("/a", 1)), Some(changed("/b", 1)), None)
        );
        events.push(changed("/a", 1));
        assert_eq!(events.pop(), Some(changed("/a", 1)));
    }

    #[test]
    fn a_flood_is_told_once_and_takes_no_memory() {
        let mut events = Events::default();
        for n in 0..3 * MAX_EVENTS {
            events.push(changed(&format!("/a/{n}"), 1));
        }
        assert_eq!((events.pop(), events.pop()), (Some(Event::Flood), None));
        events.push(changed("/a", 1));
        assert_eq!(events.pop(), Some(changed("/a", 1)));
    }

    #[test]
    fn an_ended_watch_says_nothing_more() {
        let mut events = Events::default();
        for (path, token) in [("/a", 1), ("/a/b", 1), ("/a", 2), ("/ab", 1)] {
            events.push(changed(path, token));
        }
        events.forget("/a", 1);
        assert_eq!(
            (events.pop(), events.pop(), events.pop()),
            (Some(changed("/a", 2)), Some(changed("/ab", 1)), None)
        );
    }
}
