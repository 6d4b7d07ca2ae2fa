//! Network interfaces of a run, in its namespace.
//!
//! A tap of a program's has another tap behind it, with a bridge of the kernel's between the two: frames that the program
//! writes come out there, and what is written there the program reads.
//!
//! ```text
//!   switch -- rf0 == rf0-br == rf0-lab -- the lab
//! ```
//!
//! What a switch merges on the way to its tap the kernel cuts again before it comes to the lab, which counts what it sent.
//! This happens in the call that writes to the tap, so it is the switch's time.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringferry_sys::netif;
use ringferry_sys::tap::{Offloads, Tap, TapConfig};

use crate::experiment::RowError;

/// How long a program may take to make a tap.
const PATIENCE: Duration = Duration::from_secs(15);

fn ip(words: &str) -> Result<(), RowError> {
    let output = Command::new("ip").args(words.split(' ')).stdin(Stdio::null()).output();
    let output =
        output.map_err(|error| RowError::failed(format!("cannot run ip: {error}; apt install iproute2")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(RowError::failed(format!("ip {words}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// A bridge that asks nobody and tells nobody.
pub(super) fn bridge(name: &str) -> Result<(), RowError> {
    ip(&format!("link add {name} type bridge stp_state 0 mcast_snooping 0 forward_delay 0"))?;
    netif::quiet_ipv6(name);
    ip(&format!("link set {name} up"))
}

/// Puts an interface on a bridge. One that learns no addresses sends every frame on.
pub(super) fn join(interface: &str, bridge: &str, learning: bool) -> Result<(), RowError> {
    netif::quiet_ipv6(interface);
    ip(&format!("link set {interface} master {bridge}"))?;
    let learning = if learning { "on" } else { "off" };
    ip(&format!("link set dev {interface} type bridge_slave learning {learning}"))?;
    ip(&format!("link set {interface} up"))
}

/// Makes a tap that the lab reads and writes. With `offloads`, frames are read as they were sent: to be cut, or not.
pub(super) fn open(name: &str, offloads: Offloads) -> Result<Tap, RowError> {
    Tap::open(&TapConfig { offloads, ..TapConfig::new(name) }).map_err(RowError::failed)
}

/// Opens what lies behind the tap `near`, once a program has made that.
pub(super) fn behind(near: &str, offloads: Offloads) -> Result<Tap, RowError> {
    let (bridge, far) = (format!("{near}-br"), format!("{near}-lab"));
    let begin = Instant::now();
    while netif::index(near).map_err(RowError::failed)?.is_none() {
        if begin.elapsed() >= PATIENCE {
            return Err(RowError::failed(format!("nobody has made tap {near}")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let tap = open(&far, offloads)?;
    self::bridge(&bridge)?;
    join(near, &bridge, false)?;
    join(&far, &bridge, false)?;
    Ok(tap)
}
