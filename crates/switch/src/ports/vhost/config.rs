//! Configuration of a vhost-user port: keys, flags and checks.

use std::os::fd::RawFd;
use std::path::PathBuf;

use ringferry_packet::ether::Mac;

use crate::config::{
    Boolean, Choice, Claim, Fields, Flag, MAC, PortSettings, SOCKET, Text, Unset, keys, number, power_of_two,
};

/// Settings of a vhost-user port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserConfig {
    /// The socket of the front end.
    pub endpoint: VhostUserEndpoint,
    /// Largest virtqueue accepted (the front end chooses the size); a power of two, 2 to 32768 (VIRTIO 1.4,
    /// 2.7). Absent: any.
    pub queue_size: Option<u16>,
    /// MAC address shown in the device's configuration space to front ends that ask for it; absent: they
    /// choose their own.
    pub mac: Option<Mac>,
    /// Virtio features that are offered to the front end.
    pub features: FeatureToggles,
}

/// The socket on which the port and its front end meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VhostUserEndpoint {
    /// Bind this path and wait for the front end (QEMU `-chardev socket,path=…`).
    Listen(PathBuf),
    /// Connect to this path, again and again until the front end is there (QEMU `server=on`).
    Connect(PathBuf),
    /// An inherited socket, at least 3: connected, or listening (the kernel knows which: `SO_ACCEPTCONN`).
    Fd(RawFd),
    /// A socket from systemd with this `FileDescriptorName=`.
    Activation(String),
}

/// Features that a vhost-user port offers, all on by default. A feature that is off is not offered, whatever
/// the front end can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureToggles {
    /// Frames may span several receive buffers (`VIRTIO_NET_F_MRG_RXBUF`).
    pub mergeable: bool,
    /// Partial checksums both ways (`VIRTIO_NET_F_CSUM`, `GUEST_CSUM`).
    pub csum: bool,
    /// TCP segmentation offload both ways (`HOST_TSO4/6`, `GUEST_TSO4/6`, `*_ECN`). Needs `csum`.
    pub tso: bool,
    /// UDP segmentation offload both ways (`HOST_USO`, `GUEST_USO4/6`). Needs `csum`.
    pub uso: bool,
    /// Notification suppression by index (`VIRTIO_F_EVENT_IDX`).
    pub event_idx: bool,
    /// Indirect descriptors (`VIRTIO_F_INDIRECT_DESC`).
    pub indirect: bool,
    /// Packed rings (`VIRTIO_F_RING_PACKED`).
    pub packed: bool,
    /// Buffers used in the order they came (`VIRTIO_F_IN_ORDER`).
    pub in_order: bool,
}

impl Default for FeatureToggles {
    fn default() -> Self {
        FeatureToggles {
            mergeable: true,
            csum: true,
            tso: true,
            uso: true,
            event_idx: true,
            indirect: true,
            packed: true,
            in_order: true,
        }
    }
}

keys! {
    /// The keys that only a vhost-user port has.
    pub(crate) struct VhostUserKeys {
        /// The socket on which the front end is met. This, `fd` or `activation` must be given.
        socket: PathBuf {
            is: SOCKET,
            default: Unset::Means("none"),
            example: "/run/ringferry/vm0.sock",
        }
        /// An inherited socket, connected or listening.
        fd: RawFd {
            is: number(3..=RawFd::MAX as u64),
            default: Unset::Means("none"),
            example: "5",
        }
        /// A socket from systemd, by its `FileDescriptorName=`.
        activation: String {
            is: ACTIVATION,
            default: Unset::Means("none"),
            example: "vm0",
        }
        /// `listen` on the socket, or `connect` to a front end that listens there, again and again until it does.
        mode: Mode {
            is: Choice { what: "a mode", words: &[("listen", Mode::Listen), ("connect", Mode::Connect)] },
            default: Unset::Value("listen"),
            example: "connect",
            only_with: "socket" because "an inherited socket listens or is connected already",
        }
        /// Largest virtqueue accepted; the front end chooses the size.
        queue_size: u16 {
            is: power_of_two(2..=32768),
            default: Unset::Means("any"),
            example: "1024",
        }
        /// MAC address told to front ends that ask for one.
        mac: Mac {
            is: MAC,
            default: Unset::Means("the front end chooses"),
            example: "52:54:00:00:00:01",
        }
        /// Offer checksum offloads (`VIRTIO_NET_F_CSUM`, `GUEST_CSUM`).
        csum: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// Offer TCP segmentation offloads (`HOST_TSO4/6`, `GUEST_TSO4/6`, `*_ECN`); needs `csum`.
        tso: bool {
            is: Boolean,
            default: Unset::Means("as `csum`"),
            example: "false",
        }
        /// Offer UDP segmentation offloads (`HOST_USO`, `GUEST_USO4/6`); needs `csum`.
        uso: bool {
            is: Boolean,
            default: Unset::Means("as `csum`"),
            example: "false",
        }
        /// Offer frames that span several receive buffers (`VIRTIO_NET_F_MRG_RXBUF`).
        mergeable: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// Offer notification suppression by index (`VIRTIO_F_EVENT_IDX`).
        event_idx: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// Offer indirect descriptors (`VIRTIO_F_INDIRECT_DESC`).
        indirect: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// Offer packed rings (`VIRTIO_F_RING_PACKED`).
        packed: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// Offer that buffers are used in the order in which they come (`VIRTIO_F_IN_ORDER`).
        in_order: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
    }
}

/// The role of the port at its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Listen,
    Connect,
}

const ACTIVATION: Text<String> = Text {
    placeholder: "NAME",
    what: "at most 255 ASCII characters, no colon",
    read: |name| check_activation(name).map(|()| name.to_owned()),
    write: String::to_owned,
};

impl PortSettings for VhostUserConfig {
    const KIND: &'static str = "vhost-user";

    const FLAGS: &'static [Flag] = &[
        Flag {
            word: "vhost-user",
            key: "socket",
            place: "PATH",
            help: "listen on PATH for a guest's front end; with mode=connect, connect to it",
        },
        Flag {
            word: "vhost-user-fd",
            key: "fd",
            place: "N",
            help: "an inherited socket, connected or listening",
        },
        Flag {
            word: "vhost-user-activation",
            key: "activation",
            place: "NAME",
            help: "a socket from systemd with FileDescriptorName=NAME",
        },
    ];

    type Keys = VhostUserKeys;

    fn from_keys(keys: VhostUserKeys, fields: &mut Fields<'_>) -> Option<Self> {
        let VhostUserKeys {
            socket,
            fd,
            activation,
            mode,
            queue_size,
            mac,
            csum,
            tso,
            uso,
            mergeable,
            event_idx,
            indirect,
            packed,
            in_order,
        } = keys;
        fields.exactly_one(&["socket", "fd", "activation"]);
        // Segmentation offloads follow `csum`, and may not be asked for without it (VIRTIO 1.4, 5.1.3.1).
        let csum = csum.unwrap_or(true);
        for (key, on) in [("tso", tso), ("uso", uso)] {
            if on == Some(true) && !csum {
                let message = "needs csum: a segmented packet gets new checksums; turn csum on or this off";
                fields.report(key, message);
            }
        }
        let features = FeatureToggles {
            mergeable: mergeable.unwrap_or(true),
            csum,
            tso: tso.unwrap_or(csum),
            uso: uso.unwrap_or(csum),
            event_idx: event_idx.unwrap_or(true),
            indirect: indirect.unwrap_or(true),
            packed: packed.unwrap_or(true),
            in_order: in_order.unwrap_or(true),
        };
        let socket = socket.map(|path| match mode {
            Some(Mode::Connect) => VhostUserEndpoint::Connect(path),
            _ => VhostUserEndpoint::Listen(path),
        });
        let fd = fd.map(VhostUserEndpoint::Fd);
        let endpoint = socket.or(fd).or_else(|| activation.map(VhostUserEndpoint::Activation))?;
        Some(VhostUserConfig { endpoint, queue_size, mac, features })
    }

    fn to_keys(&self) -> VhostUserKeys {
        let VhostUserConfig { endpoint, queue_size, mac, features } = self;
        let FeatureToggles { mergeable, csum, tso, uso, event_idx, indirect, packed, in_order } = *features;
        let met = match endpoint.clone() {
            VhostUserEndpoint::Listen(path) => {
                VhostUserKeys { socket: Some(path), mode: Some(Mode::Listen), ..VhostUserKeys::default() }
            }
            VhostUserEndpoint::Connect(path) => {
                VhostUserKeys { socket: Some(path), mode: Some(Mode::Connect), ..VhostUserKeys::default() }
            }
            VhostUserEndpoint::Fd(fd) => VhostUserKeys { fd: Some(fd), ..VhostUserKeys::default() },
            VhostUserEndpoint::Activation(name) => {
                VhostUserKeys { activation: Some(name), ..VhostUserKeys::default() }
            }
        };
        VhostUserKeys {
            queue_size: *queue_size,
            mac: *mac,
            csum: Some(csum),
            tso: Some(tso),
            uso: Some(uso),
            mergeable: Some(mergeable),
            event_idx: Some(event_idx),
            indirect: Some(indirect),
            packed: Some(packed),
            in_order: Some(in_order),
            ..met
        }
    }

    fn claim(&self) -> Claim<'_> {
        match &self.endpoint {
            VhostUserEndpoint::Listen(path) | VhostUserEndpoint::Connect(path) => Claim::Socket(path),
            VhostUserEndpoint::Fd(fd) => Claim::Fd(*fd),
            VhostUserEndpoint::Activation(name) => Claim::thing(format!("the systemd socket {name:?}")),
        }
    }

    fn is_passed(&self) -> bool {
        matches!(self.endpoint, VhostUserEndpoint::Fd(_) | VhostUserEndpoint::Activation(_))
    }

    fn default_name(&self) -> String {
        match &self.endpoint {
            VhostUserEndpoint::Listen(path) | VhostUserEndpoint::Connect(path) => {
                path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
            }
            VhostUserEndpoint::Fd(fd) => format!("fd{fd}"),
            VhostUserEndpoint::Activation(name) => name.clone(),
        }
    }
}

/// Checks that systemd takes the text as a `FileDescriptorName=` (systemd.socket(5)).
fn check_activation(name: &str) -> Result<(), String> {
    if name.len() > 255 || name.bytes().any(|byte| !(b' '..=b'~').contains(&byte) || byte == b':') {
        return Err(format!(
            "{name:?} is not a FileDescriptorName= of systemd: at most 255 ASCII characters, no colon"
        ));
    }
    Ok(())
}
