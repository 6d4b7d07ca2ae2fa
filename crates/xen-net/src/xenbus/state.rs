//! The state that each side publishes in the store (`enum xenbus_state` in Xen's `io/xenbus.h`).
//! The drivers read and write it on their control thread; the [module](super) has the sequence as a
//! picture.

use ringferry_xen::store::{Client, Nodes, StoreError, path};

/// The state of one side of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum State {
    /// The toolstack has created the device, and no driver has looked at it.
    Initialising = 1,
    /// The back end has published its features.
    InitWait = 2,
    /// The front end has published its rings.
    Initialised = 3,
    /// The side is ready for packets.
    Connected = 4,
    /// The side has stopped its packets, and the other is to unmap what is shared.
    Closing = 5,
    /// The side shares nothing any more.
    Closed = 6,
    /// Used by other classes of devices only.
    Reconfiguring = 7,
    /// Used by other classes of devices only.
    Reconfigured = 8,
}

impl State {
    /// All states, in the order of their numbers.
    pub const ALL: [State; 8] = [
        Self::Initialising,
        Self::InitWait,
        Self::Initialised,
        Self::Connected,
        Self::Closing,
        Self::Closed,
        Self::Reconfiguring,
        Self::Reconfigured,
    ];

    /// Returns the number that stands for the state in the store.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Reads the state of the device at path `device`. Returns `None` when the node is absent, may
    /// not be read, or holds no valid state; the other side is to be left alone in all three cases.
    ///
    /// # Errors
    /// The connection to the store failed.
    pub fn read(nodes: &mut impl Nodes, device: &str) -> Result<Option<State>, StoreError> {
        match nodes.number::<u8>(&path::join(device, "state")) {
            Ok(number) => Ok(Self::ALL.into_iter().find(|state| Some(state.number()) == number)),
            Err(error) if error.is_fatal() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Writes the state of the device at path `device`, unless the node is gone, which writing must
    /// not create again. Returns true if it was there.
    ///
    /// # Errors
    /// The connection to the store failed, or the store refused the write.
    pub fn write(self, client: &mut Client, device: &str) -> Result<bool, StoreError> {
        client.transaction(|nodes| {
            let node = path::join(device, "state");
            let there = nodes.read(&node)?.is_some();
            if there {
                nodes.write(&node, self.number().to_string())?;
            }
            Ok(there)
        })
    }
}
