//! What was denied of late, for the audit log: a ring for each worker, which overwrites its oldest entry.
//!
//! The worker raises `begun`, writes the entry, and raises `written`, with release; a reader copies entries up to `written` and then looks at `begun`, which
//! tells the ones that may have been overwritten meanwhile. Neither waits. A worker notes a bounded number in a second, and counts the rest.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::flows::Key;
use crate::headers::Ends;
use crate::policy::Direction;

/// Entries of a ring.
const ENTRIES: usize = 256;

/// Entries that a worker adds in a second: more is read by nobody, and each costs a cache line.
const PER_SECOND: u64 = 100;

const WORDS: usize = 7;

/// Bytes of a name that are kept: names have no more, but for the characters that are escaped where they are shown.
const MAX_NAME: usize = 255;

/// Words of a name in its ring, of which the first byte is its length.
const NAME_WORDS: usize = (1 + MAX_NAME).div_ceil(size_of::<u64>());

/// A packet that was denied, or would have been.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Second of the switch's clock.
    pub at: u32,
    /// Whether the guest had sent it.
    pub direction: Direction,
    /// Its ends, as the guest sees them.
    pub ends: Ends,
    /// Its VLAN, 0 without a tag.
    pub vlan: u16,
    /// The rule that denied it.
    pub rule: u16,
    /// It has passed all the same, as the policy is tried out.
    pub passed: bool,
    /// The name that was asked for, if that is why; its first 255 bytes.
    pub name: Option<String>,
}

/// The ring of one worker.
#[derive(Debug)]
struct Ring {
    entries: Box<[[AtomicU64; WORDS]]>,
    /// The names of the entries that have one; none at all under a policy without resolvers.
    names: Box<[[AtomicU64; NAME_WORDS]]>,
    /// Entries ever begun, and ever written.
    begun: AtomicU64,
    written: AtomicU64,
    /// The second of the last entry, and the entries in it.
    second: AtomicU64,
    in_second: AtomicU64,
    /// Denials that were not noted.
    missed: AtomicU64,
}

/// The rings of all workers, under one policy: what its rules have denied.
#[derive(Debug)]
pub(crate) struct Denials {
    /// A random number, by which a reader finds that these are other rings than those that it has read.
    number: u64,
    rings: Box<[Ring]>,
}

/// Where a reader is: the number of the rings, and the entries of each worker that it has seen there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor(Vec<u64>);

impl Cursor {
    /// The cursor that another one was [turned into](Self::into_inner).
    #[must_use]
    pub fn of(seen: Vec<u64>) -> Cursor {
        Cursor(seen)
    }

    /// Returns the numbers that it is made of.
    #[must_use]
    pub fn into_inner(self) -> Vec<u64> {
        self.0
    }
}

impl Denials {
    /// Makes empty rings, in which names have room if `named`.
    pub(crate) fn new(workers: usize, number: u64, named: bool) -> Denials {
        let names = if named { ENTRIES } else { 0 };
        let ring = || Ring {
            entries: (0..ENTRIES).map(|_| Default::default()).collect(),
            names: (0..names).map(|_| Default::default()).collect(),
            begun: AtomicU64::new(0),
            written: AtomicU64::new(0),
            second: AtomicU64::new(0),
            in_second: AtomicU64::new(0),
            missed: AtomicU64::new(0),
        };
        Denials { number, rings: (0..workers.max(1)).map(|_| ring()).collect() }
    }

    /// Notes a denial. Only the thread of `worker` calls it.
    pub(crate) fn note(&self, worker: usize, denial: &Denial) {
        let Some(ring) = self.rings.get(worker) else { return };
        let add = |counter: &AtomicU64| {
            let before = counter.load(Ordering::Relaxed);
            counter.store(before + 1, Ordering::Relaxed);
            before
        };
        if ring.second.load(Ordering::Relaxed) != u64::from(denial.at) {
            ring.second.store(denial.at.into(), Ordering::Relaxed);
            ring.in_second.store(0, Ordering::Relaxed);
        }
        if add(&ring.in_second) >= PER_SECOND {
            add(&ring.missed);
            return;
        }
        let written = ring.written.load(Ordering::Relaxed);
        let entry = &ring.entries[written as usize % ENTRIES];
        let is_in = u64::from(denial.direction == Direction::In);
        let name = denial.name.as_ref().zip(ring.names.get(written as usize % ENTRIES));
        let rest = u64::from(denial.rule)
            | is_in << 16
            | u64::from(denial.passed) << 17
            | u64::from(name.is_some()) << 18;
        let key = Key::flow(&denial.ends, denial.vlan).words();
        // Whoever reads one of these words sees, behind its fence, that this entry was begun.
        ring.begun.store(written + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, value) in entry.iter().zip(key.into_iter().chain([denial.at.into(), rest])) {
            word.store(value, Ordering::Relaxed);
        }
        if let Some((name, entry)) = name {
            for (word, value) in entry.iter().zip(words_of(name)) {
                word.store(value, Ordering::Relaxed);
            }
        }
        ring.written.store(written + 1, Ordering::Release);
    }

    /// Returns what was denied since `cursor`, by worker and in order, and moves it on; also the denials since the start that are in no ring.
    pub(crate) fn since(&self, cursor: &mut Cursor) -> (Vec<Denial>, u64) {
        // Others begin anew: of another policy, or in another process.
        if cursor.0.first() != Some(&self.number) {
            cursor.0 = vec![self.number];
        }
        cursor.0.resize(1 + self.rings.len(), 0);
        let (mut denials, mut missed) = (Vec::new(), 0);
        for (ring, seen) in self.rings.iter().zip(&mut cursor.0[1..]) {
            let written = ring.written.load(Ordering::Acquire);
            let oldest = written.saturating_sub(ENTRIES as u64);
            let from = (*seen).max(oldest);
            let entry = |at: u64| {
                let entry = &ring.entries[at as usize % ENTRIES];
                let entry = entry.each_ref().map(|word| word.load(Ordering::Relaxed));
                let name = ring.names.get(at as usize % ENTRIES).filter(|_| entry[WORDS - 1] >> 18 & 1 == 1);
                (at, entry, name.map(|name| name.each_ref().map(|word| word.load(Ordering::Relaxed))))
            };
            let copies: Vec<_> = (from..written).map(entry).collect();
            fence(Ordering::Acquire);
            let whole = ring.begun.load(Ordering::Relaxed).saturating_sub(ENTRIES as u64);
            missed += ring.missed.load(Ordering::Relaxed);
            *seen = written;
            let read = copies.into_iter().filter(|(at, ..)| *at >= whole);
            denials.extend(read.filter_map(|(_, [a, b, c, d, e, at, rest], name)| {
                let (ends, vlan) = Key::from_words([a, b, c, d, e]).ends()?;
                let direction = if rest >> 16 & 1 == 1 { Direction::In } else { Direction::Out };
                Some(Denial {
                    at: at as u32,
                    direction,
                    ends,
                    vlan,
                    rule: rest as u16,
                    passed: rest >> 17 & 1 == 1,
                    name: name.map(|words| name_of(&words)),
                })
            }));
        }
        (denials, missed)
    }
}

/// Returns the words in which a name is kept, or as much of it as there is room for.
fn words_of(name: &str) -> [u64; NAME_WORDS] {
    let mut bytes = [0; NAME_WORDS * size_of::<u64>()];
    let kept = &name.as_bytes()[..name.len().min(MAX_NAME)];
    bytes[0] = kept.len() as u8;
    bytes[1..=kept.len()].copy_from_slice(kept);
    let mut words = [0; NAME_WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// Returns the name that is kept in these words.
fn name_of(words: &[u64; NAME_WORDS]) -> String {
    let bytes: Vec<_> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    String::from_utf8_lossy(&bytes[1..=usize::from(bytes[0])]).into_owned()
}
