//! The control connection of a test: JSON lines over TCP between the two ends.
//!
//! ```text
//! client                                  server
//!   | -- test -------------------------->   |     control connection
//!   | <-------------- ready | failed ----   |
//!   | -- data ------------------------->    |     each TCP connection that lasts as long as the test starts with one
//!   | <----------------------------- go -   |     line each way, then carries payload only
//!   | -- start ------------------------>    |
//!   | <-> progress, each 250 ms <------->   |     what has *arrived* so far at the end that sends the message
//!   | <-> done | failed <-------------->    |     each end when its part is over
//! ```

use super::{Error, Mode};
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// An end that makes no step for this long has failed. Long enough for several retransmissions under heavy
/// loss.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Longest control line in bytes; a real one is below 1 KiB.
const MAX_LINE: usize = 16 << 10;
/// Version of this protocol.
pub const VERSION: u32 = 2;
/// Most sessions of a test. Each is a thread and a socket or two at either end.
pub const MAX_SESSIONS: u16 = 256;

/// The direction in which payload flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

impl Direction {
    /// A number that makes the payload of the two directions differ.
    pub fn salt(self) -> u64 {
        match self {
            Direction::ToServer => 1,
            Direction::ToClient => 2,
        }
    }
}

/// The test that the client asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// Always [`VERSION`].
    pub version: u32,
    pub mode: Mode,
    /// How long senders send, in seconds.
    pub seconds: f64,
    /// Bytes of a write, datagram or request.
    pub size: usize,
    /// Payload bits per second of each sender, if limited.
    pub rate: Option<u64>,
    /// How many times over all of it happens at once, 1 to [`MAX_SESSIONS`].
    #[serde(default = "one")]
    pub sessions: u16,
    /// The client's UDP ports in UDP mode, one per session.
    #[serde(default)]
    pub ports: Vec<u16>,
}

/// Sessions where nobody says how many.
pub fn one() -> u16 {
    1
}

/// Payload that passed through one end of one direction, all sessions together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flow {
    pub direction: Direction,
    pub bytes: u64,
    /// Datagrams, requests or responses; for TCP streams whole blocks written, 0 at the receiver.
    pub blocks: u64,
    /// Seconds from the first byte to the last, of the session that took longest.
    pub seconds: f64,
    /// Blocks with wrong bytes (receiver only).
    pub corrupt: u64,
    /// Datagrams overtaken by a later one (receiver only).
    pub reordered: u64,
    /// Extra copies of datagrams, which `bytes` and `blocks` leave out (receiver only).
    pub duplicated: u64,
}

impl Flow {
    /// A flow in `direction` that carried nothing yet.
    pub fn new(direction: Direction) -> Self {
        Self { direction, bytes: 0, blocks: 0, seconds: 0.0, corrupt: 0, reordered: 0, duplicated: 0 }
    }

    /// Adds a session of the same direction to its entry in `flows`, or makes one.
    pub fn add_to(self, flows: &mut Vec<Flow>) {
        match flows.iter_mut().find(|flow| flow.direction == self.direction) {
            Some(sum) => {
                sum.bytes += self.bytes;
                sum.blocks += self.blocks;
                sum.seconds = sum.seconds.max(self.seconds);
                sum.corrupt += self.corrupt;
                sum.reordered += self.reordered;
                sum.duplicated += self.duplicated;
            }
            None => flows.push(self),
        }
    }
}

/// The counters of one end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The payload that it sent, one entry per direction.
    pub sent: Vec<Flow>,
    /// The payload that it received, likewise.
    pub received: Vec<Flow>,
    /// CPU time of its process for this test, user and kernel, in seconds.
    pub cpu_seconds: f64,
}

/// A line of the control connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    /// The request for a test.
    Test(Test),
    /// The server agrees.
    Ready {
        /// Names this test on its data connections and in its payload.
        token: u64,
        /// One per session: the server's UDP ports in UDP mode, its TCP ports where every transaction has a
        /// connection of its own.
        #[serde(default)]
        ports: Vec<u16>,
    },
    /// First line on a data connection.
    Data {
        /// The token of [`Message::Ready`].
        token: u64,
        /// The direction in which payload flows on it (a request/response test says `ToServer`).
        direction: Direction,
        /// Number of the session, from 0.
        session: u16,
    },
    /// The answer to [`Message::Data`].
    Go,
    /// All data connections are open; both ends begin.
    Start,
    /// The payload that has arrived so far.
    Progress {
        bytes: u64,
        /// Datagrams or transactions.
        blocks: u64,
    },
    Done(Outcome),
    /// This end cannot go on.
    Failed {
        /// For the user of the other end.
        reason: String,
    },
}

/// A connection that carries [`Message`]s.
pub struct Control {
    stream: TcpStream,
    pending: Vec<u8>,
}

impl Control {
    /// Speaks over `stream`; sets its time limits.
    pub fn new(stream: TcpStream) -> Result<Self, Error> {
        stream.set_nodelay(true).map_err(Error::Control)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(Error::Control)?;
        Ok(Self { stream, pending: Vec::new() })
    }

    pub fn send(&mut self, message: &Message) -> Result<(), Error> {
        let mut line = serde_json::to_vec(message).map_err(|error| Error::Protocol(error.to_string()))?;
        line.push(b'\n');
        self.stream.write_all(&line).map_err(Error::Control)
    }

    /// The next message, or nothing if none is complete within `wait`.
    pub fn receive(&mut self, wait: Duration) -> Result<Option<Message>, Error> {
        self.stream.set_read_timeout(Some(wait)).map_err(Error::Control)?;
        loop {
            if let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|error| Error::Protocol(error.to_string()));
            }
            if self.pending.len() > MAX_LINE {
                return Err(Error::Protocol(format!("a line longer than {MAX_LINE} bytes")));
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(Error::Closed),
                Ok(count) => self.pending.extend_from_slice(&bytes[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Control(error)),
            }
        }
    }

    /// The next message, which must come within [`PATIENCE`].
    pub fn expect(&mut self) -> Result<Message, Error> {
        match self.receive(PATIENCE)? {
            Some(Message::Failed { reason }) => Err(Error::Peer(reason)),
            Some(message) => Ok(message),
            None => Err(Error::Silent),
        }
    }

    /// The bare connection, once the messages are over.
    pub fn into_stream(self) -> Result<TcpStream, Error> {
        if self.pending.is_empty() {
            Ok(self.stream)
        } else {
            Err(Error::Protocol("payload before go".into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, Control) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, Control::new(listener.accept().unwrap().0).unwrap())
    }

    #[test]
    fn a_message_survives_arriving_in_pieces() {
        let (mut raw, mut control) = pair();
        raw.write_all(b"{\"ready\":{\"token\":18446744073709551615,").unwrap();
        assert_eq!(control.receive(Duration::from_millis(20)).unwrap(), None);
        raw.write_all(b"\"ports\":[7]}}\n\"go\"\n").unwrap();
        assert_eq!(control.expect().unwrap(), Message::Ready { token: u64::MAX, ports: vec![7] });
        assert_eq!(control.expect().unwrap(), Message::Go);
    }

    #[test]
    fn the_sessions_of_a_direction_add_up_and_last_as_long_as_the_longest() {
        let mut flows = Vec::new();
        for (direction, seconds) in
            [(Direction::ToServer, 2.0), (Direction::ToClient, 9.0), (Direction::ToServer, 1.0)]
        {
            let flow = Flow { bytes: 10, blocks: 3, corrupt: 1, seconds, ..Flow::new(direction) };
            Flow { reordered: 4, duplicated: 5, ..flow }.add_to(&mut flows);
        }
        assert_eq!(flows.len(), 2);
        let sum = flows[0];
        assert_eq!((sum.direction, sum.seconds), (Direction::ToServer, 2.0));
        assert_eq!((sum.bytes, sum.blocks, sum.corrupt, sum.reordered, sum.duplicated), (20, 6, 2, 8, 10));
    }

    #[test]
    fn a_test_of_a_client_that_knows_no_sessions_is_read_so_that_its_version_can_be_refused() {
        let text = r#"{"version":1,"mode":"rr","seconds":1.0,"size":1,"rate":null,"udp_port":null}"#;
        let test: Test = serde_json::from_str(text).unwrap();
        assert_eq!((test.version, test.sessions), (1, 1));
    }

    #[test]
    fn nonsense_endless_lines_and_an_early_end_are_errors() {
        let (mut raw, mut control) = pair();
        raw.write_all(b"GET / HTTP/1.1\n").unwrap();
        assert!(matches!(control.expect(), Err(Error::Protocol(_))));

        let (mut raw, mut control) = pair();
        raw.write_all(&vec![b'x'; 2 * MAX_LINE]).unwrap();
        assert!(matches!(control.expect(), Err(Error::Protocol(_))));

        let (raw, mut control) = pair();
        drop(raw);
        assert!(matches!(control.expect(), Err(Error::Closed)));
    }

    #[test]
    fn the_reason_of_a_failure_reaches_the_other_end() {
        let (raw, mut control) = pair();
        Control::new(raw).unwrap().send(&Message::Failed { reason: "busy".into() }).unwrap();
        assert!(matches!(control.expect(), Err(Error::Peer(reason)) if reason == "busy"));
    }
}
