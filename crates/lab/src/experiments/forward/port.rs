//! The vhost-user ends: two sockets that a forwarder, whoever it is, connects its two NICs to, and the sessions on them.
//!
//! A thread serves both while the forwarder starts and stops: front ends wait for answers.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ringferry_memory::GuestMemory;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Listener;
use ringferry_vhost_user::backend::{Device, Offer, Session};
use ringferry_vhost_user::{ProtocolFeatures, RingSetup};

use super::case::{Case, QUEUE};
use crate::experiment::RowError;
use crate::experiments::txmap::clock::Over;

/// How often the thread looks whether it is still needed.
const LOOK: Duration = Duration::from_millis(20);

/// The rings of a NIC: receiveq, transmitq, and again for each further pair.
pub(super) type Rings = Vec<RingSetup>;

/// Two listening sockets. Dropping it closes the connections; stop whoever uses the rings first.
#[derive(Debug)]
pub(super) struct Ports {
    over: Arc<Over>,
    shared: [Arc<Shared>; 2],
    thread: Option<JoinHandle<()>>,
}

/// The rings that the session of a port has announced.
#[derive(Debug)]
struct Shared(Mutex<State>);

#[derive(Debug)]
struct State {
    rings: Vec<Option<RingSetup>>,
    enabled: Vec<bool>,
    error: Option<String>,
}

impl Shared {
    fn new(queues: usize) -> Arc<Self> {
        let rings = std::iter::repeat_with(|| None).take(2 * queues).collect();
        Arc::new(Self(Mutex::new(State { rings, enabled: vec![false; 2 * queues], error: None })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ports {
    /// Listens at both sockets and offers what the row is about.
    pub(super) fn listen(case: &Case, sockets: [&Path; 2]) -> Result<Self, RowError> {
        let shared = [1, case.how.queues].map(Shared::new);
        let over = Arc::new(Over::default());
        let mut slots = Vec::new();
        for ((socket, queues), shared) in sockets.into_iter().zip([1, case.how.queues]).zip(&shared) {
            let mut offer = Offer::net(case.features().bits(), queues as u16);
            // DPDK tracks no chains in flight, so nobody does.
            offer.protocol -= ProtocolFeatures::INFLIGHT_SHMFD;
            let listener = Listener::bind(socket).map_err(RowError::failed)?;
            slots.push(Slot { listener, offer, session: None, device: Told(Arc::clone(shared)) });
        }
        let told = Arc::clone(&over);
        let body = move || {
            if let Err(error) = serve(&mut slots, &told) {
                slots.iter().for_each(|slot| slot.device.0.state().error = Some(error.to_string()));
            }
        };
        let thread = std::thread::Builder::new().name("lab-ports".into()).spawn(body)?;
        Ok(Self { over, shared, thread: Some(thread) })
    }

    /// The rings of both NICs, once all are started with the features of the row; only once.
    pub(super) fn take(&self, case: &Case) -> Result<Option<[Rings; 2]>, RowError> {
        for shared in &self.shared {
            let state = shared.state();
            if let Some(error) = &state.error {
                return Err(RowError::failed(format!("a vhost-user session ended: {error}")));
            }
            if state.enabled.contains(&false) || state.rings.iter().any(Option::is_none) {
                return Ok(None);
            }
        }
        let [near, far] = [0, 1].map(|at: usize| {
            self.shared[at].state().rings.iter_mut().filter_map(Option::take).collect::<Rings>()
        });
        for ring in near.iter().chain(&far) {
            let (wanted, got) = (case.features().bits(), ring.features);
            if wanted != got || ring.parts.size != QUEUE {
                return Err(RowError::failed(format!(
                    "the driver took features {got:#x} and a queue of {}, and this row is about {wanted:#x} and {QUEUE}",
                    ring.parts.size
                )));
            }
        }
        Ok(Some([near, far]))
    }
}

impl Drop for Ports {
    fn drop(&mut self) {
        self.over.tell();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The listener of one port and its session.
struct Slot {
    listener: Listener,
    offer: Offer,
    session: Option<Session>,
    device: Told,
}

/// Serves one front end on each socket until it goes, or nobody needs them any more.
fn serve(slots: &mut [Slot], over: &Over) -> Result<(), Box<dyn std::error::Error>> {
    let epoll = Epoll::new()?;
    for (slot, token) in slots.iter().zip(0..) {
        epoll.add(&slot.listener, token, Interest::READABLE)?;
    }
    let mut events = EventBuf::with_capacity(2);
    while !over.told() {
        epoll.wait(&mut events, Some(LOOK))?;
        for event in events.iter() {
            let Some(slot) = slots.get_mut(event.token as usize) else { continue };
            match &mut slot.session {
                None => {
                    if let Some(stream) = slot.listener.accept()? {
                        epoll.remove(&slot.listener)?;
                        let session = Session::new(stream, slot.offer)?;
                        epoll.add(&session, event.token, Interest::READABLE)?;
                        slot.session = Some(session);
                    }
                }
                Some(session) => {
                    session.on_readable(&mut slot.device)?;
                }
            }
        }
    }
    for slot in slots {
        if let Some(mut session) = slot.session.take() {
            session.disconnect(&mut slot.device);
        }
    }
    Ok(())
}

/// Keeps what a session tells.
struct Told(Arc<Shared>);

impl Device for Told {
    fn features_acked(&mut self, _: u64) {}

    fn memory_changed(&mut self, _: Option<Arc<GuestMemory>>) {}

    fn ring_started(&mut self, index: u16, ring: RingSetup) {
        let mut state = self.0.state();
        if let Some(enabled) = state.enabled.get_mut(usize::from(index)) {
            *enabled = ring.enabled;
            state.rings[usize::from(index)] = Some(ring);
        }
    }

    fn ring_call_changed(&mut self, _: u16, _: Option<EventFd>) {
        // The forwarder polls.
    }

    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        if let Some(is) = self.0.state().enabled.get_mut(usize::from(index)) {
            *is = enabled;
        }
    }

    fn ring_stopped(&mut self, index: u16) -> u16 {
        // Whoever has the ring has stopped: a run never resumes.
        let ring = self.0.state().rings.get_mut(usize::from(index)).and_then(Option::take);
        ring.map_or(0, |ring| ring.base)
    }
}
