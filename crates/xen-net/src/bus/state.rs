//! What each side says of itself (`enum xenbus_state` in Xen's `io/xenbus.h`).

use ringferry_xen::store::{Client, Nodes, StoreError, path};

/// The state of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum State {
    /// The device has been made; nobody has looked at it.
    Initialising = 1,
    /// The back end has said what it can do.
    InitWait = 2,
    /// The front end has said where its rings are.
    Initialised = 3,
    /// Packets flow.
    Connected = 4,
    /// Packets have stopped; the other side is to let go.
    Closing = 5,
    /// Nothing is shared any more.
    Closed = 6,
    /// Used by other devices.
    Reconfiguring = 7,
    /// Used by other devices.
    Reconfigured = 8,
}

impl State {
    /// All states.
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

    /// Its number in the store.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The state that is in the node `state` below `device`; `None` when there is no such node, none that may be read, or no
    /// state in it. All mean that the other side is not to be dealt with.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub fn read(nodes: &mut impl Nodes, device: &str) -> Result<Option<State>, StoreError> {
        match nodes.number::<u8>(&path::join(device, "state")) {
            Ok(number) => Ok(Self::ALL.into_iter().find(|state| Some(state.number()) == number)),
            Err(error) if error.is_fatal() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Writes the state of the device `device`, unless the device is gone, which must not come back by that. Says whether
    /// it was there.
    ///
    /// # Errors
    /// The store cannot be asked, or it refuses.
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
