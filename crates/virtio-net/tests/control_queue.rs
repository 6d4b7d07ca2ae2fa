//! The control queue: both halves together, and the device half against a guest that writes what it
//! likes.

mod common;

use std::sync::Arc;

use common::{BORDER, BUFFERS, END, Piece, Raw, device_map, device_ring, payload, readable, writable};
use proptest::prelude::*;
use ringferry_memory::{Area, GuestMemory};
use ringferry_ring::Fault;
use ringferry_virtio_net::control::{Coalesce, Command, ERR, MAX_COMMAND, OK, Rss, RxMode};
use ringferry_virtio_net::device::{self, Settings};
use ringferry_virtio_net::driver::{Arena, Controlq};
use ringferry_virtio_net::{Features, MAX_FRAME};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

fn settings() -> Settings {
    Settings::new(Features::all(), MAC, 4)
}

/// Settings have no equality of their own; what they print tells them apart.
fn state(settings: &Settings) -> String {
    format!("{settings:?}")
}

const COALESCE: Coalesce = Coalesce { max_packets: 8, max_usecs: 20 };

/// Every kind of command, but for the one with a result.
fn commands() -> Vec<Command> {
    let mut commands = vec![
        Command::MacTable { unicast: vec![[2; 6]; 3], multicast: vec![[1; 6]] },
        Command::MacTable { unicast: vec![[2; 6]; 680], multicast: vec![[3; 6]; 680] },
        Command::MacAddress([2, 9, 9, 9, 9, 9]),
        Command::VlanAdd(4095),
        Command::VlanDel(4095),
        Command::AnnounceAck,
        Command::QueuePairs(4),
        Command::GuestOffloads(Features::GUEST_CSUM.bits()),
        Command::Rss(Rss { types: 1, unclassified: 3, table: vec![0, 1], max_tx: 4, key: vec![5; 40] }),
        Command::Hash { types: 2, key: vec![6; 40] },
        Command::CoalesceTransmit(COALESCE),
        Command::CoalesceReceive(COALESCE),
        Command::CoalesceQueue(1, COALESCE),
    ];
    use RxMode::*;
    for mode in [Promiscuous, AllMulticast, AllUnicast, NoMulticast, NoUnicast, NoBroadcast] {
        commands.extend([Command::Rx(mode, true), Command::Rx(mode, false)]);
    }
    commands
}

fn both_halves(features: Features) -> (Controlq, device::Controlq<Area>, Arc<GuestMemory>) {
    let mut arena = Arena::new(Controlq::arena_bytes()).unwrap();
    let (queue, driver) = Controlq::new(&mut arena, features).unwrap();
    let memory = device_map(&arena);
    let device = device::Controlq::new(device_ring(&memory, &queue, features));
    (driver, device, memory)
}

#[test]
fn clause_5_1_6_5_every_command_passes_from_half_to_half() {
    for features in [Features::all(), Features::all() - Features::EVENT_IDX] {
        let (mut driver, mut device, memory) = both_halves(features);
        let (mut here, mut there) = (settings(), settings());
        (here.announce, there.announce) = (true, true);
        for command in commands() {
            assert!(there.apply(command.clone()), "{command:?}");
            assert!(!device.ring().enable_kicks());
            assert_eq!(driver.submit(&command), Some(true), "the device sleeps");
            assert_eq!(driver.poll(), None);
            assert_eq!(driver.submit(&command), None, "one at a time");
            assert!(!driver.ring().enable_calls());
            assert!(device.poll(&memory, &mut here), "the driver sleeps");
            assert_eq!(driver.poll(), Some(true), "{command:?}");
            assert_eq!(driver.poll(), None);
            assert_eq!(state(&here), state(&there));
        }
        assert!(!here.announce && here.pairs == 4);
    }
}

#[test]
fn clause_5_1_6_5_a_refused_command_changes_nothing() {
    let (mut driver, mut device, memory) = both_halves(Features::all());
    let mut here = settings();
    let refused = [
        Command::QueuePairs(0),
        Command::QueuePairs(5),
        Command::QueuePairs(u16::MAX),
        Command::VlanAdd(4096),
        Command::VlanDel(u16::MAX),
        Command::MacAddress([1; 6]),
        Command::GuestOffloads(1 << 63),
        Command::GuestOffloads(Features::CSUM.bits()),
    ];
    let before = state(&here);
    for command in refused {
        driver.submit(&command).unwrap();
        device.poll(&memory, &mut here);
        assert_eq!((driver.poll(), state(&here)), (Some(false), before.clone()), "{command:?}");
    }
    // Nothing at all was negotiated.
    let mut none = Settings::new(Features::CTRL_VQ, MAC, 4);
    let before = state(&none);
    for command in commands() {
        driver.submit(&command).unwrap();
        device.poll(&memory, &mut none);
        assert_eq!((driver.poll(), state(&none)), (Some(false), before.clone()), "{command:?}");
    }
}

#[test]
fn a_command_longer_than_the_driver_has_room_for_is_not_sent() {
    let (mut driver, mut device, memory) = both_halves(Features::all());
    let command = Command::MacTable { unicast: vec![[2; 6]; MAX_COMMAND / 6], multicast: vec![] };
    assert_eq!(driver.submit(&command), None);
    assert!(driver.submit(&Command::AnnounceAck).is_some(), "the queue is free");
    device.poll(&memory, &mut settings());
    assert_eq!(driver.poll(), Some(true));
}

struct Served {
    raw: Raw,
    queue: device::Controlq<Area>,
    settings: Settings,
}

/// Address of the acknowledgement, among canaries.
const ACK: u64 = END - 64;

impl Served {
    fn new() -> Self {
        let raw = Raw::new(128);
        let queue = device::Controlq::new(raw.device(Features::VERSION_1));
        Self { raw, queue, settings: settings() }
    }

    /// Serves one chain; the acknowledgement byte if the chain came back.
    fn serve(&mut self, pieces: &[Piece]) -> Option<u8> {
        self.raw.write(ACK, &[0xa5; 64]);
        let head = self.raw.chain(pieces);
        let memory = Arc::clone(&self.raw.memory);
        self.queue.poll(&memory, &mut self.settings);
        let used = self.raw.used();
        if used.is_empty() {
            return None;
        }
        // The length is what was written: the acknowledgement (2.7.8.2).
        assert_eq!(used, [(u32::from(head), 1)]);
        let ack = self.raw.read(ACK, 64);
        assert_eq!(ack[1..], [0xa5; 63], "no more than the acknowledgement is written");
        Some(ack[0])
    }

    /// Serves `bytes`, cut at `cuts`.
    fn command(&mut self, bytes: &[u8], cuts: &[usize]) -> Option<u8> {
        let mut parts = Vec::new();
        let mut from = 0;
        for &cut in cuts.iter().chain([&bytes.len()]) {
            let to = cut.clamp(from, bytes.len());
            parts.push(&bytes[from..to]);
            from = to;
        }
        let mut pieces = self.raw.scatter(BUFFERS, &parts);
        pieces.push(writable(ACK, 1));
        self.serve(&pieces)
    }
}

#[test]
fn clause_2_7_4_1_a_command_may_be_cut_anywhere() {
    let mut served = Served::new();
    let bytes = Command::MacTable { unicast: vec![[2; 6]], multicast: vec![[3; 6]] }.encode();
    for first in 0..=bytes.len() {
        assert_eq!(served.command(&bytes, &[first]), Some(OK));
        assert_eq!(served.command(&bytes, &[first, first, first + 1, first + 5]), Some(OK));
    }
    let single: Vec<_> = (1..bytes.len()).collect();
    assert_eq!(served.command(&bytes, &single), Some(OK));
    // Across two regions, and with room for more than the acknowledgement.
    served.raw.write(BORDER - 7, &bytes);
    assert_eq!(served.serve(&[readable(BORDER - 7, bytes.len()), writable(ACK, 60)]), Some(OK));
    // An acknowledgement behind empty descriptors that point nowhere.
    let pieces = [readable(BORDER - 7, bytes.len()), (0, 0, true), (u64::MAX, 0, true), writable(ACK, 1)];
    assert_eq!(served.serve(&pieces), Some(OK));
}

#[test]
fn short_long_and_unknown_commands_are_answered_with_an_error() {
    let mut served = Served::new();
    let before = state(&served.settings);
    for command in commands() {
        let bytes = command.encode();
        for len in 0..bytes.len().min(40) {
            assert_eq!(served.command(&bytes[..len], &[]), Some(ERR), "{command:?} {len}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(served.command(&longer, &[]), Some(ERR), "{command:?} and a byte");
    }
    for class in 0..=u8::MAX {
        for command in [6, 7, u8::MAX] {
            assert_eq!(served.command(&[class, command, 0, 0], &[]), Some(ERR));
        }
    }
    // Nothing to read at all.
    assert_eq!(served.serve(&[writable(ACK, 1)]), Some(ERR));
    assert_eq!(state(&served.settings), before);
}

#[test]
fn cve_2014_0150_tables_longer_than_the_command() {
    let mut served = Served::new();
    let before = state(&served.settings);
    for count in [1u32, 2, 681, 0x1000_0000, 0x2aaa_aaab, u32::MAX] {
        let bytes = [&[1, 0][..], &count.to_le_bytes(), &[2; 5]].concat();
        assert_eq!(served.command(&bytes, &[]), Some(ERR), "{count}");
        let bytes = [&[1, 0][..], &[0; 4], &count.to_le_bytes(), &[2; 5]].concat();
        assert_eq!(served.command(&bytes, &[]), Some(ERR), "{count}");
    }
    assert_eq!(state(&served.settings), before);
}

#[test]
fn oversize_commands_are_not_read() {
    let mut served = Served::new();
    let before = state(&served.settings);
    // The longest that is read, and one byte more.
    let filled = |len: usize| [&[1, 0, 0x51, 5, 0, 0][..], &payload(0, len - 6)].concat();
    assert_eq!(filled(MAX_COMMAND).len(), MAX_COMMAND);
    for bytes in [filled(MAX_COMMAND), filled(MAX_COMMAND + 1), filled(MAX_FRAME)] {
        assert_eq!(served.command(&bytes, &[2]), Some(ERR));
    }
    // As long as a chain may be, in no memory: refused by its length.
    assert_eq!(served.serve(&[(0, u32::MAX - 1, false), writable(ACK, 1)]), Some(ERR));
    assert_eq!((served.queue.ring().fault(), state(&served.settings)), (None, before));
}

#[test]
fn a_command_without_room_for_its_answer_breaks_the_ring() {
    let command = Command::QueuePairs(2).encode();
    let read = readable(BUFFERS, command.len());
    let bad: [&[Piece]; 6] = [
        &[read],
        &[read, (ACK, 0, true)],
        &[read, writable(END, 1)],
        &[read, writable(u64::MAX, 1)],
        &[readable(END - 2, command.len()), writable(ACK, 1)],
        &[readable(u64::MAX - 1, command.len()), writable(ACK, 1)],
    ];
    for pieces in bad {
        let mut served = Served::new();
        served.raw.write(BUFFERS, &command);
        assert_eq!(served.serve(pieces), None, "{pieces:?}");
        assert_eq!(served.queue.ring().fault(), Some(Fault::Unusable));
        assert_eq!(served.settings.pairs, 1, "what cannot be answered is not done: {pieces:?}");
        assert_eq!(served.serve(&[read, writable(ACK, 1)]), None, "sticky");
    }
}

#[test]
fn a_flood_of_commands_is_served_in_bounded_bursts() {
    let mut served = Served::new();
    let bytes = Command::AnnounceAck.encode();
    served.raw.write(BUFFERS, &bytes);
    for _ in 0..60 {
        served.raw.chain(&[readable(BUFFERS, bytes.len()), writable(ACK, 1)]);
    }
    let memory = Arc::clone(&served.raw.memory);
    let mut rounds = 0;
    let mut answered = 0;
    while served.queue.ring().enable_kicks() {
        served.queue.poll(&memory, &mut served.settings);
        let used = served.raw.used().len();
        assert!((1..=16).contains(&used));
        answered += used;
        rounds += 1;
    }
    assert_eq!((answered, rounds), (60, 4));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn random_commands_are_always_answered(
        head in (0u8..8, 0u8..8),
        data in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..40),
            proptest::collection::vec(0u8..3, 0..40),
        ],
        cuts in proptest::collection::vec(0usize..40, 0..6),
        features in any::<u64>(),
    ) {
        let mut served = Served::new();
        served.settings = Settings::new(Features::from_bits_retain(features), MAC, 4);
        let mut model = served.settings.clone();
        let bytes = [&[head.0, head.1][..], &data].concat();
        let mut cuts = cuts;
        cuts.sort_unstable();
        let ack = served.command(&bytes, &cuts);
        // There is room for an acknowledgement, and none for a result.
        let done = Command::decode(&bytes)
            .is_some_and(|command| command.result_len() == 0 && model.apply(command));
        prop_assert_eq!(ack, Some(if done { OK } else { ERR }));
        prop_assert_eq!(state(&served.settings), state(&model));
    }
}
