//! The attacks. Each is set up by a function that returns a [`Step`]: a piece of work that is done again and again until the
//! process is ended. A switch may answer an attack by ending the connection or by serving the port no longer; the attacker
//! then connects again as soon as it can, and what was refused is counted.
//!
//! | module | attacks |
//! |---|---|
//! | `floods` | more frames than the switch can carry, large, small, to everybody, from any address, for bad receivers; M5: to another worker's port |
//! | `segments` | H3, M4: frames that are many packets, for many |
//! | `rings` | H4: full rings that are disabled; rings that break |
//! | `messages` | H5, D1: messages, connections, descriptors that are slow to close |
//! | `events` | H1, M6: eventfds that block or never fall silent |
//! | `memory` | H2: memory that is none, or that is taken away while it is used |

mod events;
mod floods;
mod memory;
mod messages;
mod rings;
mod segments;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::case::Who;
use crate::experiment::RowError;

/// A piece of an attack; returns how many operations it was, or why there can be no more on this connection.
pub(super) type Step = Box<dyn FnMut() -> Result<u64, RowError>>;

/// How often the attacker tells what it has done.
const REPORT: Duration = Duration::from_millis(50);
/// How long it waits before it tries again when it was thrown out.
const AGAIN: Duration = Duration::from_millis(2);
/// How much kinder than others the attacker is to the processor that it shares with the innocent guests: what is measured is
/// what it does to them by way of the switch.
const NICE: i32 = 15;

/// An attack, by the name of its row and, where it has one, the number of the finding that it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(super) enum Attack {
    Flood64,
    FloodTso,
    FloodBroadcast,
    FloodMacs,
    Flood16Pairs,
    TinyBuffers,
    NoBuffers,
    DearChains,
    H1BlockingCall,
    H2SparseMemory,
    PunchedHoles,
    H3Segments,
    H3SegmentsPairs,
    H3SegmentsSmallest,
    H4Disable,
    H5MemTable,
    M3BrokenRings,
    M3Malformed,
    M4Storm,
    M5OtherWorker,
    M6SemaphoreKick,
    D1LingeringSocket,
    Connections,
    Devices,
    Messages,
}

/// An attack's properties: name, ports, whether it makes sense on testpmd, why it cannot be carried out on Open vSwitch, set-up.
struct About {
    name: &'static str,
    ports: usize,
    testpmd: bool,
    not_on_ovs: Option<&'static str>,
    set_up: fn(&Place) -> Result<Step, RowError>,
}

/// Why there are no frames on Open vSwitch that are to be cut.
const NO_TSO: &str = "Open vSwitch offers no segmentation (VIRTIO_NET_F_HOST_TSO4) at ports where it listens";

impl Attack {
    pub(super) const ALL: [Attack; 25] = [
        Attack::Flood64,
        Attack::FloodTso,
        Attack::FloodBroadcast,
        Attack::FloodMacs,
        Attack::Flood16Pairs,
        Attack::TinyBuffers,
        Attack::NoBuffers,
        Attack::DearChains,
        Attack::H1BlockingCall,
        Attack::H2SparseMemory,
        Attack::PunchedHoles,
        Attack::H3Segments,
        Attack::H3SegmentsPairs,
        Attack::H3SegmentsSmallest,
        Attack::H4Disable,
        Attack::H5MemTable,
        Attack::M3BrokenRings,
        Attack::M3Malformed,
        Attack::M4Storm,
        Attack::M5OtherWorker,
        Attack::M6SemaphoreKick,
        Attack::D1LingeringSocket,
        Attack::Connections,
        Attack::Devices,
        Attack::Messages,
    ];

    #[rustfmt::skip]
    fn about(self) -> About {
        let about = |name, ports, testpmd, set_up| About { name, ports, testpmd, not_on_ovs: None, set_up };
        let cut = |about| About { not_on_ovs: Some(NO_TSO), ..about };
        match self {
            Attack::Flood64 => about("flood-64", 2, true, floods::small),
            Attack::FloodTso => cut(about("flood-tso", 2, true, floods::tso)),
            Attack::FloodBroadcast => about("flood-broadcast", 9, false, floods::broadcast),
            Attack::FloodMacs => about("flood-macs", 2, false, floods::macs),
            Attack::Flood16Pairs => about("flood-16-pairs", 2, false, floods::pairs),
            Attack::TinyBuffers => about("tiny-buffers", 2, true, floods::tiny_buffers),
            Attack::NoBuffers => about("no-buffers", 2, true, floods::no_buffers),
            Attack::DearChains => about("dear-chains", 2, true, floods::dear_chains),
            Attack::H1BlockingCall => about("h1-blocking-call", 1, true, events::call),
            Attack::H2SparseMemory => about("h2-sparse-memory", 1, true, memory::sparse),
            Attack::PunchedHoles => about("punched-holes", 1, true, memory::holes),
            Attack::H3Segments => cut(about("h3-segments", 9, false, segments::large)),
            Attack::H3SegmentsPairs => cut(about("h3-segments-16-pairs", 9, false, segments::pairs)),
            Attack::H3SegmentsSmallest => cut(about("h3-segments-smallest", 9, false, segments::smallest)),
            Attack::H4Disable => about("h4-disable", 1, true, rings::disable),
            Attack::H5MemTable => about("h5-mem-table", 1, true, messages::mem_table),
            Attack::M3BrokenRings => about("m3-broken-rings", 1, true, rings::broken),
            Attack::M3Malformed => about("m3-malformed", 1, true, messages::malformed),
            Attack::M4Storm => About {
                not_on_ovs: Some("Open vSwitch has no storm control"),
                ..about("m4-storm", 9, false, segments::large)
            },
            Attack::M5OtherWorker => About {
                not_on_ovs: Some("Open vSwitch has no rings between the threads of its datapath"),
                ..about("m5-other-worker", 2, false, floods::other_worker)
            },
            Attack::M6SemaphoreKick => about("m6-semaphore-kick", 1, true, events::kick),
            Attack::D1LingeringSocket => about("d1-lingering-socket", 1, true, messages::lingering),
            Attack::Connections => about("connections", 1, true, messages::connections),
            Attack::Devices => about("devices", 1, true, messages::devices),
            Attack::Messages => about("messages", 1, true, messages::messages),
        }
    }

    pub(super) fn name(self) -> &'static str {
        self.about().name
    }

    /// Ports that the attacker has.
    pub(super) fn ports(self) -> usize {
        self.about().ports
    }

    /// Returns true if it can be carried out on testpmd, which has no addresses, no broadcasts and one queue pair for each port.
    pub(super) fn on_testpmd(self) -> bool {
        self.about().testpmd
    }

    /// Keys of the attacker's ports on ringferry, each behind a comma.
    pub(super) fn keys(self) -> &'static str {
        match self {
            // Five such frames a second, or, were each counted as one packet, as many as go in.
            Attack::M4Storm => ",storm=10kpps",
            _ => "",
        }
    }

    /// Returns true if it is about what workers have between them.
    pub(super) fn wants_two_workers(self) -> bool {
        self == Attack::M5OtherWorker
    }

    /// Why it cannot be carried out on Open vSwitch, if so.
    pub(super) fn not_on_ovs(self) -> Option<&'static str> {
        self.about().not_on_ovs
    }
}

impl From<Attack> for String {
    fn from(attack: Attack) -> String {
        attack.name().into()
    }
}

impl TryFrom<String> for Attack {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        Attack::ALL
            .into_iter()
            .find(|attack| attack.name() == name)
            .ok_or_else(|| format!("no attack {name}"))
    }
}

/// The attacker's ports.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Place {
    /// The sockets of its ports.
    pub sockets: Vec<PathBuf>,
    pub who: Who,
}

/// The order of the attacker's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub attack: Attack,
    pub place: Place,
}

/// The attacker's counters, which its process tells in a line of JSON at a time.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Report {
    /// Frames, messages or connections so far.
    pub operations: u64,
    /// Times that it had to begin anew.
    pub refused: u64,
}

/// Attacks until the process is ended.
pub(super) fn run(order: &Order) -> Result<(), RowError> {
    // It is never refused to be kinder.
    let _ = rustix::process::nice(NICE);
    let set_up = order.attack.about().set_up;
    // Whoever cannot even begin has no attack to measure.
    let mut step = Some(set_up(&order.place)?);
    let mut report = Report::default();
    let mut out = std::io::stdout().lock();
    let mut told: Option<Instant> = None;
    loop {
        let done = match &mut step {
            Some(attack) => attack(),
            None => set_up(&order.place).map(|attack| {
                step = Some(attack);
                0
            }),
        };
        let thrown_out = done.is_err();
        let begins = report.operations == 0 && done.as_ref().is_ok_and(|operations| *operations > 0);
        match done {
            Ok(operations) => report.operations += operations,
            Err(_) => {
                report.refused += 1;
                step = None;
            }
        }
        // Told also when it has begun, and when it was thrown out: a switch may let it wait for a minute before it begins anew.
        if begins || thrown_out || told.is_none_or(|told| told.elapsed() >= REPORT) {
            told = Some(Instant::now());
            writeln!(out, "{}", serde_json::to_string(&report).map_err(RowError::failed)?)?;
            out.flush()?;
        }
        if thrown_out {
            std::thread::sleep(AGAIN);
        }
    }
}
