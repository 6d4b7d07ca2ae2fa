//! The connection between a switch and its successor: messages of text, bulk data and descriptors.
//!
//! ```text
//!   MAGIC 4, kind 4, bytes of text 8, bytes of bulk 8, descriptors 4, zero 4       the header, with the first descriptors
//!   a byte, with as many further descriptors as the kernel takes                   as often as it takes
//! ```
//!
//! Text and bulk lie one behind the other in a memfd, which is the first descriptor if there is any of either: so a large state never waits for
//! its reader. Either end waits for the other for as long as the [timeout](Channel::set_timeout) says, and no longer.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use ringferry_memory::SharedMem;
use ringferry_sys::socket::{MAX_FDS, Stream};
use rustix::event::{PollFd, PollFlags, Timespec};

/// The first bytes of every message: "RFHO".
const MAGIC: u32 = u32::from_be_bytes(*b"RFHO");
/// Length of the header in bytes.
const HEADER: usize = 32;
/// Upper bound on text in bytes: some kilobytes for each of a few thousand ports.
const MAX_TEXT: u64 = 64 << 20;
/// Upper bound on bulk data in bytes: a million addresses take 16 MiB.
const MAX_BULK: u64 = 512 << 20;
/// Upper bound on the descriptors of a message: as many as a process may have open.
const MAX_DESCRIPTORS: u32 = 1 << 20;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    /// Who the switch is, and its configuration. Without text: the question for it.
    Hello = 1,
    /// The state while packets still flow. Without text: the question for it.
    Draft = 2,
    /// The state of a switch that stands still. Without text: the question for it.
    Final = 3,
    /// The successor has taken over.
    Running = 4,
    /// What was asked for cannot be had; the text says why, for people.
    Refused = 5,
    /// The predecessor, which has nothing left, was told to end while it was replaced, and that is for the successor to do.
    End = 6,
}

impl Kind {
    fn of(number: u32) -> Option<Kind> {
        [Kind::Hello, Kind::Draft, Kind::Final, Kind::Running, Kind::Refused, Kind::End]
            .into_iter()
            .find(|kind| *kind as u32 == number)
    }
}

/// A message that was received.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) text: Vec<u8>,
    pub(crate) bulk: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// One end of the connection.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: Stream,
    /// How long a message may take, as a whole.
    timeout: Cell<Duration>,
}

impl Channel {
    /// Takes over a connection, which blocks from now on.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub(crate) fn new(stream: Stream) -> io::Result<Channel> {
        stream.set_nonblocking(false)?;
        Ok(Channel { stream, timeout: Cell::new(Duration::MAX) })
    }

    /// Sets the time for which either direction waits: a message that is received for all of it, however few bytes come at a time.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub(crate) fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let timeout = timeout.max(Duration::from_millis(1));
        self.timeout.set(timeout);
        self.stream.set_timeout(Some(timeout))
    }

    /// Returns true if the other end has ended, at a moment at which it has nothing to say.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub(crate) fn is_over(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
        Ok(rustix::event::poll(&mut fds, Some(&Timespec::default()))? > 0)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The other end is gone or does not read, or no memory is left.
    pub(crate) fn send(
        &self,
        kind: Kind,
        text: &[u8],
        bulk: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let memory = if text.len() + bulk.len() > 0 {
            let memory = SharedMem::new("ringferry-handover", text.len() + bulk.len())?;
            let file = File::from(memory.fd().try_clone_to_owned()?);
            file.write_all_at(text, 0)?;
            file.write_all_at(bulk, text.len() as u64)?;
            Some(memory)
        } else {
            None
        };
        let all: Vec<_> = memory.iter().map(SharedMem::fd).chain(descriptors.iter().copied()).collect();
        let mut header = Vec::with_capacity(HEADER);
        header.extend(MAGIC.to_be_bytes());
        header.extend((kind as u32).to_le_bytes());
        header.extend((text.len() as u64).to_le_bytes());
        header.extend((bulk.len() as u64).to_le_bytes());
        header.extend((descriptors.len() as u32).to_le_bytes());
        header.resize(HEADER, 0);
        let mut parts = all.chunks(MAX_FDS);
        self.send_whole(&header, parts.next().unwrap_or_default())?;
        parts.try_for_each(|part| self.send_whole(&[0], part))
    }

    fn send_whole(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut sent = self.stream.send(bytes, descriptors)?;
        while sent < bytes.len() {
            sent += self.stream.send(&bytes[sent..], &[])?;
        }
        Ok(())
    }

    /// Receives a message.
    ///
    /// # Errors
    /// The other end is gone or says nothing (`WouldBlock`), or what came is no message.
    pub(crate) fn receive(&self) -> io::Result<Message> {
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let until = Instant::now().checked_add(self.timeout.get());
        let (mut header, mut descriptors) = ([0; HEADER], Vec::new());
        self.receive_whole(&mut header, &mut descriptors, until)?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        if word(0) != MAGIC.swap_bytes() {
            return Err(bad("this is no message of a hand-over"));
        }
        let kind = Kind::of(word(4)).ok_or_else(|| bad("a message of an unknown kind"))?;
        let (text, bulk, count) = (long(8), long(16), word(24));
        if text > MAX_TEXT || bulk > MAX_BULK || count > MAX_DESCRIPTORS {
            return Err(bad("a message that is too long"));
        }
        let count = count as usize + usize::from(text + bulk > 0);
        while descriptors.len() < count {
            let before = descriptors.len();
            self.receive_whole(&mut [0], &mut descriptors, until)?;
            if descriptors.len() == before {
                return Err(bad("descriptors are missing"));
            }
        }
        if descriptors.len() > count {
            return Err(bad("more descriptors than the message has"));
        }
        let (mut first, mut rest) = (vec![0; text as usize], vec![0; bulk as usize]);
        if text + bulk > 0 {
            let file = File::from(descriptors.remove(0));
            file.read_exact_at(&mut first, 0)?;
            file.read_exact_at(&mut rest, text)?;
        }
        Ok(Message { kind, text: first, bulk: rest, descriptors })
    }

    fn receive_whole(
        &self,
        bytes: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
        until: Option<Instant>,
    ) -> io::Result<()> {
        let mut filled = 0;
        while filled < bytes.len() {
            if let Some(until) = until
                && !self.stream.is_readable_within(until.saturating_duration_since(Instant::now()))?
            {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let received = self.stream.recv(&mut bytes[filled..], descriptors)?;
            if received.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if received.fds_lost {
                let text =
                    "no room for the descriptors: raise the limit of open files (ulimit -n, LimitNOFILE=)";
                return Err(io::Error::other(text));
            }
            filled += received.bytes;
        }
        Ok(())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use ringferry_sys::eventfd::EventFd;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (a, b) = Stream::pair().unwrap();
        let [a, b] = [a, b].map(|stream| Channel::new(stream).unwrap());
        [&a, &b].iter().for_each(|end| end.set_timeout(Duration::from_secs(60)).unwrap());
        (a, b)
    }

    #[test]
    fn text_bulk_and_hundreds_of_descriptors_arrive_whole() {
        let (a, b) = pair();
        let events: Vec<_> = (0..300).map(|_| EventFd::new().unwrap()).collect();
        let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
        a.send(Kind::Draft, b"text", &[7; 1 << 20], &fds).unwrap();
        a.send(Kind::Running, b"", b"", &[]).unwrap();
        let message = b.receive().unwrap();
        assert_eq!((message.kind, &message.text[..]), (Kind::Draft, &b"text"[..]));
        assert_eq!((message.bulk, message.descriptors.len()), (vec![7; 1 << 20], 300));
        // In their order.
        for (at, fd) in message.descriptors.into_iter().enumerate() {
            EventFd::from_fd(fd).unwrap().signal().unwrap();
            assert!(events[at].drain().unwrap(), "descriptor {at}");
        }
        let message = b.receive().unwrap();
        assert!(message.kind == Kind::Running && message.text.is_empty() && message.descriptors.is_empty());
    }

    #[test]
    fn what_is_no_message_is_refused_and_a_silent_peer_is_not_waited_for() {
        for (bytes, what) in [
            (vec![0; HEADER], "no message"),
            ([&b"RFHO"[..], &9_u32.to_le_bytes(), &[0; 24]].concat(), "unknown kind"),
            ([&b"RFHO"[..], &1_u32.to_le_bytes(), &u64::MAX.to_le_bytes(), &[0; 16]].concat(), "too long"),
        ] {
            let (a, b) = pair();
            a.send_whole(&bytes, &[]).unwrap();
            let error = b.receive().unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
        let (a, b) = pair();
        b.set_timeout(Duration::from_millis(20)).unwrap();
        assert_eq!(b.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        // Nor is one that says a byte at a time, for longer.
        let begin = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for byte in &MAGIC.to_be_bytes() {
                    let _ = a.send_whole(&[*byte], &[]);
                    std::thread::sleep(Duration::from_millis(15));
                }
            });
            assert_eq!(b.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
        let (a, b) = pair();
        b.set_timeout(Duration::from_secs(60)).unwrap();
        // Promised descriptors that do not come.
        let event = EventFd::new().unwrap();
        let mut header = [&b"RFHO"[..], &1_u32.to_le_bytes(), &[0; 24]].concat();
        header[24] = 2;
        a.send_whole(&header, &[event.as_fd()]).unwrap();
        a.send_whole(&[0], &[]).unwrap();
        assert!(b.receive().unwrap_err().to_string().contains("missing"));
        drop(a);
        assert_eq!(b.receive().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
