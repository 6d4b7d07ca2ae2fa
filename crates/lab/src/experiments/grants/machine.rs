//! The machine that the two halves meet on: Xen, or processes of which the lab's own plays hypervisor, store and toolstack.

use std::path::Path;
use std::sync::Arc;

use ringferry_xen::domain::{DomId, Domain};
use ringferry_xen::process::ProcessDomain;
use ringferry_xen::real::RealDomain;
use ringferry_xen::store::{Client, NodeAccess, Nodes, Permission, path};
use ringferry_xen_net::xenbus::State;
use ringferry_xen_sim::Broker;
use ringferry_xen_sim::store::{Limits, Running, Server};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::case::{Case, Mode};
use crate::experiment::RowError;

/// Class of the devices: none that a driver of the kernel would take for its own.
pub(super) const CLASS: &str = "ringferry-lab";

/// Domains of the back end and of the front end, where processes are domains.
const BACK: DomId = DomId(1);
const FRONT: DomId = DomId(2);

/// Files in the folder of a run.
const BROKER: &str = "broker";
const STORE: &str = "store";

/// The provider that plays the hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Provider {
    /// The kernel: domains are processes.
    Process,
    /// Xen: both halves in this domain, which grants to itself.
    Xen,
}

impl std::str::FromStr for Provider {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "process" => Ok(Provider::Process),
            "xen" => Ok(Provider::Xen),
            _ => Err("`process` or `xen`"),
        }
    }
}

/// A domain, and its connection to the store.
type Place = (Arc<dyn Domain>, Client);

/// One run's machine, with an interface plugged in; what is left of it goes with this.
pub(super) struct Machine {
    /// Where the processes find each other.
    folder: TempDir,
    own: Option<(Broker, Running)>,
    tools: Client,
    nodes: [String; 2],
    place: Option<Place>,
}

impl Machine {
    pub(super) fn new(provider: Provider) -> Result<Self, RowError> {
        let folder = crate::experiments::folder()?;
        let (own, tools, place, ids) = match provider {
            Provider::Process => {
                let broker = Broker::bind(folder.path().join(BROKER)).map_err(RowError::failed)?;
                let store = Server::new(Limits::DEFAULT)?.start()?;
                store.introduce(BACK);
                store.introduce(FRONT);
                store.listen(folder.path().join(STORE), FRONT).map_err(RowError::failed)?;
                let back = domain(folder.path(), BACK)?;
                let place = (back, store.client(BACK)?);
                let tools = store.client(DomId(0))?;
                (Some((broker, store)), tools, place, [BACK, FRONT])
            }
            Provider::Xen => {
                let domain: Arc<dyn Domain> = Arc::new(RealDomain::open()?);
                let id = domain.id();
                (None, Client::open()?, (domain, Client::open()?), [id, id])
            }
        };
        let [back, front] = ids;
        let nodes = [path::backend(back, CLASS, front, 0), path::frontend(front, CLASS, 0)];
        let mut machine = Self { folder, own, tools, nodes, place: Some(place) };
        machine.plug(ids)?;
        Ok(machine)
    }

    /// The folder that the front end's process is told of.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The back end's domain, once.
    pub(super) fn back(&mut self) -> Result<Place, RowError> {
        self.place.take().ok_or_else(|| RowError::failed("there is one back end only"))
    }

    /// Makes the interface's nodes, as a toolstack does.
    fn plug(&mut self, [back, front]: [DomId; 2]) -> Result<(), RowError> {
        let [back_node, front_node] = &self.nodes;
        let initialising = State::Initialising.number().to_string();
        let sides = [(back_node, back, front), (front_node, front, back)];
        let done = self.tools.transaction(|nodes| {
            for (node, owner, other) in sides {
                nodes.remove(node)?;
                nodes.mkdir(node)?;
                let read =
                    [Permission::new(owner, NodeAccess::None), Permission::new(other, NodeAccess::Read)];
                nodes.set_permissions(node, &read)?;
            }
            let (back_id, front_id) = (back.to_string(), front.to_string());
            for (node, key, value) in [
                (back_node, "frontend", front_node.as_str()),
                (back_node, "frontend-id", &front_id),
                (back_node, "online", "1"),
                (back_node, "state", &initialising),
                (front_node, "backend", back_node),
                (front_node, "backend-id", &back_id),
                (front_node, "state", &initialising),
            ] {
                nodes.write(&path::join(node, key), value)?;
            }
            Ok(())
        });
        done.map_err(RowError::failed)
    }

    /// Pages that are granted or mapped still; `None` when nobody can tell.
    pub(super) fn left(&self) -> Option<usize> {
        self.own.as_ref().map(|(broker, _)| broker.granted_pages() + broker.mapped_pages())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // In a store of our own they end with it.
        for node in self.nodes.iter().filter(|_| self.own.is_none()) {
            let _ = self.tools.remove(node);
        }
    }
}

fn domain(folder: &Path, id: DomId) -> Result<Arc<dyn Domain>, RowError> {
    let domain = ProcessDomain::connect(folder.join(BROKER), Some(id)).map_err(RowError::failed)?;
    Ok(Arc::new(domain))
}

/// The front end's domain, in a process of its own.
pub(super) fn front(provider: Provider, folder: &Path) -> Result<Place, RowError> {
    Ok(match provider {
        Provider::Process => (domain(folder, FRONT)?, Client::connect(folder.join(STORE))?),
        Provider::Xen => (Arc::new(RealDomain::open()?), Client::open()?),
    })
}

/// Says whether this mode negotiates `feature-persistent`, and whether the control ring.
pub(super) fn features(case: &Case) -> (bool, bool) {
    (case.mode == Mode::Persistent, case.mode == Mode::Static)
}
