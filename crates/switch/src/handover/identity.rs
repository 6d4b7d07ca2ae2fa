//! Telling open files apart, of those that are kept.
//!
//! Of an eventfd only `/proc/self/fdinfo` tells that, and the same text has a line for each lock of the open file (`F_OFD_SETLK`). Whoever has passed the eventfd can
//! set as many as it likes: the kernel takes 140 ms to write down 45 000. So the thread that serves everybody does not ask. It waits for a [moment](PATIENCE), and the
//! port concerned is not kept for as long as its files take longer. What was found out meanwhile counts at the next try, if the port has the same files still.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use ringferry_sys::closer::{Closer, Deferred};
use ringferry_vhost_user::backend::Put;
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use crate::ports::table::Generation;

/// How long the files of a port may take to be told apart. Those of a usual one take 10 us, and a thread, which needs a processor.
const PATIENCE: Duration = Duration::from_millis(20);

/// How long a thread asks on for files that nobody waits for any more: a busy machine may not run it for a while.
const LONGEST: Duration = Duration::from_secs(1);

/// Threads that may be held up at a time.
const MOST_LATE: usize = 4;

/// The mark by which an open file is told from all others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Identity {
    /// Device and inode of a socket or a memfd.
    File(u64, u64),
    /// An eventfd.
    Event(String),
    /// Another file, of which this port keeps as many as it has.
    Of(String, usize),
}

impl Identity {
    /// Tells a socket or a memfd from all others; `None` if it is neither.
    pub(super) fn of_file(fd: impl AsFd) -> io::Result<Option<Identity>> {
        let status = rustix::fs::fstat(fd)?;
        let is_told_by_inode =
            matches!(FileType::from_raw_mode(status.st_mode), FileType::Socket | FileType::RegularFile);
        Ok(is_told_by_inode.then_some(Identity::File(status.st_dev, status.st_ino)))
    }

    /// Tells a file that is neither from all others. This takes as long as whoever has it likes.
    fn of_another(fd: BorrowedFd<'_>, port: &str, place: usize) -> io::Result<Identity> {
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
        let event = about.lines().find_map(|line| line.strip_prefix("eventfd-id:"));
        Ok(match event {
            Some(id) => Identity::Event(id.trim().to_owned()),
            None => Identity::Of(port.to_owned(), place),
        })
    }
}

/// Tells files apart for a thread that must not wait for long.
#[derive(Debug)]
pub(super) struct Identifier {
    patience: Duration,
    /// The answers that are still to come, about ports in these states.
    asked: BTreeMap<String, (Generation, Receiver<Told>)>,
    /// Held by each thread.
    threads: Arc<()>,
    /// Closes copies: whoever closes an eventfd waits for who has the kernel write down the locks of one.
    closer: Closer,
}

type Told = io::Result<Vec<Identity>>;

impl Default for Identifier {
    fn default() -> Identifier {
        Identifier {
            patience: PATIENCE,
            asked: BTreeMap::new(),
            threads: Arc::default(),
            closer: Closer::new(),
        }
    }
}

impl Identifier {
    /// Tells the files of a port in this state apart, which `each` calls back with one after the other, in the order of their places. `Ok(None)`: it takes too long.
    ///
    /// # Errors
    /// Those of `each`; there are no descriptors left, or no thread can be had.
    pub(super) fn tell_apart(
        &mut self,
        port: &str,
        generation: Generation,
        each: impl FnOnce(&mut Put<'_>) -> io::Result<()>,
    ) -> io::Result<Option<Vec<Identity>>> {
        let known = match self.asked.remove(port) {
            Some((of, told)) if of == generation => match told.try_recv() {
                Ok(told) => Some(told?),
                Err(TryRecvError::Empty) => {
                    self.asked.insert(port.to_owned(), (generation, told));
                    return Ok(None);
                }
                Err(TryRecvError::Disconnected) => None,
            },
            _ => None,
        };
        let (mut all, mut others) = (Vec::new(), Vec::new());
        // Only of those that are asked there are copies: of a socket, or of memory, one might be the last, whose close may wait.
        let listed = each(&mut |fd| {
            let identity = Identity::of_file(fd)?;
            if identity.is_none() && known.is_none() {
                others.push((all.len(), self.closer.defer_soon(fd.try_clone_to_owned()?)));
            }
            all.push(identity);
            Ok(all.len() as u32 - 1)
        });
        listed?;
        let told = match known {
            None if !others.is_empty() => self.ask(port, generation, others)?,
            known => Some(known.unwrap_or_default()),
        };
        let Some(mut told) = told.map(Vec::into_iter) else { return Ok(None) };
        Ok(Some(all.into_iter().filter_map(|identity| identity.or_else(|| told.next())).collect()))
    }

    /// Has a thread ask of each of these files, at these places.
    fn ask(
        &mut self,
        port: &str,
        generation: Generation,
        files: Vec<(usize, Deferred<OwnedFd>)>,
    ) -> io::Result<Option<Vec<Identity>>> {
        if Arc::strong_count(&self.threads) > MOST_LATE {
            return Ok(None);
        }
        let (sender, told) = sync_channel::<Told>(1);
        let (name, held, begin) = (port.to_owned(), Arc::clone(&self.threads), Instant::now());
        let look = move || {
            let _held = held;
            let mut identities = Vec::with_capacity(files.len());
            for (place, fd) in &files {
                if begin.elapsed() > LONGEST {
                    return;
                }
                identities.push(Identity::of_another(fd.as_fd(), &name, *place));
            }
            let _ = sender.send(identities.into_iter().collect());
        };
        std::thread::Builder::new().name("ringferry-tell".to_owned()).spawn(look)?;
        match told.recv_timeout(self.patience) {
            Ok(told) => told.map(Some),
            Err(_) => {
                self.asked.insert(port.to_owned(), (generation, told));
                Ok(None)
            }
        }
    }

    /// A port is not there any more.
    pub(super) fn forget(&mut self, port: &str) {
        self.asked.remove(port);
    }
}

#[cfg(test)]
mod tests {
    use ringferry_memory::SharedMem;
    use ringferry_sys::eventfd::EventFd;
    use ringferry_sys::socket::Stream;

    use super::*;
    use crate::ports::table::EntryId;

    /// A port's files: two eventfds, one of which comes twice, a socket, memory, and a file that is none of these.
    fn files() -> Vec<OwnedFd> {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
        let (one, two, memory) =
            (EventFd::new().unwrap(), EventFd::new().unwrap(), SharedMem::new("m", 1).unwrap());
        let (socket, _) = Stream::pair().unwrap();
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        [one.as_fd(), socket.as_fd(), two.as_fd(), memory.fd(), one.as_fd(), pipe.as_fd()].map(copy).into()
    }

    /// A port after so many messages.
    fn state(messages: u64) -> Generation {
        (EntryId::nth(1), (0, messages))
    }

    fn each(files: &[OwnedFd]) -> impl FnOnce(&mut Put<'_>) -> io::Result<()> {
        |put| files.iter().try_for_each(|file| put(file.as_fd()).map(drop))
    }

    #[test]
    fn files_are_told_apart() {
        let files = files();
        let mut patient = Identifier { patience: Duration::from_secs(60), ..Identifier::default() };
        let told = patient.tell_apart("a", state(0), each(&files)).unwrap().unwrap();
        let is_same = |one: usize, other: usize| told[one] == told[other];
        assert!(is_same(0, 4) && !is_same(0, 2) && !is_same(1, 3));
        assert!(matches!(&told[..], [
            Identity::Event(_), Identity::File(..), Identity::Event(_), Identity::File(..), Identity::Event(_), Identity::Of(port, 5),
        ] if port == "a"));
    }

    /// A front end that sets locks on an eventfd has the kernel write down all of them for who asks.
    #[test]
    fn l_files_that_take_too_long_are_not_waited_for() {
        let files = files();
        // For each the kernel takes microseconds.
        let many: Vec<_> = std::iter::repeat_with(|| files[0].try_clone().unwrap()).take(150).collect();
        let mut hasty = Identifier { patience: Duration::ZERO, ..Identifier::default() };
        assert!(hasty.tell_apart("a", state(0), each(&many)).unwrap().is_none());
        // Sockets and memory take no time.
        assert!(hasty.tell_apart("b", state(0), each(&files[1..2])).unwrap().is_some());
        // What is found out later counts, of the same state alone.
        let later = Instant::now() + Duration::from_secs(60);
        let told = loop {
            assert!(Instant::now() < later, "it is never told");
            match hasty.tell_apart("a", state(0), each(&many)).unwrap() {
                Some(told) => break told,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(told.len(), many.len());
        assert!(hasty.tell_apart("a", state(0), each(&many)).unwrap().is_none());
        assert!(hasty.tell_apart("a", state(1), each(&many)).unwrap().is_none());
        hasty.forget("a");
        assert!(hasty.asked.is_empty());
        // Where as many threads are held up as may be, there is not one more.
        let mut patient = Identifier { patience: Duration::from_secs(60), ..Identifier::default() };
        let held: Vec<_> = (0..MOST_LATE).map(|_| Arc::clone(&patient.threads)).collect();
        assert!(patient.tell_apart("a", state(0), each(&files)).unwrap().is_none());
        drop(held);
        assert!(patient.tell_apart("a", state(0), each(&files)).unwrap().is_some());
    }
}
