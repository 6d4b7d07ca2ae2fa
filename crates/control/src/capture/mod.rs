//! Packet capture: what a client asks for, what it is given, and the memory that frames come through.
//!
//! A client asks with [`Request::Capture`](crate::Request::Capture). The switch makes two files in memory and a pipe and sends their descriptors with
//! its [answer](CaptureStarted). From then on each worker copies what the capture wants into a [ring] of its own, and the client takes it out
//! at its leisure; nobody waits for anybody. The capture ends when the client closes its end of the pipe, also by dying; the client
//! knows that the switch has ended when nobody reads the pipe any more.

pub mod ring;

use ringferry_packet::filter::Instruction;
use serde::{Deserialize, Serialize};

/// Which way frames go, as the switch sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// Into the switch: what the port's guest, or the host behind a tap, sends.
    In,
    /// Out of the switch: what the port's guest receives.
    Out,
}

/// Whether frames are captured that are dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CaptureDrops {
    /// No: the frames that come in, whatever becomes of them, and those that go out.
    #[default]
    None,
    /// The frames that are dropped, each with its reason, and no others.
    Only,
    /// The frames that are dropped, beside the others.
    Too,
}

/// What to capture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureRequest {
    /// Names of the ports; all that there are, if none is named.
    #[serde(default)]
    pub ports: Vec<String>,
    /// One direction only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direction: Option<Direction>,
    /// Frames that are dropped.
    #[serde(default)]
    pub drops: CaptureDrops,
    /// Bytes of each frame to keep, at most; 0 for all.
    #[serde(default)]
    pub snaplen: u32,
    /// A cBPF program of which frames to keep, an instruction each (code, jt, jf, k); all, if it is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filter: Vec<(u16, u8, u8, u32)>,
    /// Size of each worker's ring in KiB, rounded up to a power of two; 0 for the usual one.
    #[serde(default)]
    pub buffer_kib: u32,
}

impl CaptureRequest {
    /// Returns the program of the filter.
    pub fn program(&self) -> Vec<Instruction> {
        self.filter.iter().map(|&(code, jt, jf, k)| Instruction { code, jt, jf, k }).collect()
    }
}

/// A capture that has begun. Three descriptors come with it: the file of the rings' indexes and counters, the file of their contents,
/// and the end of a pipe that the client keeps open for as long as the capture is to last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureStarted {
    /// The ports, by the numbers that records have.
    pub interfaces: Vec<CaptureInterface>,
    /// Number of rings, one for each worker.
    pub rings: u16,
    /// Bytes of each.
    pub ring_bytes: u32,
    /// Bytes of each frame that are kept, at most.
    pub snaplen: u32,
}

/// A port of a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureInterface {
    /// Its name.
    pub name: String,
    /// Its kind and peer, for people.
    pub description: String,
}

/// Number of descriptors that come with [`CaptureStarted`].
pub const DESCRIPTORS: usize = 3;

/// Bytes of a frame that are kept if nobody says: more than any frame has, and the snapshot length that libpcap's tools write.
pub const SNAPLEN: u32 = 262_144;
