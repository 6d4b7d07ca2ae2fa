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
    /// Who may connect to the socket, if the port makes one.
    pub access: AccessConfig,
    /// Largest virtqueue accepted (the front end chooses the size); a power of two, 2 to 32768 (VIRTIO 1.4,
    /// 2.7). Absent: any.
    pub queue_size: Option<u16>,
    /// MAC address shown in the device's configuration space to front ends that ask for it; absent: they
    /// choose their own.
    pub mac: Option<Mac>,
    /// Virtio features that are offered to the front end.
    pub features: FeatureToggles,
}

/// Who may connect to the socket of a port that listens. What is absent is as the switch makes files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessConfig {
    /// The user who owns the file, by name or number.
    pub owner: Option<String>,
    /// The group of the file, by name or number.
    pub group: Option<String>,
    /// The permissions of the file; who may write may connect.
    pub mode: Option<u32>,
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
    pub(crate) struct VhostUserKeys: NextConnection {
        /// Sets the path of the socket on which the switch meets the front end. One of `socket`, `fd` and `activation`
        /// must be given.
        socket: PathBuf {
            is: SOCKET,
            default: Unset::Means("none"),
            example: "/run/ringferry/vm0.sock",
            change: Reopen,
        }
        /// Gives the number of an inherited socket, which is connected or listening.
        fd: RawFd {
            is: number(3..=RawFd::MAX as u64),
            default: Unset::Means("none"),
            example: "5",
            change: Reopen,
        }
        /// Names a socket that systemd passes, by its `FileDescriptorName=`.
        activation: String {
            is: ACTIVATION,
            default: Unset::Means("none"),
            example: "vm0",
            change: Reopen,
        }
        /// Says whether the switch listens on the socket or connects to a front end that listens there. It tries to
        /// connect until it succeeds.
        mode: Mode {
            is: Choice { what: "a mode", words: &[("listen", Mode::Listen), ("connect", Mode::Connect)] },
            default: Unset::Value("listen"),
            example: "connect",
            change: Reopen,
            only_with: "socket" because "an inherited socket listens or is connected already",
        }
        /// Sets the user who owns the socket that the port makes, by name or number.
        socket_owner: String {
            is: ACCOUNT,
            default: Unset::Means("the user of the switch"),
            example: "libvirt-qemu",
            change: Reopen,
            only_with: "socket" because "an inherited socket has its owner already",
        }
        /// Sets the group of the socket that the port makes, by name or number.
        socket_group: String {
            is: ACCOUNT,
            default: Unset::Means("the group of the switch"),
            example: "kvm",
            change: Reopen,
            only_with: "socket" because "an inherited socket has its group already",
        }
        /// Sets the permissions of the socket that the port makes, in octal digits. Who may write to the socket may
        /// connect.
        socket_mode: u32 {
            is: PERMISSIONS,
            default: Unset::Means("what the umask of the switch leaves of 0777"),
            example: "0660",
            change: Reopen,
            only_with: "socket" because "an inherited socket has its permissions already",
        }
        /// Limits the size of a virtqueue. The front end chooses the size.
        queue_size: u16 {
            is: power_of_two(2..=32768),
            default: Unset::Means("any"),
            example: "1024",
        }
        /// Sets the MAC address that front ends are told if they ask for one. It is announced by RARP when a guest arrives that ran elsewhere before.
        mac: Mac {
            is: MAC,
            default: Unset::Means("the front end chooses"),
            example: "52:54:00:00:00:01",
        }
        /// With `true` checksum offloads are offered (`VIRTIO_NET_F_CSUM`, `GUEST_CSUM`).
        csum: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// With `true` TCP segmentation offloads are offered (`HOST_TSO4/6`, `GUEST_TSO4/6`, `*_ECN`). They need
        /// `csum`.
        tso: bool {
            is: Boolean,
            default: Unset::Means("as `csum`"),
            example: "false",
        }
        /// With `true` UDP segmentation offloads are offered (`HOST_USO`, `GUEST_USO4/6`). They need `csum`.
        uso: bool {
            is: Boolean,
            default: Unset::Means("as `csum`"),
            example: "false",
        }
        /// With `true` mergeable receive buffers are offered, so that a frame may span several
        /// (`VIRTIO_NET_F_MRG_RXBUF`).
        mergeable: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// With `true` notification suppression by index is offered (`VIRTIO_F_EVENT_IDX`).
        event_idx: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// With `true` indirect descriptors are offered (`VIRTIO_F_INDIRECT_DESC`).
        indirect: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// With `true` packed rings are offered (`VIRTIO_F_RING_PACKED`).
        packed: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// With `true` it is offered that buffers are used in the order in which they were made available
        /// (`VIRTIO_F_IN_ORDER`).
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

const ACCOUNT: Text<String> = Text {
    placeholder: "ACCOUNT",
    what: "a name of at most 32 letters, digits and `-_.`, or a number",
    read: |name| {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.len() <= 32 && name.bytes().all(good) && !name.starts_with('-') {
            Ok(name.to_owned())
        } else {
            Err(format!("{name:?} is not the name or number of a user or group"))
        }
    },
    write: String::to_owned,
};

const PERMISSIONS: Text<u32> = Text {
    placeholder: "MODE",
    what: "permissions in octal digits, such as \"0660\"",
    read: |digits| {
        let octal = digits.len() <= 4 && digits.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
        let mode = u32::from_str_radix(digits, 8).ok().filter(|mode| octal && *mode <= 0o777);
        mode.ok_or_else(|| format!("{digits:?} is not a mode: three octal digits, such as 660"))
    },
    write: |mode| format!("{mode:04o}"),
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
            socket_owner: owner,
            socket_group: group,
            socket_mode,
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
        let access = AccessConfig { owner, group, mode: socket_mode };
        for key in ["socket_owner", "socket_group", "socket_mode"] {
            if mode == Some(Mode::Connect) && fields.has(key) {
                let message = "does not go with mode = \"connect\": the front end makes that socket";
                fields.report(key, message);
            }
        }
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
        Some(VhostUserConfig { endpoint, access, queue_size, mac, features })
    }

    fn to_keys(&self) -> VhostUserKeys {
        let VhostUserConfig { endpoint, access, queue_size, mac, features } = self;
        let AccessConfig { owner, group, mode } = access.clone();
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
            socket_owner: owner,
            socket_group: group,
            socket_mode: mode,
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
