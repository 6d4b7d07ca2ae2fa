//! The ports of the switch, by kind: one folder each, with its control side and its queue side.
//!
//! | folder | a port for |
//! |---|---|
//! | `vhost` | a virtual machine, or any other vhost-user front end |
//! | `tap` | the host's network stack |
//! | `xen` | the virtual interfaces of Xen guests |
//! | `xdp` | an interface of the host, such as a physical network |
//!
//! | file | idea |
//! |---|---|
//! | `mod` | the control side of a port: [`PortControl`] |
//! | `queues` | the queue sides of all kinds as the engine's one instance of [`Queues`](crate::plane::Queues) |
//! | `table` | the table of ports: they come, go, and get their events |
//! | `ids` | numbers of ports that come and go |
//! | `handed` | ports on their way to another process |
//! | `marks` | which entries are not as they are stored any more |
//! | `passed` | descriptors and sockets that were inherited, or passed by systemd |
//!
//! **A kind of port** is a type that implements `Queues`, for the workers (a row in `queues::kinds!`), one that implements [`PortControl`],
//! for the control plane, and a configuration (a variant of [`PortKind`], with an arm in [`open`]). The table, the engine and the
//! control socket know nothing else of it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use ringferry_control::snapshot::PortSnapshot;
use ringferry_memory::MapBudget;
use ringferry_sys::epoll::{Epoll, Interest};
use ringferry_sys::netif::InterfaceError;
use ringferry_sys::socket::BindError;
use ringferry_sys::tap::TapError;
use ringferry_vhost_user::backend::Put;
use ringferry_xdp::XdpError;

use crate::config::{PortConfig, PortKind, SwitchConfig, TapConfig, TapSource};
use crate::counters::PortTotals;
use crate::fdb::PortId;
use crate::plane::{PortFault, PortShared};
use crate::privileged::Privileges;
use crate::rules::Rules;

pub(crate) mod handed;
mod ids;
pub(crate) mod marks;
pub(crate) mod passed;
pub mod queues;
pub(crate) mod table;
pub(crate) mod tap;
pub(crate) mod vhost;
pub(crate) mod xdp;
pub(crate) mod xen;

use handed::{Descriptors, HandedPort};
use ids::PortIds;
use passed::Passed;
use queues::Workers;
use table::{EntryId, QueueStates, token};
use xen::MappingBudget;
pub use xen::XenError;

/// The error of a port that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A socket cannot be bound, or not be connected to.
    #[error(transparent)]
    Socket(#[from] BindError),
    /// A tap cannot be opened or created.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A tap's interface cannot be configured.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// A descriptor that was to be inherited is missing or of another type than it should be.
    #[error("descriptor {fd}: {source}")]
    Inherited {
        /// Number of the descriptor in this process.
        fd: i32,
        /// The system's error, which says what is wrong with the descriptor.
        source: io::Error,
    },
    /// systemd passed no socket of that name.
    #[error(
        "no socket named {0} was passed: start ringferry from a socket unit with \
         FileDescriptorName={0}"
    )]
    NotActivated(String),
    /// There is no Xen, or no store.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// There is no such interface.
    #[error("there is no interface {0} in this network namespace")]
    NoInterface(String),
    /// An interface cannot have such an MTU as long as it has these sockets.
    #[error(
        "with this MTU packets lie in another number of frames, for which its sockets are made: write it into the configuration file, and have the port opened anew (`ringferry ctl remove {0} --runtime`, `ringferry ctl reload`)"
    )]
    OtherFrames(String),
    /// An interface has no AF_XDP sockets for the switch.
    #[error("interface {interface}: {source}")]
    Xdp {
        /// Name of the interface.
        interface: String,
        /// The reason, and what to do.
        source: XdpError,
    },
    /// The system has no descriptors left.
    #[error(transparent)]
    Os(#[from] io::Error),
    /// The switch has as many ports as it can have.
    #[error("no number is left for a port")]
    NoId,
    /// A port whose descriptors are inherited cannot be added to a running switch.
    #[error(
        "its descriptor is passed when the switch is started: a running switch can be given a path or the name of a tap only"
    )]
    OnlyAtStart,
    /// The helper has opened it, and its descriptors did not arrive.
    #[error(
        "its descriptors did not arrive, as there is no room for more: raise the limit of open files (ulimit -n, or LimitNOFILE= of the systemd unit)"
    )]
    NoRoom,
    /// There is no user or group of that name.
    #[error("{0}")]
    Account(String),
    /// The process before has handed over something else.
    #[error("{0}")]
    Handed(String),
    /// The helper could not open the port.
    #[error("{0}")]
    Helper(String),
}

/// The limits on the guest memory that may be mapped, for all ports and for each.
pub(crate) struct GuestMemoryBudget {
    process: Arc<MapBudget>,
    /// Upper bound on what one port may have mapped, in bytes.
    port: u64,
}

impl GuestMemoryBudget {
    fn new(config: &SwitchConfig) -> Self {
        let bytes = |gib: u32| u64::from(gib) << 30;
        let process = MapBudget::new(bytes(config.guest_memory_gib), "[switch] guest_memory_gib");
        Self { process, port: bytes(config.port_memory_gib) }
    }

    /// From now on each port is sure of a part of what all may have.
    pub(crate) fn keep_shares(&self) {
        self.process.keep_shares();
    }

    /// Makes the budget of one more port.
    fn of_port(&self) -> Arc<MapBudget> {
        MapBudget::within(&self.process, self.port, "[switch] port_memory_gib")
    }
}

/// Shared parts of the switch, passed to every call of a port's control side.
pub(crate) struct Context<'a> {
    pub(crate) workers: &'a Arc<Workers>,
    epoll: &'a Epoll,
    ids: &'a mut PortIds,
    budget: &'a mut MappingBudget,
    /// Limits on the guest memory that is mapped.
    memory: &'a GuestMemoryBudget,
    /// The state is kept for the case that this process is killed.
    tracks: bool,
    /// The entry whose control side is called.
    entry: EntryId,
}

impl Context<'_> {
    /// Has [`PortControl::serve`] called with `sub` when `fd` is ready.
    ///
    /// # Errors
    /// The user's limit of watched descriptors is reached, or `fd` cannot be watched.
    fn watch(&self, fd: impl std::os::fd::AsFd, sub: u32, interest: Interest) -> io::Result<()> {
        self.epoll.add(fd, token(self.entry, sub), interest)
    }

    /// Allocates an id for a port of the entry.
    ///
    /// # Errors
    /// [`OpenError::NoId`] if all are in use.
    fn allocate(&mut self) -> Result<PortId, OpenError> {
        self.ids.allocate(Instant::now()).ok_or(OpenError::NoId)
    }

    /// Takes a port away from the workers and gives its id back. When this returns no worker knows of it.
    fn release(&mut self, id: PortId) {
        self.workers.remove_port(id);
        self.ids.free(id, Instant::now());
    }

    /// Stops watching a descriptor. Closing it is not enough, as the process that passed it to us may hold
    /// the same open file.
    fn unwatch(&self, fd: impl std::os::fd::AsFd) -> io::Result<()> {
        self.epoll.remove(fd)
    }
}

/// One port of the switch, as a client of the control socket may ask for it: an entry has one, but one of Xen guests has one for each
/// interface.
pub(crate) struct Interface<'a> {
    pub(crate) id: PortId,
    pub(crate) name: &'a str,
    pub(crate) queues: InterfaceQueues<'a>,
    pub(crate) counters: &'a PortTotals,
}

/// The bases at which the rings of a vhost-user port resume, in the order of their indices; none for ports of other kinds.
pub(crate) type Positions = Vec<Option<u32>>;

/// The queues of an [`Interface`].
pub(crate) enum InterfaceQueues<'a> {
    /// Queue pairs, over which the switch spreads flows.
    Pairs(&'a PortShared),
    /// A number of queues, over which the kernel spreads flows.
    Kernel(u16),
}

/// The control side of one entry of the configuration. The table calls it, on the control plane's thread, and drops it after
/// [`remove`](PortControl::remove).
pub(crate) trait PortControl {
    /// Handles an event: a descriptor that is watched as `sub` is ready, or the
    /// [deadline](PortControl::deadline) is over.
    fn serve(&mut self, sub: u32, cx: &mut Context<'_>);

    /// Returns the time at which [`serve`](PortControl::serve) is to be called with 0 although nothing is
    /// ready.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Checks, about once a second, for changes that cause no event.
    fn tick(&mut self, config: &PortConfig, cx: &mut Context<'_>) {
        let _ = (config, cx);
    }

    /// Returns true if what the port was made of does not exist any more, so that it has to be opened anew.
    fn is_gone(&self) -> bool {
        false
    }

    /// Returns true if somebody has removed the file of its socket, so that no front end can connect any more.
    fn has_lost_socket(&self) -> bool {
        false
    }

    /// Listens on a socket that was opened anew in the place of the one that nobody finds any more. Whoever is connected stays.
    ///
    /// # Errors
    /// The socket cannot be had; the entry is as it was.
    fn listen_again(
        &mut self,
        port: &PortConfig,
        passed: &mut Passed,
        cx: &mut Context<'_>,
    ) -> Result<(), OpenError> {
        let _ = (port, passed, cx);
        Ok(())
    }

    /// Returns the number of its ports whose packets flow, as far as the control plane knows.
    fn count_up(&self) -> usize;

    /// Returns true if a front end is connected that has agreed with a port on settings.
    fn has_session(&self) -> bool {
        false
    }

    /// Handles the report that a worker cannot serve a port any more. Returns true if the port is one of this
    /// entry's.
    fn fault(&mut self, fault: &PortFault, cx: &mut Context<'_>) -> bool {
        let _ = (fault, cx);
        false
    }

    /// Ends the session of a peer whose memory is lost. Called when some peer's is.
    fn look_at_memory(&mut self, cx: &mut Context<'_>) {
        let _ = cx;
    }

    /// Takes over other settings of the entry, which [can change](PortConfig::can_become) while it is open, but for the rules and the workers, of
    /// which the table takes care. Those on which a front end has agreed hold from the next connection on.
    ///
    /// # Errors
    /// A setting cannot be had; the entry is as it was, as far as that could be done.
    fn change(&mut self, before: &PortConfig, now: &PortConfig) -> Result<(), OpenError>;

    /// Serves the front ends that are connected, and no others: the entry is to be removed. The table has seen to it that no frames are sent to
    /// them any more.
    fn retire(&mut self, cx: &mut Context<'_>) {
        let _ = cx;
    }

    /// Changes the rules of the entry's ports.
    fn set_rules(&mut self, rules: &Rules, workers: &Workers);

    /// Tells the peer of a port whether its link is up, as the port's administrator says. Returns true if the peer was told; one that is not sees it when
    /// it next looks, if it looks.
    fn set_link(&mut self, port: PortId, up: bool) -> bool {
        let _ = (port, up);
        false
    }

    /// Returns the entry's ports as they are now.
    fn interfaces(&self) -> Vec<Interface<'_>>;

    /// Returns the state of the entry and of each of its ports. `states` are those of the workers' queues.
    fn snapshots(
        &self,
        config: &PortConfig,
        budget: &MappingBudget,
        states: &mut QueueStates,
    ) -> Vec<PortSnapshot>;

    /// Returns numbers that change whenever [`hand_over`](Self::hand_over) would return another state.
    fn generation(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Returns true if the kind of each of the state's descriptors is known: merely looking at one of another kind may wait for whoever passed it.
    fn can_be_kept(&self) -> bool {
        true
    }

    /// Returns the entry's state for another process, whose descriptors go to `put`. Nothing changes.
    ///
    /// # Errors
    /// Those of `put`.
    fn hand_over(&self, put: &mut Put<'_>) -> io::Result<HandedPort>;

    /// Asks the workers, which are paused, for what [`suspend`](Self::suspend) takes, which is called next, and does not wait for them.
    fn begin_to_suspend(&mut self) {}

    /// Takes from the workers, which are paused, what another process is to have, and returns where it goes on there.
    ///
    /// # Errors
    /// A worker does not answer, for people.
    fn suspend(&mut self) -> Result<Positions, String> {
        Ok(Positions::new())
    }

    /// Gives to the workers what was [suspended](Self::suspend), as no other process has taken over.
    fn resume(&mut self) {}

    /// What is to be done before this process [takes over](Self::take_over) what another one serves, so that its packets wait for less: by another thread, as a peer
    /// may hold that up.
    fn ahead(&self) -> Option<Task> {
        None
    }

    /// Gives the workers what the process before has suspended, at these positions: all of it is this process's from now on.
    fn take_over(&mut self, positions: &Positions, workers: &Workers) {
        let _ = (positions, workers);
    }

    /// Goes on where a process was killed that had all this.
    fn recover(&mut self, workers: &Workers) {
        let _ = workers;
    }

    /// Leaves everything to the process that has taken over. What is dropped then is not noticed by any peer.
    fn let_go(&mut self) {}

    /// Takes its ports away from the workers and closes everything. When this returns, nothing of its peers
    /// is watched; a late worker or a [`Closer`](ringferry_sys::closer::Closer) may still hold memory and
    /// descriptors, and frees them later.
    fn remove(&mut self, cx: &mut Context<'_>);
}

/// Work for another thread, which leaves the rest of it undone once it was told that it is enough.
pub(crate) type Task = Box<dyn FnOnce(&AtomicBool) + Send>;

/// A port whose sockets, taps and connections are open and that no worker serves yet: called with the
/// context, it gets its number and its workers.
pub(crate) type Plug =
    Box<dyn FnOnce(&PortConfig, &mut Context<'_>) -> Result<Box<dyn PortControl>, OpenError>>;

/// Opens what a port needs that a switch in its sandbox cannot open itself: a socket, the queues of a tap. [`open`] makes a port of it.
///
/// # Errors
/// A resource cannot be opened; everything that was opened for the port is closed again.
pub(crate) fn acquire(port: &PortConfig, workers: usize) -> Result<Vec<OwnedFd>, OpenError> {
    match &port.kind {
        PortKind::VhostUser(config) => vhost::acquire(config),
        PortKind::Tap(config) => tap::acquire(port, config, workers),
        PortKind::Xdp(config) => xdp::acquire(port, config),
        // Its devices are open to the sandbox, if there was such a port at the start.
        PortKind::XenVif(_) => Ok(Vec::new()),
    }
}

/// Sets up the interface of a port again ([`tap::set_up`], [`xdp::set_up`]), and undoes what `before` had asked for beyond that; ports of other kinds have none.
///
/// # Errors
/// No permission, or a setting that the interface cannot have.
pub(crate) fn set_up(port: &PortConfig, before: Option<&PortConfig>) -> Result<(), OpenError> {
    match &port.kind {
        PortKind::Tap(TapConfig { source: TapSource::Name { name, .. }, .. }) => {
            if let Some(before) = before {
                tap::undo(before, port, name)?;
            }
            tap::set_up(port, name)
        }
        PortKind::Xdp(config) => xdp::set_up(port, config),
        _ => Ok(()),
    }
}

/// Returns true if the port has an interface whose settings somebody could undo.
pub(crate) fn has_interface(port: &PortConfig) -> bool {
    matches!(&port.kind, PortKind::Tap(TapConfig { source: TapSource::Name { .. }, .. }))
}

/// Returns what of the settings of a port's interface somebody has undone meanwhile, for people; ports without one have none.
pub(crate) fn astray(port: &PortConfig) -> Vec<String> {
    match &port.kind {
        PortKind::Tap(TapConfig { source: TapSource::Name { name, .. }, .. }) => tap::astray(port, name),
        _ => Vec::new(),
    }
}

/// What has become of the process whose state a port is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    /// It goes on, if this one cannot.
    GoesOn,
    /// It has died, so whatever can be had is better than nothing.
    Died,
}

/// Makes a port of the state that another process has handed over. A port of Xen guests has none: it is opened, when that process has ended.
///
/// # Errors
/// The state is that of another kind of port, or not all descriptors were passed. What this process lacks is an error of the port, when it is made.
pub(crate) fn adopt(
    port: &PortConfig,
    state: HandedPort,
    fds: Descriptors,
    privileges: &Privileges,
    before: Before,
) -> Result<Plug, OpenError> {
    match (&port.kind, state) {
        (PortKind::VhostUser(config), HandedPort::VhostUser(state)) => {
            vhost::adopt(config, state, fds, privileges, before)
        }
        (PortKind::Tap(config), HandedPort::Tap(state)) => tap::adopt(config, &state, fds, privileges),
        (PortKind::Xdp(config), HandedPort::Xdp(state)) => xdp::adopt(config, &state, fds, privileges),
        _ => Err(OpenError::Handed("the state is that of another kind of port".to_owned())),
    }
}

/// Opens the resources of a port. Several ports can be opened before any is plugged in, so that a
/// configuration with a missing resource starts nothing.
///
/// # Errors
/// A resource cannot be opened; everything that was opened for the port is closed again.
pub(crate) fn open(port: &PortConfig, workers: usize, passed: &mut Passed) -> Result<Plug, OpenError> {
    match &port.kind {
        PortKind::VhostUser(config) => vhost::open(config, passed),
        PortKind::Tap(config) => tap::open(port, config, workers, passed),
        PortKind::Xdp(config) => xdp::open(port, config, passed),
        PortKind::XenVif(config) => xen::open(config, workers),
    }
}
