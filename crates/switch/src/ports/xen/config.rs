//! The configuration of a xen-vif port.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::config::{Claim, Fields, Flag, MAX_WORKERS, PortSettings, check_socket_path, entry};

/// Most pages kept mapped for a queue: slots have 16 bits, one value of which means none.
const MAX_PAGES: u64 = 65534;

/// The first number that is no guest's (`DOMID_FIRST_RESERVED`).
const DOMAINS: u64 = 0x7ff0;

/// Bytes of the name of a device class, part of paths in the store.
const MAX_CLASS: usize = 32;

/// Settings of a xen-vif port. The port is the back end of interfaces that a toolstack makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenVifConfig {
    /// What plays the hypervisor.
    pub provider: XenProvider,
    /// Class of the devices in the store, usually `vif`. One of its own keeps the kernel's back end from serving them, too.
    pub class: String,
    /// The only interface to serve; absent: every one of the class, each with a port of its own.
    pub only: Option<VifName>,
    /// Most queues of an interface, 1 to [`MAX_WORKERS`]; absent: one per worker.
    pub queues: Option<u16>,
    /// Keep pages mapped of front ends that allow it (`feature-persistent`).
    pub persistent: bool,
    /// Keep pages mapped that front ends hand over on the control ring.
    pub static_grants: bool,
    /// How all other pages are reached.
    pub transfer: Transfer,
    /// Most pages kept mapped for a queue, 1 to 65534.
    pub pages: usize,
    /// Front ends may send packets of several pages (`feature-sg`).
    pub sg: bool,
    /// They may leave checksums to us.
    pub csum: bool,
    /// They may leave segmentation to us (`feature-gso-tcpv4`, `feature-gso-tcpv6`). Needs `sg` and `csum`.
    pub gso: bool,
}

/// What plays the hypervisor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum XenProvider {
    /// Xen; the switch runs in one of its domains.
    Xen,
    /// A broker, with Linux processes as domains.
    Process {
        /// Its socket.
        broker: PathBuf,
        /// The socket of the store, for our domain.
        store: PathBuf,
        /// Number of our domain.
        domain: u16,
    },
}

/// How pages that are not kept mapped are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// The hypervisor copies.
    Copy,
    /// They are mapped for a burst.
    Map,
}

/// An interface, as a toolstack numbers it: `5.0` is device 0 of domain 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VifName {
    /// The domain of the front end.
    pub domain: u16,
    /// Number of the device in that domain.
    pub device: u32,
}

impl fmt::Display for VifName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.domain, self.device)
    }
}

impl FromStr for VifName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?;
        let parts =
            text.split_once('.').and_then(|(domain, device)| Some((number(domain)?, number(device)?)));
        match parts {
            Some((domain, device)) if u64::from(domain) < DOMAINS => {
                Ok(VifName { domain: domain as u16, device })
            }
            _ => Err(format!("{text:?} is not an interface: write DOMAIN.DEVICE, such as 5.0")),
        }
    }
}

impl PortSettings for XenVifConfig {
    const KIND: &'static str = "xen-vif";

    const FLAGS: &'static [Flag] = &[Flag { word: "xen-vif", key: "provider", place: "PROVIDER" }];

    fn parse(fields: &mut Fields<'_>) -> Option<Self> {
        let provider = parse_provider(fields);
        let class = fields.checked("class", check_class).map_or_else(|| "vif".to_owned(), |(_, class)| class);
        let only = fields.checked("vif", |text| text.parse::<VifName>().map(drop));
        let queues = fields.number("queues", 1..=MAX_WORKERS.into()).map(|(_, queues)| queues);
        let persistent = fields.boolean("persistent").is_none_or(|(_, on)| on);
        let static_grants = fields.boolean("static_grants").is_none_or(|(_, on)| on);
        let transfer = fields.checked("transfer", |text| match text {
            "copy" | "map" => Ok(()),
            _ => Err(format!("{text:?} is not a way to reach pages; known: \"copy\", \"map\"")),
        });
        let pages = fields.number("pages", 1..=MAX_PAGES).map(|(_, pages)| pages);
        let sg = fields.boolean("sg").is_none_or(|(_, on)| on);
        let csum = fields.boolean("csum").is_none_or(|(_, on)| on);
        let gso = fields.boolean("gso");
        if let Some((place, true)) = gso.as_ref().filter(|_| !(sg && csum)) {
            fields.report(
                place,
                "gso",
                "needs sg and csum: what is to be segmented has several pages and no checksum; turn them on or this off",
            );
        }
        Some(XenVifConfig {
            provider: provider?,
            class,
            only: only.and_then(|(_, text)| text.parse().ok()),
            queues,
            persistent,
            static_grants,
            transfer: if transfer.is_some_and(|(_, way)| way == "map") {
                Transfer::Map
            } else {
                Transfer::Copy
            },
            pages: pages.unwrap_or(ringferry_xen_net::netback::DEFAULT_PAGES),
            sg,
            csum,
            gso: gso.map_or(sg && csum, |(_, on)| on),
        })
    }

    fn dump(&self, out: &mut String) {
        let provider = if self.provider == XenProvider::Xen { "xen" } else { "process" };
        entry(out, "provider", provider);
        if let XenProvider::Process { broker, store, domain } = &self.provider {
            entry(out, "broker", broker.to_string_lossy().as_ref());
            entry(out, "store", store.to_string_lossy().as_ref());
            entry(out, "domain", i64::from(*domain));
        }
        entry(out, "class", self.class.as_str());
        if let Some(only) = self.only {
            entry(out, "vif", only.to_string());
        }
        if let Some(queues) = self.queues {
            entry(out, "queues", i64::from(queues));
        }
        entry(out, "persistent", self.persistent);
        entry(out, "static_grants", self.static_grants);
        entry(out, "transfer", if self.transfer == Transfer::Copy { "copy" } else { "map" });
        entry(out, "pages", self.pages as i64);
        entry(out, "sg", self.sg);
        entry(out, "csum", self.csum);
        entry(out, "gso", self.gso);
    }
    fn claim(&self) -> Claim<'_> {
        let class = &self.class;
        Claim::Thing {
            whole: format!("interfaces of class {class:?} of {:?}", self.provider),
            part: self.only.map(|vif| vif.to_string()),
            shown: match self.only {
                Some(vif) => format!("interface {vif} of class {class:?}"),
                None => format!("every interface of class {class:?}"),
            },
        }
    }

    fn default_name(&self) -> String {
        self.only.map_or_else(|| "xen".to_owned(), |vif| format!("xen{vif}"))
    }

    fn is_shared(&self) -> bool {
        self.only.is_none()
    }
}

fn parse_provider(fields: &mut Fields<'_>) -> Option<XenProvider> {
    let provider = fields.checked("provider", |text| match text {
        "xen" | "process" => Ok(()),
        _ => Err(format!("{text:?} is not a provider; known: \"xen\", \"process\"")),
    });
    let process = provider.as_ref().is_some_and(|(_, name)| name == "process");
    let place = fields.place();
    let broker = fields.checked("broker", check_socket_path);
    let store = fields.checked("store", check_socket_path);
    let domain = fields.number::<u16>("domain", 0..=DOMAINS - 1);
    if !process {
        let given = [
            ("broker", broker.map(|(place, _)| place)),
            ("store", store.map(|(place, _)| place)),
            ("domain", domain.map(|(place, _)| place)),
        ];
        for (key, place) in given {
            if let Some(place) = place {
                fields.report(&place, key, "only goes with provider = \"process\"");
            }
        }
        return Some(XenProvider::Xen);
    }
    for (key, given) in [("broker", broker.is_some()), ("store", store.is_some())] {
        if !given {
            fields.report(&place, key, "must be given with provider = \"process\"");
        }
    }
    let (broker, store) = (broker?.1.into(), store?.1.into());
    Some(XenProvider::Process { broker, store, domain: domain.map_or(0, |(_, domain)| domain) })
}

fn check_class(class: &str) -> Result<(), String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if class.is_empty() || class.len() > MAX_CLASS || !class.bytes().all(allowed) {
        return Err(format!("{class:?} is not a class of devices: 1 to {MAX_CLASS} letters, digits and -_"));
    }
    Ok(())
}
