//! Configuration of a xen-vif port: keys, flags and checks.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::config::{
    Boolean, Choice, Claim, Fields, Flag, MAX_WORKERS, PortSettings, SOCKET, Text, Unset, keys, number,
    number_of,
};

/// Upper bound on the pages kept mapped for a queue: slots have 16 bits, one value of which means none.
const MAX_PAGES: u64 = 65534;

/// Upper bound on domain numbers: the first one that is no guest's (`DOMID_FIRST_RESERVED`).
const DOMAINS: u64 = 0x7ff0;

/// Upper bound on the name of a device class, in bytes; it is part of paths in the store.
const MAX_CLASS: usize = 32;

/// Settings of a xen-vif port. The port is the back end of interfaces that a toolstack makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenVifConfig {
    /// The source of grants, event channels and the store: Xen, or a broker process.
    pub provider: XenProvider,
    /// Class of the devices in the store, usually `vif`. One of its own keeps the kernel's back end from serving them, too.
    pub class: String,
    /// The only interface to serve; absent: every one of the class, each with a port of its own.
    pub only: Option<VifName>,
    /// Most queues of an interface, 1 to [`MAX_WORKERS`]; absent: one per worker.
    pub queues: Option<u16>,
    /// If true, pages of front ends that allow it are kept mapped (`feature-persistent`).
    pub persistent: bool,
    /// If true, pages that front ends hand over on the control ring are kept mapped.
    pub static_grants: bool,
    /// Access to all other pages: by grant copy or by mapping.
    pub transfer: Transfer,
    /// Upper bound on the pages kept mapped for a queue, 1 to 65534.
    pub pages: usize,
    /// If true, front ends may send packets of several pages (`feature-sg`).
    pub sg: bool,
    /// If true, front ends may leave checksums to us.
    pub csum: bool,
    /// If true, front ends may leave segmentation to us (`feature-gso-tcpv4`, `feature-gso-tcpv6`). Needs
    /// `sg` and `csum`.
    pub gso: bool,
}

/// The source of grants, event channels and the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum XenProvider {
    /// Xen; the switch runs in one of its domains.
    Xen,
    /// A broker process, with Linux processes as domains.
    Process {
        /// Path of the broker's socket.
        broker: PathBuf,
        /// The socket of the store, for our domain.
        store: PathBuf,
        /// Number of the domain that the switch runs in.
        domain: u16,
    },
}

/// Access to pages that are not kept mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// The hypervisor copies the bytes (grant copy).
    Copy,
    /// Pages are mapped for one burst.
    Map,
}

/// An interface, as a toolstack numbers it: `5.0` is device 0 of domain 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VifName {
    /// Number of the front end's domain.
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

keys! {
    /// The keys that only a xen-vif port has.
    pub(crate) struct XenVifKeys: Reopen {
        /// Selects the hypervisor: `xen`, in one of whose domains the switch runs, or `process`, a broker that
        /// simulates one with Linux processes as domains.
        provider: Provider {
            is: Choice {
                what: "a provider",
                words: &[("xen", Provider::Xen), ("process", Provider::Process)],
            },
            default: Unset::Value("xen"),
            example: "xen",
        }
        /// Sets the path of the broker's socket. `provider = "process"` needs it.
        broker: PathBuf {
            is: SOCKET,
            default: Unset::Means("none"),
            example: "/run/broker.sock",
        }
        /// Sets the path of the socket on which the store serves the switch's domain. `provider = "process"` needs it.
        store: PathBuf {
            is: SOCKET,
            default: Unset::Means("none"),
            example: "/run/store.sock",
        }
        /// Sets the number of the switch's domain with `provider = "process"`.
        domain: u16 {
            is: number(0..=DOMAINS - 1),
            default: Unset::Means("0"),
            example: "3",
        }
        /// Sets the class of the devices in the store that are served. With a class of its own they are not served by
        /// the kernel's back end as well.
        class: String {
            is: CLASS,
            default: Unset::Value("vif"),
            example: "ringferry",
        }
        /// Names the only interface that is served.
        vif: VifName {
            is: VIF,
            default: Unset::Means("every one of the class, each on a port of its own"),
            example: "5.0",
        }
        /// Limits the queues of an interface (`multi-queue-max-queues`).
        queues: u16 {
            is: number_of("queues", 1..=MAX_WORKERS as u64),
            default: Unset::Means("one for each worker"),
            example: "2",
        }
        /// With `true` pages stay mapped for front ends that allow it (`feature-persistent`).
        persistent: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// With `true` pages that a front end hands over on the control ring stay mapped (`feature-ctrl-ring`).
        static_grants: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// Says how all other pages are accessed: the hypervisor copies them (`copy`), or they are mapped for the time
        /// of a burst (`map`).
        transfer: Transfer {
            is: Choice {
                what: "a transfer mode",
                words: &[("copy", Transfer::Copy), ("map", Transfer::Map)],
            },
            default: Unset::Value("copy"),
            example: "map",
            change: NextConnection,
        }
        /// Limits the pages that stay mapped for a queue. Those of all queues together stay below `vm.max_map_count`.
        pages: usize {
            is: number_of("pages", 1..=MAX_PAGES),
            default: Unset::Value("1024"),
            example: "256",
            change: NextConnection,
        }
        /// With `true` front ends may send packets of several pages (`feature-sg`).
        sg: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// With `true` front ends may send packets whose checksum is not finished.
        csum: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// With `true` front ends may send packets that are yet to be segmented (`feature-gso-tcpv4`,
        /// `feature-gso-tcpv6`). It needs `sg` and `csum`.
        gso: bool {
            is: Boolean,
            default: Unset::Means("as `sg` and `csum`"),
            example: "false",
        }
    }
}

/// The provider as it is named in the configuration, without its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Provider {
    Xen,
    Process,
}

const CLASS: Text<String> = Text {
    placeholder: "CLASS",
    what: "1 to 32 letters, digits and `-_`",
    read: |class| check_class(class).map(|()| class.to_owned()),
    write: String::to_owned,
};

const VIF: Text<VifName> = Text {
    placeholder: "DOMAIN.DEVICE",
    what: "the numbers of a domain and of a device, such as \"5.0\"",
    read: str::parse,
    write: VifName::to_string,
};

impl PortSettings for XenVifConfig {
    const KIND: &'static str = "xen-vif";

    const FLAGS: &'static [Flag] = &[Flag {
        word: "xen-vif",
        key: "provider",
        place: "PROVIDER",
        help: "with xen: every network interface of this Xen host's guests, each a port such as xen5.0",
    }];

    type Keys = XenVifKeys;

    fn from_keys(keys: XenVifKeys, fields: &mut Fields<'_>) -> Option<Self> {
        let XenVifKeys {
            provider,
            broker,
            store,
            domain,
            class,
            vif,
            queues,
            persistent,
            static_grants,
            transfer,
            pages,
            sg,
            csum,
            gso,
        } = keys;
        // If the word is wrong the provider is unknown, and keys that belong to one of them are not reported.
        let provider = match provider {
            None if fields.has("provider") => None,
            Some(Provider::Process) => {
                for (key, given) in [("broker", &broker), ("store", &store)] {
                    if given.is_none() && !fields.has(key) {
                        fields.report(key, "must be given with provider = \"process\"");
                    }
                }
                let ends = broker.zip(store);
                let domain = domain.unwrap_or(0);
                ends.map(|(broker, store)| XenProvider::Process { broker, store, domain })
            }
            Some(Provider::Xen) | None => {
                for key in ["broker", "store", "domain"] {
                    if fields.has(key) {
                        fields.report(key, "only goes with provider = \"process\"");
                    }
                }
                Some(XenProvider::Xen)
            }
        };
        let (sg, csum) = (sg.unwrap_or(true), csum.unwrap_or(true));
        if gso == Some(true) && !(sg && csum) {
            let message = "needs sg and csum: what is to be segmented has several pages and no checksum; turn them on or this off";
            fields.report("gso", message);
        }
        Some(XenVifConfig {
            provider: provider?,
            class: class.unwrap_or_else(|| "vif".to_owned()),
            only: vif,
            queues,
            persistent: persistent.unwrap_or(true),
            static_grants: static_grants.unwrap_or(true),
            transfer: transfer.unwrap_or(Transfer::Copy),
            pages: pages.unwrap_or(ringferry_xen_net::netback::DEFAULT_PAGES),
            sg,
            csum,
            gso: gso.unwrap_or(sg && csum),
        })
    }

    fn to_keys(&self) -> XenVifKeys {
        let (provider, broker, store, domain) = match self.provider.clone() {
            XenProvider::Xen => (Provider::Xen, None, None, None),
            XenProvider::Process { broker, store, domain } => {
                (Provider::Process, Some(broker), Some(store), Some(domain))
            }
        };
        XenVifKeys {
            provider: Some(provider),
            broker,
            store,
            domain,
            class: Some(self.class.clone()),
            vif: self.only,
            queues: self.queues,
            persistent: Some(self.persistent),
            static_grants: Some(self.static_grants),
            transfer: Some(self.transfer),
            pages: Some(self.pages),
            sg: Some(self.sg),
            csum: Some(self.csum),
            gso: Some(self.gso),
        }
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

fn check_class(class: &str) -> Result<(), String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if class.is_empty() || class.len() > MAX_CLASS || !class.bytes().all(allowed) {
        return Err(format!("{class:?} is not a class of devices: 1 to {MAX_CLASS} letters, digits and -_"));
    }
    Ok(())
}
