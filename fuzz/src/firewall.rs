//! The firewall of a port, whose guest and whose peers send any frames.
//!
//! Each frame that passes a firewall which knows no flow is also read by another parser (`etherparse`), which must find that it is one that the policy allows: nothing goes round
//! it. A verdict does not change when more of the frame is seen, and what a flow lets pass is between its two ends.

use std::net::IpAddr;
use std::sync::Arc;

use etherparse::{LaxNetSlice, LaxSlicedPacket};
use ringferry_firewall::{Direction, Firewall, Policy, Verdict, View, read};
use ringferry_packet::vnet::{F_NEEDS_CSUM, Header};

use crate::ring::Reached;
use crate::script::{Bytes, Field, operations};

/// Bytes of a frame, at most.
const FRAME: usize = 1600;

/// What the guest may open, and what others may.
const POLICY: &str = "\
set far 203.0.113.0/24 2001:db8::/32
resolver 203.0.113.53
allow out tcp port 443 to @far
allow out tcp port 8443 to example.com
allow in udp port 53
dhcp deny
flows 256
";

operations! {
    /// One step of a script.
    Step {
        /// The frame has so many bytes from now on.
        Resize { len: u16 },
        /// Bytes of the frame.
        Write { at: u16, value: u64 },
        /// A checksum is left to the receiver.
        Checksum { start: u16, offset: u16 },
        /// No checksum is left out.
        Whole {},
        /// The frame goes through a firewall that knows flows, so many seconds after the last one.
        Send { out: u8, after: u16 },
        /// The frame goes through a firewall that knows none, first seen up to here.
        Judge { out: u8, have: u16 },
    }
}

/// Runs a script, and panics if a check fails.
///
/// # Panics
/// A check fails.
pub fn firewall(input: &[u8]) -> Reached {
    let policy = Arc::new(
        read("policy", POLICY, &mut |_| Err(std::io::ErrorKind::NotFound.into())).expect("it is one"),
    );
    let fresh = || {
        Firewall::new(
            Arc::clone(&policy),
            1,
            [3, 5, 7, 11].map(|seed: u64| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        )
    };
    let (known, mut now) = (fresh(), 0);
    let (mut frame, mut header) = (vec![0u8; 60], Header::NONE);
    let mut input = Bytes(input);
    let mut reached = Reached::default();
    while let Some(step) = Step::get(&mut input) {
        match step {
            Step::Resize { len } => frame.resize((usize::from(len) % FRAME).max(14), 0),
            Step::Write { at, value } => {
                for (byte, value) in frame.iter_mut().skip(at.into()).zip(value.to_le_bytes()) {
                    *byte = value;
                }
            }
            Step::Checksum { start, offset } => {
                header =
                    Header { flags: F_NEEDS_CSUM, csum_start: start, csum_offset: offset, ..Header::NONE };
            }
            Step::Whole {} => header = Header::NONE,
            Step::Send { out, after } => {
                now += u32::from(after);
                let passes = known.judge(direction(out & 1 == 1), view(&header, &frame, frame.len()), now, 0)
                    == Verdict::Pass;
                reached.frames += usize::from(passes);
            }
            Step::Judge { out, have } => {
                let have = usize::from(have).clamp(14, frame.len().max(14)).min(frame.len());
                judge(&policy, &fresh(), out & 1 == 1, &header, &frame, have, &mut reached);
            }
        }
    }
    reached
}

fn direction(out: bool) -> Direction {
    if out { Direction::Out } else { Direction::In }
}

fn view<'f>(header: &'f Header, frame: &'f [u8], have: usize) -> View<'f> {
    View { header, bytes: &frame[..have], len: frame.len(), peek: &|_| None }
}

fn judge(
    policy: &Policy,
    firewall: &Firewall,
    out: bool,
    header: &Header,
    frame: &[u8],
    have: usize,
    reached: &mut Reached,
) {
    let asked = firewall.would_judge(direction(out), view(header, frame, have), 0).0;
    let whole = firewall.judge(direction(out), view(header, frame, frame.len()), 0, 0);
    assert_ne!(whole, Verdict::Beyond, "all of it is there");
    assert!(asked == whole || asked == Verdict::Beyond, "{asked:?} of {have} bytes, and {whole:?} of all");
    reached.chains += 1;
    if whole != Verdict::Pass {
        reached.broken = true;
        return;
    }
    reached.longest += 1;
    assert!(is_allowed(policy, out, frame), "it went round the policy: {out} {header:?} {frame:02x?}");
    if header.needs_csum() {
        let mut changed = frame.to_vec();
        let lies = usize::from(header.csum_start) + usize::from(header.csum_offset);
        for value in [0x00, 0xff, 0x35] {
            changed.iter_mut().skip(lies).take(2).for_each(|byte| *byte = value);
            assert!(
                is_allowed(policy, out, &changed),
                "the checksum makes another frame of it: {header:?} {frame:02x?}"
            );
        }
    }
}

/// Whether another parser finds in a frame what the policy allows, or what neighbours need.
fn is_allowed(policy: &Policy, out: bool, frame: &[u8]) -> bool {
    let Ok(packet) = LaxSlicedPacket::from_ethernet(frame) else { return false };
    let (destination, payload) = match &packet.net {
        Some(LaxNetSlice::Ipv4(ip)) => (IpAddr::V4(ip.header().destination_addr()), ip.payload()),
        Some(LaxNetSlice::Ipv6(ip)) => (IpAddr::V6(ip.header().destination_addr()), ip.payload()),
        Some(LaxNetSlice::Arp(_)) => return true,
        // Reverse ARP, and ARP that the other parser does not know.
        None => {
            let at = 12 + 4 * packet.link_exts.len();
            return at <= 20 && matches!(frame.get(at..at + 2), Some([0x08, 0x06] | [0x80, 0x35]));
        }
    };
    let be16 =
        |at: usize| payload.payload.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    match (payload.ip_number.0, out, be16(2)) {
        (6, true, Some(443)) => ringferry_firewall::is_in(&policy.draft().sets[0], destination),
        // A question for the name that may be asked for.
        (17, true, Some(53)) => {
            let is_asked = |name: &[u8]| name.eq_ignore_ascii_case(b"\x07example\x03com\0");
            destination == IpAddr::from([203, 0, 113, 53])
                && payload.payload.get(20..33).is_some_and(is_asked)
        }
        (17, false, Some(53)) => true,
        (58, ..) => matches!(payload.payload.first(), Some(130..=136 | 143)),
        _ => false,
    }
}
