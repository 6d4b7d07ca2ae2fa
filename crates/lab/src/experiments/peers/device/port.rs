//! The socket that a front end connects to, and the session on it, served by a thread of its own while the
//! engine works: a front end waits for answers while it starts and stops.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ringferry_memory::GuestMemory;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Listener;
use ringferry_vhost_user::backend::{Device, Offer, Session};
use ringferry_vhost_user::{ProtocolFeatures, RingSetup};

use super::End;
use crate::experiment::RowError;
use crate::experiments::peers::case::Case;

/// How often the thread looks whether it is still needed.
const LOOK: Duration = Duration::from_millis(20);

/// A port that serves one front end. Dropping it closes the connection; stop the engine first.
#[derive(Debug)]
pub(in crate::experiments::peers) struct Port {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    over: AtomicBool,
    /// The rings that run and that no engine has taken yet, and what the session ended with.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rings: [Option<RingSetup>; 2],
    enabled: [bool; 2],
    error: Option<String>,
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Port {
    /// Listens at `socket` and offers the rings of `case`.
    pub(in crate::experiments::peers) fn listen(case: &Case, socket: &Path) -> Result<Port, RowError> {
        let listener = Listener::bind(socket).map_err(RowError::failed)?;
        let shared = Arc::new(Shared::default());
        let state = Arc::clone(&shared);
        let mut offer = Offer::net(case.features().bits(), 1);
        offer.protocol -= ProtocolFeatures::INFLIGHT_SHMFD;
        let body = move || {
            if let Err(error) = serve(&listener, offer, &state) {
                state.state().error = Some(error.to_string());
            }
        };
        let thread = std::thread::Builder::new().name("lab-port".into()).spawn(body)?;
        Ok(Port { shared, thread: Some(thread) })
    }

    /// The queue pair, once the front end has started it with the features of `case`; only once.
    pub(in crate::experiments::peers) fn take(&self, case: &Case) -> Result<Option<End>, RowError> {
        let mut state = self.shared.state();
        if let Some(error) = &state.error {
            return Err(RowError::failed(format!("the vhost-user session ended: {error}")));
        }
        if state.enabled != [true; 2] || state.rings.iter().any(Option::is_none) {
            return Ok(None);
        }
        let [Some(rx), Some(tx)] = std::mem::take(&mut state.rings) else { return Ok(None) };
        let (wanted, got) = (case.features().bits(), tx.features);
        if wanted != got {
            let text = format!("the driver took features {got:#x}, and this row is about {wanted:#x}");
            return Err(RowError::failed(text));
        }
        if rx.parts.size != case.queue || tx.parts.size != case.queue {
            let text = format!("the driver's queues have {} and {} entries", rx.parts.size, tx.parts.size);
            return Err(RowError::failed(text));
        }
        End::new([rx, tx]).map(Some)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves one front end until it goes, or until the port is dropped.
fn serve(listener: &Listener, offer: Offer, shared: &Arc<Shared>) -> Result<(), Box<dyn std::error::Error>> {
    let epoll = Epoll::new()?;
    epoll.add(listener, 0, Interest::READABLE)?;
    let mut events = EventBuf::with_capacity(1);
    let mut device = Rings { shared: Arc::clone(shared) };
    let mut session: Option<Session> = None;
    while !shared.over.load(Ordering::Acquire) {
        epoll.wait(&mut events, Some(LOOK))?;
        match &mut session {
            None => {
                if let Some(stream) = listener.accept()? {
                    epoll.remove(listener)?;
                    let new = Session::new(stream, offer)?;
                    epoll.add(&new, 0, Interest::READABLE)?;
                    session = Some(new);
                }
            }
            Some(session) => {
                session.on_readable(&mut device)?;
            }
        }
    }
    if let Some(mut session) = session {
        session.disconnect(&mut device);
    }
    Ok(())
}

/// The rings that the session has announced.
struct Rings {
    shared: Arc<Shared>,
}

impl Device for Rings {
    fn features_acked(&mut self, _: u64) {}

    fn memory_changed(&mut self, _: Option<Arc<GuestMemory>>) {}

    fn ring_started(&mut self, index: u16, ring: RingSetup) {
        let mut state = self.shared.state();
        state.enabled[usize::from(index)] = ring.enabled;
        state.rings[usize::from(index)] = Some(ring);
    }

    fn ring_call_changed(&mut self, index: u16, call: Option<EventFd>) {
        // Before the engine has it; afterwards nobody waits for calls.
        if let Some(ring) = &mut self.shared.state().rings[usize::from(index)] {
            ring.call = call;
        }
    }

    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        self.shared.state().enabled[usize::from(index)] = enabled;
    }

    fn ring_stopped(&mut self, index: u16) -> u16 {
        // The engine's ring, if it has one, is of no interest any more: a run never resumes.
        let ring = self.shared.state().rings[usize::from(index)].take();
        ring.map_or(0, |ring| ring.base)
    }
}
