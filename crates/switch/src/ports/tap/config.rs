//! Configuration of a tap port: keys, flags and checks.

use std::net::IpAddr;
use std::os::fd::RawFd;

use ringferry_packet::ether::Mac;

use crate::config::{
    Boolean, Claim, Fields, Flag, List, MAC, MAX_WORKERS, PortSettings, Text, Unset, digits, keys, number,
    number_of,
};

/// Bytes the name of a network interface may have: `IFNAMSIZ` is 16 with the closing NUL (netdevice(7)).
pub const MAX_TAP_NAME: usize = 15;

/// Settings of a tap port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapConfig {
    /// The tap: by name, or as an inherited descriptor.
    pub source: TapSource,
    /// Checksum and segmentation offloads to and from the kernel (`TUNSETOFFLOAD`).
    pub offloads: bool,
    /// Queues of the tap, 1 to [`MAX_WORKERS`]; absent: one per worker, or one if the tap exists and has one.
    pub queues: Option<u16>,
    /// The settings of the interface.
    pub link: LinkConfig,
}

/// The settings of a tap's interface. The switch carries them out when it makes the tap, and bridge, addresses and state whenever it opens
/// it or the bridge comes back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkConfig {
    /// The tap outlives the switch, if the switch makes it.
    pub persistent: bool,
    /// Ethernet address of the interface; absent: it keeps its own.
    pub mac: Option<Mac>,
    /// The bridge of the kernel that the tap is a port of.
    pub bridge: Option<String>,
    /// Addresses of the host on the tap.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Whether the interface is brought up; absent: it is if the switch makes it.
    pub up: Option<bool>,
}

/// The tap device of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TapSource {
    /// A tap that is opened by its name.
    Name {
        /// Name of the interface, 1 to [`MAX_TAP_NAME`] bytes.
        name: String,
        /// True: the tap must exist already. False: it must not. Absent: it is created if it does not exist.
        existing: Option<bool>,
    },
    /// An inherited descriptor of `/dev/net/tun` with a tap attached, at least 3.
    Fd(RawFd),
}

keys! {
    /// The keys that only a tap port has.
    pub(crate) struct TapKeys: Live {
        /// Names the tap. One of `tap` and `fd` must be given.
        tap: String {
            is: TAP_NAME,
            default: Unset::Means("none"),
            example: "rf0",
            change: Reopen,
        }
        /// Gives the number of an inherited descriptor of `/dev/net/tun` with a tap attached.
        fd: RawFd {
            is: number(3..=RawFd::MAX as u64),
            default: Unset::Means("none"),
            example: "7",
            change: Reopen,
        }
        /// With `true` the tap must exist already, with `false` it must not.
        existing: bool {
            is: Boolean,
            default: Unset::Means("either; it is made if it does not exist"),
            example: "true",
            change: Reopen,
            only_with: "tap" because "an inherited tap exists already",
        }
        /// With `true` checksum and segmentation offloads are used in both directions between the switch and the
        /// kernel.
        offloads: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
            change: Reopen,
        }
        /// Sets the number of queues of the tap. Each is read by one worker.
        queues: u16 {
            is: number_of("queues", 1..=MAX_WORKERS as u64),
            default: Unset::Means("one for each worker; one if the tap exists and has one"),
            example: "2",
            change: Reopen,
        }
        /// With `true` the tap stays when the switch ends, with its addresses and its place in a bridge, and the next
        /// start attaches to it. It must then be removed by hand (`ip link delete`).
        persistent: bool {
            is: Boolean,
            default: Unset::Value("false"),
            example: "true",
            change: Reopen,
            only_with: "tap" because "an inherited tap is whoever's that made it",
        }
        /// Sets the Ethernet address of the interface before the interface is brought up. Guests that know the host by
        /// another one find it again when they have asked for it in vain, some twenty seconds after a change.
        mac: Mac {
            is: MAC,
            default: Unset::Means("a tap that exists keeps its own; one that is made always gets the same one for its name on this machine"),
            example: "52:54:00:00:00:fe",
            only_with: "tap" because "an inherited tap is set up by whoever made it",
        }
        /// Names a bridge of the kernel. The tap becomes a port of it at the start, and whenever either of them comes
        /// back.
        bridge: String {
            is: TAP_NAME,
            default: Unset::Means("none"),
            example: "br0",
            only_with: "tap" because "an inherited tap is set up by whoever made it",
        }
        /// Lists IP addresses of the host on the tap, each with the length of its network's prefix.
        address: Vec<(IpAddr, u8)> {
            is: List(INTERFACE_ADDRESS),
            default: Unset::Means("none is added"),
            example: "10.0.0.1/24",
            only_with: "tap" because "an inherited tap is set up by whoever made it",
        }
        /// With `true` the interface is brought up.
        up: bool {
            is: Boolean,
            default: Unset::Means("up if the switch makes the tap; as it is if the tap exists"),
            example: "true",
            only_with: "tap" because "an inherited tap is set up by whoever made it",
        }
    }
}

/// An address of an interface, with the length of its network's prefix.
const INTERFACE_ADDRESS: Text<(IpAddr, u8)> = Text {
    placeholder: "IP/BITS",
    what: "an IP address with the length of its network's prefix, such as \"10.0.0.1/24\"",
    read: |text| {
        let parts =
            text.split_once('/').and_then(|(address, bits)| Some((address.parse().ok()?, digits(bits)?)));
        let longest = |address: &IpAddr| if address.is_ipv4() { 32 } else { 128 };
        match parts {
            Some((address, bits))
                if bits <= longest(&address) && !address.is_multicast() && !address.is_unspecified() =>
            {
                Ok((address, bits as u8))
            }
            _ => Err(format!("{text:?} is not an address with a prefix length, such as 10.0.0.1/24")),
        }
    },
    write: |(address, bits)| format!("{address}/{bits}"),
};

/// The name of an interface of the host.
pub(crate) const TAP_NAME: Text<String> = Text {
    placeholder: "NAME",
    what: "1 to 15 bytes, no spaces, no `/`, `:` or `%`",
    read: |name| check_tap_name(name).map(|()| name.to_owned()),
    write: String::to_owned,
};

impl PortSettings for TapConfig {
    const KIND: &'static str = "tap";

    const FLAGS: &'static [Flag] = &[
        Flag {
            word: "tap",
            key: "tap",
            place: "NAME",
            help: "a tap device of the host, made if it does not exist",
        },
        Flag { word: "tap-fd", key: "fd", place: "N", help: "an inherited tap" },
    ];

    type Keys = TapKeys;

    fn from_keys(keys: TapKeys, fields: &mut Fields<'_>) -> Option<Self> {
        let TapKeys { tap, fd, existing, offloads, queues, persistent, mac, bridge, address, up } = keys;
        fields.exactly_one(&["tap", "fd"]);
        if fields.has("worker") && queues != Some(1) {
            let message = "only goes with queues = 1: of several queues each worker reads one";
            fields.report("worker", message);
        }
        if persistent == Some(true) && existing == Some(false) {
            fields.report(
                "persistent",
                "does not go with existing = false: the next start finds the tap and refuses it",
            );
        }
        let source = tap.map(|name| TapSource::Name { name, existing }).or_else(|| fd.map(TapSource::Fd))?;
        let persistent = persistent.unwrap_or(false);
        let link = LinkConfig { persistent, mac, bridge, addresses: address.unwrap_or_default(), up };
        Some(TapConfig { source, offloads: offloads.unwrap_or(true), queues, link })
    }

    fn to_keys(&self) -> TapKeys {
        let (tap, fd, existing) = match &self.source {
            TapSource::Name { name, existing } => (Some(name.clone()), None, *existing),
            TapSource::Fd(fd) => (None, Some(*fd), None),
        };
        let LinkConfig { persistent, mac, bridge, addresses, up } = self.link.clone();
        TapKeys {
            tap,
            fd,
            existing,
            offloads: Some(self.offloads),
            queues: self.queues,
            persistent: Some(persistent).filter(|persistent| *persistent),
            mac,
            bridge,
            address: Some(addresses).filter(|addresses| !addresses.is_empty()),
            up,
        }
    }

    fn claim(&self) -> Claim<'_> {
        match &self.source {
            TapSource::Name { name, .. } => Claim::thing(format!("the tap {name}")),
            TapSource::Fd(fd) => Claim::Fd(*fd),
        }
    }

    fn lasting_interface(&self) -> Option<&str> {
        match &self.source {
            TapSource::Name { name, .. } => Some(name.as_str()).filter(|_| self.link.persistent),
            TapSource::Fd(_) => None,
        }
    }

    fn is_of_the_host(&self) -> bool {
        true
    }

    fn has_sessions(&self) -> bool {
        false
    }

    fn is_passed(&self) -> bool {
        matches!(self.source, TapSource::Fd(_))
    }

    fn default_name(&self) -> String {
        match &self.source {
            TapSource::Name { name, .. } => name.clone(),
            TapSource::Fd(fd) => format!("fd{fd}"),
        }
    }
}

/// Checks that the kernel takes `name` as an interface name (`dev_valid_name`). A `%` is refused as it makes
/// the kernel choose a number.
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
