//! The network device's control queue over hostile guest memory.
//!
//! Each command is read a second time, from a copy of memory, and applied to a copy of the settings. A
//! refused command must have changed nothing, exactly the commands in the range of the specification are
//! carried out, every answer has its length, and no byte is written but answers, results and the ring.

use std::sync::Arc;

use ringferry_ring::{Buffer, Device, RingFeatures, part_bytes};
use ringferry_virtio_net::config::HashLimits;
use ringferry_virtio_net::control::{Coalesce, Command, ERR, MAX_COMMAND, OK, Rss, RxMode};
use ringferry_virtio_net::device::{Controlq, Settings};
use ringferry_virtio_net::{Features, queue_index};

use crate::guest::{BASE, Guest, Hostile, Image, Memory, Places};
use crate::net::PACKED;
use crate::oracle::{self, Model};
use crate::pen::{Pen, Stroke, offer};
use crate::ring::{Cursor, Reached, Setup, WRITE};
use crate::script::{Bytes, Field, operations};

/// Number of ring sizes that an input can choose from, as in [`net`](crate::net).
const SIZES: u8 = 6;

/// Numbers of queue pairs of the device, to choose from. More than these only make comparing slow.
const PAIRS: [u16; 4] = [1, 2, 5, 64];

/// Upper bound on the commands served per poll: the bound that the crate under test sets itself.
const BURST: usize = 16;

/// Entries of each MAC address table, at most.
const MAC_TABLE: usize = 64;

/// Offset at which [`Step::Ask`] begins to write commands: one place behind the other, and round again.
pub const COMMANDS: u32 = 0x1_0000;
const PLACE: u32 = 0x400;
const PLACES: u32 = 8;

/// Sets of negotiated features, to choose from.
pub const FEATURES: [Features; 4] = [
    Features::all(),
    Features::CTRL_VQ,
    Features::CTRL_VQ.union(Features::CTRL_RX).union(Features::CTRL_VLAN).union(Features::MQ),
    Features::all()
        .difference(Features::RSS)
        .difference(Features::NOTF_COAL)
        .difference(Features::GUEST_USO4),
];

operations! {
    /// One step of a script.
    Step {
        /// The driver changes its ring or memory.
        Driver { stroke: Stroke },
        /// The driver writes a command that makes some sense, and offers it. `at` chooses its head, or its id. See
        /// [`command`] for `kind`, `few` and `value`. `cut`: bytes of the command in its first buffer, 0 for all; `room`:
        /// bytes for the answer.
        Ask { at: u16, kind: u8, few: u8, value: u64, cut: u8, room: u8 },
        /// The device serves the queue.
        Poll {},
        /// The device asks for kicks.
        Enable {},
        /// The device wants the guest to announce itself.
        Announce {},
        /// The device is being reset.
        Reset {},
    }
}

/// Makes a command from a few bytes: `kind` and `few` choose it and the length of its lists, `value` their
/// content.
pub fn command(kind: u8, few: u8, value: u64) -> Command {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    let (low, high) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
    let types = u32::from_le_bytes([e, f, g, h]);
    let coalesce = Coalesce { max_packets: high.into(), max_usecs: types };
    let key = |len: u8| (0..len).map(|at| at ^ a).collect();
    let macs = |count: u8| (0..count).map(|at| [a, b, c, d, e, at]).collect();
    match kind % 16 {
        0..6 => {
            let modes = [
                RxMode::Promiscuous,
                RxMode::AllMulticast,
                RxMode::AllUnicast,
                RxMode::NoMulticast,
                RxMode::NoUnicast,
                RxMode::NoBroadcast,
            ];
            Command::Rx(modes[usize::from(kind % 16)], a & 1 != 0)
        }
        6 => Command::MacTable { unicast: macs(few), multicast: macs(h) },
        7 => Command::MacAddress([a, b, c, d, e, f]),
        8 if few & 1 != 0 => Command::VlanAdd(low),
        8 => Command::VlanDel(low),
        9 => Command::AnnounceAck,
        10 => Command::QueuePairs(low),
        11 => {
            let table = (0..1u16 << (few % 10)).map(|at| if at == high { low } else { at & low }).collect();
            Command::Rss(Rss { types: types & 0xffff, unclassified: low, table, max_tx: high, key: key(g) })
        }
        12 => Command::Hash { types: types & 0xffff, key: key(few) },
        13 => Command::GuestOffloads(value),
        14 if few & 1 != 0 => Command::CoalesceTransmit(coalesce),
        14 => Command::CoalesceReceive(coalesce),
        _ if few & 1 != 0 => Command::CoalesceQueue(low, coalesce),
        _ => Command::QueryQueue(low),
    }
}

/// A control queue, its hostile driver, and the expected state of the device.
struct Subject {
    guest: Guest,
    places: Places,
    features: RingFeatures,
    pen: Pen,
    queue: Controlq<Hostile>,
    settings: Settings,
    negotiated: Features,
    pairs: u16,
    resetting: bool,
    asked: u32,
    reached: Reached,
}

/// Runs a script on a control queue, and panics if a check fails.
pub fn queue(input: &[u8]) -> Reached {
    run(input).unwrap_or_default()
}

fn run(input: &[u8]) -> Option<Reached> {
    let mut input = Bytes(input);
    let mut subject = Subject::new(&mut input)?;
    while let Some(step) = Step::get(&mut input) {
        match step {
            Step::Driver { stroke } => subject.pen.apply(stroke, &subject.guest),
            Step::Ask { at, kind, few, value, cut, room } => {
                subject.ask(at, &command(kind, few, value), cut.into(), room.into());
            }
            Step::Poll {} => subject.poll(),
            Step::Enable {} => drop(subject.queue.ring().enable_kicks()),
            Step::Announce {} => subject.settings.announce = true,
            Step::Reset {} => {
                subject.settings.begin_reset();
                subject.resetting = true;
            }
        }
    }
    subject.reached.broken = subject.queue.ring().fault().is_some();
    Some(subject.reached)
}

impl Subject {
    /// Makes a device from the first bytes: its ring, then its features and number of pairs.
    fn new(input: &mut Bytes<'_>) -> Option<Self> {
        let setup = Setup::get(input)?;
        let [features, pairs] = [u8::get(input)?, u8::get(input)?].map(usize::from);
        let (negotiated, pairs) = (FEATURES[features % FEATURES.len()], PAIRS[pairs % PAIRS.len()]);
        let packed = setup.flags & PACKED != 0;
        let (places, features) = Setup { size: setup.size % SIZES, ..setup }.ring(packed);
        let guest = Guest::new();
        let start = Cursor::new(&places, setup.base);
        if !packed {
            guest.write(places.at[1] + 2, &setup.base.to_le_bytes());
            guest.write(places.at[2] + 2, &setup.base.to_le_bytes());
        }
        let ring = Device::new(places.of_device(&guest), features, start.base(), None).ok()?;
        Some(Self {
            pen: Pen::new(places, start),
            queue: Controlq::new(ring),
            settings: Settings::new(negotiated, [2, 0, 0, 0, 0, 1], pairs),
            guest,
            places,
            features,
            negotiated,
            pairs,
            resetting: false,
            asked: 0,
            reached: Reached::default(),
        })
    }

    /// Writes a command and offers it to the device.
    fn ask(&mut self, at: u16, command: &Command, cut: u32, room: u32) {
        let place = COMMANDS + PLACE * (self.asked % PLACES);
        self.asked += 1;
        let bytes = command.encode();
        self.guest.write(BASE + u64::from(place), &bytes);
        let len = bytes.len() as u32;
        // The answer lies behind the command; there is room for it even where the next place begins.
        let cut = cut.min(len);
        let mut parts = vec![(place, len, 0), (place + PLACE - 16, room, WRITE)];
        if cut > 0 {
            parts[0] = (place + cut, len - cut, 0);
            parts.insert(0, (place, cut, 0));
        }
        // In a split ring the command takes three descriptors that no other chain has, if there are so many.
        let at = if self.places.packed { at } else { at % (self.places.size / 4).max(1) * 4 };
        for stroke in offer(self.places.packed, at, &parts) {
            self.pen.apply(stroke, &self.guest);
        }
    }

    /// Polls the device and checks the commands that it carried out.
    fn poll(&mut self) {
        let start = Cursor::new(&self.places, self.queue.ring().base());
        let broken = self.queue.ring().fault().is_some();
        let mut image = self.guest.image();
        let mut twin = self.settings.clone();
        let (_, _, struck) = self.guest.watch(|| self.queue.poll(self.guest.map(), &mut self.settings));
        self.check_bounds();
        if struck {
            // The driver wrote meanwhile, so the commands that were served cannot be read again.
            return;
        }
        let (end, fault) = (self.queue.ring().base(), self.queue.ring().fault());
        assert!(!broken || end == start.base(), "a broken ring has commands");
        if end == start.base() {
            return;
        }
        let (chains, before) = (self.chains(start, end, &image), image.clone());
        let mut places = Vec::new();
        let mut unusable = false;
        for (at, chain) in &chains {
            let Some(written) = self.expect(chain, &mut image, &mut twin) else {
                unusable = true;
                break;
            };
            places.push((*at, chain, written));
        }
        assert!(!unusable || fault.is_some(), "a command that cannot be answered breaks the ring");
        assert!(self.settings == twin, "the settings are as the commands say");
        self.reached.chains += places.len();
        // If the driver has its answers written to its ring, the expected lengths and commands are
        // overwritten.
        let lens = part_bytes(self.places.size, self.places.packed);
        let own: Vec<Buffer> = (0..3)
            .filter(|part| *part == 2 || *part == 0 && self.places.packed)
            .map(|part| Buffer { addr: self.places.at[part], len: lens[part] as u32 })
            .collect();
        let overlap = |buffer: &&Buffer| {
            own.iter().any(|own| {
                buffer.addr < own.addr + u64::from(own.len)
                    && own.addr < buffer.addr.saturating_add(buffer.len.into())
            })
        };
        if chains.iter().any(|(_, chain)| chain.writable.iter().chain(&chain.readable).any(|b| overlap(&b))) {
            return;
        }
        let mut after = self.guest.image();
        if fault.is_none() && !self.features.in_order {
            for (at, chain, written) in &places {
                self.check_used(*at, chain, *written);
            }
        }
        for Buffer { addr, len } in own {
            let ring = before.read(addr, len as usize).expect("a ring in memory");
            after.write(addr, &ring);
        }
        assert!(after == image, "bytes were written that are no answer");
    }

    /// Returns the chains that were taken, with their positions in the ring.
    fn chains(&self, mut at: Cursor, end: u16, image: &Image) -> Vec<(Cursor, Model)> {
        let mut chains = Vec::new();
        let mut free = self.places.size;
        while at.base() != end {
            assert!(chains.len() < BURST, "more commands than a burst");
            let chain = oracle::chain(image, &self.places, self.features, at, free);
            let chain = chain.expect("a chain that breaks a rule was taken");
            let next = at.forward(&self.places, chain.slots);
            free -= chain.slots;
            chains.push((at, chain));
            at = next;
        }
        chains
    }

    /// Applies a command to the copies; returns the number of bytes written, or `None` if it cannot be
    /// answered.
    fn expect(&mut self, chain: &Model, image: &mut Image, twin: &mut Settings) -> Option<u32> {
        let first = chain.writable.iter().position(|buffer| buffer.len > 0)?;
        let ack = chain.writable[first].addr;
        image.read(ack, 1)?;
        let len: usize = chain.readable.iter().map(|buffer| buffer.len as usize).sum();
        let mut bytes = Vec::new();
        if len <= MAX_COMMAND {
            for buffer in chain.readable.iter().filter(|buffer| buffer.len > 0) {
                bytes.extend(image.read(buffer.addr, buffer.len as usize)?);
            }
        }
        let room: u64 = chain.writable.iter().map(|buffer| u64::from(buffer.len)).sum();
        let command = Command::decode(&bytes).filter(|command| room > command.result_len() as u64);
        let Some(command) = command else {
            image.write(ack, &[ERR]);
            return Some(1);
        };
        let good = self.may(&command) && self.in_range(&command, twin);
        let mut written = 1;
        if let (Command::QueryQueue(queue), true) = (&command, good) {
            let result = twin.coalesce(*queue).to_bytes();
            scatter(image, &chain.writable[first..], &result)?;
            written += result.len() as u32;
        }
        let before = twin.clone();
        let done = twin.apply(command.clone());
        assert_eq!(done, good, "{command:?} of {} pairs", self.pairs);
        assert!(done || before == *twin, "{command:?} was refused and changed something");
        image.write(ack, &[if done { OK } else { ERR }]);
        self.reached.frames += usize::from(done);
        Some(written)
    }

    /// Returns true if the feature of a command was negotiated; the comments name the clauses.
    fn may(&self, command: &Command) -> bool {
        let feature = match command {
            // VIRTIO 1.4, 5.1.6.5.1.
            Command::Rx(RxMode::Promiscuous | RxMode::AllMulticast, _) => Features::CTRL_RX,
            Command::Rx(..) => Features::CTRL_RX_EXTRA,
            // VIRTIO 1.4, 5.1.6.5.2.
            Command::MacTable { .. } => Features::CTRL_RX,
            Command::MacAddress(_) => Features::CTRL_MAC_ADDR,
            // VIRTIO 1.4, 5.1.6.5.3 and 5.1.6.5.4.
            Command::VlanAdd(_) | Command::VlanDel(_) => Features::CTRL_VLAN,
            Command::AnnounceAck => Features::GUEST_ANNOUNCE,
            // VIRTIO 1.4, 5.1.6.5.6, 5.1.6.5.7 and 5.1.6.5.6.4.
            Command::QueuePairs(_) => Features::MQ,
            Command::Rss(_) => Features::RSS,
            Command::Hash { .. } => Features::HASH_REPORT,
            // VIRTIO 1.4, 5.1.6.5.9 and 5.1.6.5.10.
            Command::GuestOffloads(_) => Features::CTRL_GUEST_OFFLOADS,
            Command::CoalesceTransmit(_) | Command::CoalesceReceive(_) => Features::NOTF_COAL,
            Command::CoalesceQueue(..) | Command::QueryQueue(_) => Features::VQ_NOTF_COAL,
        };
        self.negotiated.contains(feature) && !self.resetting
    }

    /// Returns true if the values of a command are in range.
    fn in_range(&self, command: &Command, settings: &Settings) -> bool {
        let HashLimits { max_key, max_table, types: supported } = HashLimits::DEVICE;
        let hashes = |types: u32, key: &[u8]| {
            types & !supported.bits() == 0
                && key.len() <= usize::from(max_key)
                && (types == 0 || !key.is_empty())
        };
        match command {
            Command::MacAddress(mac) => mac[0] & 1 == 0,
            Command::VlanAdd(id) | Command::VlanDel(id) => *id < 4096,
            Command::QueuePairs(pairs) => (1..=self.pairs).contains(pairs),
            Command::Rss(Rss { types, unclassified, table, max_tx, key }) => {
                hashes(*types, key)
                    && table.len().is_power_of_two()
                    && table.len() <= usize::from(max_table)
                    && table.iter().chain([unclassified]).all(|pair| *pair < self.pairs)
                    && (1..=self.pairs).contains(max_tx)
            }
            Command::Hash { types, key } => hashes(*types, key),
            Command::GuestOffloads(bits) => {
                let known = [1, 7, 8, 9, 10, 54, 55].iter().fold(0u64, |all, bit| all | 1 << bit);
                bits & !(self.negotiated.bits() & known) == 0
            }
            Command::CoalesceQueue(queue, _) | Command::QueryQueue(queue) => {
                usize::from(*queue) < queue_index::count(settings.pairs)
            }
            _ => true,
        }
    }

    /// Checks the used element of a chain.
    fn check_used(&self, at: Cursor, chain: &Model, written: u32) {
        let (id, len) = if self.places.packed {
            let [l0, l1, l2, l3, i0, i1] = self.guest.number(self.places.desc(at.index) + 8);
            (u32::from(u16::from_le_bytes([i0, i1])), u32::from_le_bytes([l0, l1, l2, l3]))
        } else {
            let element = self.places.element(at.index);
            let word = |at| u32::from_le_bytes(self.guest.number(at));
            (word(element), word(element + 4))
        };
        assert_eq!((id, len), (u32::from(chain.id), written), "an answer's id and length");
    }

    /// Checks that the settings stay within bounds, whatever the driver sent.
    fn check_bounds(&self) {
        let settings = &self.settings;
        assert!((1..=self.pairs).contains(&settings.pairs), "{} pairs", settings.pairs);
        for filter in [&settings.unicast, &settings.multicast] {
            assert!(filter.table.len() <= MAC_TABLE);
        }
        assert!(settings.mac[0] & 1 == 0, "a group address of its own");
        assert!(self.negotiated.contains(settings.guest_offloads));
        let steering = settings.steering(Arc::default());
        assert_eq!(steering.ready().len(), usize::from(settings.pairs));
        for port in 0..4 {
            let (pair, _) = steering.choose(&udp(port), 1);
            assert!(pair.is_some_and(|pair| pair < settings.pairs), "steered to {pair:?}");
        }
    }
}

/// Writes a result into buffers, without its first byte.
fn scatter(image: &mut Image, buffers: &[Buffer], bytes: &[u8]) -> Option<()> {
    let all = buffers.iter().flat_map(|buffer| (0..u64::from(buffer.len)).map(|at| (buffer.addr, at)));
    for ((addr, at), byte) in all.skip(1).zip(bytes) {
        let addr = addr.checked_add(at)?;
        image.read(addr, 1)?;
        image.write(addr, &[*byte]);
    }
    Some(())
}

/// Makes a frame of UDP over IPv4 from a port.
fn udp(port: u8) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..34].copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame[35] = port;
    frame
}
