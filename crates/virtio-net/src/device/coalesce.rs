//! Notification coalescing (VIRTIO 1.4, 5.1.6.5.10) of one queue, as a state machine without clock
//! or timer.
//!
//! The owner of a queue creates a [`Coalescer`] with it and calls it on the queue's thread. After
//! each flush it calls [`Coalescer::used`] with the number of packets and with what the ring's
//! event suppression returned (2.7.10), and when a time that it was given has come,
//! [`Coalescer::poll`]. A notification that is held back is sent later even if nothing more is
//! used; one that the driver suppresses is never sent and needs no timer.

use crate::control::Coalesce;

/// The decision about a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The driver is not to be notified.
    No,
    /// The notification is to be sent now.
    Now,
    /// Hold the notification back until more is used, or until this time in microseconds, at which
    /// [`Coalescer::poll`] must be called.
    At(u64),
}

/// The coalescing state of one queue. Coalescing is off by default: every notification that the
/// driver wants is sent at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalescer {
    limits: Coalesce,
    /// Packets used since a limit was last reached.
    packets: u32,
    /// Time at which the first of them was used, in microseconds.
    since: u64,
    /// True if the driver wants a notification for at least one of them.
    wanted: bool,
}

impl Coalescer {
    /// Creates the state of a queue with these limits.
    pub fn new(limits: Coalesce) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Returns the limits in force.
    pub fn limits(&self) -> Coalesce {
        self.limits
    }

    /// Returns true if the limits are on; otherwise [`Coalescer::used`] ignores the time.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.limits.is_on()
    }

    /// Counts `packets` that were used and published, and decides about their notification. `now`
    /// is in microseconds of any monotonic clock; `wanted` is what the ring returned when they were
    /// published.
    #[inline]
    pub fn used(&mut self, now: u64, packets: u32, wanted: bool) -> Notify {
        if !self.limits.is_on() {
            return if wanted { Notify::Now } else { Notify::No };
        }
        // A wanted notification counts as one packet at least.
        let packets = packets.max(wanted.into());
        if packets > 0 && self.packets == 0 {
            self.since = now;
        }
        self.packets = self.packets.saturating_add(packets);
        self.wanted |= wanted;
        self.poll(now)
    }

    /// Decides about the pending notification once time has passed; `now` is in microseconds.
    pub fn poll(&mut self, now: u64) -> Notify {
        let Coalesce { max_packets, max_usecs } = self.limits;
        let due = self.since.saturating_add(max_usecs.into());
        if self.packets < max_packets && (self.packets == 0 || now < due) {
            return if self.wanted && self.packets > 0 { Notify::At(due) } else { Notify::No };
        }
        // A limit is reached, whether or not the driver wants a notification; counting starts again
        // with the next packet.
        self.packets = 0;
        if std::mem::take(&mut self.wanted) { Notify::Now } else { Notify::No }
    }

    /// Changes the limits. A notification that is due by the new ones is sent now (5.1.6.5.10.4).
    pub fn set(&mut self, now: u64, limits: Coalesce) -> Notify {
        self.limits = limits;
        // With no packet counted, nothing is held back.
        if self.packets == 0 { Notify::No } else { self.poll(now) }
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
                assert_eq!(queue.used(now, 1, true), Notify::Now);
                assert_eq!(queue.used(now, 1, false), Notify::No);
                assert_eq!(queue.poll(now), Notify::No);
            }
        }
        assert_eq!(Coalescer::default(), Coalescer::new(Coalesce { max_packets: 0, max_usecs: 0 }));
    }

    /// Runs the example of 5.1.6.5.10.2.
    #[test]
    fn clause_5_1_6_5_10_2_after_15_packets_or_10_microseconds() {
        let mut queue = Coalescer::new(ON);
        assert_eq!(queue.used(100, 1, true), Notify::At(110));
        assert_eq!(queue.used(105, 13, true), Notify::At(110));
        assert_eq!(queue.used(106, 1, true), Notify::Now);
        assert_eq!(queue.poll(200), Notify::No, "counting begins with the next packet");
        assert_eq!(queue.used(300, 1, true), Notify::At(310));
        assert_eq!(queue.poll(309), Notify::At(310));
        assert_eq!(queue.poll(310), Notify::Now);
        assert_eq!(queue.poll(311), Notify::No);
        // A burst at once.
        assert_eq!(queue.used(400, 64, true), Notify::Now);
        assert_eq!(queue.used(400, 0, false), Notify::No);
    }

    #[test]
    fn clause_5_1_6_5_10_6_suppressed_notifications_are_not_sent() {
        let mut queue = Coalescer::new(ON);
        assert_eq!(queue.used(100, 14, false), Notify::No);
        assert_eq!(queue.used(101, 1, false), Notify::No);
        // The conditions were met just now, so that one packet waits.
        assert_eq!(queue.used(102, 1, true), Notify::At(112));
        // A notification that was wanted once stays pending, also when later packets cross no index
        // that the driver waits for (2.7.10).
        assert_eq!(queue.used(103, 1, false), Notify::At(112));
        assert_eq!(queue.poll(112), Notify::Now);
    }

    #[test]
    fn clause_5_1_6_5_10_4_a_change_sends_what_is_due() {
        let mut queue = Coalescer::new(Coalesce { max_packets: 15, max_usecs: 1000 });
        assert_eq!(queue.used(0, 10, true), Notify::At(1000));
        assert_eq!(queue.set(1, Coalesce { max_packets: 8, max_usecs: 1000 }), Notify::Now);
        assert_eq!(queue.set(2, Coalesce { max_packets: 1, max_usecs: 1 }), Notify::No, "nothing is owed");
        queue.set(3, ON);
        assert_eq!(queue.used(10, 1, true), Notify::At(20));
        assert_eq!(queue.set(12, Coalesce { max_packets: 15, max_usecs: 5 }), Notify::At(15));
        assert_eq!(queue.set(13, Coalesce::default()), Notify::Now, "switched off");
        assert_eq!(queue.used(14, 1, true), Notify::Now);
    }

    proptest! {
        /// A notification that the driver wants is always sent in time, and never more packets or
        /// time pass than the limits allow.
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
                // The model's timer fires.
                if let Some(at) = owed.filter(|at| *at <= now) {
                    prop_assert_eq!(queue.poll(at), Notify::Now);
                    owed = None;
                }
                let wanted = wanted && packets > 0;
                match queue.used(now, packets, wanted) {
                    Notify::Now => owed = None,
                    Notify::At(at) => {
                        prop_assert!(limits.is_on() && now < at && at <= now + u64::from(max_usecs));
                        prop_assert!(owed.is_none_or(|before| before == at), "never later");
                        owed = Some(at);
                    }
                    Notify::No => prop_assert!(!wanted && owed.is_none()),
                }
            }
        }
    }
}
