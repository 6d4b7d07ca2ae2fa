//! The configuration of a vhost-user port.

use std::os::fd::RawFd;
use std::path::PathBuf;

use ringferry_packet::ether::Mac;

use crate::config::{Claim, Fields, Flag, PortSettings, check_socket_path, entry, parse_mac};

/// Settings of a vhost-user port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserConfig {
    /// Where the front end is met.
    pub endpoint: VhostUserEndpoint,
    /// Largest virtqueue accepted (the front end chooses the size); a power of two, 2 to 32768 (VIRTIO 1.4,
    /// 2.7). Absent: any.
    pub queue_size: Option<u16>,
    /// MAC address shown in the device's configuration space to front ends that ask for it; absent: they
    /// choose their own.
    pub mac: Option<Mac>,
    /// Features offered.
    pub features: FeatureToggles,
}

/// Where a vhost-user front end is met.
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

/// Features a vhost-user port offers, all on by default. Off means: not offered, whatever the front end can
/// do.
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

impl FeatureToggles {
    /// Every toggle with its key; `csum` first because others depend on it.
    fn by_key(&mut self) -> [(&'static str, &mut bool); 8] {
        [
            ("csum", &mut self.csum),
            ("tso", &mut self.tso),
            ("uso", &mut self.uso),
            ("mergeable", &mut self.mergeable),
            ("event_idx", &mut self.event_idx),
            ("indirect", &mut self.indirect),
            ("packed", &mut self.packed),
            ("in_order", &mut self.in_order),
        ]
    }
}

impl PortSettings for VhostUserConfig {
    const KIND: &'static str = "vhost-user";

    const FLAGS: &'static [Flag] = &[
        Flag { word: "vhost-user", key: "socket", place: "PATH" },
        Flag { word: "vhost-user-fd", key: "fd", place: "N" },
        Flag { word: "vhost-user-activation", key: "activation", place: "NAME" },
    ];

    fn parse(fields: &mut Fields<'_>) -> Option<Self> {
        let one = fields.exactly_one(&["socket", "fd", "activation"]);
        let mode = fields.checked("mode", |mode| match mode {
            "listen" | "connect" => Ok(()),
            _ => Err(format!("{mode:?} is not a mode; known: \"listen\", \"connect\"")),
        });
        if let Some((place, _)) = mode.as_ref().filter(|_| one && !fields.has("socket")) {
            fields.report(
                place,
                "mode",
                "only goes with socket: an inherited socket listens or is connected already",
            );
        }
        let socket = fields.checked("socket", check_socket_path).map(|(_, path)| match &mode {
            Some((_, mode)) if mode == "connect" => VhostUserEndpoint::Connect(path.into()),
            _ => VhostUserEndpoint::Listen(path.into()),
        });
        let fd = fields.descriptor().map(VhostUserEndpoint::Fd);
        let activation = fields
            .checked("activation", check_activation)
            .map(|(_, name)| VhostUserEndpoint::Activation(name));
        let queue_size = fields.number::<u16>("queue_size", 2..=32768);
        if let Some((place, size)) = queue_size.as_ref().filter(|(_, size)| !size.is_power_of_two()) {
            fields.report(place, "queue_size", format!("{size} is not a power of two"));
        }
        let mac = fields
            .checked("mac", |text| parse_mac(text).map(|_| ()))
            .and_then(|(_, text)| parse_mac(&text).ok());
        let features = parse_features(fields);
        Some(VhostUserConfig {
            endpoint: socket.or(fd).or(activation)?,
            queue_size: queue_size.map(|(_, size)| size),
            mac,
            features,
        })
    }

    fn dump(&self, out: &mut String) {
        match &self.endpoint {
            VhostUserEndpoint::Listen(path) | VhostUserEndpoint::Connect(path) => {
                entry(out, "socket", path.to_string_lossy().as_ref());
                let listen = matches!(self.endpoint, VhostUserEndpoint::Listen(_));
                entry(out, "mode", if listen { "listen" } else { "connect" });
            }
            VhostUserEndpoint::Fd(fd) => entry(out, "fd", *fd),
            VhostUserEndpoint::Activation(name) => entry(out, "activation", name.as_str()),
        }
        if let Some(size) = self.queue_size {
            entry(out, "queue_size", i64::from(size));
        }
        if let Some(mac) = self.mac {
            entry(out, "mac", mac.to_string());
        }
        let mut features = self.features;
        for (key, on) in features.by_key() {
            entry(out, key, *on);
        }
    }

    fn claim(&self) -> Claim<'_> {
        match &self.endpoint {
            VhostUserEndpoint::Listen(path) | VhostUserEndpoint::Connect(path) => Claim::Socket(path),
            VhostUserEndpoint::Fd(fd) => Claim::Fd(*fd),
            VhostUserEndpoint::Activation(name) => Claim::thing(format!("the systemd socket {name:?}")),
        }
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

/// Segmentation offloads follow `csum` when not given, and may not be asked for without it (VIRTIO 1.4,
/// 5.1.3.1).
fn parse_features(fields: &mut Fields<'_>) -> FeatureToggles {
    let csum = fields.boolean("csum").is_none_or(|(_, on)| on);
    let mut features = FeatureToggles { csum, ..FeatureToggles::default() };
    for (key, on) in [("tso", &mut features.tso), ("uso", &mut features.uso)] {
        let given = fields.boolean(key);
        *on = given.as_ref().map_or(csum, |(_, on)| *on);
        if let Some((place, true)) = given.filter(|_| !csum) {
            fields.report(
                &place,
                key,
                "needs csum: a segmented packet gets new checksums; turn csum on or this off",
            );
        }
    }
    for (key, on) in [
        ("mergeable", &mut features.mergeable),
        ("event_idx", &mut features.event_idx),
        ("indirect", &mut features.indirect),
        ("packed", &mut features.packed),
        ("in_order", &mut features.in_order),
    ] {
        *on = fields.boolean(key).is_none_or(|(_, on)| on);
    }
    features
}

/// What systemd takes as `FileDescriptorName=` (systemd.socket(5)).
fn check_activation(name: &str) -> Result<(), String> {
    if name.len() > 255 || name.bytes().any(|byte| !(b' '..=b'~').contains(&byte) || byte == b':') {
        return Err(format!(
            "{name:?} is not a FileDescriptorName= of systemd: at most 255 ASCII characters, no colon"
        ));
    }
    Ok(())
}
