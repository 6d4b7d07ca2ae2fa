//! What a running `ringferry guest` tells about itself: its answer to [`Request::Show`](crate::Request::Show).

use std::fmt::Write as _;

use ringferry_virtio_net::Features;
use serde::{Deserialize, Serialize};

use crate::channels::{Channels, Stats, Steering};

/// What `ringferry guest` tells about itself: the answer to `show` on its control socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GuestSnapshot {
    /// Version of the schemas of all that is printed as JSON, docs/json.md.
    pub version: u32,
    /// Process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// The tap.
    pub port: String,
    /// Path of the back end's socket.
    pub peer: String,
    /// Whether a back end serves it.
    pub up: bool,
    /// The features agreed on.
    #[serde(with = "crate::names::virtio")]
    #[cfg_attr(feature = "schema", schemars(with = "Vec<String>"))]
    pub features: Features,
    /// Queue pairs.
    pub channels: Channels,
    /// Where they are served.
    pub steering: Steering,
    /// What was counted; of each queue, too.
    pub stats: Stats,
}

impl GuestSnapshot {
    /// For a terminal.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "ringferry guest, process {}, up {} s\n{}: {}, {}\n",
            self.pid,
            self.uptime_seconds,
            self.port,
            self.peer,
            if self.up { "link up" } else { "no back end" }
        );
        if !self.features.is_empty() {
            let _ = writeln!(text, "  features: {}", self.features.names().join(" "));
        }
        for part in [self.channels.to_text(), self.steering.to_text(), self.stats.to_text()] {
            let _ = write!(text, "\n{part}");
        }
        text
    }
}
