//! The dirty log of both packet queues against an oracle: the memory of a guest is compared before and after each step of the
//! device, and every page that differs must be marked when the step is over, for every kind of ring and of receive buffers.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::{BUFFERS, END, GSO, Guest, Mode, PLAIN, Raw, payload, writable};
use proptest::prelude::*;
use ringferry_memory::{DirtyLog, GuestMemory, MapBudget, SharedMem, WriteSlice};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::{Parts, RingAddresses, WriteLog, part_bytes};
use ringferry_virtio_net::driver::Queue;
use ringferry_virtio_net::{Features, MAX_FRAME, device};

const PAGE: usize = 4096;

/// A guest whose memory is migrated.
struct Migrating {
    guest: Guest,
    log: Arc<DirtyLog>,
    /// Pages that hold parts of a ring that the device may write.
    rings: BTreeSet<u64>,
}

fn pages(addr: u64, len: usize) -> std::ops::RangeInclusive<u64> {
    addr / 4096..=(addr + len as u64 - 1) / 4096
}

/// The addresses of a queue, and the pages that its device may write.
fn addresses(memory: &GuestMemory, queue: &Queue, packed: bool) -> (RingAddresses, BTreeSet<u64>) {
    let [desc, driver, device] = part_bytes(queue.size, packed);
    let area = |addr, len| memory.user_area(addr, len).unwrap();
    let parts = Parts {
        size: queue.size,
        desc: area(queue.desc, desc),
        driver: area(queue.avail, driver),
        device: area(queue.used, device),
    };
    let mut written: BTreeSet<u64> = pages(parts.device.guest_addr(), device).collect();
    if packed {
        written.extend(pages(parts.desc.guest_addr(), desc));
    }
    (RingAddresses::of(&parts, packed), written)
}

impl Migrating {
    fn new(features: Features, size: u16, mode: Mode) -> Self {
        let mut guest = Guest::new(features, size, mode, PLAIN);
        let region = guest.memory.regions()[0].spec();
        let bytes = ((region.guest_addr + region.size) as usize).div_ceil(PAGE).div_ceil(8);
        let file = SharedMem::new("dirty-log", bytes).unwrap();
        let log = DirtyLog::map_within(file.fd(), bytes as u64, 0, &MapBudget::unlimited()).unwrap();
        let packed = features.contains(Features::RING_PACKED);
        let [rx, tx] = &guest.pair.queues;
        let (rx, mut rings) = addresses(&guest.memory, rx, packed);
        let (tx, more) = addresses(&guest.memory, tx, packed);
        rings.extend(more);
        guest.device_rx.ring().set_log(Some(WriteLog::new(Arc::clone(&log), rx)));
        guest.device_tx.ring().set_log(Some(WriteLog::new(Arc::clone(&log), tx)));
        Self { guest, log, rings }
    }

    fn snapshot(&self) -> Vec<u8> {
        let region = self.guest.memory.regions()[0].spec();
        let mut bytes = vec![0; region.size as usize];
        let area = self.guest.memory.area(region.guest_addr, bytes.len()).unwrap();
        area.read(0, bytes.len()).unwrap().copy_to(&mut bytes);
        bytes
    }

    /// Does what a device does in one turn, and checks the log: all pages that differ are marked, and no more pages of buffers
    /// than `bytes` can have been written to.
    fn watched<T>(&mut self, bytes: usize, turn: impl FnOnce(&mut Guest) -> T) -> T {
        let first = self.guest.memory.regions()[0].spec().guest_addr / 4096;
        let before = self.snapshot();
        let result = turn(&mut self.guest);
        let after = self.snapshot();
        let differ = (first..).zip(before.chunks(PAGE).zip(after.chunks(PAGE)));
        let differ: BTreeSet<u64> =
            differ.filter(|(_, (before, after))| before != after).map(|(page, _)| page).collect();
        let marked: BTreeSet<u64> = self.log.take().into_iter().collect();
        assert!(differ.is_subset(&marked), "{differ:?} of {marked:?}");
        let buffers = marked.difference(&self.rings).count();
        assert!(buffers <= bytes, "{buffers} pages of buffers are marked for {bytes} bytes");
        result
    }

    /// Takes what the guest has sent, and gives its buffers back.
    fn send(&mut self) -> usize {
        self.watched(0, |guest| {
            let memory = Arc::clone(&guest.memory);
            let taken = guest.device_tx.poll(&memory, 32, &mut Burst::new());
            guest.device_tx.complete();
            guest.device_tx.ring().disable_kicks();
            guest.device_tx.ring().enable_kicks();
            taken
        })
    }

    /// Delivers frames, by the short way for runs or one by one.
    fn receive(&mut self, frames: &[(Header, Vec<u8>)], run: bool) -> usize {
        // A frame lies in as many pieces as there are buffers, each of which may begin and end in another page.
        let bytes = frames.iter().map(|(_, frame)| 2 + 2 * (frame.len() + 12) / 64).sum();
        self.watched(bytes, |guest| {
            guest.device_rx.expect(frames.len());
            let mut burst = Burst::new();
            for (header, frame) in frames {
                burst.push(*header, frame.as_slice().into());
            }
            let mut translator = guest.memory.translator();
            let picks: Vec<u32> = (0..frames.len() as u32).collect();
            let mut done =
                if run { guest.device_rx.deliver_run(&mut translator, &burst, &picks).frames } else { 0 };
            for frame in &burst.frames()[done..] {
                let (first, rest) = (frame.prefix(), burst.rest(frame));
                let delivered = guest.device_rx.deliver(&mut translator, frame.header, first, rest);
                done += usize::from(delivered.is_ok());
            }
            guest.device_rx.flush();
            done
        })
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send(Vec<usize>),
    Receive(Vec<usize>, bool),
    Kicks,
}

fn lens() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![4 => 60usize..1514, 1 => Just(64), 1 => 1514usize..20_000, 1 => Just(MAX_FRAME)];
    prop::collection::vec(len, 1..12)
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => lens().prop_map(Step::Send),
        4 => (lens(), any::<bool>()).prop_map(|(lens, run)| Step::Receive(lens, run)),
        1 => Just(Step::Kicks),
    ]
}

fn header(len: usize) -> Header {
    if len >= 1514 { GSO } else { Header::default() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_page_that_the_device_writes_is_marked(
        mode in prop::sample::select(&Mode::ALL[..]),
        bits in 0u32..16,
        log in 2u32..7,
        steps in prop::collection::vec(steps(), 1..12),
    ) {
        let mut features = mode.with(Features::VERSION_1 | Features::CSUM | Features::HOST_TSO4 | Features::GUEST_CSUM);
        let choices =
            [Features::RING_PACKED, Features::IN_ORDER, Features::EVENT_IDX, Features::INDIRECT_DESC];
        choices.iter().enumerate().for_each(|(at, choice)| features.set(*choice, bits & 1 << at != 0));
        let mut migrating = Migrating::new(features, 1 << log, mode);
        let (mut number, mut received) = (0, 0);
        for step in steps {
            migrating.guest.pair.refill();
            migrating.guest.pair.reclaim();
            match step {
                Step::Send(lens) => {
                    for len in lens {
                        number += 1;
                        // There may be no room; the frames that fit are enough.
                        migrating.guest.pair.send_frame(&header(len), &payload(number, len));
                    }
                    migrating.guest.pair.transmitq.flush();
                    while migrating.send() > 0 {}
                }
                Step::Receive(lens, run) => {
                    let frame = |(number, len): (u64, usize)| (header(len), payload(number, len));
                    let frames: Vec<_> = (number..).zip(lens.iter().copied()).map(frame).collect();
                    number += frames.len() as u64;
                    let delivered = migrating.receive(&frames, run);
                    received += delivered;
                    prop_assert_eq!(migrating.guest.receive().len(), delivered);
                }
                Step::Kicks => {
                    migrating.watched(0, |guest| {
                        guest.device_rx.ring().enable_kicks();
                        guest.device_rx.ring().disable_kicks();
                    });
                }
            }
        }
        // A small frame fits any ring, so that no case delivers nothing.
        let last = [(Header::default(), payload(number, 60))];
        migrating.guest.pair.refill();
        received += migrating.receive(&last, true);
        prop_assert!(received > 0);
    }
}

#[test]
fn nothing_is_read_straight_into_buffers_while_writes_are_logged() {
    let mode = Mode::Mergeable;
    let mut migrating = Migrating::new(mode.with(Features::VERSION_1), 256, mode);
    migrating.guest.pair.refill();
    let guest = &mut migrating.guest;
    let mut room: Vec<WriteSlice<'_>> = Vec::new();
    assert!(!guest.device_rx.room(&mut guest.memory.translator(), 64, 1514, &mut room));
    guest.device_rx.ring().set_log(None);
    assert!(guest.device_rx.room(&mut guest.memory.translator(), 64, 1514, &mut room));
}

/// A chain has far more buffers than a frame has pieces, most of them empty: exactly the pages that bytes were written to are marked, however many they are.
#[test]
fn cve_2019_14835_many_and_empty_buffers_mark_the_pages_that_were_written_to_and_no_others() {
    let frame = payload(1, 60);
    for features in [Features::VERSION_1, Features::VERSION_1 | Features::MRG_RXBUF] {
        let mut raw = Raw::new(128);
        let mut queue = device::Receiveq::new(raw.device(features), features);
        let bytes = (END / 4096).div_ceil(8);
        let file = SharedMem::new("dirty-log", bytes as usize).unwrap();
        let log = DirtyLog::map_within(file.fd(), bytes, 0, &MapBudget::unlimited()).unwrap();
        let ring = raw.addresses();
        queue.ring().set_log(Some(WriteLog::new(Arc::clone(&log), ring)));
        // 36 buffers of two bytes, each on a page of its own, and 28 empty ones on others, or in no memory.
        let mut pieces = Vec::new();
        let mut written = BTreeSet::from([raw.used_page()]);
        for i in 0..36 {
            if i < 28 {
                let nowhere = [BUFFERS + 0x2000 * i + 0x1000, u64::MAX, 0, END];
                pieces.push(writable(nowhere[i as usize % 4], 0));
            }
            let at = BUFFERS + 0x2000 * i + 0xffe;
            written.insert(at / 4096);
            pieces.push(writable(at, 2));
        }
        raw.chain(&pieces);
        let mut translator = raw.memory.translator();
        queue.deliver(&mut translator, Header::default(), &frame, &[]).unwrap();
        queue.flush();
        assert_eq!(log.take().into_iter().collect::<BTreeSet<_>>(), written);
        assert_eq!(raw.used().len(), 1);
    }
}
