//! [`RealDomain`]: the provider for a domain under Xen, through the devices in `/dev/xen` of the
//! Linux kernel. A program opens it once at start; each handle that it hands out has descriptors of
//! its own, and can be used from another thread.
//!
//! | device, module | what for |
//! |---|---|
//! | `gntdev`, `xen-gntdev` | using what others granted: [`foreign`] |
//! | `gntalloc`, `xen-gntalloc` | granting pages of our own: [`grants`] |
//! | `evtchn`, `xen-evtchn` | event channels, each with a descriptor of its own: [`events`] |
//! | `xenbus`, `xenfs` | the store: [`Client::open`] |
//!
//! Every domain has these devices, not only the first. The user needs read and write permission.
//!
//! A PV domain may grant to itself. In a domain of another type Xen (4.17) moves a page that the
//! domain maps of its own to the new place, so that the kernel finds all ones and no memory where
//! the page was, and breaks. So [`RealDomain`] refuses that.

pub mod events;
pub mod foreign;
pub mod grants;

use std::io;

use ringferry_sys::xen::EventDevice;

use crate::domain::{DomId, Domain, EventPort};
use crate::event::EventChannel;
use crate::grant::{Foreign, GrantTable};
use crate::store::{Client, Nodes};

use self::events::RealChannel;
use self::foreign::RealForeign;
use self::grants::RealGrantTable;

/// File that holds the type of the domain. A domain of type PV maps foreign pages into its own page
/// tables; the others have their memory mapped by the hypervisor.
const GUEST_TYPE: &str = "/sys/hypervisor/guest_type";

/// The domain in which this program runs.
#[derive(Debug)]
pub struct RealDomain {
    id: DomId,
    paravirtual: bool,
}

impl RealDomain {
    /// Opens the provider, and reads from the store which domain this is.
    ///
    /// # Errors
    /// There is no Xen, no store, or no permission to use it.
    pub fn open() -> io::Result<RealDomain> {
        RealDomain::of_store(&mut Client::open()?)
    }

    /// Does the same with a connection to the store that is open already.
    ///
    /// # Errors
    /// There is no store, or no permission to use it.
    pub fn of_store(store: &mut Client) -> io::Result<RealDomain> {
        let id = store.number("domid").map_err(io::Error::other)?;
        let missing =
            || io::Error::new(io::ErrorKind::NotFound, "the store does not say which domain this is (domid)");
        Ok(RealDomain { id: DomId(id.ok_or_else(missing)?), paravirtual: is_paravirtual()? })
    }
}

/// Returns true if this is a PV domain. Kernels before 4.13 do not report it; they are treated as
/// not PV, which is always safe.
fn is_paravirtual() -> io::Result<bool> {
    match std::fs::read_to_string(GUEST_TYPE) {
        Ok(kind) => Ok(kind.trim_end() == "PV"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl Domain for RealDomain {
    fn id(&self) -> DomId {
        self.id
    }

    fn grants(&self) -> io::Result<Box<dyn GrantTable>> {
        Ok(Box::new(RealGrantTable::open()?))
    }

    fn foreign(&self, domain: DomId) -> io::Result<Box<dyn Foreign>> {
        if domain == self.id && !self.paravirtual {
            let text = "a domain of this kind cannot use grants of its own: give the other end a domain, or use one of kind PV";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        Ok(Box::new(RealForeign::open(domain, self.paravirtual)?))
    }

    fn alloc_unbound(&self, remote: DomId) -> io::Result<(EventPort, Box<dyn EventChannel>)> {
        let device = EventDevice::unbound(remote.0)?;
        Ok((EventPort(device.port()), Box::new(RealChannel(device))))
    }

    fn bind_interdomain(&self, remote: DomId, port: EventPort) -> io::Result<Box<dyn EventChannel>> {
        Ok(Box::new(RealChannel(EventDevice::interdomain(remote.0, port.0)?)))
    }
}
