//! The commands of the control queue (VIRTIO 1.4, 5.1.6.5), as bytes and as values.
//!
//! On the wire a command is `class`, `command`, its data, and one byte that the device writes: the
//! acknowledgement. Both halves use the one table below.

/// `ack`: done.
pub const OK: u8 = 0;
/// `ack`: refused; nothing has changed.
pub const ERR: u8 = 1;

/// Longest command accepted, in bytes: MAC tables of 680 entries each.
pub const MAX_COMMAND: usize = 8192;

/// The switches of VIRTIO_NET_CTRL_RX, with their command numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RxMode {
    /// Receive everything.
    Promiscuous = 0,
    /// Receive all multicast.
    AllMulticast = 1,
    /// Receive all unicast.
    AllUnicast = 2,
    /// Receive no multicast.
    NoMulticast = 3,
    /// Receive no unicast.
    NoUnicast = 4,
    /// Receive no broadcast.
    NoBroadcast = 5,
}

impl RxMode {
    const ALL: [RxMode; 6] = [
        RxMode::Promiscuous,
        RxMode::AllMulticast,
        RxMode::AllUnicast,
        RxMode::NoMulticast,
        RxMode::NoUnicast,
        RxMode::NoBroadcast,
    ];
}

/// One command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Switches a receive mode on or off (5.1.6.5.1).
    Rx(RxMode, bool),
    /// Replaces the address filters (5.1.6.5.2).
    MacTable {
        /// Unicast addresses to receive.
        unicast: Vec<[u8; 6]>,
        /// Multicast addresses to receive.
        multicast: Vec<[u8; 6]>,
    },
    /// Sets the device's own address (5.1.6.5.2).
    MacAddress([u8; 6]),
    /// Receives frames of a VLAN (5.1.6.5.3).
    VlanAdd(u16),
    /// Receives frames of a VLAN no more (5.1.6.5.3).
    VlanDel(u16),
    /// The guest has announced itself (5.1.6.5.4).
    AnnounceAck,
    /// Uses so many queue pairs from now on (5.1.6.5.6).
    QueuePairs(u16),
    /// Takes these receive offloads from now on, as feature bits (5.1.6.5.9).
    GuestOffloads(u64),
}

const CLASS_RX: u8 = 0;
const CLASS_MAC: u8 = 1;
const CLASS_VLAN: u8 = 2;
const CLASS_ANNOUNCE: u8 = 3;
const CLASS_MQ: u8 = 4;
const CLASS_GUEST_OFFLOADS: u8 = 5;

impl Command {
    /// The bytes a driver sends.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes;
        match self {
            Command::Rx(mode, on) => bytes = vec![CLASS_RX, *mode as u8, u8::from(*on)],
            Command::MacTable { unicast, multicast } => {
                bytes = vec![CLASS_MAC, 0];
                for table in [unicast, multicast] {
                    bytes.extend_from_slice(&(table.len() as u32).to_le_bytes());
                    bytes.extend(table.iter().flatten());
                }
            }
            Command::MacAddress(mac) => {
                bytes = vec![CLASS_MAC, 1];
                bytes.extend_from_slice(mac);
            }
            Command::VlanAdd(id) => bytes = with_u16(CLASS_VLAN, 0, *id),
            Command::VlanDel(id) => bytes = with_u16(CLASS_VLAN, 1, *id),
            Command::AnnounceAck => bytes = vec![CLASS_ANNOUNCE, 0],
            Command::QueuePairs(pairs) => bytes = with_u16(CLASS_MQ, 0, *pairs),
            Command::GuestOffloads(bits) => {
                bytes = vec![CLASS_GUEST_OFFLOADS, 0];
                bytes.extend_from_slice(&bits.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads what a driver sent; `None` for a command that is unknown, too short or too long.
    pub fn decode(bytes: &[u8]) -> Option<Command> {
        let [class, command, data @ ..] = bytes else { return None };
        Some(match (*class, *command) {
            (CLASS_RX, number) => {
                let mode = *RxMode::ALL.get(usize::from(number))?;
                let [on] = data else { return None };
                Command::Rx(mode, *on != 0)
            }
            (CLASS_MAC, 0) => {
                let (unicast, data) = mac_table(data)?;
                let (multicast, data) = mac_table(data)?;
                data.is_empty().then_some(Command::MacTable { unicast, multicast })?
            }
            (CLASS_MAC, 1) => Command::MacAddress(data.try_into().ok()?),
            (CLASS_VLAN, 0) => Command::VlanAdd(u16::from_le_bytes(data.try_into().ok()?)),
            (CLASS_VLAN, 1) => Command::VlanDel(u16::from_le_bytes(data.try_into().ok()?)),
            (CLASS_ANNOUNCE, 0) if data.is_empty() => Command::AnnounceAck,
            (CLASS_MQ, 0) => Command::QueuePairs(u16::from_le_bytes(data.try_into().ok()?)),
            (CLASS_GUEST_OFFLOADS, 0) => Command::GuestOffloads(u64::from_le_bytes(data.try_into().ok()?)),
            _ => return None,
        })
    }
}

fn with_u16(class: u8, command: u8, value: u16) -> Vec<u8> {
    let [low, high] = value.to_le_bytes();
    vec![class, command, low, high]
}

/// Reads one table and returns what is behind it. The count is the driver's word: the bytes must be
/// there.
fn mac_table(data: &[u8]) -> Option<(Vec<[u8; 6]>, &[u8])> {
    let (count, data) = data.split_first_chunk::<4>()?;
    let bytes = (u32::from_le_bytes(*count) as usize).checked_mul(6)?;
    let (table, data) = data.split_at_checked(bytes)?;
    Some((table.as_chunks::<6>().0.to_vec(), data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_survive_the_wire() {
        let commands = [
            Command::Rx(RxMode::NoBroadcast, true),
            Command::MacTable { unicast: vec![[2; 6]], multicast: vec![[1; 6], [3; 6]] },
            Command::MacAddress([2, 0, 0, 0, 0, 1]),
            Command::VlanAdd(100),
            Command::VlanDel(4094),
            Command::AnnounceAck,
            Command::QueuePairs(2),
            Command::GuestOffloads(1 << 54 | 1),
        ];
        for command in commands {
            assert_eq!(Command::decode(&command.encode()), Some(command));
        }
    }

    #[test]
    fn cve_2014_0150_mac_table_count_is_checked_against_the_bytes_there() {
        let mut bytes = vec![CLASS_MAC, 0];
        bytes.extend_from_slice(&u32::MAX.to_le_bytes());
        bytes.extend_from_slice(&[0; 12]);
        assert_eq!(Command::decode(&bytes), None);
        // A second table that is missing, and bytes behind it.
        assert_eq!(Command::decode(&[CLASS_MAC, 0, 0, 0, 0, 0]), None);
        assert_eq!(Command::decode(&[CLASS_MAC, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]), None);
    }

    #[test]
    fn short_and_unknown_commands_are_refused() {
        for bytes in
            [&[][..], &[0], &[0, 0], &[0, 6, 1], &[1, 1, 2, 3], &[4, 0, 1], &[4, 1, 0, 0], &[9, 0, 0]]
        {
            assert_eq!(Command::decode(bytes), None, "{bytes:?}");
        }
    }
}
