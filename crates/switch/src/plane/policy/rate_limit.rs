//! A rate that a port's frames are paced to: packets and bytes a second, each by a token bucket that all
//! workers share.
//!
//! Frames of a port with `rate_in` stay in its ring until [`RateLimit::wait`] is 0; those for a port with
//! `rate_out` wait in its [shaper](super::shaper). Either way a frame that passes is
//! [charged](RateLimit::charge) by its size on a wire, and may borrow.

use std::sync::Arc;

use super::WireCost;
use super::token_bucket::TokenBucket;
use crate::rules::{Limits, Rate};

/// A limit in packets and bytes per second, each with a bucket that all workers share.
#[derive(Debug)]
pub(crate) struct RateLimit {
    packets: Option<Arc<TokenBucket>>,
    bytes: Option<Arc<TokenBucket>>,
}

impl RateLimit {
    /// Makes the limit of a port, if it has one. A bucket of `before` is kept if its rate is the same, so
    /// that a change of other rules does not fill it.
    pub(crate) fn new(limits: &Limits, before: Option<&RateLimit>) -> Option<Self> {
        let packets = bucket(limits.packets, before.and_then(|before| before.packets.as_ref()));
        let bytes = bucket(limits.bytes, before.and_then(|before| before.bytes.as_ref()));
        (packets.is_some() || bytes.is_some()).then_some(Self { packets, bytes })
    }

    /// Returns the microseconds from `now` on for which nothing may pass; 0 if a frame may.
    #[inline]
    pub(crate) fn wait(&self, now: u64) -> u64 {
        let wait = |bucket: &Option<Arc<TokenBucket>>| bucket.as_ref().map_or(0, |bucket| bucket.wait(now));
        wait(&self.packets).max(wait(&self.bytes))
    }

    /// Charges both buckets for a frame that passes.
    #[inline]
    pub(crate) fn charge(&self, cost: WireCost, now: u64) {
        if let Some(packets) = &self.packets {
            packets.charge(cost.packets, now);
        }
        if let Some(bytes) = &self.bytes {
            bytes.charge(cost.bytes, now);
        }
    }

    /// Returns the number of frames of the cost `each` that may pass at once; the last of them may borrow.
    #[inline]
    pub(crate) fn frames(&self, each: WireCost, now: u64) -> u64 {
        let frames = |bucket: &Option<Arc<TokenBucket>>, each: u64| {
            bucket.as_ref().map_or(u64::MAX, |bucket| bucket.left(now) / each.max(1) + 1)
        };
        frames(&self.packets, each.packets).min(frames(&self.bytes, each.bytes))
    }

    /// Returns the buckets of packets and of bytes.
    pub(super) fn buckets(&self) -> [Option<&Arc<TokenBucket>>; 2] {
        [self.packets.as_ref(), self.bytes.as_ref()]
    }

    /// Returns the packets and the bytes per second, where they are limited.
    pub(crate) fn per_second(&self) -> (Option<u64>, Option<u64>) {
        let per_second = |bucket: &Option<Arc<TokenBucket>>| Some(bucket.as_ref()?.rate().per_second);
        (per_second(&self.packets), per_second(&self.bytes))
    }
}

/// Returns a bucket for a rate: `before`, if it has the same rate, else a full one.
pub(super) fn bucket(rate: Option<Rate>, before: Option<&Arc<TokenBucket>>) -> Option<Arc<TokenBucket>> {
    let rate = rate?;
    let same = before.filter(|before| before.rate() == rate);
    Some(same.map_or_else(|| Arc::new(TokenBucket::new(rate)), Arc::clone))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(packets: Option<(u64, u64)>, bytes: Option<(u64, u64)>) -> RateLimit {
        let rate = |rate: Option<(u64, u64)>| rate.map(|(per_second, burst)| Rate { per_second, burst });
        RateLimit::new(&Limits { packets: rate(packets), bytes: rate(bytes) }, None).unwrap()
    }

    const SMALL: WireCost = WireCost { packets: 1, bytes: 100 };

    #[test]
    fn the_slower_of_both_says_how_long() {
        let both = limit(Some((10, 1)), Some((1000, 1000)));
        assert_eq!((both.wait(0), both.frames(SMALL, 0)), (0, 2));
        (0..3).for_each(|_| both.charge(SMALL, 0));
        assert!(both.wait(0) >= 200_000, "two packets are owed");
        both.charge(WireCost { packets: 0, bytes: 1700 }, 0);
        assert!(both.wait(0) >= 1_000_000, "a thousand bytes are owed");
        assert_eq!(both.wait(both.wait(0)), 0);
    }

    #[test]
    fn nothing_limited_is_no_limit() {
        assert!(RateLimit::new(&Limits::default(), None).is_none());
        assert_eq!(limit(Some((5, 1)), None).frames(WireCost { packets: 1, bytes: u64::MAX }, 0), 2);
        assert_eq!(limit(Some((5, 1)), None).per_second(), (Some(5), None));
    }

    #[test]
    fn a_limit_that_did_not_change_keeps_its_bucket() {
        let before = limit(Some((10, 1)), Some((1000, 1000)));
        before.charge(WireCost { packets: 100, bytes: 100_000 }, 0);
        let rate = |per_second, burst| Some(Rate { per_second, burst });
        let same = RateLimit::new(&Limits { packets: rate(10, 1), bytes: rate(1000, 1000) }, Some(&before));
        assert_eq!(same.unwrap().wait(0), before.wait(0));
        let other = Limits { packets: rate(11, 1), bytes: rate(1000, 1001) };
        assert_eq!(RateLimit::new(&other, Some(&before)).unwrap().wait(0), 0);
    }
}
