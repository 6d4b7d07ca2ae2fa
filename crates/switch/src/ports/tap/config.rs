//! The configuration of a tap port.

use std::os::fd::RawFd;

use crate::config::{Claim, Fields, Flag, MAX_WORKERS, PortSettings, entry};

/// Bytes the name of a network interface may have: `IFNAMSIZ` is 16 with the closing NUL (netdevice(7)).
pub const MAX_TAP_NAME: usize = 15;

/// Settings of a tap port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapConfig {
    /// Which tap.
    pub source: TapSource,
    /// Checksum and segmentation offloads to and from the kernel (`TUNSETOFFLOAD`).
    pub offloads: bool,
    /// Queues of the tap, 1 to [`MAX_WORKERS`]; absent: one per worker, or one if the tap exists and has one.
    pub queues: Option<u16>,
}

/// Which tap device a port uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TapSource {
    /// The tap with this name.
    Name {
        /// Name of the interface, 1 to [`MAX_TAP_NAME`] bytes.
        name: String,
        /// Whether the tap must exist already (`Some(true)`), must not (`Some(false)`), or is created when it
        /// does not (`None`).
        existing: Option<bool>,
    },
    /// An inherited descriptor of `/dev/net/tun` with a tap attached, at least 3.
    Fd(RawFd),
}

impl PortSettings for TapConfig {
    const KIND: &'static str = "tap";

    const FLAGS: &'static [Flag] =
        &[Flag { word: "tap", key: "tap", place: "NAME" }, Flag { word: "tap-fd", key: "fd", place: "N" }];

    fn parse(fields: &mut Fields<'_>) -> Option<Self> {
        let one = fields.exactly_one(&["tap", "fd"]);
        let existing = fields.boolean("existing");
        if let Some((place, _)) = existing.as_ref().filter(|_| one && !fields.has("tap")) {
            fields.report(place, "existing", "only goes with tap: an inherited tap exists already");
        }
        let tap = fields.checked("tap", check_tap_name);
        let tap =
            tap.map(|(_, name)| TapSource::Name { name, existing: existing.map(|(_, existing)| existing) });
        let fd = fields.descriptor().map(TapSource::Fd);
        let offloads = fields.boolean("offloads").is_none_or(|(_, on)| on);
        let queues = fields.number("queues", 1..=MAX_WORKERS.into()).map(|(_, queues)| queues);
        if let Some(place) = fields.place_of("worker").filter(|_| queues != Some(1)) {
            let message = "only goes with queues = 1: of several queues each worker reads one";
            fields.report(&place, "worker", message);
        }
        Some(TapConfig { source: tap.or(fd)?, offloads, queues })
    }

    fn dump(&self, out: &mut String) {
        match &self.source {
            TapSource::Name { name, existing } => {
                entry(out, "tap", name.as_str());
                if let Some(existing) = existing {
                    entry(out, "existing", *existing);
                }
            }
            TapSource::Fd(fd) => entry(out, "fd", *fd),
        }
        entry(out, "offloads", self.offloads);
        if let Some(queues) = self.queues {
            entry(out, "queues", i64::from(queues));
        }
    }

    fn claim(&self) -> Claim<'_> {
        match &self.source {
            TapSource::Name { name, .. } => Claim::thing(format!("the tap {name}")),
            TapSource::Fd(fd) => Claim::Fd(*fd),
        }
    }

    fn default_name(&self) -> String {
        match &self.source {
            TapSource::Name { name, .. } => name.clone(),
            TapSource::Fd(fd) => format!("fd{fd}"),
        }
    }
}

/// What the kernel takes as an interface name (`dev_valid_name`), without `%`, which makes it choose a
/// number.
fn check_tap_name(name: &str) -> Result<(), String> {
    if name.len() > MAX_TAP_NAME {
        return Err(format!(
            "{name:?} has {} bytes, an interface name has at most {MAX_TAP_NAME}",
            name.len()
        ));
    }
    let bad = |byte: u8| byte.is_ascii_whitespace() || byte == 0x0b || b"/:%\0".contains(&byte);
    if matches!(name, "" | "." | "..") || name.bytes().any(bad) {
        return Err(format!("{name:?} is not an interface name: no spaces, no / : %"));
    }
    Ok(())
}
