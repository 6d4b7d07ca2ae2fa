//! Scenarios for firewalls.

use ringferry_packet::testing::Packet;

use super::Seed;
use crate::firewall::Step;
use crate::ring::Reached;
use crate::script::Field;

/// A packet from the guest, or to it.
fn packet(v6: bool, tcp: bool, ports: [u16; 2], options: usize, payload: Vec<u8>) -> Vec<Step> {
    let mut packet = Packet::plain(v6, tcp, payload);
    let addresses: &[u8] = match v6 {
        true => &[
            0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 2,
        ],
        false => &[10, 0, 0, 2, 203, 0, 113, 53],
    };
    packet.addresses[..addresses.len()].copy_from_slice(addresses);
    packet.ports = (u32::from(ports[0]) << 16 | u32::from(ports[1])).to_be_bytes();
    packet.options = options;
    let frame = packet.partial();
    let write = |(at, bytes): (usize, &[u8])| {
        let mut value = [0; 8];
        value[..bytes.len()].copy_from_slice(bytes);
        Step::Write { at: (at * 8) as u16, value: u64::from_le_bytes(value) }
    };
    let writes = frame.chunks(8).enumerate().map(write);
    std::iter::once(Step::Resize { len: frame.len() as u16 }).chain(writes).collect()
}

pub(super) fn seeds() -> Vec<Seed> {
    let seed = |name, steps: &[Step], chains, longest, frames, broken| {
        let mut bytes = Vec::new();
        steps.iter().for_each(|step| step.put(&mut bytes));
        Seed { target: "firewall", name, bytes, reaches: Reached { chains, longest, frames, broken } }
    };
    let question = b"\x07\x09\x01\0\0\x01\0\0\0\0\0\0\x07example\x03com\0\0\x01\0\x01".to_vec();
    let ask =
        [packet(false, false, [5000, 53], 0, question), vec![Step::Judge { out: 1, have: 64 }]].concat();
    let opened =
        [Step::Judge { out: 1, have: 64 }, Step::Send { out: 1, after: 1 }, Step::Send { out: 1, after: 9 }];
    let tcp = |v6, options| [packet(v6, true, [5000, 443], options, vec![1; 20]), opened.to_vec()].concat();
    let checksum = [
        packet(false, true, [5000, 443], 0, vec![1; 20]),
        vec![Step::Checksum { start: 34, offset: 16 }],
        opened.to_vec(),
    ]
    .concat();
    let denied = [packet(true, false, [5000, 9], 0, vec![1; 20]), opened.to_vec()].concat();
    vec![
        seed("asks_for_a_name", &ask, 1, 1, 0, false),
        seed("opens_tcp4", &tcp(false, 0), 1, 1, 2, false),
        seed("opens_tcp6_behind_options", &tcp(true, 2), 1, 1, 2, false),
        seed("leaves_its_checksum", &checksum, 1, 1, 2, false),
        seed("is_denied", &denied, 1, 0, 0, true),
    ]
}
