//! When each frame is due: at a constant rate, whatever has become of those before it (open loop). A frame that is sent late
//! because the switch had no room still carries the time that it was due, so its latency counts the wait, and no stall is
//! left out because nothing was sent meanwhile.

/// A constant rate from time 0 on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    nanos_per_frame: f64,
}

impl Pace {
    /// So many frames a second; more than none.
    pub(super) fn new(rate: f64) -> Self {
        Self { nanos_per_frame: 1e9 / rate }
    }

    /// How many frames are due before this time, in nanoseconds.
    #[inline]
    pub(super) fn due(self, nanos: u64) -> u64 {
        (nanos as f64 / self.nanos_per_frame).ceil() as u64
    }

    /// When a frame is due, counted from 0.
    #[inline]
    pub(super) fn time(self, frame: u64) -> u64 {
        (frame as f64 * self.nanos_per_frame) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_due_at_a_constant_rate_from_the_beginning_on() {
        let pace = Pace::new(1000.0);
        assert_eq!([0, 1, 999_999, 1_000_000, 1_000_001].map(|nanos| pace.due(nanos)), [0, 1, 1, 1, 2]);
        assert_eq!([0, 1, 7].map(|frame| pace.time(frame)), [0, 1_000_000, 7_000_000]);
        assert_eq!(pace.due(1_000_000_000), 1000);
    }

    #[test]
    fn a_frame_is_never_sent_before_it_is_due_and_none_is_forgotten() {
        for rate in [3.0, 1.0e6, 7.77e6, 1.4e7] {
            let pace = Pace::new(rate);
            let mut sent = 0;
            // Rounds of uneven lengths, one of them a long stall.
            for now in (0..1000).map(|round: u64| round * 97 + u64::from(round > 500) * 5_000_000) {
                while sent < pace.due(now) {
                    assert!(pace.time(sent) <= now, "{rate}: {sent} at {now}");
                    sent += 1;
                }
            }
            let end = 999 * 97 + 5_000_000;
            assert!((sent as f64 - rate * end as f64 / 1e9).abs() <= 1.0, "{rate}: {sent}");
        }
    }
}
