//! Telling open files apart, of those that are kept.

use std::io;
use std::os::fd::AsFd;

use ringferry_sys::eventfd::EventId;
use rustix::fs::FileType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The mark by which an open file is told from all others. Whoever else has the file has no say in how long it takes to find that out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Identity {
    /// Device and inode of a socket or a memfd.
    File(u64, u64),
    /// The mark of an event, which its port has had from the start.
    #[serde(serialize_with = "to_text", deserialize_with = "of_text")]
    Event(EventId),
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

    /// Tells the file that has this place among those of a port from all others.
    pub(super) fn of(
        fd: impl AsFd,
        event: Option<EventId>,
        port: &str,
        place: usize,
    ) -> io::Result<Identity> {
        match event {
            Some(event) => Ok(Identity::Event(event)),
            None => Ok(Self::of_file(fd)?.unwrap_or_else(|| Identity::Of(port.to_owned(), place))),
        }
    }

    /// Returns the mark of an event.
    pub(super) fn event(&self) -> Option<EventId> {
        match self {
            Identity::Event(event) => Some(*event),
            Identity::File(..) | Identity::Of(..) => None,
        }
    }
}

/// A mark is a text in what is kept, as it was when the kernel gave it.
fn to_text<S: Serializer>(event: &EventId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&event.0)
}

fn of_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EventId, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(EventId).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use ringferry_memory::SharedMem;
    use ringferry_sys::eventfd::EventFd;
    use ringferry_sys::socket::Stream;

    use super::*;

    #[test]
    fn files_are_told_apart() {
        let event = || (EventFd::new().unwrap(), Some(EventId::draw()));
        let ((one, mark), (two, another)) = (event(), event());
        let (socket, other) = Stream::pair().unwrap();
        let memory = SharedMem::new("m", 1).unwrap();
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        let of = |fd, event, place| Identity::of(fd, event, "a", place).unwrap();
        assert_eq!(of(one.as_fd(), mark, 0), of(one.as_fd(), mark, 4));
        assert_ne!(of(one.as_fd(), mark, 0), of(two.as_fd(), another, 0));
        assert_eq!(of(socket.as_fd(), None, 2), of(socket.as_fd(), None, 3));
        assert_ne!(of(socket.as_fd(), None, 2), of(other.as_fd(), None, 2));
        assert!(matches!(of(memory.fd(), None, 2), Identity::File(..)));
        assert_eq!(of(pipe.as_fd(), None, 5), Identity::Of("a".to_owned(), 5));
    }

    #[test]
    fn the_mark_of_an_event_that_an_earlier_program_has_kept_is_read() {
        let identity: Identity = serde_json::from_str(r#"{ "Event": "57" }"#).unwrap();
        assert_eq!(identity, Identity::Event(EventId(57)));
        let last = Identity::Event(EventId(u64::MAX));
        let text = serde_json::to_string(&last).unwrap();
        assert_eq!(text, r#"{"Event":"18446744073709551615"}"#);
        assert_eq!(serde_json::from_str::<Identity>(&text).unwrap(), last);
    }
}
