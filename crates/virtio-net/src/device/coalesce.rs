//! When the driver hears of used buffers: notification coalescing (VIRTIO 1.4, 5.1.6.5.10) of one queue, as a state
//! machine without clock or timer.
//!
//! The owner of a queue tells it what was used and whether the ring says that the driver wants a
//! notification (2.7.10), and is told when to send it. A notification that is held back is
//! sent later even if nothing more is used; one the driver does not want is never sent and needs no timer.

use crate::control::Coalesce;

/// What to do about a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Nothing is owed.
    No,
    /// Send it.
    Now,
    /// Not before more is used; but at this time, in microseconds, call [`Coalescer::poll`].
    At(u64),
}

/// The notifications of one queue. Off by default: every one the driver wants is sent at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalescer {
    limits: Coalesce,
    /// Packets since the last notification was due.
    packets: u32,
    /// When the first of them was used.
    since: u64,
    /// The driver wants to hear of one of them at least.
    wanted: bool,
}

impl Coalescer {
    /// With these limits.
    pub fn new(limits: Coalesce) -> Self {
        Self { limits, ..Self::default() }
    }

    /// The limits.
    pub fn limits(&self) -> Coalesce {
        self.limits
    }

    /// Whether the time matters: while not, [`Coalescer::used`] may be told any.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.limits.is_on()
    }

    /// Counts `packets` that were used and shown to the driver, and says what to do. `now` is in microseconds of
    /// any clock that does not go back; `wanted` is what the ring said when they were shown.
    #[inline]
    pub fn used(&mut self, now: u64, packets: u32, wanted: bool) -> Call {
        if !self.limits.is_on() {
            return if wanted { Call::Now } else { Call::No };
        }
        // What is wanted is owed, whatever was counted.
        let packets = packets.max(wanted.into());
        if packets > 0 && self.packets == 0 {
            self.since = now;
        }
        self.packets = self.packets.saturating_add(packets);
        self.wanted |= wanted;
        self.poll(now)
    }

    /// Says what to do when time has passed.
    pub fn poll(&mut self, now: u64) -> Call {
        let Coalesce { max_packets, max_usecs } = self.limits;
        let due = self.since.saturating_add(max_usecs.into());
        if self.packets < max_packets && (self.packets == 0 || now < due) {
            return if self.wanted && self.packets > 0 { Call::At(due) } else { Call::No };
        }
        // Met, whether the driver wants to hear of it or not; counting begins again with the next packet.
        self.packets = 0;
        if std::mem::take(&mut self.wanted) { Call::Now } else { Call::No }
    }

    /// Changes the limits. A notification that is due by the new ones is sent now (5.1.6.5.10.4).
    pub fn set(&mut self, now: u64, limits: Coalesce) -> Call {
        self.limits = limits;
        // Nothing is held back without limits, nor when nothing is counted.
        if self.packets == 0 { Call::No } else { self.poll(now) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ON: Coalesce = Coalesce { max_packets: 15, max_usecs: 10 };

    #[test]
    fn clause_5_1_6_5_10_1_off_by_default_and_with_either_limit_zero() {
        for (max_packets, max_usecs) in [(0, 0), (0, 10), (15, 0)] {
            let mut queue = Coalescer::new(Coalesce { max_packets, max_usecs });
            assert!(!queue.is_on());
            for now in [0, 5, 1000] {
                assert_eq!(queue.used(now, 1, true), Call::Now);
                assert_eq!(queue.used(now, 1, false), Call::No);
                assert_eq!(queue.poll(now), Call::No);
            }
        }
        assert_eq!(Coalescer::default(), Coalescer::new(Coalesce { max_packets: 0, max_usecs: 0 }));
    }

    /// The example of 5.1.6.5.10.2.
    #[test]
    fn clause_5_1_6_5_10_2_after_15_packets_or_10_microseconds() {
        let mut queue = Coalescer::new(ON);
        assert_eq!(queue.used(100, 1, true), Call::At(110));
        assert_eq!(queue.used(105, 13, true), Call::At(110));
        assert_eq!(queue.used(106, 1, true), Call::Now);
        assert_eq!(queue.poll(200), Call::No, "counting begins with the next packet");
        assert_eq!(queue.used(300, 1, true), Call::At(310));
        assert_eq!(queue.poll(309), Call::At(310));
        assert_eq!(queue.poll(310), Call::Now);
        assert_eq!(queue.poll(311), Call::No);
        // A burst at once.
        assert_eq!(queue.used(400, 64, true), Call::Now);
        assert_eq!(queue.used(400, 0, false), Call::No);
    }

    #[test]
    fn clause_5_1_6_5_10_6_suppressed_notifications_are_not_sent() {
        let mut queue = Coalescer::new(ON);
        assert_eq!(queue.used(100, 14, false), Call::No);
        assert_eq!(queue.used(101, 1, false), Call::No);
        // The conditions were met just now, so that one packet waits.
        assert_eq!(queue.used(102, 1, true), Call::At(112));
        // What was wanted once is owed, also when later packets cross no index the driver waits for (2.7.10).
        assert_eq!(queue.used(103, 1, false), Call::At(112));
        assert_eq!(queue.poll(112), Call::Now);
    }

    #[test]
    fn clause_5_1_6_5_10_4_a_change_sends_what_is_due() {
        let mut queue = Coalescer::new(Coalesce { max_packets: 15, max_usecs: 1000 });
        assert_eq!(queue.used(0, 10, true), Call::At(1000));
        assert_eq!(queue.set(1, Coalesce { max_packets: 8, max_usecs: 1000 }), Call::Now);
        assert_eq!(queue.set(2, Coalesce { max_packets: 1, max_usecs: 1 }), Call::No, "nothing is owed");
        queue.set(3, ON);
        assert_eq!(queue.used(10, 1, true), Call::At(20));
        assert_eq!(queue.set(12, Coalesce { max_packets: 15, max_usecs: 5 }), Call::At(15));
        assert_eq!(queue.set(13, Coalesce::default()), Call::Now, "switched off");
        assert_eq!(queue.used(14, 1, true), Call::Now);
    }

    proptest! {
        /// Whatever happens, a notification that the driver wants is sent in time, and never more packets or
        /// time pass than the limits say.
        #[test]
        fn nothing_is_lost_and_nothing_is_late(
            steps in proptest::collection::vec((0u64..20, 0u32..6, any::<bool>()), 1..200),
            max_packets in 0u32..20, max_usecs in 0u32..30,
        ) {
            let limits = Coalesce { max_packets, max_usecs };
            let mut queue = Coalescer::new(limits);
            let (mut now, mut owed) = (0, None::<u64>);
            for (wait, packets, wanted) in steps {
                now += wait;
                // A timer that is kept.
                if let Some(at) = owed.filter(|at| *at <= now) {
                    prop_assert_eq!(queue.poll(at), Call::Now);
                    owed = None;
                }
                let wanted = wanted && packets > 0;
                match queue.used(now, packets, wanted) {
                    Call::Now => owed = None,
                    Call::At(at) => {
                        prop_assert!(limits.is_on() && now < at && at <= now + u64::from(max_usecs));
                        prop_assert!(owed.is_none_or(|before| before == at), "never later");
                        owed = Some(at);
                    }
                    Call::No => prop_assert!(!wanted && owed.is_none()),
                }
            }
        }
    }
}
