//! [`Channels`]: the number of queue pairs that a driver uses, and its change under traffic (VIRTIO
//! 1.4, 5.1.6.5.5 to 5.1.6.5.7). It does for this driver what `ethtool -L` and `ethtool -X` do for
//! the kernel's.
//!
//! A driver creates it after negotiation and uses it from its control thread:
//! [`Channels::set_pairs`] or [`Channels::set_table`] returns a command to submit, and
//! [`Channels::answered`] takes the device's acknowledgement. Until then either number of pairs may
//! be in force, so the driver keeps to what both allow: it sends on the queues of the smaller
//! number and listens on those of the larger one. A change that is refused leaves everything as it
//! was.
//!
//! ```text
//!            set_pairs, set_table                 (transmit = min, receive = max of both)
//!   settled ----------------------> changing
//!      ^                               |
//!      +-------------------------------+
//!        answered(true): the new state; answered(false): the old one
//! ```

use ringferry_packet::flow::{HashTypes, KEY_LEN};

use crate::Features;
use crate::config::{HashConfig, HashLimits};
use crate::control::{Command, Rss};

/// The reason why pairs or steering cannot change. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// The number of pairs is 0 or more than the device has.
    #[error("{wanted} queue pairs are not between 1 and the {max} of the device")]
    Pairs {
        /// Number of pairs that was requested.
        wanted: u16,
        /// Number of pairs that the device has.
        max: u16,
    },
    /// The device has not yet acknowledged the last change.
    #[error("the last change is not answered yet; wait for it")]
    Busy,
    /// The device has one pair and no command to change that.
    #[error("the device does not offer multiqueue; there is one pair")]
    NoMultiqueue,
    /// The device does not offer receive-side scaling.
    #[error("the device does not offer receive-side scaling; steering is automatic")]
    NoRss,
    /// The device cannot take an indirection table of this many entries.
    #[error("an indirection table of {0} entries is not a power of two of at most {1}")]
    Table(usize, u16),
    /// The indirection table names a queue that is not in use.
    #[error("the indirection table names queue {entry} of {pairs}; use more queues or change the table")]
    Entry {
        /// The largest entry of the table.
        entry: u16,
        /// Number of pairs in use.
        pairs: u16,
    },
    /// The hash key is empty, or longer than the device takes.
    #[error("a key of {0} bytes is not between 1 and {1}")]
    Key(usize, u8),
}

/// The number of pairs of a driver and its receive steering, with at most one change in flight.
#[derive(Clone, Debug)]
pub struct Channels {
    max: u16,
    limits: HashLimits,
    rss: bool,
    mq: bool,
    reports: bool,
    key: Vec<u8>,
    now: State,
    /// The change that the device has not yet acknowledged.
    next: Option<State>,
}

/// The configuration that a device was given.
#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    pairs: u16,
    /// The user's indirection table; without one, pairs take turns.
    table: Option<Vec<u16>>,
}

/// Number of entries of the default table: several for each pair, so that all have nearly the same
/// share.
const TABLE: u16 = 128;

impl Channels {
    /// Starts with one pair in use, of those that the device's configuration space reports. `key`
    /// is the hash key, which senders should not know;
    /// [`SYMMETRIC_KEY`](ringferry_packet::flow::SYMMETRIC_KEY) makes both directions of a
    /// connection equal. Bytes of it after the 40th, or beyond the device's limit, are not used.
    pub fn new(features: Features, config: &HashConfig, key: &[u8]) -> Self {
        let HashConfig { net, hash: limits, .. } = *config;
        let offered = features.consistent();
        // A device with limits below the minimum does not implement what it offers (5.1.4.1).
        let valid = limits.is_valid(features) && !limits.types.is_empty();
        let len = key.len().min(KEY_LEN).min(limits.max_key.into());
        Self {
            max: net.pairs(features),
            limits,
            rss: valid && offered.contains(Features::RSS),
            mq: offered.contains(Features::MQ),
            reports: valid && offered.contains(Features::HASH_REPORT.union(Features::CTRL_VQ)),
            key: key[..len].to_vec(),
            now: State { pairs: 1, table: None },
            next: None,
        }
    }

    /// Returns the most pairs that the device supports.
    pub fn max(&self) -> u16 {
        self.max
    }

    /// Returns the number of pairs that the device has acknowledged.
    pub fn pairs(&self) -> u16 {
        self.now.pairs
    }

    /// Returns how many transmitqs, from the first, may be sent on. They become fewer when a change
    /// is submitted (5.1.6.5.6.1), and more when it is acknowledged.
    pub fn transmit(&self) -> u16 {
        self.next.as_ref().map_or(self.now.pairs, |next| next.pairs.min(self.now.pairs))
    }

    /// Returns how many receiveqs, from the first, may receive packets and must have buffers. They
    /// become more when a change is submitted, and fewer when it is acknowledged; packets that
    /// others received before that are still to be taken.
    pub fn receive(&self) -> u16 {
        self.next.as_ref().map_or(self.now.pairs, |next| next.pairs.max(self.now.pairs))
    }

    /// Returns true while a change is not acknowledged.
    pub fn is_changing(&self) -> bool {
        self.next.is_some()
    }

    /// Returns the command that enables hash reports at the start, if the device has them without
    /// RSS; its acknowledgement is not passed to [`answered`](Channels::answered).
    pub fn start(&self) -> Option<Command> {
        let hash = Command::Hash { types: self.limits.types.bits(), key: self.key.clone() };
        (self.reports && !self.rss && !self.key.is_empty()).then_some(hash)
    }

    /// Begins a change to `pairs` pairs. Submit the command when the receiveqs of all of them have
    /// buffers, and pass its acknowledgement to [`Channels::answered`].
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn set_pairs(&mut self, pairs: u16) -> Result<Command, ChannelError> {
        if !(1..=self.max).contains(&pairs) {
            return Err(ChannelError::Pairs { wanted: pairs, max: self.max });
        }
        self.change(State { pairs, ..self.now.clone() })
    }

    /// Begins a change to this indirection table; `None` selects the default, in which pairs take
    /// turns. The command is handled like that of [`Channels::set_pairs`].
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn set_table(&mut self, table: Option<Vec<u16>>) -> Result<Command, ChannelError> {
        if !self.rss {
            return Err(ChannelError::NoRss);
        }
        let entries = table.as_ref().map_or(1, Vec::len);
        if !entries.is_power_of_two() || entries > usize::from(self.limits.max_table) {
            return Err(ChannelError::Table(entries, self.limits.max_table));
        }
        self.change(State { table, ..self.now.clone() })
    }

    /// Ends the change in flight: `done` is the device's acknowledgement. Returns true if the
    /// configuration differs now.
    pub fn answered(&mut self, done: bool) -> bool {
        match self.next.take().filter(|_| done) {
            Some(next) => std::mem::replace(&mut self.now, next) != self.now,
            None => false,
        }
    }

    fn change(&mut self, next: State) -> Result<Command, ChannelError> {
        if self.next.is_some() {
            return Err(ChannelError::Busy);
        }
        let command = self.command(&next)?;
        self.next = Some(next);
        Ok(command)
    }

    /// Returns the command for a state. With RSS the number of pairs is part of its command: the
    /// multiqueue command would switch RSS off, and a later RSS command would restore an old
    /// number.
    fn command(&self, state: &State) -> Result<Command, ChannelError> {
        let State { pairs, table } = state;
        let &pairs = pairs;
        if !self.rss {
            return if self.mq { Ok(Command::QueuePairs(pairs)) } else { Err(ChannelError::NoMultiqueue) };
        }
        if self.key.is_empty() {
            return Err(ChannelError::Key(0, self.limits.max_key));
        }
        let table = match table {
            Some(table) => table.clone(),
            None => (0..TABLE.min(self.limits.max_table)).map(|entry| entry % pairs).collect(),
        };
        match table.iter().max() {
            Some(&entry) if entry >= pairs => Err(ChannelError::Entry { entry, pairs }),
            _ => Ok(Command::Rss(Rss {
                types: (self.limits.types & HashTypes::all()).bits(),
                unclassified: 0,
                table,
                max_tx: pairs,
                key: self.key.clone(),
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use ringferry_packet::flow::SYMMETRIC_KEY;

    use super::*;
    use crate::config::NetConfig;

    const MQ: Features = Features::CTRL_VQ.union(Features::MQ);

    fn channels(features: Features, pairs: u16) -> Channels {
        let net = NetConfig { max_virtqueue_pairs: pairs, ..NetConfig::default() };
        Channels::new(features, &HashConfig::new(net, HashLimits::DEVICE), &SYMMETRIC_KEY)
    }

    #[test]
    fn clause_5_1_6_5_6_1_pairs_out_of_range_are_not_asked_for() {
        let mut channels = channels(MQ, 4);
        for wanted in [0, 5, u16::MAX] {
            assert_eq!(channels.set_pairs(wanted), Err(ChannelError::Pairs { wanted, max: 4 }));
        }
        assert_eq!((channels.pairs(), channels.is_changing()), (1, false));
        assert_eq!(channels.set_table(None), Err(ChannelError::NoRss));
    }

    #[test]
    fn clause_5_1_6_5_6_1_queues_are_left_before_the_command_and_taken_after_the_answer() {
        let mut channels = channels(MQ, 4);
        assert_eq!(channels.set_pairs(3), Ok(Command::QueuePairs(3)));
        assert_eq!((channels.transmit(), channels.receive(), channels.pairs()), (1, 3, 1));
        assert_eq!(channels.set_pairs(2), Err(ChannelError::Busy));
        assert!(channels.answered(true));
        assert_eq!((channels.transmit(), channels.receive(), channels.pairs()), (3, 3, 3));
        assert!(channels.set_pairs(2).is_ok());
        assert_eq!((channels.transmit(), channels.receive(), channels.pairs()), (2, 3, 3));
        assert!(!channels.answered(false), "refused: the old number");
        assert_eq!((channels.transmit(), channels.receive(), channels.pairs()), (3, 3, 3));
        assert!(!channels.answered(true), "nothing was asked");
    }

    #[test]
    fn with_rss_the_number_of_pairs_and_the_table_never_disagree() {
        let mut channels = channels(Features::MULTIQUEUE, 4);
        let Ok(Command::Rss(rss)) = channels.set_pairs(3) else { panic!("RSS") };
        assert_eq!((rss.max_tx, rss.table.len(), &rss.table[..4]), (3, 128, &[0, 1, 2, 0][..]));
        assert!(channels.answered(true));
        let Ok(Command::Rss(rss)) = channels.set_table(Some(vec![2, 1])) else { panic!("RSS") };
        assert_eq!((rss.max_tx, rss.table), (3, vec![2, 1]), "the number is not taken back");
        assert!(channels.answered(true));
        // The user's table is not discarded.
        assert_eq!(channels.set_pairs(2), Err(ChannelError::Entry { entry: 2, pairs: 2 }));
        assert_eq!(channels.set_table(Some(vec![0, 3])), Err(ChannelError::Entry { entry: 3, pairs: 3 }));
        assert_eq!(channels.set_table(Some(vec![0; 3])), Err(ChannelError::Table(3, 128)));
        assert_eq!(channels.set_table(Some(vec![0; 256])), Err(ChannelError::Table(256, 128)));
        assert!(channels.set_table(None).is_ok() && channels.answered(true));
        assert!(channels.set_pairs(1).is_ok());
    }

    #[test]
    fn a_device_that_contradicts_itself_is_used_without_what_it_gets_wrong() {
        let net = NetConfig { max_virtqueue_pairs: 0x8001, ..NetConfig::default() };
        let limits = HashLimits { max_key: 10, ..HashLimits::DEVICE };
        let mut channels = Channels::new(Features::MULTIQUEUE, &HashConfig::new(net, limits), &[1; 60]);
        assert_eq!((channels.max(), channels.start()), (1, None));
        assert_eq!(channels.set_table(None), Err(ChannelError::NoRss));
        assert_eq!(channels.set_pairs(1), Ok(Command::QueuePairs(1)));
        assert_eq!(self::channels(Features::CTRL_VQ, 4).set_pairs(1), Err(ChannelError::NoMultiqueue));
    }

    #[test]
    fn clause_5_1_6_5_6_4_hash_reports_without_rss_are_switched_on() {
        let channels = channels(MQ | Features::HASH_REPORT, 2);
        let types = HashTypes::SHORT.bits();
        assert_eq!(channels.start(), Some(Command::Hash { types, key: SYMMETRIC_KEY.to_vec() }));
        assert_eq!(self::channels(Features::MULTIQUEUE, 2).start(), None, "RSS says it");
    }
}
