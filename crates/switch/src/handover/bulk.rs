//! Bulk data of a hand-over, as little-endian records in one piece of memory: addresses, flows, and frames that wait in shapers and on wires.
//!
//! A state refers to its records by [`Section`]. What is read back is checked against the end of the data; records that make no sense are left out.

use std::collections::BTreeMap;

use ringferry_firewall::Record;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use serde::{Deserialize, Serialize};

use crate::fdb::PortId;
use crate::plane::{Address, Delayed, Queued, Waiting, WireCost};
use crate::rules::MAX_VID;

/// A part of the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Section {
    at: u64,
    bytes: u64,
}

impl Section {
    /// Returns true if nothing is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// Length of an address in bytes: VLAN 2, address 6, port 2, zero 2, second 4.
const ADDRESS: usize = 16;
/// Length of a flow in bytes: two words.
const FLOW: usize = 16;
/// Length of what goes before a frame that waits: port 2, sender 2, length 4, time 8, packets 8, bytes 8, virtual header 12, zero 4.
const FRAME: usize = 48;
/// Upper bound on a frame in bytes, above the largest that a virtual header describes.
const MAX_FRAME: usize = 128 << 10;

/// Numbers of ports in the process that sent them, and here.
pub(crate) type Ports = BTreeMap<u16, PortId>;

/// Data that is being gathered.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    fn section(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> Section {
        let at = self.0.len() as u64;
        write(&mut self.0);
        Section { at, bytes: self.0.len() as u64 - at }
    }

    pub(crate) fn addresses(&mut self, addresses: impl IntoIterator<Item = Address>) -> Section {
        self.section(|out| {
            for Address { vid, mac, port, seen } in addresses {
                out.extend(vid.to_le_bytes());
                out.extend(mac.0);
                out.extend(port.0.to_le_bytes());
                out.extend([0; 2]);
                out.extend(seen.to_le_bytes());
            }
        })
    }

    pub(crate) fn flows(&mut self, flows: impl IntoIterator<Item = [u64; 2]>) -> Section {
        self.section(|out| flows.into_iter().flatten().for_each(|word| out.extend(word.to_le_bytes())))
    }

    /// Flows that a firewall knows.
    pub(crate) fn firewall(&mut self, flows: impl IntoIterator<Item = Record>) -> Section {
        self.section(|out| flows.into_iter().flatten().for_each(|word| out.extend(word.to_le_bytes())))
    }

    pub(crate) fn waiting(&mut self, waiting: &Waiting) -> Section {
        self.section(|out| {
            for (port, Queued { since, cost, delayed }) in waiting {
                out.extend(port.0.to_le_bytes());
                out.extend(delayed.from.0.to_le_bytes());
                out.extend((delayed.frame.len() as u32).to_le_bytes());
                [*since, cost.packets, cost.bytes].iter().for_each(|word| out.extend(word.to_le_bytes()));
                out.extend(delayed.header.to_bytes());
                out.extend([0; 4]);
                out.extend(&delayed.frame);
            }
        })
    }

    pub(crate) fn into_inner(self) -> Vec<u8> {
        self.0
    }
}

/// Data that was received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

impl<'a> Reader<'a> {
    /// Returns the bytes of a section; none if it lies outside.
    fn section(self, Section { at, bytes }: Section) -> &'a [u8] {
        let end = at.checked_add(bytes).and_then(|end| usize::try_from(end).ok());
        end.and_then(|end| self.0.get(at as usize..end)).unwrap_or_default()
    }

    /// Returns the addresses behind ports that there are.
    pub(crate) fn addresses(self, section: Section, ports: &Ports) -> Vec<Address> {
        let records = self.section(section).chunks_exact(ADDRESS);
        let addresses = records.filter_map(|record| {
            let mac = Mac(record[2..8].try_into().expect("six bytes"));
            let vid = Some(u16_at(record, 0)).filter(|vid| *vid <= MAX_VID)?;
            Some(Address { vid, mac, port: *ports.get(&u16_at(record, 8))?, seen: u32_at(record, 12) })
        });
        addresses.collect()
    }

    pub(crate) fn flows(self, section: Section) -> impl Iterator<Item = [u64; 2]> + 'a {
        self.section(section).chunks_exact(FLOW).map(|record| [u64_at(record, 0), u64_at(record, 8)])
    }

    pub(crate) fn firewall(self, section: Section) -> impl Iterator<Item = Record> + 'a {
        let records = self.section(section).chunks_exact(size_of::<Record>());
        records.map(|record| std::array::from_fn(|word| u64_at(record, word * 8)))
    }

    /// Returns the frames between ports that there are.
    pub(crate) fn waiting(self, section: Section, ports: &Ports) -> Waiting {
        let mut rest = self.section(section);
        let mut waiting = Waiting::new();
        while let Some((record, frames)) = rest.split_at_checked(FRAME) {
            let len = u32_at(record, 4) as usize;
            let Some((frame, next)) = frames.split_at_checked(len).filter(|_| len <= MAX_FRAME) else {
                break;
            };
            rest = next;
            let (Some(port), Some(from)) = (ports.get(&u16_at(record, 0)), ports.get(&u16_at(record, 2)))
            else {
                continue;
            };
            let header = Header::from_bytes(record[32..44].try_into().expect("a header"));
            // A frame that is none, or that its header contradicts, is not delivered on anybody's word.
            if header.check(len).is_err() {
                continue;
            }
            let cost = WireCost { packets: u64_at(record, 16), bytes: u64_at(record, 24) };
            let delayed = Delayed { from: *from, header, frame: frame.to_vec() };
            waiting.push((*port, Queued { since: u64_at(record, 8), cost, delayed }));
        }
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn waiting_frame(header: Header, len: usize) -> (PortId, Queued) {
        let delayed = Delayed { from: PortId(1), header, frame: vec![7; len] };
        (PortId(1), Queued { since: 5, cost: WireCost { packets: 1, bytes: 60 }, delayed })
    }

    fn ports() -> Ports {
        Ports::from([(1, PortId(9))])
    }

    /// The lengths of the frames that are read back.
    fn lengths(bytes: &[u8], section: Section) -> Vec<usize> {
        let waiting = Reader(bytes).waiting(section, &ports());
        waiting.iter().map(|(_, queued)| queued.delayed.frame.len()).collect()
    }

    #[test]
    fn cve_2013_4149_sections_and_lengths_beyond_the_data_are_not_believed() {
        let mut writer = Writer::default();
        let addresses = writer.addresses([Address { vid: 1, mac: MAC, port: PortId(1), seen: 3 }]);
        let flows = writer.flows([[1, 2]]);
        let waiting =
            writer.waiting(&vec![waiting_frame(Header::NONE, 60), waiting_frame(Header::NONE, 100)]);
        let mut bytes = writer.into_inner();
        let end = bytes.len() as u64;
        let read = |section| {
            let reader = Reader(&bytes);
            let addresses = reader.addresses(section, &ports()).len();
            (addresses, reader.flows(section).count(), lengths(&bytes, section).len())
        };
        assert_eq!((read(addresses).0, read(flows).1, read(waiting).2), (1, 1, 2));
        for (at, bytes) in
            [(0, end + 1), (end, 1), (end + 1, 0), (1, u64::MAX), (u64::MAX, 1), (u64::MAX, u64::MAX)]
        {
            assert_eq!(read(Section { at, bytes }), (0, 0, 0), "{at} {bytes}");
        }
        // The length of the second frame goes beyond the data.
        assert_eq!(lengths(&bytes, waiting), [60, 100]);
        let at = waiting.at as usize + FRAME + 60 + 4;
        for len in [101, 1 << 17, u32::MAX] {
            bytes[at..at + 4].copy_from_slice(&len.to_le_bytes());
            assert_eq!(lengths(&bytes, waiting), [60], "{len}");
        }
    }

    #[test]
    fn cve_2024_41090_no_frame_that_waited_is_shorter_than_an_ethernet_header_or_contradicted_by_its_own() {
        let beyond = Header { flags: 1, csum_start: 34, csum_offset: 25, ..Header::NONE };
        for (header, len, passes) in [
            (Header::NONE, 0, false),
            (Header::NONE, 13, false),
            (Header::NONE, 14, true),
            (beyond, 60, false),
            (beyond, 61, true),
            (Header { gso_type: 0x42, ..Header::NONE }, 60, false),
            (Header::NONE, MAX_FRAME, true),
            (Header::NONE, MAX_FRAME + 1, false),
        ] {
            let mut writer = Writer::default();
            let waiting = writer.waiting(&vec![waiting_frame(header, len)]);
            let expected = if passes { vec![len] } else { Vec::new() };
            assert_eq!(lengths(&writer.into_inner(), waiting), expected, "{header:?}");
        }
    }
}
