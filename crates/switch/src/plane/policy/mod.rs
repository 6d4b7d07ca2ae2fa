//! A port's policy: the checks and limits that its rules set for frames that come from it or are to leave by it.
//!
//! The control plane compiles a [`PortPolicy`] from the [`Rules`] when they change and all workers share it; its only mutable words are those of
//! token buckets. A port whose rules ask for nothing has no policy, and costs nothing.
//!
//! | file | idea |
//! |---|---|
//! | `mod` | the policy: VLAN, source guard, storm control, rates, in the order of their cost |
//! | `vlan` | which VLAN a frame belongs to, and its tag (IEEE 802.1Q) |
//! | `source_guard` | whether a frame's source addresses are the port's own (anti-spoofing) |
//! | `token_bucket` | a token bucket that all workers share (GCRA) |
//! | `rate_limit` | a rate that a port's frames are paced to: packets and bytes a second |
//! | `firewall` | whether a frame's conversation is allowed, asked of the crate `firewall` |
//! | `shaper` | where frames for a port wait that has received as much as its rate allows (CoDel) |

use std::sync::Arc;

use ringferry_firewall::Direction;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::{GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header};

use crate::counters::DropReason;
use crate::plane::now::Now;
use crate::plane::policy::firewall::PortFirewall;
use crate::plane::policy::rate_limit::RateLimit;
use crate::plane::policy::source_guard::{Judgement, SourceGuard};
use crate::plane::policy::token_bucket::TokenBucket;
use crate::plane::policy::vlan::{Membership, Tagged};
use crate::plane::wire::CompiledEnd;
use crate::rules::{Limits, Rules, Vlans};

pub(crate) mod firewall;
pub(crate) mod rate_limit;
pub(crate) mod shaper;
pub(crate) mod source_guard;
pub(crate) mod token_bucket;
pub(crate) mod vlan;

/// The longest headers that count for a frame to be segmented: Ethernet, two tags, and the longest of IPv4
/// and TCP. A sender that lies about where its headers end thus gains next to nothing.
const MOST_HEADERS: u64 = 14 + 8 + 60 + 60;

/// The checks and limits of a port's frames, compiled from its [`Rules`].
#[derive(Debug)]
pub(crate) struct PortPolicy {
    /// The port is to be removed: nothing more leaves by it.
    retired: bool,
    membership: Membership,
    isolated: bool,
    quarantine: Option<String>,
    forwards_reserved: bool,
    guard: Option<SourceGuard>,
    firewall: Option<PortFirewall>,
    storm: Option<Arc<TokenBucket>>,
    rate_in: Option<RateLimit>,
    rate_out: Option<RateLimit>,
    wire: Option<CompiledEnd>,
}

/// The verdict on a frame that is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The frame is to be dropped, for this reason.
    Drop(DropReason),
    /// The frame cannot be judged where it lies: its sender could change what was checked before it is copied
    /// to its receiver. The caller asks again about a private copy of the whole frame, and delivers that.
    Unstable,
}

/// Where a policy is in force, as far as it has to know.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Here {
    /// Number of the switch's workers.
    pub(crate) workers: usize,
    /// The switch's clock in seconds.
    pub(crate) now: u32,
}

impl PortPolicy {
    /// The policy of a port with these rules; `None` if it would let everything pass. `before` is the policy
    /// that this one replaces: limits that do not change keep their buckets, as a change of other rules is no
    /// reason to grant a burst.
    pub(crate) fn new(rules: &Rules, before: Option<&PortPolicy>, here: Here) -> Option<Self> {
        Self::compile(rules, before, here, false)
    }

    /// The policy of a port that is to be removed: no further frames leave by it. What it sends is admitted as before, and what waits for its rate
    /// goes out.
    pub(crate) fn retired(rules: &Rules, before: Option<&PortPolicy>, here: Here) -> Option<Self> {
        Self::compile(rules, before, here, true)
    }

    fn compile(rules: &Rules, before: Option<&PortPolicy>, here: Here, retired: bool) -> Option<Self> {
        let Rules {
            vlans,
            isolated,
            quarantine,
            forward_reserved,
            guard,
            firewall,
            storm,
            rate_in,
            rate_out,
            wire,
            ..
        } = rules;
        let open = *vlans == Vlans::default()
            && !isolated
            && quarantine.is_none()
            && !forward_reserved
            && guard.is_none()
            && firewall.is_none()
            && storm.is_none()
            && *rate_in == Limits::default()
            && *rate_out == Limits::default()
            && wire.is_none();
        (!open || retired).then(|| Self {
            retired,
            membership: Membership::new(vlans),
            isolated: *isolated,
            quarantine: quarantine.clone(),
            forwards_reserved: *forward_reserved,
            guard: guard.as_ref().map(SourceGuard::new),
            firewall: firewall.as_ref().map(|rule| {
                PortFirewall::new(rule, before.and_then(|before| before.firewall.as_ref()), here)
            }),
            storm: rate_limit::bucket(*storm, before.and_then(|before| before.storm.as_ref())),
            rate_in: RateLimit::new(rate_in, before.and_then(PortPolicy::rate_in)),
            rate_out: RateLimit::new(rate_out, before.and_then(PortPolicy::rate_out)),
            wire: wire.as_ref().map(|end| CompiledEnd::new(end, before.and_then(PortPolicy::wire))),
        })
    }

    /// Returns the end of a wire that the port is, if it is one.
    #[inline]
    pub(crate) fn wire(&self) -> Option<&CompiledEnd> {
        self.wire.as_ref()
    }

    /// Returns true if no further frames are to leave by the port.
    #[inline]
    pub(crate) fn is_retired(&self) -> bool {
        self.retired
    }

    /// Admits a frame of `burst` to the VLAN that it belongs to, which is returned. `private` says that the
    /// burst lies in memory that its sender cannot write. An admitted frame is charged to the port's rate,
    /// which was asked before the frame was taken from its ring.
    ///
    /// # Errors
    /// The frame is to be dropped, or judged again in a private copy: see [`Refusal`].
    #[inline]
    pub(crate) fn admit(
        &self,
        burst: &Burst<'_>,
        frame: &Frame,
        private: bool,
        now: &Now,
        worker: usize,
    ) -> Result<Tagged, Refusal> {
        // Tokens are spent only on frames that have passed all checks.
        let tagged = self.check_source(burst, frame, private)?;
        if let Some(firewall) = &self.firewall {
            firewall.judge(Direction::Out, burst, frame, private, now, worker)?;
        }
        if let Some(rate_in) = &self.rate_in {
            rate_in.charge(WireCost::of_frame(frame), now.micros());
        }
        Ok(tagged)
    }

    /// Makes the checks of [`admit`](Self::admit); nothing is charged or remembered.
    ///
    /// # Errors
    /// As for [`admit`](Self::admit).
    pub(crate) fn check(
        &self,
        burst: &Burst<'_>,
        frame: &Frame,
        private: bool,
        now: &Now,
    ) -> Result<Tagged, Refusal> {
        let tagged = self.check_source(burst, frame, private)?;
        match &self.firewall {
            Some(firewall) if !firewall.would_pass(Direction::Out, burst, frame, now).0 => {
                Err(Refusal::Drop(DropReason::Firewall))
            }
            _ => Ok(tagged),
        }
    }

    /// Checks VLAN and source addresses, in the order of their cost.
    #[inline]
    fn check_source(&self, burst: &Burst<'_>, frame: &Frame, private: bool) -> Result<Tagged, Refusal> {
        let tagged = self.membership.classify(frame.prefix(), &frame.header);
        let tagged = tagged.ok_or(Refusal::Drop(DropReason::Vlan))?;
        if let Some(guard) = &self.guard {
            match guard.judge(burst, frame) {
                Judgement::Fine => {}
                Judgement::FineIfStable if private => {}
                Judgement::FineIfStable => return Err(Refusal::Unstable),
                Judgement::Spoofed => return Err(Refusal::Drop(DropReason::Spoofed)),
            }
        }
        Ok(tagged)
    }

    /// Returns the firewall between the port and all others, if there is one.
    #[inline]
    pub(crate) fn firewall(&self) -> Option<&PortFirewall> {
        self.firewall.as_ref()
    }

    /// Storm control: returns whether the port may send this frame to everybody. The frame counts as the
    /// packets that it is on a wire: a receiver without segmentation offloads gets each of them.
    #[inline]
    pub(crate) fn may_flood(&self, frame: &Frame, now: &Now) -> bool {
        self.storm.as_ref().is_none_or(|bucket| bucket.take(WireCost::of_frame(frame).packets, now.micros()))
    }

    /// Returns whether [`may_flood`](Self::may_flood) would be true, and takes no tokens.
    pub(crate) fn could_flood(&self, frame: &Frame, now: &Now) -> bool {
        self.storm.as_ref().is_none_or(|bucket| bucket.has(WireCost::of_frame(frame).packets, now.micros()))
    }

    /// Returns whether there is a limit on what the port sends to everybody.
    pub(crate) fn has_storm(&self) -> bool {
        self.storm.is_some()
    }

    /// Returns whether the port's source addresses are checked.
    pub(crate) fn has_guard(&self) -> bool {
        self.guard.is_some()
    }

    /// Returns the ingress limit of the port, if there is one.
    #[inline]
    pub(crate) fn rate_in(&self) -> Option<&RateLimit> {
        self.rate_in.as_ref()
    }

    /// Returns the egress limit of the port, if there is one.
    #[inline]
    pub(crate) fn rate_out(&self) -> Option<&RateLimit> {
        self.rate_out.as_ref()
    }

    /// Returns the token buckets by the key of the rule that each is of.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = (&'static str, &TokenBucket)> {
        let [in_packets, in_bytes] = self.rate_in().map_or([None, None], RateLimit::buckets);
        let [out_packets, out_bytes] = self.rate_out().map_or([None, None], RateLimit::buckets);
        let all = [
            ("storm", self.storm.as_ref()),
            ("rate_in_packets", in_packets),
            ("rate_in", in_bytes),
            ("rate_out_packets", out_packets),
            ("rate_out", out_bytes),
        ];
        all.into_iter().filter_map(|(key, bucket)| Some((key, &**bucket?)))
    }

    /// Returns true if the port exchanges no frames with other isolated ports.
    #[inline]
    pub(crate) fn isolated(&self) -> bool {
        self.isolated
    }

    /// Returns the name of the only port that the port exchanges frames with, if it is cut off from all others.
    #[inline]
    pub(crate) fn quarantine(&self) -> Option<&str> {
        self.quarantine.as_deref()
    }

    /// Returns true if frames to reserved addresses, and from addresses of no station, are forwarded.
    #[inline]
    pub(crate) fn forwards_reserved(&self) -> bool {
        self.forwards_reserved
    }

    /// Returns the port's VLAN membership.
    #[inline]
    pub(crate) fn membership(&self) -> &Membership {
        &self.membership
    }
}

/// The size of a frame as it would be on a wire, in packets and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WireCost {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
}

impl WireCost {
    /// Returns the cost of a frame of a burst.
    #[inline]
    pub(crate) fn of_frame(frame: &Frame) -> Self {
        Self::of(&frame.header, frame.prefix(), frame.len.into())
    }

    /// Returns the cost of a frame of `len` bytes that begins with `first`. One that is to be segmented is as
    /// many packets, each with its headers.
    fn of(header: &Header, first: &[u8], len: u64) -> Self {
        if !header.is_gso() || header.gso_size == 0 {
            return Self { packets: 1, bytes: len };
        }
        let transport = match header.gso_type & !GSO_ECN {
            GSO_TCPV4 | GSO_TCPV6 => {
                let words = first.get(usize::from(header.csum_start) + 12).map_or(5, |byte| byte >> 4);
                u64::from(words.max(5)) * 4
            }
            GSO_UDP_L4 => 8,
            // IP fragments have no transport header.
            _ => 0,
        };
        let headers = (u64::from(header.csum_start) + transport).min(MOST_HEADERS).min(len);
        let packets = (len - headers).div_ceil(header.gso_size.into()).max(1);
        Self { packets, bytes: len + (packets - 1) * headers }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use proptest::prelude::*;
    use ringferry_memory::ReadSlice;
    use ringferry_packet::ether::Mac;
    use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_UDP};

    use super::*;
    use crate::plane::now::Clock;
    use crate::rules;
    use crate::rules::Rate;

    const OWN: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    /// Time stands still: buckets are asked twice, and a later question must not come earlier.
    fn now() -> Now {
        static STILL: AtomicU64 = AtomicU64::new(0);
        Now::new(Clock::Scripted(&STILL), 0)
    }

    /// Returns the rate of a bucket so slow that no token is added while a test runs.
    fn once(burst: u64) -> Option<Rate> {
        Some(Rate { per_second: 1, burst })
    }

    fn frame(source: Mac, tci: Option<u16>, len: usize) -> Vec<u8> {
        let mut frame = [[0xff; 6], source.0].concat();
        if let Some(tci) = tci {
            frame.extend([0x81, 0]);
            frame.extend(tci.to_be_bytes());
        }
        frame.extend([0x88, 0xcc]);
        frame.resize(len, 0);
        frame
    }

    fn admit(policy: &PortPolicy, header: Header, frame: &[u8]) -> Result<Tagged, Refusal> {
        let mut burst = Burst::new();
        burst.push(header, ReadSlice::from(frame));
        policy.admit(&burst, &burst.frames()[0], false, &now(), 0)
    }

    #[test]
    fn a_port_whose_rules_ask_for_nothing_has_no_gate() {
        let rules = Rules { max_macs: Some(1), static_macs: vec![(OWN, 0)], ..Rules::default() };
        assert!(
            PortPolicy::new(&rules, None, Here::default()).is_none(),
            "those are the forwarding database's"
        );
        let some = [
            Rules { vlans: Vlans::Access(0), ..Rules::default() },
            Rules { isolated: true, ..Rules::default() },
            Rules { quarantine: Some("a".to_owned()), ..Rules::default() },
            Rules { forward_reserved: true, ..Rules::default() },
            Rules { guard: Some(rules::Guard::default()), ..Rules::default() },
            Rules { storm: once(1), ..Rules::default() },
            Rules { rate_in: Limits { packets: once(1), bytes: None }, ..Rules::default() },
            Rules { rate_out: Limits { packets: None, bytes: once(1) }, ..Rules::default() },
        ];
        for rules in some {
            let policy = PortPolicy::new(&rules, None, Here::default()).unwrap();
            assert_eq!(policy.isolated(), rules.isolated);
            assert_eq!(policy.membership().leaves(5).is_some(), rules.vlans == Vlans::default());
        }
    }

    #[test]
    fn each_rule_has_its_reason_and_refused_frames_cost_no_tokens() {
        let rules = Rules {
            vlans: Vlans::Access(5),
            guard: Some(rules::Guard { macs: vec![OWN], ips: None }),
            rate_in: Limits { packets: once(2), bytes: None },
            ..Rules::default()
        };
        let policy = PortPolicy::new(&rules, None, Here::default()).unwrap();
        let left = || policy.rate_in().unwrap().frames(WireCost { packets: 1, bytes: 0 }, now().micros());
        let refused = |reason| Err(Refusal::Drop(reason));
        assert_eq!(admit(&policy, Header::NONE, &frame(OTHER, Some(6), 60)), refused(DropReason::Vlan));
        assert_eq!(admit(&policy, Header::NONE, &frame(OTHER, None, 60)), refused(DropReason::Spoofed));
        assert_eq!(left(), 3, "two, and one that borrows");
        assert_eq!(
            admit(&policy, Header::NONE, &frame(OWN, Some(5), 60)),
            Ok(Tagged { vid: 5, wire: Some(5) })
        );
        assert_eq!(left(), 2);
    }

    /// Two reads of the sender's memory may differ.
    #[test]
    fn what_its_sender_could_still_change_is_asked_for_again() {
        let ips = Some(vec![rules::Network { address: "2001:db8::".parse().unwrap(), bits: 64 }]);
        let guard = Some(rules::Guard { macs: vec![OWN], ips });
        let policy = PortPolicy::new(&Rules { guard, ..Rules::default() }, None, Here::default()).unwrap();
        let mut advertisement = frame(OWN, None, 86);
        advertisement[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
        advertisement[18..22].copy_from_slice(&[0, 32, 58, 255]);
        advertisement[22..26].copy_from_slice(&[0x20, 1, 0x0d, 0xb8]);
        advertisement[54] = 136;
        advertisement[62..66].copy_from_slice(&[0x20, 1, 0x0d, 0xb8]);
        advertisement[78..80].copy_from_slice(&[2, 1]);
        advertisement[80..86].copy_from_slice(&OWN.0);
        let mut burst = Burst::new();
        burst.push(Header::NONE, ReadSlice::from(&advertisement[..]));
        let ask = |private| policy.admit(&burst, &burst.frames()[0], private, &now(), 0);
        assert_eq!(ask(false), Err(Refusal::Unstable));
        assert_eq!(ask(true), Ok(Tagged { vid: 0, wire: None }));
    }

    #[test]
    fn storm_control_counts_packets() {
        let at = now();
        let may_flood = |policy: &PortPolicy, header: Header, len| {
            let bytes = frame(OWN, None, len);
            let mut burst = Burst::new();
            burst.push(header, ReadSlice::from(&bytes[..]));
            policy.may_flood(&burst.frames()[0], &at)
        };
        let policy =
            PortPolicy::new(&Rules { storm: once(3), ..Rules::default() }, None, Here::default()).unwrap();
        let plain = [(); 5].map(|()| may_flood(&policy, Header::NONE, 60));
        assert_eq!(plain, [true, true, true, false, false]);
        let free =
            PortPolicy::new(&Rules { isolated: true, ..Rules::default() }, None, Here::default()).unwrap();
        assert!(may_flood(&free, Header::NONE, 60));
        // A frame that is to be segmented counts as its segments.
        let storm =
            PortPolicy::new(&Rules { storm: once(10), ..Rules::default() }, None, Here::default()).unwrap();
        let large = gso(GSO_UDP_L4, 100, 34);
        assert!(!may_flood(&storm, large, 42 + 1001), "eleven datagrams");
        assert!(may_flood(&storm, large, 42 + 900) && !may_flood(&storm, large, 42 + 101), "nine, and two");
        assert!(may_flood(&storm, Header::NONE, 60) && !may_flood(&storm, Header::NONE, 60));
    }

    #[test]
    fn limits_that_do_not_change_are_not_filled_by_a_change_of_others() {
        let at = now();
        let limits = Limits { packets: once(1), bytes: None };
        let before = Rules { storm: once(1), rate_in: limits, rate_out: limits, ..Rules::default() };
        let policy = PortPolicy::new(&before, None, Here::default()).unwrap();
        let cost = WireCost { packets: 5, bytes: 0 };
        let bytes = frame(OWN, None, 60);
        let mut burst = Burst::new();
        burst.push(Header::NONE, ReadSlice::from(&bytes[..]));
        let broadcast = &burst.frames()[0];
        assert!(policy.may_flood(broadcast, &at));
        policy.rate_in().unwrap().charge(cost, at.micros());
        policy.rate_out().unwrap().charge(cost, at.micros());
        let after = Rules { isolated: true, rate_out: Limits { packets: once(2), bytes: None }, ..before };
        let after = PortPolicy::new(&after, Some(&policy), Here::default()).unwrap();
        assert!(!after.may_flood(broadcast, &at));
        assert!(after.rate_in().unwrap().wait(at.micros()) > 0);
        assert_eq!(after.rate_out().unwrap().wait(at.micros()), 0, "that one is new");
    }

    fn gso(gso_type: u8, gso_size: u16, csum_start: u16) -> Header {
        Header { flags: F_NEEDS_CSUM, gso_type, gso_size, csum_start, csum_offset: 16, ..Header::NONE }
    }

    #[test]
    fn a_frame_to_be_segmented_is_its_segments() {
        let mut tcp = [0; 66];
        tcp[46] = 0x80;
        let of = |header: &Header, len| {
            let cost = WireCost::of(header, &tcp[..64], len);
            (cost.packets, cost.bytes)
        };
        let header = gso(GSO_TCPV4, 1448, 34);
        assert_eq!(of(&header, 66 + 3 * 1448), (3, 3 * 1514));
        assert_eq!(of(&header, 66 + 3 * 1448 + 1), (4, 3 * 1514 + 67));
        assert_eq!(of(&header, 66), (1, 66));
        assert_eq!(of(&gso(GSO_UDP_L4, 100, 34), 42 + 250), (3, 42 * 3 + 250));
        assert_eq!(of(&gso(GSO_UDP, 1480, 34), 34 + 3000), (3, 34 * 3 + 3000));
        assert_eq!(of(&Header::NONE, 1514), (1, 1514));
    }

    #[test]
    fn lies_about_headers_hide_no_segments() {
        let lie = WireCost::of(&gso(GSO_TCPV4, 1000, 60_000), &[0xff; 64], 65_000);
        let truth = WireCost::of(&gso(GSO_TCPV4, 1000, 34), &[0; 64], 65_000);
        assert!(truth.packets - lie.packets <= 1);
    }

    proptest! {
        #[test]
        fn no_header_does_harm(bytes: [u8; 12], first in proptest::collection::vec(any::<u8>(), 0..100), len in 0..70_000u64) {
            let cost = WireCost::of(&Header::from_bytes(&bytes), &first, len);
            prop_assert!(cost.packets >= 1 && cost.bytes >= len);
            prop_assert!(cost.packets <= len.max(1));
        }
    }
}
