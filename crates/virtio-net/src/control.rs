//! The commands of the control queue (VIRTIO 1.4, 5.1.6.5), encoded by the driver half and decoded
//! by the device half.
//!
//! An encoded command is `class`, `command`, its data, and one byte that the device writes: the
//! acknowledgement. One command has a result after it. This module checks sizes only;
//! [`Settings`](crate::device::Settings) checks whether values are in range. It holds no state.

/// Acknowledgement of a command that was carried out.
pub const OK: u8 = 0;
/// Acknowledgement of a command that was refused and changed nothing.
pub const ERR: u8 = 1;

/// Longest command that is accepted, in bytes: MAC tables of 680 entries each, or an indirection
/// table of 2048.
pub const MAX_COMMAND: usize = 8192;

/// The receive modes of VIRTIO_NET_CTRL_RX, with their command numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RxMode {
    /// The device delivers every frame.
    Promiscuous = 0,
    /// The device delivers every multicast frame.
    AllMulticast = 1,
    /// The device delivers every unicast frame.
    AllUnicast = 2,
    /// The device delivers no multicast frame.
    NoMulticast = 3,
    /// The device delivers no unicast frame.
    NoUnicast = 4,
    /// The device delivers no broadcast frame.
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

/// Limits of notification coalescing (5.1.6.5.10): a device that has used buffers notifies after
/// `max_packets`, or `max_usecs` after the first of them. If either is 0, as it is before a driver
/// sets them, it notifies after every packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalesce {
    /// Most packets before a notification.
    pub max_packets: u32,
    /// Longest delay of a notification, in microseconds.
    pub max_usecs: u32,
}

impl Coalesce {
    /// Size of the encoded limits in bytes.
    pub const LEN: usize = 8;

    /// Encodes the limits in little-endian byte order.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let [p0, p1, p2, p3] = self.max_packets.to_le_bytes();
        let [u0, u1, u2, u3] = self.max_usecs.to_le_bytes();
        [p0, p1, p2, p3, u0, u1, u2, u3]
    }

    /// Decodes limits in little-endian byte order.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let [p0, p1, p2, p3, u0, u1, u2, u3] = *bytes;
        Self {
            max_packets: u32::from_le_bytes([p0, p1, p2, p3]),
            max_usecs: u32::from_le_bytes([u0, u1, u2, u3]),
        }
    }

    /// Returns true if notifications are held back at all.
    #[inline]
    pub const fn is_on(self) -> bool {
        self.max_packets != 0 && self.max_usecs != 0
    }
}

/// Receive-side scaling as a driver configures it (5.1.6.5.7). Queues are numbered by pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rss {
    /// Packet types that are hashed, as bits VIRTIO_NET_HASH_TYPE_*.
    pub types: u32,
    /// Queue of the packets whose type is not hashed.
    pub unclassified: u16,
    /// Indirection table: the queue for each value of the hash's low bits. The number of entries is
    /// a power of two.
    pub table: Vec<u16>,
    /// Number of transmitqs that the driver uses.
    pub max_tx: u16,
    /// Key of the hash, at most 255 bytes long.
    pub key: Vec<u8>,
}

/// One command of the driver, with its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Switches a receive mode on or off (5.1.6.5.1).
    Rx(RxMode, bool),
    /// Replaces both tables of the address filter (5.1.6.5.2).
    MacTable {
        /// Unicast addresses that the device delivers.
        unicast: Vec<[u8; 6]>,
        /// Multicast addresses that the device delivers.
        multicast: Vec<[u8; 6]>,
    },
    /// Sets the device's own address (5.1.6.5.2).
    MacAddress([u8; 6]),
    /// Adds a VLAN ID to the VLAN filter (5.1.6.5.3).
    VlanAdd(u16),
    /// Removes a VLAN ID from the VLAN filter (5.1.6.5.3).
    VlanDel(u16),
    /// Acknowledges a request to announce the guest (5.1.6.5.4).
    AnnounceAck,
    /// Sets the number of queue pairs in use and selects automatic receive steering (5.1.6.5.6).
    QueuePairs(u16),
    /// Selects receive-side scaling with these parameters (5.1.6.5.7).
    Rss(Rss),
    /// Sets the hash that is reported and selects automatic receive steering (5.1.6.5.6.4).
    Hash {
        /// Packet types that are hashed, as bits VIRTIO_NET_HASH_TYPE_*.
        types: u32,
        /// Key of the hash, at most 255 bytes long.
        key: Vec<u8>,
    },
    /// Sets the receive offloads in use, as feature bits (5.1.6.5.9).
    GuestOffloads(u64),
    /// Sets the coalescing limits of all transmitqs (5.1.6.5.10).
    CoalesceTransmit(Coalesce),
    /// Sets the coalescing limits of all receiveqs (5.1.6.5.10).
    CoalesceReceive(Coalesce),
    /// Sets the coalescing limits of one queue, by its index (5.1.6.5.10).
    CoalesceQueue(u16, Coalesce),
    /// Asks for the coalescing limits of one queue; the result is a [`Coalesce`] (5.1.6.5.10).
    QueryQueue(u16),
}

const CLASS_RX: u8 = 0;
const CLASS_MAC: u8 = 1;
const CLASS_VLAN: u8 = 2;
const CLASS_ANNOUNCE: u8 = 3;
const CLASS_MQ: u8 = 4;
const CLASS_GUEST_OFFLOADS: u8 = 5;
const CLASS_NOTF_COAL: u8 = 6;

/// Number of reserved bytes in VIRTIO_NET_CTRL_MQ_HASH_CONFIG between types and key. They lie where
/// RSS has other fields and should be 0, but some drivers leave values in them, so they are
/// ignored.
const HASH_RESERVED: usize = 8;

impl Command {
    /// Encodes the command as the driver sends it.
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
            Command::Rss(Rss { types, unclassified, table, max_tx, key }) => {
                bytes = vec![CLASS_MQ, 1];
                bytes.extend(types.to_le_bytes());
                // The field holds the number of entries minus 1; a table has at least one entry.
                bytes.extend((table.len().max(1) as u16).wrapping_sub(1).to_le_bytes());
                bytes.extend(unclassified.to_le_bytes());
                bytes.extend(table.iter().flat_map(|queue| queue.to_le_bytes()));
                bytes.extend(max_tx.to_le_bytes());
                put_key(&mut bytes, key);
            }
            Command::Hash { types, key } => {
                bytes = vec![CLASS_MQ, 2];
                bytes.extend(types.to_le_bytes());
                bytes.extend([0; HASH_RESERVED]);
                put_key(&mut bytes, key);
            }
            Command::GuestOffloads(bits) => {
                bytes = vec![CLASS_GUEST_OFFLOADS, 0];
                bytes.extend_from_slice(&bits.to_le_bytes());
            }
            Command::CoalesceTransmit(coalesce) => {
                bytes = vec![CLASS_NOTF_COAL, 0];
                bytes.extend(coalesce.to_bytes());
            }
            Command::CoalesceReceive(coalesce) => {
                bytes = vec![CLASS_NOTF_COAL, 1];
                bytes.extend(coalesce.to_bytes());
            }
            Command::CoalesceQueue(queue, coalesce) => {
                bytes = with_u16(CLASS_NOTF_COAL, 2, *queue);
                bytes.extend([0; 2]);
                bytes.extend(coalesce.to_bytes());
            }
            Command::QueryQueue(queue) => {
                bytes = with_u16(CLASS_NOTF_COAL, 3, *queue);
                bytes.extend([0; 2]);
            }
        }
        bytes
    }

    /// Returns the size of the command's result, which the device writes after the acknowledgement
    /// if it carries the command out.
    pub fn result_len(&self) -> usize {
        if let Command::QueryQueue(_) = self { Coalesce::LEN } else { 0 }
    }

    /// Decodes a driver's command; `None` if it is unknown, too short or too long.
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
            (CLASS_MQ, 1) => Command::Rss(rss(data)?),
            (CLASS_MQ, 2) => {
                let (types, data) = data.split_first_chunk()?;
                let key = key(data.get(HASH_RESERVED..)?)?;
                Command::Hash { types: u32::from_le_bytes(*types), key }
            }
            (CLASS_NOTF_COAL, 0) => Command::CoalesceTransmit(coalesce(data)?),
            (CLASS_NOTF_COAL, 1) => Command::CoalesceReceive(coalesce(data)?),
            // Two reserved bytes after the queue are ignored (5.1.6.5.10.6).
            (CLASS_NOTF_COAL, 2) => {
                let (queue, data) = data.split_first_chunk()?;
                Command::CoalesceQueue(u16::from_le_bytes(*queue), coalesce(data.get(2..)?)?)
            }
            (CLASS_NOTF_COAL, 3) => {
                let [low, high, _, _] = *data else { return None };
                Command::QueryQueue(u16::from_le_bytes([low, high]))
            }
            (CLASS_GUEST_OFFLOADS, 0) => Command::GuestOffloads(u64::from_le_bytes(data.try_into().ok()?)),
            _ => return None,
        })
    }
}

fn with_u16(class: u8, command: u8, value: u16) -> Vec<u8> {
    let [low, high] = value.to_le_bytes();
    vec![class, command, low, high]
}

fn put_key(bytes: &mut Vec<u8>, key: &[u8]) {
    let key = &key[..key.len().min(u8::MAX.into())];
    bytes.push(key.len() as u8);
    bytes.extend(key);
}

/// Decodes a key, which ends its command.
fn key(data: &[u8]) -> Option<Vec<u8>> {
    let (len, key) = data.split_first()?;
    (key.len() == usize::from(*len)).then(|| key.to_vec())
}

/// Decodes the data of VIRTIO_NET_CTRL_MQ_RSS_CONFIG. The driver chooses the length of the table,
/// so it is checked against the bytes that are there.
fn rss(data: &[u8]) -> Option<Rss> {
    let (head, data) = data.split_first_chunk::<8>()?;
    let [t0, t1, t2, t3, m0, m1, u0, u1] = *head;
    let entries = usize::from(u16::from_le_bytes([m0, m1])) + 1;
    let (table, data) = data.split_at_checked(2 * entries)?;
    let (max_tx, data) = data.split_first_chunk()?;
    Some(Rss {
        types: u32::from_le_bytes([t0, t1, t2, t3]),
        unclassified: u16::from_le_bytes([u0, u1]),
        table: table.as_chunks().0.iter().map(|queue| u16::from_le_bytes(*queue)).collect(),
        max_tx: u16::from_le_bytes(*max_tx),
        key: key(data)?,
    })
}

fn coalesce(data: &[u8]) -> Option<Coalesce> {
    Some(Coalesce::from_bytes(data.try_into().ok()?))
}

/// Decodes one table and returns the bytes after it. The driver chooses the count, so it is checked
/// against the bytes that are there.
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
            Command::Rss(Rss {
                types: 0x3f,
                unclassified: 3,
                table: vec![0, 1, 2, 3],
                max_tx: 4,
                key: vec![9; 40],
            }),
            Command::Rss(Rss { table: vec![0x8001], key: vec![7; 255], ..Rss::default() }),
            Command::Hash { types: 1, key: vec![5; 40] },
            Command::Hash { types: 0, key: vec![] },
            Command::CoalesceTransmit(Coalesce { max_packets: 1, max_usecs: u32::MAX }),
            Command::CoalesceReceive(Coalesce { max_packets: 15, max_usecs: 10 }),
            Command::CoalesceQueue(0xfffe, Coalesce { max_packets: 3, max_usecs: 4 }),
            Command::QueryQueue(3),
        ];
        for command in commands {
            assert_eq!(Command::decode(&command.encode()), Some(command));
        }
    }

    #[test]
    fn clause_5_1_6_5_7_layout_of_rss() {
        let rss = Rss { types: 0x12, unclassified: 3, table: vec![1, 2], max_tx: 4, key: vec![8, 9] };
        let bytes = [4, 1, 0x12, 0, 0, 0, 1, 0, 3, 0, 1, 0, 2, 0, 4, 0, 2, 8, 9];
        assert_eq!(Command::Rss(rss).encode(), bytes);
        let hash = Command::Hash { types: 0x12, key: vec![8, 9] };
        assert_eq!(hash.encode(), [4, 2, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 8, 9]);
        let mut bytes = hash.encode();
        bytes[6..14].fill(0xee);
        assert_eq!(Command::decode(&bytes), Some(hash), "reserved bytes are ignored");
    }

    #[test]
    fn clause_5_1_6_5_10_layout_of_coalescing() {
        let coalesce = Coalesce { max_packets: 15, max_usecs: 10 };
        assert_eq!(Command::CoalesceTransmit(coalesce).encode(), [6, 0, 15, 0, 0, 0, 10, 0, 0, 0]);
        let queue = Command::CoalesceQueue(3, coalesce);
        assert_eq!(queue.encode(), [6, 2, 3, 0, 0, 0, 15, 0, 0, 0, 10, 0, 0, 0]);
        // The device MUST ignore reserved.
        assert_eq!(Command::decode(&[6, 2, 3, 0, 0xff, 0xff, 15, 0, 0, 0, 10, 0, 0, 0]), Some(queue));
        assert_eq!(Command::QueryQueue(0x0102).encode(), [6, 3, 2, 1, 0, 0]);
        assert_eq!(Command::decode(&[6, 3, 2, 1, 0xff, 0xff]), Some(Command::QueryQueue(0x0102)));
    }

    #[test]
    fn rss_tables_and_keys_are_checked_against_the_bytes_there() {
        let head = |mask: [u8; 2]| [&[4, 1, 0, 0, 0, 0][..], &mask, &[0, 0]].concat();
        assert_eq!(Command::decode(&head([0xff, 0xff])), None);
        for mask in [[0xff, 0xff], [0xff, 0x0f], [40, 0]] {
            assert_eq!(Command::decode(&[&head(mask)[..], &[0; 80]].concat()), None, "{mask:?}");
        }
        let table = [0, 0, 1, 0];
        for (key, good) in
            [(&[1, 7][..], true), (&[2, 7], false), (&[0, 7], false), (&[255, 7], false), (&[], false)]
        {
            let bytes = [&head([0, 0])[..], &table, key].concat();
            assert_eq!(Command::decode(&bytes).is_some(), good, "{key:?}");
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
