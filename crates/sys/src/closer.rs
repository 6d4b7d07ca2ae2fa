//! Closing what a peer has passed, on a thread where waiting harms nobody.
//!
//! The last `close` of a file runs the file's own code, and a peer chooses the file: a TCP socket with `SO_LINGER` and
//! unsent data waits for its receiver, a file of FUSE for its server, a Unix socket closes whatever lies unread in it,
//! and the last mapping of a large memfd frees all its pages. So the thread that serves everybody never closes what a
//! peer passed: it wraps such a thing in a [`Deferred`] when it arrives, and the drop of that hands it to a [`Closer`].
//!
//! A port makes one [`Closer`], [begins](Closer::begin) its thread, and gives clones of it to whoever receives things from
//! the port's peers; the thread ends with the last clone. It is not begun anew for each thing, since that would take memory
//! when a peer may have left none: the standard library ends the process if a thread that has begun gets no stack for
//! its signals. Handing over never waits and never fails. The queue has no bound of its own, since nothing may be leaked or
//! closed elsewhere; instead who reads from the peer asks [`Closer::is_behind`] first, and reads nothing while more than
//! [`ROOM`] things wait. A thread whose thing cannot be closed stays until the process ends, which waits for no thread.
//!
//! What takes its time and ends by itself, such as to unmap a guest's memory, is closed [soon](Closer::close_soon): before anything that may wait for a peer, and by
//! a second thread while the first one does. A peer that is gone keeps so nothing but what it has made to be kept.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Things that may wait in a [`Closer`] before it is [behind](Closer::is_behind). A session in good order has a few dozen
/// (the events of its rings) when it ends.
pub const ROOM: usize = 256;

/// This process is about to end.
static LEAVES: AtomicBool = AtomicBool::new(false);

/// Has all closers give way to other processes (by a nice value of 10), as this process is about to end. One that is to go on
/// must not do so: who unmaps memory holds locks of the process's mappings, and with a tenth of a processor for ten times as long.
pub fn give_way() {
    LEAVES.store(true, Ordering::Relaxed);
}

/// Closes things on a thread of its own, one after the other. Clones share the thread.
#[derive(Clone, Debug)]
pub struct Closer(Option<Arc<Handle>>);

/// What all clones of a closer share. The thread has none, so that it learns of the last one's end.
#[derive(Debug)]
struct Handle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Box<dyn Send>>,
    /// What ends by itself.
    soon: VecDeque<Box<dyn Send>>,
    /// Since when the thread has been closing a thing that is no longer in the queue.
    closing: Option<Instant>,
    /// Things that either thread is closing that were to be closed soon.
    ending: usize,
    /// There is a thread.
    running: bool,
    /// There is a second one, for what ends by itself.
    helping: bool,
    /// The last clone was dropped.
    ended: bool,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} waiting", self.waiting())
    }
}

impl State {
    fn waiting(&self) -> usize {
        self.queue.len() + self.soon.len() + self.ending + usize::from(self.closing.is_some())
    }
}

impl Default for Closer {
    fn default() -> Self {
        Closer::new()
    }
}

impl Closer {
    /// Makes a closer, whose thread begins with [`begin`](Self::begin), or with the first thing.
    pub fn new() -> Closer {
        let shared = Shared { state: Mutex::default(), changed: Condvar::new() };
        Closer(Some(Arc::new(Handle(Arc::new(shared)))))
    }

    /// Makes a closer that closes at once, on the thread that hands over: for who may wait for a peer, such as a
    /// program with one peer, or a test that counts descriptors.
    pub fn inline() -> Closer {
        Closer(None)
    }

    /// Begins the thread, if there is none. If none can be had, the next call tries again.
    pub fn begin(&self) {
        if let Some(Handle(shared)) = self.0.as_deref() {
            shared.begin(&mut shared.lock());
        }
    }

    /// Drops `thing` on the closer's thread. Never waits. If no thread can be had, the thing waits for the next call.
    pub fn close(&self, thing: impl Send + 'static) {
        let Some(Handle(shared)) = self.0.as_deref() else { return drop(thing) };
        let mut state = shared.lock();
        state.queue.push_back(Box::new(thing));
        shared.begin(&mut state);
        shared.changed.notify_one();
    }

    /// Does the same for a `thing` whose end waits for nobody.
    pub fn close_soon(&self, thing: impl Send + 'static) {
        let Some(Handle(shared)) = self.0.as_deref() else { return drop(thing) };
        let mut state = shared.lock();
        state.soon.push_back(Box::new(thing));
        shared.begin(&mut state);
        shared.help(&mut state);
        shared.changed.notify_one();
    }

    /// Number of things that are not closed yet.
    pub fn waiting(&self) -> usize {
        self.0.as_ref().map_or(0, |handle| handle.0.lock().waiting())
    }

    /// Returns for how long the thread has been closing one and the same thing, which may be for good.
    pub fn held_up(&self) -> Duration {
        let since = self.0.as_ref().and_then(|handle| handle.0.lock().closing);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns true if more than [`ROOM`] things wait: take nothing more from the peer until this is false.
    pub fn is_behind(&self) -> bool {
        self.waiting() > ROOM
    }

    /// Wraps `thing` so that this closer closes it when it is dropped.
    pub fn defer<T: Send + 'static>(&self, thing: T) -> Deferred<T> {
        Deferred { thing: Some(thing), closer: self.clone(), soon: false }
    }

    /// Wraps a descriptor that a peer has passed. That of memory is [closed soon](Self::close_soon), whatever becomes of the message that it came with: a peer
    /// that is gone would keep all of the memory by something else that it has passed before, and that waits.
    pub fn defer_passed(&self, fd: OwnedFd) -> Deferred<OwnedFd> {
        // Only memfds and files on tmpfs and hugetlbfs have seals. No file is asked anything for this.
        let soon = rustix::fs::fcntl_get_seals(&fd).is_ok();
        Deferred { thing: Some(fd), closer: self.clone(), soon }
    }

    /// Wraps `thing`, whose end waits for nobody, so that it is [closed soon](Self::close_soon) when it is dropped.
    pub fn defer_soon<T: Send + 'static>(&self, thing: T) -> Deferred<T> {
        Deferred { thing: Some(thing), closer: self.clone(), soon: true }
    }
}

/// Time after which a thing that is being closed may never be.
const HELD_UP: Duration = Duration::from_secs(1);

/// Closers that were left to what they cannot close, so that others do not wait for it.
#[derive(Debug)]
pub struct LeftBehind {
    closers: Vec<Closer>,
    most: usize,
}

impl LeftBehind {
    /// Leaves so many behind at most.
    pub fn at_most(most: usize) -> LeftBehind {
        LeftBehind { closers: Vec::new(), most }
    }

    /// Number of things that are not closed yet by those that were left behind.
    pub fn waiting(&self) -> usize {
        self.closers.iter().map(Closer::waiting).sum()
    }

    /// Puts a new closer in the place of one that has been closing the same thing for a second, and gives it what waits behind that: it may be what the thing
    /// waits for, as the other end of a connection. Returns false if it is held up, and too many were left behind.
    pub fn relieve(&mut self, closer: &mut Closer) -> bool {
        self.closers.retain(|closer| closer.waiting() > 0);
        if closer.held_up() < HELD_UP {
            return true;
        }
        if self.closers.len() >= self.most {
            return false;
        }
        let next = Closer::new();
        if let (Some(Handle(held_up)), Some(Handle(next))) = (closer.0.as_deref(), next.0.as_deref()) {
            next.lock().queue.append(&mut held_up.lock().queue);
        }
        next.begin();
        self.closers.push(std::mem::replace(closer, next));
        true
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(self: &Arc<Self>, state: &mut State) {
        if !state.running {
            let own = Arc::clone(self);
            let thread = std::thread::Builder::new().name("ringferry-close".to_owned());
            state.running = thread.spawn(move || own.run()).is_ok();
        }
    }

    /// Begins a second thread while the first one may wait for a peer and something is to be closed soon, if there is none. If none can be had, the next call
    /// tries again.
    fn help(self: &Arc<Self>, state: &mut State) {
        if state.closing.is_some() && !state.helping && !state.soon.is_empty() {
            let own = Arc::clone(self);
            let thread = std::thread::Builder::new().name("ringferry-close".to_owned());
            state.helping = thread.spawn(move || own.run_helping()).is_ok();
        }
    }

    /// Closes until there is nothing left and the last clone was dropped.
    fn run(self: &Arc<Self>) {
        let (mut state, mut gives_way) = (self.lock(), false);
        loop {
            if let Some(thing) = state.soon.pop_front() {
                state = self.end(state, thing, &mut gives_way);
            } else if let Some(thing) = state.queue.pop_front() {
                state.closing = Some(Instant::now());
                drop(state);
                close(thing, &mut gives_way);
                state = self.lock();
                state.closing = None;
            } else if state.ended {
                break;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.running = false;
    }

    /// Closes what is to be closed soon, until there is none of that.
    fn run_helping(&self) {
        let (mut state, mut gives_way) = (self.lock(), false);
        while let Some(thing) = state.soon.pop_front() {
            state = self.end(state, thing, &mut gives_way);
        }
        state.helping = false;
    }

    /// Closes a thing that ends by itself.
    fn end<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        thing: Box<dyn Send>,
        gives_way: &mut bool,
    ) -> MutexGuard<'a, State> {
        state.ending += 1;
        drop(state);
        close(thing, gives_way);
        let mut state = self.lock();
        state.ending -= 1;
        state
    }
}

/// Closes a thing, at a tenth of a processor's share once the process is about to end.
fn close(thing: Box<dyn Send>, gives_way: &mut bool) {
    if LEAVES.load(Ordering::Relaxed) && !std::mem::replace(gives_way, true) {
        crate::process::give_way();
    }
    drop(thing);
}

/// A thing that a [`Closer`] closes when this is dropped.
pub struct Deferred<T: Send + 'static> {
    /// `None` only while it is dropped or taken out.
    thing: Option<T>,
    closer: Closer,
    /// Its end waits for nobody.
    soon: bool,
}

impl<T: Send + 'static> Deferred<T> {
    /// Makes something else of the thing, which is closed as that would have been.
    pub fn map<U: Send + 'static>(mut self, make: impl FnOnce(T) -> U) -> Deferred<U> {
        let thing = self.thing.take().map(make);
        Deferred { thing, closer: self.closer.clone(), soon: self.soon }
    }

    /// Takes the thing out; closing it is the caller's from now on.
    pub fn into_inner(mut self) -> T {
        self.thing.take().expect("a thing is there until it is taken out, once")
    }
}

impl<T: Send + 'static> Deref for Deferred<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.thing.as_ref().expect("a thing is there until it is taken out, once")
    }
}

impl<T: Send + fmt::Debug + 'static> fmt::Debug for Deferred<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.thing.fmt(f)
    }
}

impl<T: Send + 'static> Drop for Deferred<T> {
    fn drop(&mut self) {
        match self.thing.take() {
            Some(thing) if self.soon => self.closer.close_soon(thing),
            Some(thing) => self.closer.close(thing),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::testing::lingering;

    /// Longer than any machine needs for what is waited for here.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < deadline, "{what} did not happen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Its drop waits for a word from the test.
    struct Waits(Receiver<()>);

    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(2 * PATIENCE);
        }
    }

    #[test]
    fn d1_closing_what_waits_keeps_nobody() {
        let closer = Closer::new();
        let (word, waits) = channel();
        closer.close(Waits(waits));
        closer.close(Vec::<u8>::new());
        assert_eq!(closer.waiting(), 2, "the first waits for us, and the second for the first");
        word.send(()).unwrap();
        until("closing", || closer.waiting() == 0);
    }

    /// Behind the socket of a front end that is gone lies the memory of its guest.
    #[test]
    fn d1_what_ends_by_itself_is_closed_while_a_socket_lingers() {
        let closer = Closer::new();
        let (socket, _peer) = lingering();
        closer.close(socket);
        until("the thread to take the socket", || closer.held_up() > Duration::ZERO);
        let closed = Arc::new(AtomicBool::new(false));
        struct Says(Arc<AtomicBool>);
        impl Drop for Says {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        for _ in 0..3 {
            closed.store(false, Ordering::Release);
            drop(closer.defer_soon(Says(Arc::clone(&closed))));
            until("what ends by itself to be closed", || closed.load(Ordering::Acquire));
        }
        until("nothing but the socket, which lingers still, to be left", || closer.waiting() == 1);
    }

    /// No process is left that could end it from outside.
    #[test]
    fn d1_a_socket_that_lingers_for_what_is_behind_it_is_closed_in_the_end() {
        let mut closer = Closer::new();
        let (socket, peer) = lingering();
        closer.close(socket);
        closer.close(peer);
        let first = closer.clone();
        let mut left = LeftBehind::at_most(1);
        until("another closer", || {
            assert!(left.relieve(&mut closer));
            !left.closers.is_empty()
        });
        until("both ends to be closed", || first.waiting() == 0 && closer.waiting() == 0);
        assert!(left.relieve(&mut closer) && left.closers.is_empty());
    }

    #[test]
    fn d1_memory_is_closed_while_what_came_before_it_waits() {
        let closer = Closer::new();
        let (socket, _peer) = lingering();
        drop(closer.defer_passed(socket));
        until("the thread to take the socket", || closer.held_up() > Duration::ZERO);
        let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        drop(closer.defer_passed(memory));
        until("nothing but the socket to be left", || closer.waiting() == 1);
    }

    #[test]
    fn d1_a_socket_that_lingers_keeps_nobody() {
        let closer = Closer::new();
        let (socket, mut peer) = lingering();
        drop(closer.defer(socket));
        assert_eq!(closer.waiting(), 1);
        // It waits until its peer has read everything.
        let mut data = [0; 65536];
        while peer.read(&mut data).unwrap() > 0 {}
        until("closing", || closer.waiting() == 0);
    }

    #[test]
    fn d1_what_cannot_be_closed_is_counted() {
        let closer = Closer::new();
        let (word, waits) = channel();
        closer.close(Waits(waits));
        for _ in 0..ROOM - 1 {
            closer.close(());
        }
        assert!(!closer.is_behind());
        closer.close(());
        assert!(closer.is_behind());
        word.send(()).unwrap();
        until("catching up", || !closer.is_behind() && closer.waiting() == 0);
    }

    #[test]
    fn the_thread_stays_until_the_last_clone_and_the_last_thing_have_gone() {
        let closer = Closer::new();
        let shared = Arc::clone(&closer.0.as_ref().unwrap().0);
        assert!(!shared.lock().running);
        closer.begin();
        assert!(shared.lock().running);
        let (id, seen) = channel();
        struct Tells(std::sync::mpsc::Sender<std::thread::ThreadId>);
        impl Drop for Tells {
            fn drop(&mut self) {
                let _ = self.0.send(std::thread::current().id());
            }
        }
        let [one, other] = [(), ()].map(|()| {
            closer.close(Tells(id.clone()));
            let seen = seen.recv_timeout(PATIENCE).unwrap();
            until("closing", || closer.waiting() == 0);
            seen
        });
        assert_eq!(one, other, "one thread for all");
        let (word, waits) = channel();
        closer.clone().close(Waits(waits));
        drop(closer);
        assert!(shared.lock().running);
        word.send(()).unwrap();
        until("the thread's end", || !shared.lock().running);
    }

    #[test]
    fn what_is_taken_out_is_the_callers_to_close() {
        let closer = Closer::new();
        let thing = closer.defer(Arc::new(()));
        let (copy, thing) = (Arc::clone(&thing), thing.into_inner());
        assert_eq!((Arc::strong_count(&thing), closer.waiting()), (2, 0));
        drop((copy, thing));
        Closer::inline().close(());
        assert_eq!(Closer::inline().waiting(), 0);
    }
}
