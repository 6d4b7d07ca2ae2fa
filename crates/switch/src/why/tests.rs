//! Situations, each produced by workers that forward frames, and the sentence that is expected. Those that need a front end or a whole switch are tried in
//! `crates/ringferry/tests/program/why.rs`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_control::mirror::Mirror;
use ringferry_control::snapshot::{
    CaptureSnapshot, Negotiated, PairSnapshot, PortState, VERSION, WorkerSnapshot,
};
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};
use ringferry_virtio_net::Features;

use super::*;
use crate::config::{Config, Edit, SwitchConfig};
use crate::fdb::PortId;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::series::{Sample, Series};
use crate::snapshot::{FdbMerge, rules_by_key, worker};
use crate::trace;

const SECOND: u64 = 1_000_000;

/// One port of a scene.
struct Guest {
    name: &'static str,
    id: PortId,
    wire: Arc<Wire>,
    features: Features,
    mtu: u16,
    rules: Rules,
    worker: u16,
}

/// A switch of workers without threads, whose counters are sampled each second of their clock.
struct Scene {
    bed: Bed,
    series: Series,
    began: Instant,
    guests: Vec<Guest>,
    mirrors: Vec<Mirror>,
}

fn rules(settings: &[&str]) -> Rules {
    let settings: Vec<_> = settings.iter().map(|setting| (*setting).to_owned()).collect();
    if settings.is_empty() {
        return Rules::default();
    }
    let port = Config::builder().port_flag("tap:t").build().unwrap().ports.remove(0);
    port.edited(&Edit::set(&settings).unwrap()).unwrap().rules
}

fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

/// A frame of `len` bytes from station `from` to station `to`; 0xff is everybody.
fn frame(to: u8, from: u8, len: usize) -> HeapFrame {
    let to = if to == 0xff { Mac::BROADCAST } else { mac(to) };
    let mut bytes = [to.0, mac(from).0].concat();
    bytes.extend([0x88, 0xb5]);
    bytes.resize(len, 0);
    HeapFrame::new(Header::NONE, bytes)
}

/// A TCP packet of `len` bytes that is not finished: to be cut into segments of 1000 bytes, or without a checksum only.
fn unfinished(to: u8, from: u8, len: usize, is_large: bool) -> HeapFrame {
    let HeapFrame { mut bytes, .. } = frame(to, from, len);
    bytes[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
    bytes[16..18].copy_from_slice(&(len as u16 - 14).to_be_bytes());
    (bytes[22], bytes[23], bytes[46]) = (64, 6, 0x50);
    let header = Header { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Header::default() };
    let large = Header { gso_type: GSO_TCPV4, hdr_len: 54, gso_size: 1000, ..header };
    HeapFrame::new(if is_large { large } else { header }, bytes)
}

/// An IPv4 packet that must not be fragmented.
fn unfragmentable(to: u8, from: u8, len: usize) -> HeapFrame {
    let HeapFrame { mut bytes, .. } = frame(to, from, len);
    bytes[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
    bytes[16..18].copy_from_slice(&(len as u16 - 14).to_be_bytes());
    bytes[20..34].copy_from_slice(&[0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    HeapFrame::new(Header::NONE, bytes)
}

impl Scene {
    /// The guests vm1 and vm2 with all features, who know each other, and vm3, which is not known.
    fn new(settings: [&[&str]; 3]) -> Scene {
        Scene::with(settings, [Features::DEVICE; 3], [1500; 3], 1)
    }

    fn with(settings: [&[&str]; 3], features: [Features; 3], mtu: [u16; 3], workers: usize) -> Scene {
        let mut bed = Bed::new(&SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() }, workers);
        let guests = [0, 1, 2].map(|at: usize| {
            let rules = rules(settings[at]);
            let worker = at % workers;
            let (features, mtu) = (features[at], mtu[at]);
            let offloads = features.guest_offloads();
            let port = HeapPort { offloads, mtu, rules: rules.clone(), first: worker, ..HeapPort::default() };
            let (id, wire) = bed.add(&port);
            Guest { name: ["vm1", "vm2", "vm3"][at], id, wire, features, mtu, rules, worker: worker as u16 }
        });
        let series = Series::default();
        let mut scene =
            Scene { bed, series, began: Instant::now(), guests: guests.into(), mirrors: Vec::new() };
        scene.send(0, frame(2, 1, 60));
        scene.send(1, frame(1, 2, 60));
        scene.sample();
        scene
    }

    fn wire(&self, guest: usize) -> &Wire {
        &self.guests[guest].wire
    }

    /// A guest sends a frame, which goes where it goes.
    fn send(&mut self, guest: usize, frame: HeapFrame) {
        self.wire(guest).send(0, frame);
        self.bed.run();
    }

    /// For ten seconds a guest sends these frames, ten times a second.
    fn keep_sending(&mut self, guest: usize, frames: &[HeapFrame]) {
        self.keep_all_sending(&[(guest, frames)]);
    }

    /// The same of several guests.
    fn keep_all_sending(&mut self, senders: &[(usize, &[HeapFrame])]) {
        for tenth in 1..=100 {
            for (guest, frames) in senders {
                frames.iter().for_each(|frame| self.wire(*guest).send(0, frame.clone()));
            }
            self.bed.run();
            self.bed.run_for(SECOND / 10);
            if tenth % 10 == 0 {
                self.sample();
            }
        }
    }

    /// For ten seconds worker 0 is busy for so much of the time: it has no thread, whose rounds would be measured.
    fn keep_busy(&mut self, guest: usize, frame: &HeapFrame, percent: u64) {
        for _ in 0..10 {
            for _ in 0..100 {
                self.send(guest, frame.clone());
                let took = Duration::from_micros(SECOND / 100 * percent / 100);
                self.bed.worker_counters().next().unwrap().count_round(took);
                self.bed.run_for(SECOND / 100);
            }
            self.sample();
        }
    }

    fn take(&self) -> Sample {
        let now = self.began + Duration::from_micros(self.bed.now());
        let ports = self.guests.iter().map(|guest| (guest.id, self.bed.totals(guest.id)));
        Sample::of(now, self.bed.worker_counters(), ports)
    }

    fn sample(&mut self) {
        let sample = self.take();
        self.series.keep(sample);
    }

    fn snapshot(&mut self) -> Snapshot {
        // So little later that windows begin at samples.
        self.bed.advance(1000);
        let sample = self.take();
        let names: BTreeMap<PortId, &str> = self.guests.iter().map(|guest| (guest.id, guest.name)).collect();
        let mut fdb = FdbMerge::default();
        for number in 0..self.bed.worker_counters().count() {
            for page in self.bed.addresses(number) {
                fdb.add(page, |id| names[&id].to_owned());
            }
        }
        let age = Duration::from_micros(self.bed.now());
        let workers = (0..).zip(self.bed.worker_counters()).map(|(number, counters)| WorkerSnapshot {
            load: self.series.worker(&sample, number, |id| names.get(&id).copied()),
            ..worker(counters, age)
        });
        let ports = self.guests.iter().map(|guest| {
            let totals = self.bed.totals(guest.id);
            let pair = PairSnapshot { worker: guest.worker, ..PairSnapshot::default() };
            PortSnapshot {
                name: guest.name.to_owned(),
                negotiated: Negotiated::VhostUser(guest.features),
                state: PortState::Up,
                fault: None,
                peer: String::new(),
                mtu: guest.mtu,
                mac: None,
                queues: Vec::new(),
                counters: totals.by_name(),
                drops: totals.drops_by_name(),
                rules: rules_by_key(&guest.rules),
                pairs: vec![pair],
                rates: self.series.port(&sample, guest.id),
                another_waits: false,
                ended: None,
                stopped_seconds: None,
                front_end: None,
            }
        });
        let (ports, workers) = (ports.collect(), workers.collect());
        let (fdb, mirrors) = (fdb.settle(true, None), self.mirrors.clone());
        Snapshot { version: VERSION, ports, fdb, workers, mirrors, ..Snapshot::default() }
    }

    fn why(&mut self, port: &str, peer: Option<&str>) -> Diagnosis {
        let snapshot = self.snapshot();
        let of = |name: &str| self.guests.iter().find(|guest| guest.name == name).unwrap().rules.clone();
        let ids = self.guests.iter().map(|guest| (guest.name, guest.id)).collect::<BTreeMap<_, _>>();
        let bed = RefCell::new(&mut self.bed);
        let traced = trace::Known {
            snapshot: &snapshot,
            rules: &of,
            id: &|name| ids.get(name).copied(),
            capture: &|id| format!("capture {}", id.0),
            walk: &|frame| Ok(Some(bed.borrow_mut().walk(frame))),
        };
        let known = Known {
            snapshot: &snapshot,
            rules: &of,
            is_drained: &|_| false,
            renewed: &|_| None,
            trace: &|request| trace::trace(&traced, request),
        };
        why(&known, port, peer).unwrap()
    }
}

/// Checks that a situation was found, with a sentence that begins, or goes on, like this. Then it must not be said that nothing was found.
fn check(diagnosis: &Diagnosis, situation: &str, effect: Effect, sentence: &str) -> Result<(), String> {
    let text = diagnosis.to_text();
    let is_it = |finding: &&Finding| finding.situation == situation && finding.text.contains(sentence);
    let found = diagnosis.findings.iter().find(is_it);
    let found = found.ok_or_else(|| format!("not {situation}, {sentence}\n{text}"))?;
    if found.effect != effect || found.remedy.is_empty() || found.text.ends_with("..") {
        return Err(format!("{situation} is another one: {found:?}"));
    }
    if !text.contains(sentence) || text.contains("Nothing was found") {
        return Err(format!("{situation} is not in the text: {text}"));
    }
    Ok(())
}

/// A scene in which something is wrong, and what is said about it.
struct Case {
    situation: &'static str,
    effect: Effect,
    /// The port that is asked about, and its peer.
    about: (&'static str, Option<&'static str>),
    make: fn() -> Scene,
    sentence: &'static str,
}

const ALL: Features = Features::DEVICE;
const NO_RULES: [&[&str]; 3] = [&[], &[], &[]];

/// Without what `features` has.
fn lacking(features: Features) -> Features {
    ALL.difference(features)
}

/// vm1 sends thousands of frames a second to this station, and vm2 takes none.
fn overrun(to: u8) -> Scene {
    let mut scene = Scene::new(NO_RULES);
    scene.wire(1).set_room(0, 0);
    scene.keep_sending(0, &vec![frame(to, 1, 60); 600]);
    scene
}

fn cases() -> Vec<Case> {
    use Effect::{Loses, Notes, Slows, Stops};
    let case = |situation, effect, about, make, sentence| Case { situation, effect, about, make, sentence };
    vec![
        case(
            "out-of-buffers",
            Loses,
            ("vm2", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                scene.wire(1).set_room(0, 0);
                scene.keep_sending(0, &[frame(2, 1, 60), frame(2, 1, 60)]);
                scene
            },
            "ran out of them in 100 % of the bursts for it",
        ),
        case(
            "out-of-buffers",
            Loses,
            ("vm2", None),
            || overrun(2),
            "Of all that comes from ports which vm2 can hear, 100 % is of vm1, 6.00k packets a second.",
        ),
        case(
            "overruns",
            Loses,
            ("vm1", None),
            || overrun(2),
            "vm1 sends 6.00k packets a second, 100 % of all that comes from ports which vm2 can hear, and at vm2 6.00k a second are dropped",
        ),
        case(
            "drops-no-receive-buffers",
            Loses,
            ("vm2", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                scene.wire(1).set_room(0, 150);
                scene.keep_sending(0, &[frame(2, 1, 60), frame(2, 1, 60)]);
                scene
            },
            "25 % of the packets for vm2 are dropped as `no-receive-buffers`, 5 a second.",
        ),
        case(
            "drops-isolated",
            Loses,
            ("vm2", None),
            || {
                let mut scene = Scene::new([&["isolated=on"], &["isolated=on"], &[]]);
                scene.guests[1].wire.send(0, frame(0xff, 2, 60));
                scene.bed.run();
                scene.keep_sending(0, &[frame(2, 1, 60)]);
                scene
            },
            "dropped as `isolated`, 10 a second. Sender and receiver are both isolated ports.",
        ),
        case(
            "isolated",
            Stops,
            ("vm1", Some("vm2")),
            || Scene::new([&["isolated=on"], &["isolated=on"], &[]]),
            "Nothing passes from vm1 to vm2: vm1 and vm2 are both isolated.",
        ),
        case(
            "apart-from-some",
            Notes,
            ("vm1", None),
            || Scene::new([&["isolated=on"], &["isolated=on"], &[]]),
            "Rules keep vm1 apart from vm2: nothing passes from here to there.",
        ),
        case(
            "apart-from-all",
            Stops,
            ("vm1", None),
            || Scene::new([&["vlan=10"], &["vlan=20"], &["vlan=30"]]),
            "Nothing passes from vm1 to any other port that is up (vm2, vm3): rules keep them apart.",
        ),
        case(
            "no-common-vlan",
            Stops,
            ("vm1", Some("vm2")),
            || Scene::new([&["vlan=10"], &["vlan=20"], &[]]),
            "Nothing passes from vm1 to vm2: vm1 is in VLAN 10 and vm2 is in VLAN 20.",
        ),
        case(
            "no-common-vlan",
            Stops,
            ("vm1", Some("vm2")),
            || Scene::new([&["vlan=10"], &["trunk=20,30", "native=none"], &[]]),
            "Nothing passes from vm1 to vm2: vm1 is in VLAN 10 and vm2 is in VLANs 20, 30.",
        ),
        case(
            "would-be-dropped",
            Notes,
            ("vm1", Some("vm2")),
            || Scene::new([&["trunk=10,20", "native=none"], &["trunk=20,30", "native=none"], &[]]),
            "A frame from vm1 to vm2 with a tag of VLAN 10 would not arrive, by the rule behind `vlan`: Not flooded to there, as it is not in VLAN 10.",
        ),
        case(
            "would-be-dropped",
            Notes,
            ("vm1", Some("vm2")),
            || Scene::new([&["trunk=10-12,20", "native=none"], &["trunk=20,30", "native=none"], &[]]),
            "A frame from vm1 to vm2 with a tag of one of the VLANs 10, 11, 12 would not arrive, by the rule behind `vlan`: Not flooded to there, as it is not in VLAN 10.",
        ),
        case(
            "would-be-dropped",
            Loses,
            ("vm1", Some("vm2")),
            || Scene::new([&[], &["vlan=10"], &[]]),
            "A frame from vm1 to vm2 without a tag would not arrive, by the rule behind `vlan`:",
        ),
        case(
            "tagged-on-the-way",
            Notes,
            ("vm2", None),
            || Scene::new([&[], &["vlan=10"], &["vlan=20"]]),
            "vm2 is an access port of VLAN 10, and no other port that is up is one: what it sends leaves vm1 with the tag of VLAN 10,",
        ),
        case(
            "tagged-on-the-way",
            Notes,
            ("vm1", None),
            || Scene::new([&[], &["vlan=10"], &["vlan=20"]]),
            "vm2 is an access port of VLAN 10, and no other port that is up is one: what it sends leaves vm1 with the tag of VLAN 10,",
        ),
        case(
            "tagged-on-the-way",
            Notes,
            ("vm3", None),
            || Scene::new([&[], &["vlan=10"], &["vlan=10"]]),
            "vm3 is an access port of VLAN 10, and frames have come from vm1 lately without a tag and none of VLAN 10: what it sends leaves vm1 with the tag of VLAN 10,",
        ),
        case(
            "in-all-vlans",
            Notes,
            ("vm1", None),
            || Scene::new([&[], &["vlan=10"], &["vlan=10"]]),
            "vm1 has no vlan, so its guest is in all of them: what it sends with a tag of 10 reaches vm2.",
        ),
        case(
            "would-be-dropped",
            Stops,
            ("vm2", Some("vm1")),
            || Scene::new([&[], &["allowed_macs=52:54:00:00:00:99", "max_macs=0"], &[]]),
            "A frame from vm2 to vm1 without a tag would not arrive, by the rule behind `mac-limit`: vm2 has as many addresses as max_macs allows.",
        ),
        case(
            "in-quarantine",
            Notes,
            ("vm1", None),
            || Scene::new([&["quarantine=vm3"], &[], &[]]),
            "vm1 is in quarantine: it exchanges frames with vm3 alone, which gets all that it sends.",
        ),
        case(
            "in-quarantine",
            Stops,
            ("vm1", None),
            || Scene::new([&["quarantine=vm4"], &[], &[]]),
            "vm1 is in quarantine: nothing passes, as there is no vm4, which it is left with.",
        ),
        case(
            "in-quarantine",
            Stops,
            ("vm2", Some("vm1")),
            || Scene::new([&["quarantine=vm3"], &[], &[]]),
            "Nothing passes from vm2 to vm1: vm1 is in quarantine, with vm3 alone.",
        ),
        case(
            "apart-from-some",
            Notes,
            ("vm2", None),
            || Scene::new([&["quarantine=vm3"], &[], &[]]),
            "Rules keep vm2 apart from vm1",
        ),
        case(
            "no-address-allowed",
            Stops,
            ("vm1", Some("vm2")),
            || {
                let guard = Some(crate::rules::Guard::default());
                let mut scene = Scene::new(NO_RULES);
                scene.guests[0].rules = Rules { guard, ..Rules::default() };
                let (id, rules) = (scene.guests[0].id, scene.guests[0].rules.clone());
                scene.bed.set_rules(id, &rules);
                scene
            },
            "vm1 may send from no address (allowed_macs)",
        ),
        case(
            "drops-vlan",
            Loses,
            ("vm1", None),
            || {
                let mut scene = Scene::new([&["trunk=10"], &[], &[]]);
                scene.keep_sending(0, &[frame(2, 1, 60)]);
                scene
            },
            "dropped as `vlan`, 10 a second. The frame has a tag of a VLAN that its port is not in",
        ),
        case(
            "drops-spoofed",
            Loses,
            ("vm1", None),
            || {
                let mut scene = Scene::new([&["allowed_macs=02:00:00:00:00:01"], &[], &[]]);
                scene.keep_sending(0, &[frame(2, 9, 60), frame(2, 1, 60)]);
                scene
            },
            "50 % of the packets from vm1 are dropped as `spoofed`, 10 a second.",
        ),
        case(
            "drops-mac-limit",
            Loses,
            ("vm1", None),
            || {
                let mut scene = Scene::new([&["max_macs=1"], &[], &[]]);
                scene.keep_sending(0, &[frame(2, 7, 60), frame(2, 1, 60)]);
                scene
            },
            "dropped as `mac-limit`, 10 a second. The port has `max_macs` addresses already",
        ),
        case(
            "drops-storm",
            Loses,
            ("vm1", None),
            || {
                let mut scene = Scene::new([&["storm=2pps"], &[], &[]]);
                scene.keep_sending(0, &[frame(0xff, 1, 60), frame(0xff, 1, 60)]);
                scene
            },
            "of the packets from vm1 are dropped as `storm`",
        ),
        case(
            "drops-reserved",
            Loses,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                let mut lldp = frame(2, 1, 60);
                lldp.bytes[..6].copy_from_slice(&[1, 0x80, 0xc2, 0, 0, 0x0e]);
                scene.keep_sending(0, &[lldp]);
                scene
            },
            "100 % of the packets from vm1 are dropped as `reserved`, 10 a second.",
        ),
        case(
            "drops-no-destination",
            Loses,
            ("vm1", None),
            || {
                let mut scene = Scene::new([&["vlan=7"], &["vlan=8"], &["vlan=9"]]);
                scene.keep_sending(0, &[frame(0xff, 1, 60)]);
                scene
            },
            "dropped as `no-destination`, 10 a second. The frame was for everybody, or for an address that is not known, and there is no other port",
        ),
        case(
            "drops-same-port",
            Notes,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                scene.send(0, frame(0xff, 5, 60));
                scene.keep_sending(0, &[frame(5, 1, 60)]);
                scene
            },
            "dropped as `same-port`, 10 a second. The destination is behind the port that the frame came from.",
        ),
        case(
            "drops-rate-out",
            Loses,
            ("vm2", None),
            || {
                let mut scene = Scene::new([&[], &["rate_out=100kbit", "rate_out_burst=128kib"], &[]]);
                scene.keep_sending(0, &[frame(2, 1, 60_000), frame(2, 1, 60_000), frame(2, 1, 60_000)]);
                scene
            },
            "of the packets for vm2 are dropped as `rate-out`",
        ),
        case(
            "drops-tx-too-big",
            Loses,
            ("vm2", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                scene.wire(1).take_at_most(1514);
                scene.keep_sending(0, &[frame(2, 1, 3000)]);
                scene
            },
            "100 % of the packets for vm2 are dropped as `tx-too-big`, 10 a second.",
        ),
        case(
            "drops-too-big-answered",
            Loses,
            ("vm2", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                scene.wire(1).take_at_most(1514);
                scene.keep_sending(0, &[unfragmentable(2, 1, 3000)]);
                scene
            },
            "are dropped as `too-big-answered`, 10 a second. The frame does not fit the receiving guest's buffers or MTU, and its sender was told",
        ),
        case(
            "drops-offload-unsupported",
            Loses,
            ("vm2", None),
            || {
                let mut scene = Scene::with(NO_RULES, [ALL, Features::empty(), ALL], [1500; 3], 1);
                let mut odd = unfinished(2, 1, 3000, true);
                odd.bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
                scene.keep_sending(0, &[odd]);
                scene
            },
            "are dropped as `offload-unsupported`, 10 a second.",
        ),
        case(
            "drops-link-down",
            Loses,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                let id = scene.guests[0].id;
                scene.bed.set_link(id, false);
                scene.keep_sending(0, &[frame(2, 1, 60)]);
                scene
            },
            "Packets from or for vm1 are dropped as `link-down`, 10 a second.",
        ),
        case(
            "drops-link-down",
            Notes,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                let id = scene.guests[0].id;
                scene.bed.set_link(id, false);
                for _ in 0..7 {
                    scene.send(0, frame(2, 1, 60));
                }
                scene.bed.set_link(id, true);
                scene.bed.run_for(SECOND);
                scene.sample();
                scene.bed.run_for(2 * SECOND);
                scene.sample();
                scene
            },
            "7 packets from or for vm1 were dropped as `link-down` while it was not up",
        ),
        case(
            "drops-quarantine",
            Notes,
            ("vm1", None),
            || {
                let mut scene = Scene::new([&["quarantine=vm3"], &[], &[]]);
                scene.keep_sending(1, &[frame(1, 2, 60)]);
                scene
            },
            "are dropped as `quarantine`, 10 a second.",
        ),
        case(
            "drops-quarantine",
            Notes,
            ("vm1", None),
            || {
                let mut scene = Scene::new([&["quarantine=vm3"], &[], &[]]);
                scene.keep_sending(1, &[frame(1, 2, 60)]);
                scene.guests[0].rules = rules(&[]);
                scene
            },
            "were dropped as `quarantine` while a port was in quarantine",
        ),
        case(
            "segmented-in-software",
            Slows,
            ("vm2", None),
            || {
                let tso = Features::GUEST_TSO4.union(Features::GUEST_TSO6).union(Features::GUEST_ECN);
                let mut scene = Scene::with(NO_RULES, [ALL, lacking(tso), ALL], [1500; 3], 1);
                scene.keep_sending(0, &[unfinished(2, 1, 60_000, true)]);
                scene
            },
            "4.80 Mbit/s for vm2 are cut into segments by the switch, as vm2 takes no TSO.",
        ),
        case(
            "checksummed-in-software",
            Slows,
            ("vm2", None),
            || {
                let mut scene = Scene::with(NO_RULES, [ALL, Features::VERSION_1, ALL], [9000; 3], 1);
                scene.keep_sending(0, &[unfinished(2, 1, 8000, false), unfinished(2, 1, 8000, false)]);
                scene
            },
            "The switch computes checksums over 1.28 Mbit/s for vm2, every byte once more",
        ),
        case(
            "paused-by-rate-in",
            Slows,
            ("vm1", None),
            || {
                let mut scene = Scene::new([&["rate_in=1mbit", "rate_in_burst=128kib"], &[], &[]]);
                scene.keep_sending(0, &[frame(2, 1, 20_000)]);
                scene
            },
            "of the time because of rate_in=1mbit.",
        ),
        case(
            "held-by-worker",
            Slows,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                for _ in 0..10 {
                    scene.bed.run_for(SECOND);
                    scene.bed.totals(scene.guests[0].id).of(0).rx_held_microseconds.add(SECOND / 5);
                    scene.sample();
                }
                scene
            },
            "vm1 has to wait 20 % of the time for a worker that it sends to and that is behind.",
        ),
        case(
            "marked-by-rate-out",
            Slows,
            ("vm2", None),
            || {
                let mut scene = Scene::new([&[], &["rate_out=1mbit", "rate_out_burst=128kib"], &[]]);
                let mut frames = vec![unfinished(2, 1, 2000, false); 10];
                frames.iter_mut().for_each(|frame| frame.bytes[15] = 2);
                scene.keep_sending(0, &frames);
                scene
            },
            "because they have waited too long for rate_out=1mbit.",
        ),
        case(
            "worker-busy",
            Slows,
            ("vm2", None),
            || {
                let mut scene = Scene::with(NO_RULES, [ALL; 3], [1500; 3], 2);
                scene.guests[1].worker = 0;
                scene.keep_busy(0, &frame(2, 1, 60), 91);
                scene
            },
            "Worker 0, which serves vm2, is 91 % busy, 100 % of it with what vm1 sends.",
        ),
        case(
            "worker-delayed",
            Slows,
            ("vm2", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                for _ in 0..10 {
                    scene.bed.run_for(SECOND);
                    let delay = &scene.bed.worker_counters().next().unwrap().run_delay_nanoseconds;
                    delay.add(380_000_000);
                    scene.sample();
                }
                scene
            },
            "Worker 0, which serves vm2, had to wait for a processor 38 % of the time",
        ),
        case(
            "small-batches",
            Slows,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                for _ in 0..10 {
                    (0..6000).for_each(|_| scene.send(0, frame(2, 1, 60)));
                    scene.bed.run_for(SECOND);
                    scene.sample();
                }
                scene
            },
            "The 6.00k packets a second from vm1 come 1.0 at a time",
        ),
        case(
            "address-lost",
            Loses,
            ("vm2", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                scene.send(2, frame(1, 2, 60));
                scene
            },
            "02:00:00:00:00:02 was behind vm2 and has moved to vm3, 0 s ago: what is for it goes to vm3 alone.",
        ),
        case(
            "address-lost",
            Notes,
            ("vm2", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                scene.send(2, frame(1, 2, 60));
                scene.bed.run_for(u64::from(states::NEWS) * SECOND);
                scene.send(0, frame(3, 1, 60));
                scene
            },
            "02:00:00:00:00:02 was behind vm2 and has moved to vm3, 60 s ago: what is for it goes to vm3 alone.",
        ),
        case(
            "floods",
            Slows,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                let flood = [vec![frame(0xff, 1, 60); 110], vec![frame(2, 1, 60); 110]].concat();
                scene.keep_sending(0, &flood);
                scene
            },
            "50 % of the packets from vm1, 1.10k a second, are for everybody or for addresses that the switch does not know",
        ),
        case(
            "addresses-full",
            Slows,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                for number in 3..=200 {
                    scene.send(0, frame(2, number, 60));
                }
                scene
            },
            "behind vm1, and has room for 64, half of them behind one port.",
        ),
        case(
            "smaller-mtu-elsewhere",
            Notes,
            ("vm1", None),
            || Scene::with(NO_RULES, [ALL; 3], [9000, 4000, 1500], 1),
            "vm1 has an MTU of 9000, and vm3 one of 1500, and one other port has less than it, too: longer packets may be refused there.",
        ),
        case(
            "mtu-mismatch",
            Loses,
            ("vm1", Some("vm2")),
            || Scene::with(NO_RULES, [ALL, lacking(Features::MRG_RXBUF), ALL], [9000, 1500, 1500], 1),
            "vm1 has an MTU of 9000, and vm2 one of 1500: longer packets do not fit its buffers.",
        ),
        case(
            "mtu-mismatch",
            Notes,
            ("vm1", Some("vm2")),
            || Scene::with(NO_RULES, [ALL; 3], [9000, 1500, 1500], 1),
            "vm1 has an MTU of 9000, and vm2 one of 1500: the switch delivers longer packets",
        ),
        case(
            "dear-way",
            Slows,
            ("vm1", Some("vm2")),
            || {
                let tso = Features::GUEST_TSO4.union(Features::GUEST_TSO6).union(Features::GUEST_ECN);
                Scene::with(NO_RULES, [ALL, lacking(tso), ALL], [1500; 3], 1)
            },
            "The way from vm1 to vm2 is dear. TCP over IPv4: each packet of 64 KiB is cut into 45 by the switch",
        ),
        case(
            "different-workers",
            Slows,
            ("vm1", Some("vm2")),
            || Scene::with(NO_RULES, [ALL; 3], [1500; 3], 2),
            "vm1 is served by worker 0 and vm2 by worker 1: each packet between them is copied once more.",
        ),
        case(
            "address-moves",
            Loses,
            ("vm1", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                for _ in 0..2 {
                    scene.send(0, frame(3, 9, 60));
                    scene.send(1, frame(3, 9, 60));
                }
                scene.send(0, frame(3, 9, 60));
                scene
            },
            "02:00:00:00:00:09 has moved between vm1 and vm2 4 times in 1 s: what is for it goes to whoever has sent last.",
        ),
        case(
            "no-address",
            Notes,
            ("vm3", None),
            || Scene::new(NO_RULES),
            "No MAC address is known behind vm3: it has sent nothing that was forwarded lately",
        ),
        case(
            "sends-nothing",
            Notes,
            ("vm2", None),
            || {
                let mut scene = Scene::new(NO_RULES);
                scene.keep_sending(0, &[frame(2, 1, 60)]);
                scene
            },
            "vm2 has sent nothing for 10 s. It has received 10 a second meanwhile.",
        ),
    ]
}

#[test]
fn each_situation_has_its_sentence() {
    let failed: Vec<String> = cases()
        .into_iter()
        .filter_map(|Case { situation, effect, about: (port, peer), make, sentence }| {
            check(&make().why(port, peer), situation, effect, sentence).err()
        })
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n---\n"));
    let situations: std::collections::BTreeSet<_> = cases().iter().map(|case| case.situation).collect();
    assert!(situations.len() >= 25, "{situations:?}");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating.md");
    let page = std::fs::read_to_string(page).unwrap();
    let missing = situations
        .iter()
        .filter(|situation| !situation.starts_with("drops-") && !page.contains(&format!("`{situation}`")));
    assert_eq!(missing.collect::<Vec<_>>(), Vec::<&&str>::new(), "are not in docs/operating.md");
}

#[test]
fn a_port_of_which_nothing_is_wrong_is_said_to_be_so() {
    let mut scene = Scene::new(NO_RULES);
    for _ in 0..3 {
        scene.keep_sending(0, &[frame(2, 1, 60)]);
        scene.keep_sending(1, &[frame(1, 2, 60)]);
    }
    scene.keep_sending(0, &[frame(2, 1, 60)]);
    let diagnosis = scene.why("vm1", Some("vm2"));
    assert_eq!(diagnosis.findings, []);
    let text = diagnosis.to_text();
    assert!(text.contains("Nothing was found that stops, drops or slows down its packets."), "{text}");
    assert!(text.contains("vm1 -> vm2\n") && text.contains("vm2 -> vm1\n"), "{text}");
    assert_eq!(scene.why("vm1", None).ways, []);
}

#[test]
fn the_worst_is_said_first_and_what_was_long_ago_last() {
    let mut scene = Scene::new([&["isolated=on"], &["isolated=on"], &[]]);
    scene.send(1, frame(0xff, 2, 60));
    scene.keep_sending(0, &[frame(2, 1, 60)]);
    for _ in 0..7 {
        scene.keep_sending(0, &[]);
    }
    let diagnosis = scene.why("vm2", Some("vm1"));
    let order: Vec<_> = diagnosis.findings.iter().map(|finding| finding.situation.as_str()).collect();
    assert_eq!(order.first(), Some(&"isolated"));
    assert!(order.contains(&"drops-isolated"), "{order:?}");
    let text = "100 packets were dropped at vm2 as `isolated`, none of them in the last ten seconds.";
    check(&diagnosis, "drops-isolated", Effect::Notes, text).unwrap();
    let ports: Vec<_> = diagnosis.findings.iter().filter_map(|finding| finding.port.as_deref()).collect();
    assert!(ports.contains(&"vm1") && ports.contains(&"vm2"), "{ports:?}");
}

#[test]
fn a_mirror_is_said_at_both_ends() {
    let mut scene = Scene::new(NO_RULES);
    let (from, to) = ("vm1".to_owned(), "vm3".to_owned());
    scene.mirrors.push(Mirror { from, to, direction: None, vlan: None, copied: 7, lost: 2, to_state: None });
    check(
        &scene.why("vm1", None),
        "mirrored",
        Effect::Notes,
        "What passes vm1 is copied to vm3, which costs its worker time: 7 copies, 2 lost.",
    )
    .unwrap();
    check(&scene.why("vm3", None), "gets-copies", Effect::Notes, "vm3 gets copies of what passes vm1")
        .unwrap();
}

/// Knows a snapshot alone.
fn without_rules(snapshot: &Snapshot) -> Known<'_> {
    Known {
        snapshot,
        rules: &|_| Rules::default(),
        is_drained: &|_| false,
        renewed: &|_| None,
        trace: &|_| Err("there are no workers".to_owned()),
    }
}

/// Whose an address is that two ports have used, the rules may know: it is not to be held where they forbid it.
#[test]
fn an_address_that_was_taken_is_held_where_the_rules_allow_it() {
    let own: &[&str] = &["allowed_macs=02:00:00:00:00:02"];
    for (settings, wanted) in [
        (
            [&[], own, &[]],
            "it is vm2's: `ringferry ctl fdb add 02:00:00:00:00:02 vm2 --vlan 0` holds it there",
        ),
        (
            NO_RULES,
            "`ringferry ctl fdb add 02:00:00:00:00:02 vm2 --vlan 0`, or the same with vm3, holds it there",
        ),
    ] {
        let mut scene = Scene::new(settings);
        scene.send(2, frame(1, 2, 60));
        let found = scene.why("vm2", None).findings;
        let lost = found.iter().find(|finding| finding.situation == "address-lost").unwrap();
        assert!(lost.remedy.contains(wanted), "{}", lost.remedy);
    }
}

#[test]
fn an_address_that_is_held_since_moves_no_more() {
    let mut scene = Scene::new(NO_RULES);
    for _ in 0..3 {
        scene.send(0, frame(3, 9, 60));
        scene.send(1, frame(3, 9, 60));
    }
    let moves = |scene: &mut Scene| {
        scene.why("vm1", None).findings.iter().any(|finding| finding.situation == "address-moves")
    };
    assert!(moves(&mut scene));
    let held = rules(&["static_macs=02:00:00:00:00:09"]);
    scene.bed.set_rules(scene.guests[0].id, &held);
    scene.guests[0].rules = held;
    assert!(!moves(&mut scene));
}

/// Whoever cannot take what one other sends is told of the limit that bounds that one, before all that bounds itself.
#[test]
fn who_floods_is_what_is_bounded_first() {
    let mut scene = overrun(2);
    let bound = "If vm1 is not to send so much, `ringferry ctl set vm1 rate_in_packets=1kpps` bounds it";
    for (port, situation) in
        [("vm2", "out-of-buffers"), ("vm2", "drops-no-receive-buffers"), ("vm1", "overruns")]
    {
        let found = scene.why(port, None).findings;
        let finding = found.iter().find(|finding| finding.situation == situation).unwrap();
        assert!(finding.remedy.starts_with(bound), "{}", finding.remedy);
    }
    // Of broadcasts it is another limit.
    let mut scene = overrun(0xff);
    let found = scene.why("vm2", None).findings;
    assert!(found[0].remedy.contains("`ringferry ctl set vm1 storm=1kpps`"), "{}", found[0].remedy);
}

/// Neither a port that rules keep apart nor one whose flood ends where it begins is blamed for what another cannot take.
#[test]
fn who_cannot_be_heard_overruns_nobody() {
    for innocent in [["vlan=20"], ["storm=100pps"]] {
        let mut scene = Scene::new([&["vlan=10"], &["vlan=10"], &innocent]);
        if innocent[0].starts_with("storm") {
            scene = Scene::new([&[], &[], &innocent]);
        }
        scene.wire(1).set_room(0, 0);
        scene.keep_all_sending(&[(0, &vec![frame(2, 1, 60); 600]), (2, &vec![frame(0xff, 3, 60); 1200])]);
        let found = scene.why("vm2", None).findings;
        let finding = found.iter().find(|finding| finding.situation == "out-of-buffers").unwrap();
        assert!(finding.text.ends_with("is of vm1, 6.00k packets a second."), "{}", finding.text);
        assert!(finding.remedy.contains("`ringferry ctl set vm1 "), "{}", finding.remedy);
        let found = scene.why("vm3", None).findings;
        assert!(found.iter().all(|finding| finding.situation != "overruns"), "{found:?}");
    }
}

/// It is the limit which was reached that is to be raised.
#[test]
fn a_port_that_waits_for_packets_is_not_told_of_bits() {
    let mut scene = Scene::new([&["rate_in_packets=1kpps", "rate_in_packets_burst=128"], &[], &[]]);
    scene.keep_sending(0, &vec![frame(2, 1, 60); 200]);
    let found = scene.why("vm1", None).findings;
    let paused = found.iter().find(|finding| finding.situation == "paused-by-rate-in").unwrap();
    assert!(paused.remedy.contains("`ringferry ctl set vm1 rate_in_packets=RATE`"), "{}", paused.remedy);
    // Also where there is another one that is far away.
    let rules: &[&str] = &["rate_in_packets=1kpps", "rate_in_packets_burst=128", "rate_in=1gbit"];
    let mut scene = Scene::new([rules, &[], &[]]);
    scene.keep_sending(0, &vec![frame(2, 1, 60); 200]);
    let found = scene.why("vm1", None).findings;
    let paused = found.iter().find(|finding| finding.situation == "paused-by-rate-in").unwrap();
    assert!(paused.text.ends_with("because of rate_in_packets=1kpps."), "{}", paused.text);
    assert!(paused.remedy.contains("`ringferry ctl set vm1 rate_in_packets=RATE`"), "{}", paused.remedy);
}

#[test]
fn captures_of_a_port_are_one_finding() {
    let mut scene = Scene::new(NO_RULES);
    let capture = |number| CaptureSnapshot {
        number,
        ports: vec!["vm1".to_owned()],
        pid: Some(100 + number),
        seconds: 60,
    };
    let snapshot = Snapshot { captures: (0..3).map(capture).collect(), ..scene.snapshot() };
    let known = without_rules(&snapshot);
    let of = |port| why(&known, port, None).unwrap().findings;
    let found: Vec<_> = of("vm1").into_iter().filter(|finding| finding.situation == "captured").collect();
    assert_eq!(found.len(), 1);
    let by = "captured by process 100 for 1 min 0 s, captured by process 101 for 1 min 0 s, captured by process 102 for 1 min 0 s";
    assert_eq!(found[0].text, format!("What passes vm1 is {by}, which costs its worker time."));
    assert_eq!(found[0].remedy, "`kill 100`, `kill 101`, `kill 102`, when it is needed no more.");
    assert!(of("vm2").iter().all(|finding| finding.situation != "captured"));
}

#[test]
fn ports_that_do_not_exist_are_refused() {
    let mut scene = Scene::new(NO_RULES);
    let snapshot = scene.snapshot();
    let known = without_rules(&snapshot);
    let error = why(&known, "vm9", None).unwrap_err();
    assert_eq!(error, "there is no port \"vm9\"; the ports are: vm1, vm2, vm3");
    assert!(why(&known, "vm1", Some("vm9")).unwrap_err().starts_with("there is no port \"vm9\""));
    assert!(why(&known, "vm1", Some("vm1")).unwrap_err().contains("name another one as PEER"));
}
