//! Doorbell batching: the device is notified at once when it is idle, and once per batch when it is busy.
//!
//! A transmit queue owns one [`Doorbell`] for its lifetime. It calls [`Doorbell::written`] for each packet,
//! [`Doorbell::due`] after it, and [`Doorbell::end_of_poll`] when the burst is over. A doorbell costs the
//! sender more than a packet does, but a packet waits while its device is idle; the occupancy of the ring
//! tells which of the two matters (as for the deferred doorbells of FreeBSD's iflib).

/// Divisor of the ring size that gives the largest batch, used when more than half of the ring is in use.
const BATCH: usize = 16;

/// Returns the number of pending entries at which the doorbell rings, while `in_use` of the `ring` entries
/// (pending ones included) are in use.
///
/// It is 0 (ring at once) up to an eighth of the ring and grows in steps from there. It is always smaller
/// than the free space, so that the ring cannot fill up while its device does not know of the entries.
///
/// ```
/// # use ringferry_nic::tx::doorbell_threshold;
/// assert_eq!([0, 32, 33, 65, 129, 250].map(|in_use| doorbell_threshold(in_use, 256)), [0, 0, 2, 8, 16, 5]);
/// ```
#[inline]
pub fn doorbell_threshold(in_use: usize, ring: usize) -> usize {
    let batch = ring / BATCH;
    let step = if in_use > ring / 2 {
        batch
    } else if in_use > ring / 4 {
        batch / 2
    } else if in_use > ring / 8 {
        batch / 8
    } else {
        0
    };
    step.min(ring.saturating_sub(in_use).saturating_sub(1))
}

/// Counts of doorbells by reason; each doorbell has one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// Doorbells because [`doorbell_threshold`] was reached.
    pub threshold: u64,
    /// Doorbells for the rest at the end of a poll.
    pub end_of_poll: u64,
    /// Doorbells because there might be no room for the next packet.
    pub low_space: u64,
}

impl Rings {
    /// Returns the number of doorbells for any reason.
    pub fn total(&self) -> u64 {
        self.threshold + self.end_of_poll + self.low_space
    }
}

/// The number of pending entries, that is, written ones that the device was not notified of.
#[derive(Clone, Copy, Debug, Default)]
pub struct Doorbell {
    pending: usize,
    rings: Rings,
}

impl Doorbell {
    /// Returns the number of entries that the device was not notified of.
    #[inline]
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Returns how often the doorbell rang, by reason.
    pub fn rings(&self) -> Rings {
        self.rings
    }

    /// Adds `entries` that were written to the ring.
    #[inline]
    pub fn written(&mut self, entries: usize) {
        self.pending += entries;
    }

    /// Returns true if the doorbell must ring now, with `in_use` of `ring` entries in use and packets of up to
    /// `packet` entries. The ring is counted and nothing is pending afterwards.
    #[inline]
    pub fn due(&mut self, in_use: usize, ring: usize, packet: usize) -> bool {
        if self.pending == 0 {
            return false;
        }
        if ring.saturating_sub(in_use) < packet {
            self.rings.low_space += 1;
        } else if self.pending >= doorbell_threshold(in_use, ring) {
            self.rings.threshold += 1;
        } else {
            return false;
        }
        self.pending = 0;
        true
    }

    /// Returns true if anything is pending, so that the doorbell must ring. Nothing is pending afterwards.
    #[inline]
    pub fn end_of_poll(&mut self) -> bool {
        let pending = std::mem::take(&mut self.pending) > 0;
        self.rings.end_of_poll += u64::from(pending);
        pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_idle_device_is_told_at_once(ring in 1usize..=32768, share in 0usize..=8192) {
            prop_assert_eq!(doorbell_threshold(share.min(ring / 8), ring), 0);
        }

        #[test]
        fn the_threshold_grows_with_the_load_until_space_is_short(ring in 1usize..=4096, in_use in 0usize..4096) {
            let in_use = in_use.min(ring - 1);
            let (now, next) = (doorbell_threshold(in_use, ring), doorbell_threshold(in_use + 1, ring));
            prop_assert!(next >= now || next + 1 == ring - in_use - 1 || ring - in_use - 1 == 0, "{now} {next}");
        }

        #[test]
        fn the_threshold_is_below_the_free_space(ring in 1usize..=32768, in_use in 0usize..32768) {
            let in_use = in_use % ring;
            prop_assert!(doorbell_threshold(in_use, ring) < ring - in_use);
        }

        #[test]
        fn every_ring_has_one_reason_and_a_poll_leaves_nothing(
            steps in proptest::collection::vec((0usize..9, 0usize..256, any::<bool>()), 1..200),
        ) {
            let mut doorbell = Doorbell::default();
            let (mut written, mut told, mut rang) = (0, 0, 0);
            for (entries, in_use, end) in steps {
                doorbell.written(entries);
                written += entries;
                if doorbell.due(in_use, 256, 4) || (end && doorbell.end_of_poll()) {
                    rang += 1;
                    told = written;
                }
                prop_assert_eq!(doorbell.pending(), written - told);
                if end {
                    prop_assert_eq!(doorbell.pending(), 0);
                }
            }
            prop_assert_eq!(doorbell.rings().total(), rang);
        }
    }

    #[test]
    fn nothing_pending_rings_nothing() {
        let mut doorbell = Doorbell::default();
        assert!(!doorbell.due(0, 256, 1) && !doorbell.due(256, 256, 1) && !doorbell.end_of_poll());
        assert_eq!(doorbell.rings(), Rings::default());
    }

    #[test]
    fn each_reason_counts_for_itself() {
        let mut doorbell = Doorbell::default();
        doorbell.written(1);
        assert!(doorbell.due(1, 256, 8));
        doorbell.written(1);
        assert!(!doorbell.due(200, 256, 8));
        assert!(doorbell.due(249, 256, 8));
        doorbell.written(1);
        assert!(doorbell.end_of_poll());
        assert_eq!(doorbell.rings(), Rings { threshold: 1, end_of_poll: 1, low_space: 1 });
    }
}
