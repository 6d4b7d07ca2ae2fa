//! Configuration of an xdp port: keys, flags and checks.

use ringferry_xdp::Mode;

use crate::config::{Boolean, Choice, Claim, Fields, Flag, PortSettings, Unset, keys, number_of};
use crate::plane::PAIRS;
use crate::ports::tap::config::TAP_NAME;

/// Settings of an xdp port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpConfig {
    /// Name of the interface, which must exist.
    pub interface: String,
    /// Queues of the interface that are read and written, from the first one on; absent: all, up to as many as a port may have.
    pub queues: Option<u16>,
    /// How packets get between the interface and the switch.
    pub mode: Mode,
    /// The belief in the checksums of packets that come in.
    pub checksums: Checksums,
    /// The interface takes packets for all Ethernet addresses.
    pub promiscuous: bool,
}

/// The belief in the checksums of packets that come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// They are as whoever receives them finds them.
    Trust,
    /// Those that hold nothing but the sum of the pseudo header are finished.
    Finish,
}

keys! {
    /// The keys that only an xdp port has.
    pub(crate) struct XdpKeys: Reopen {
        /// Names the interface. Its packets go to the switch from then on, and not to the host.
        interface: String {
            is: TAP_NAME,
            default: Unset::Required,
            example: "eth1",
        }
        /// Sets the number of queues of the interface that the switch has, from the first one on. The host gets what
        /// comes in on the others.
        queues: u16 {
            is: number_of("queues", 1..=PAIRS as u64),
            default: Unset::Means("all that the interface has, at most 16"),
            example: "2",
        }
        /// Selects how packets get between the interface and the switch: the interface reads and writes the switch's
        /// memory itself (`zero-copy`), the kernel copies what the driver gives it (`copy`), or what any driver gives
        /// it (`generic`).
        mode: Mode {
            is: Choice {
                what: "a mode",
                words: &[
                    ("auto", Mode::Auto),
                    ("zero-copy", Mode::ZeroCopy),
                    ("copy", Mode::Copy),
                    ("generic", Mode::Generic),
                ],
            },
            default: Unset::Value("auto"),
            example: "zero-copy",
        }
        /// Selects what is believed of the checksums of packets that come in, of which AF_XDP says nothing: that they
        /// are as their sender made them (`trust`), or that those are unfinished which hold nothing but the sum of the
        /// pseudo header, as packets of this host have them that come over a veth (`finish`).
        checksums: Checksums {
            is: Choice {
                what: "a way to see checksums",
                words: &[("finish", Checksums::Finish), ("trust", Checksums::Trust)],
            },
            default: Unset::Value("finish"),
            example: "trust",
        }
        /// With `true` the interface takes packets for all Ethernet addresses, those of guests among them.
        promiscuous: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
    }
}

impl PortSettings for XdpConfig {
    const KIND: &'static str = "xdp";

    const FLAGS: &'static [Flag] = &[Flag {
        word: "xdp",
        key: "interface",
        place: "NAME",
        help: "an Ethernet interface of the host, by AF_XDP: a physical network",
    }];

    type Keys = XdpKeys;

    fn from_keys(keys: XdpKeys, _: &mut Fields<'_>) -> Option<Self> {
        let XdpKeys { interface, queues, mode, checksums, promiscuous } = keys;
        Some(XdpConfig {
            interface: interface?,
            queues,
            mode: mode.unwrap_or(Mode::Auto),
            checksums: checksums.unwrap_or(Checksums::Finish),
            promiscuous: promiscuous.unwrap_or(true),
        })
    }

    fn to_keys(&self) -> XdpKeys {
        let XdpConfig { interface, queues, mode, checksums, promiscuous } = self.clone();
        XdpKeys {
            interface: Some(interface),
            queues,
            mode: Some(mode),
            checksums: Some(checksums),
            promiscuous: Some(promiscuous),
        }
    }

    fn claim(&self) -> Claim<'_> {
        Claim::thing(format!("the interface {}", self.interface))
    }

    fn default_name(&self) -> String {
        self.interface.clone()
    }

    fn is_of_the_host(&self) -> bool {
        true
    }

    fn has_sessions(&self) -> bool {
        false
    }
}
