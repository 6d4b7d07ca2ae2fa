//! The table of vhost-user messages, and the layouts of their payloads. Everything here is constant
//! or plain data; it has no life cycle.
//!
//! A row of [`TABLE`] holds what the two ends need to know of a message before they read its
//! content: how large its payload may be, how many descriptors come with it, which feature it
//! needs, and how it is answered. Both ends and the tests read the same rows.
//!
//! Integers on the socket are in the host's byte order (vhost-user, "Message Specification").

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the protocol, which stands in bits 0 and 1 of a header's flags.
pub const VERSION: u32 = 1;
/// The message to the front end, on the channel of `SET_BACKEND_REQ_FD`, that says that the configuration space has changed
/// (`VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`). It has no payload.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;
/// Mask of the two version bits in a header's flags.
pub const VERSION_MASK: u32 = 0x3;
/// Header flag that marks a reply.
pub const FLAG_REPLY: u32 = 1 << 2;
/// Header flag with which the sender asks for success or failure (protocol feature `REPLY_ACK`).
pub const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Virtio feature bit 30, reserved by VIRTIO and taken by vhost-user to say that protocol features
/// exist.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Feature bit 26: the front end wants writes to its memory logged (live migration).
pub const F_LOG_ALL: u64 = 1 << 26;
/// Flag of a ring's addresses: writes to the used ring are logged.
pub const VRING_F_LOG: u32 = 1;
/// Feature bit 32, `VIRTIO_F_VERSION_1`, which every non-legacy device offers.
pub const F_VERSION_1: u64 = 1 << 32;
/// Feature bit 33: ring and buffer addresses go through an IOMMU.
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;
/// Feature bit 34: rings are packed, which changes the meaning of sizes, addresses and bases.
pub const F_RING_PACKED: u64 = 1 << 34;

/// Largest payload that is read, in bytes. The largest that a well-behaved peer sends is a memory
/// table of [`MAX_FDS`] regions (1032 bytes) or a crypto session (about 1 KiB); a page leaves room
/// and bounds what one connection may cost.
pub const MAX_PAYLOAD: usize = 4096;
/// Most descriptors taken with one message. The specification speaks of 8 regions in a memory
/// table; rust-vmm front ends send up to 32.
pub const MAX_FDS: usize = 32;
/// Most virtqueues that the protocol can address: a kick carries its index in 8 bits.
pub const MAX_VIRTQUEUES: u16 = 256;
/// Most bytes of configuration space that one message may carry.
pub const MAX_CONFIG: usize = 256;
/// Most memory slots that QEMU's virtio-net can use on x86 (`VHOST_USER_MAX_RAM_SLOTS`).
pub const MAX_MEM_SLOTS: usize = 509;

/// Payload bit of the kick, call and error messages: no descriptor comes with the message.
pub const NO_FD: u64 = 1 << 8;
/// Payload bits of the kick, call and error messages that hold the ring's index.
pub const RING_INDEX_MASK: u64 = 0xff;

bitflags::bitflags! {
    /// Extensions of the protocol itself (`VHOST_USER_PROTOCOL_F_*`), negotiated beside the virtio
    /// features.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ProtocolFeatures: u64 {
        /// Multiple queues: `GET_QUEUE_NUM` reports how many.
        const MQ = 1 << 0;
        /// The dirty log lies in shared memory.
        const LOG_SHMFD = 1 << 1;
        /// `SEND_RARP` announces a migrated guest.
        const RARP = 1 << 2;
        /// Any message may ask for success or failure.
        const REPLY_ACK = 1 << 3;
        /// `NET_SET_MTU` tells the back end the guest's MTU.
        const NET_MTU = 1 << 4;
        /// The back end gets a socket for requests of its own.
        const BACKEND_REQ = 1 << 5;
        /// `SET_VRING_ENDIAN` sets the byte order of legacy rings.
        const CROSS_ENDIAN = 1 << 6;
        /// A crypto device's sessions can be created and closed.
        const CRYPTO_SESSION = 1 << 7;
        /// Post-copy migration resolves page faults through userfaultfd.
        const PAGEFAULT = 1 << 8;
        /// Configuration space is read and written over the socket.
        const CONFIG = 1 << 9;
        /// The back end's requests may carry descriptors.
        const BACKEND_SEND_FD = 1 << 10;
        /// The back end can have doorbells mapped into the guest.
        const HOST_NOTIFIER = 1 << 11;
        /// In-flight descriptors are tracked in shared memory.
        const INFLIGHT_SHMFD = 1 << 12;
        /// `RESET_DEVICE` returns the device to its initial state.
        const RESET_DEVICE = 1 << 13;
        /// Kicks and calls can be sent as messages.
        const INBAND_NOTIFICATIONS = 1 << 14;
        /// Memory regions are added and removed one by one.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// The front end forwards the driver's device status.
        const STATUS = 1 << 16;
        /// Memory regions carry Xen's foreign or grant mapping data.
        const XEN_MMAP = 1 << 17;
        /// Back ends can share dma-buf objects.
        const SHARED_OBJECT = 1 << 18;
        /// The back end's state can be transferred for migration.
        const DEVICE_STATE = 1 << 19;
        /// `GET_VRING_BASE` may leave requests in flight.
        const GET_VRING_BASE_INFLIGHT = 1 << 20;
    }
}

impl fmt::Display for ProtocolFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bitflags::parser::to_writer(self, f)
    }
}

/// The negotiation that must have happened before a message is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// No negotiation: the message is allowed at any time, any number of times.
    Nothing,
    /// The back end offers protocol features at all (bit 30 in its features). Such a message may
    /// come before `SET_FEATURES`, as QEMU's do.
    ProtocolFeatures,
    /// The back end offers this protocol feature ("is present in `GET_PROTOCOL_FEATURES`").
    Offered(ProtocolFeatures),
    /// Both ends agreed on this protocol feature.
    Negotiated(ProtocolFeatures),
    /// Both ends agreed on this virtio feature.
    Virtio(u64),
}

/// The way in which a message is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// No reply, unless the sender set [`FLAG_NEED_REPLY`] and `REPLY_ACK` is negotiated: then zero
    /// for success, anything else for failure.
    Ack,
    /// Always a number: zero for success, anything else for failure.
    Status,
    /// Always a value of its own, which cannot express failure: a back end that cannot answer must
    /// close the connection, or the front end waits for ever.
    Value,
    /// Always the request's own payload, which cannot express failure either. Front ends differ in what they wait for (nothing but
    /// a reply, 8 or 16 bytes), and none looks at the content.
    Echo,
    /// Always configuration space; a reply without payload means failure.
    Config,
}

/// The fixed properties of one message, which both ends check before they parse its payload.
#[derive(Clone, Copy, Debug)]
pub struct MessageSpec {
    /// The message that the row describes.
    pub request: Request,
    /// The message's name in the specification without the common prefix `VHOST_USER_`.
    pub name: &'static str,
    /// Size of the smallest valid payload, in bytes.
    pub min: usize,
    /// Size of the largest valid payload, in bytes.
    pub max: usize,
    /// Fewest and most descriptors that may come with the message.
    pub fds: (usize, usize),
    /// The negotiation that the message depends on.
    pub needs: Needs,
    /// The way in which the message is answered.
    pub reply: Reply,
}

impl MessageSpec {
    /// Looks up a request number; `None` when the specification has no such message.
    pub fn of(number: u32) -> Option<&'static MessageSpec> {
        // Numbers run from 1 without a gap; a test holds the table to that.
        TABLE.get((number as usize).checked_sub(1)?)
    }
}

macro_rules! messages {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal,
        $min:expr, $max:expr, $fds:expr, $needs:expr, $reply:ident;)*) => {
        /// A message of the front end; the discriminant is its number on the socket.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Request {
            $($(#[$doc])* $variant = $number,)*
        }

        /// All messages of a front end, in the order of their numbers.
        pub const TABLE: &[MessageSpec] = &[
            $(MessageSpec {
                request: Request::$variant,
                name: $name,
                min: $min,
                max: $max,
                fds: $fds,
                needs: $needs,
                reply: Reply::$reply,
            },)*
        ];
    };
}

use Needs::{Negotiated, Nothing, Offered};
use ProtocolFeatures as P;

const U64: usize = size_of::<u64>();
const STATE: usize = size_of::<VringState>();
const ADDR: usize = size_of::<VringAddr>();
const TABLE_HEADER: usize = size_of::<MemoryTable>();
const REGION: usize = size_of::<MemoryRegion>();
const SINGLE: usize = size_of::<SingleRegion>();
const LOG: usize = size_of::<LogBase>();
const CONFIG: usize = size_of::<ConfigHeader>();
/// Some peers leave out the padding at the end.
const INFLIGHT: usize = size_of::<InflightDescription>();

messages! {
    //                    number, name in the specification, payload min and max, fds, needs, reply
    /// Asks for the virtio features that the back end offers.
    GetFeatures            =  1, "GET_FEATURES",             0, 0, (0, 0), Nothing, Value;
    /// Sets the virtio features that the driver acknowledged.
    SetFeatures            =  2, "SET_FEATURES",             U64, U64, (0, 0), Nothing, Ack;
    /// Marks the start of a session.
    SetOwner               =  3, "SET_OWNER",                0, 0, (0, 0), Nothing, Ack;
    /// Deprecated by the specification, and without effect here.
    ResetOwner             =  4, "RESET_OWNER",              0, 0, (0, 0), Nothing, Ack;
    /// Replaces the whole memory map; one descriptor per region.
    SetMemTable            =  5, "SET_MEM_TABLE",            TABLE_HEADER, TABLE_HEADER + MAX_FDS * REGION, (0, MAX_FDS), Nothing, Ack;
    /// Shares the memory of the dirty log.
    SetLogBase             =  6, "SET_LOG_BASE",             LOG, LOG, (1, 1), Negotiated(P::LOG_SHMFD), Echo;
    /// Sets the event that signals writes to the dirty log. No front end waits for it, and it is closed unused.
    SetLogFd               =  7, "SET_LOG_FD",               0, U64, (0, 1), Negotiated(P::LOG_SHMFD), Ack;
    /// Sets the size of a ring, in entries.
    SetVringNum            =  8, "SET_VRING_NUM",            STATE, STATE, (0, 0), Nothing, Ack;
    /// Sets the user addresses of a ring's three parts.
    SetVringAddr           =  9, "SET_VRING_ADDR",           ADDR, ADDR, (0, 0), Nothing, Ack;
    /// Sets the position at which a ring resumes; see [`crate::base`].
    SetVringBase           = 10, "SET_VRING_BASE",           STATE, STATE, (0, 0), Nothing, Ack;
    /// Stops a ring and asks for the position at which it can resume.
    GetVringBase           = 11, "GET_VRING_BASE",           STATE, STATE, (0, 0), Nothing, Value;
    /// Sets the event that signals available buffers, and starts the ring.
    SetVringKick           = 12, "SET_VRING_KICK",           U64, U64, (0, 1), Nothing, Ack;
    /// Sets the event that signals used buffers.
    SetVringCall           = 13, "SET_VRING_CALL",           U64, U64, (0, 1), Nothing, Ack;
    /// Sets the event that signals a broken ring.
    SetVringErr            = 14, "SET_VRING_ERR",            U64, U64, (0, 1), Nothing, Ack;
    /// Asks for the protocol features that the back end offers.
    GetProtocolFeatures    = 15, "GET_PROTOCOL_FEATURES",    0, 0, (0, 0), Needs::ProtocolFeatures, Value;
    /// Sets the protocol features that both ends use.
    SetProtocolFeatures    = 16, "SET_PROTOCOL_FEATURES",    U64, U64, (0, 0), Needs::ProtocolFeatures, Ack;
    /// Asks for the number of queues, which for a network device is queue pairs.
    GetQueueNum            = 17, "GET_QUEUE_NUM",            0, 0, (0, 0), Offered(P::MQ), Value;
    /// Enables or disables a ring.
    SetVringEnable         = 18, "SET_VRING_ENABLE",         STATE, STATE, (0, 0), Needs::ProtocolFeatures, Ack;
    /// Has the back end announce a migrated guest by RARP.
    SendRarp               = 19, "SEND_RARP",                U64, U64, (0, 0), Offered(P::RARP), Ack;
    /// Tells the back end the MTU that the guest is told.
    NetSetMtu              = 20, "NET_SET_MTU",              U64, U64, (0, 0), Offered(P::NET_MTU), Ack;
    /// Hands over the socket for the back end's own requests.
    SetBackendReqFd        = 21, "SET_BACKEND_REQ_FD",       0, 0, (1, 1), Offered(P::BACKEND_REQ), Ack;
    /// Updates or invalidates an IOMMU translation.
    IotlbMsg               = 22, "IOTLB_MSG",                26, 32, (0, 0), Needs::Virtio(F_ACCESS_PLATFORM), Status;
    /// Sets the byte order of a legacy ring.
    SetVringEndian         = 23, "SET_VRING_ENDIAN",         STATE, STATE, (0, 0), Negotiated(P::CROSS_ENDIAN), Ack;
    /// Reads a range of configuration space.
    GetConfig              = 24, "GET_CONFIG",               CONFIG, CONFIG + MAX_CONFIG, (0, 0), Negotiated(P::CONFIG), Config;
    /// Writes a range of configuration space.
    SetConfig              = 25, "SET_CONFIG",               CONFIG, CONFIG + MAX_CONFIG, (0, 0), Negotiated(P::CONFIG), Ack;
    /// Creates a session of a crypto device.
    CreateCryptoSession    = 26, "CREATE_CRYPTO_SESSION",    0, MAX_PAYLOAD, (0, 0), Negotiated(P::CRYPTO_SESSION), Value;
    /// Closes a session of a crypto device.
    CloseCryptoSession     = 27, "CLOSE_CRYPTO_SESSION",     U64, U64, (0, 0), Negotiated(P::CRYPTO_SESSION), Ack;
    /// Prepares for post-copy migration; answered with a userfaultfd.
    PostcopyAdvise         = 28, "POSTCOPY_ADVISE",          0, 0, (0, 0), Negotiated(P::PAGEFAULT), Value;
    /// Switches to post-copy: memory mapped from now on may fault.
    PostcopyListen         = 29, "POSTCOPY_LISTEN",          0, 0, (0, 0), Negotiated(P::PAGEFAULT), Ack;
    /// Ends post-copy migration, with all pages in place.
    PostcopyEnd            = 30, "POSTCOPY_END",             0, 0, (0, 0), Negotiated(P::PAGEFAULT), Status;
    /// Asks for a region in which the back end tracks in-flight buffers.
    GetInflightFd          = 31, "GET_INFLIGHT_FD",          INFLIGHT - 4, INFLIGHT, (0, 0), Negotiated(P::INFLIGHT_SHMFD), Value;
    /// Hands over the in-flight region of this connection or of an earlier one.
    SetInflightFd          = 32, "SET_INFLIGHT_FD",          INFLIGHT - 4, INFLIGHT, (1, 1), Negotiated(P::INFLIGHT_SHMFD), Ack;
    /// Hands over the socket of a GPU's display protocol.
    GpuSetSocket           = 33, "GPU_SET_SOCKET",           0, 0, (1, 1), Nothing, Ack;
    /// Returns the device to its initial state.
    ResetDevice            = 34, "RESET_DEVICE",             0, 0, (0, 0), Negotiated(P::RESET_DEVICE), Ack;
    /// Signals available buffers by message instead of by event.
    VringKick              = 35, "VRING_KICK",               STATE, STATE, (0, 0), Negotiated(P::INBAND_NOTIFICATIONS), Ack;
    /// Asks how many memory regions can be added.
    GetMaxMemSlots         = 36, "GET_MAX_MEM_SLOTS",        0, 0, (0, 0), Negotiated(P::CONFIGURE_MEM_SLOTS), Value;
    /// Adds one memory region to the map.
    AddMemReg              = 37, "ADD_MEM_REG",              SINGLE, SINGLE, (1, 1), Negotiated(P::CONFIGURE_MEM_SLOTS), Ack;
    /// Removes one memory region. Some front ends send a descriptor, which is closed unused.
    RemMemReg              = 38, "REM_MEM_REG",              SINGLE, SINGLE, (0, 1), Negotiated(P::CONFIGURE_MEM_SLOTS), Ack;
    /// Sets the device status (VIRTIO 1.4, 2.1).
    SetStatus              = 39, "SET_STATUS",               U64, U64, (0, 0), Negotiated(P::STATUS), Ack;
    /// Asks for the device status (VIRTIO 1.4, 2.1).
    GetStatus              = 40, "GET_STATUS",               0, 0, (0, 0), Negotiated(P::STATUS), Value;
    /// Asks for the dma-buf of a shared object.
    GetSharedObject        = 41, "GET_SHARED_OBJECT",        16, 16, (0, 0), Negotiated(P::SHARED_OBJECT), Value;
    /// Hands over a channel for the transfer of the back end's state.
    SetDeviceStateFd       = 42, "SET_DEVICE_STATE_FD",      STATE, STATE, (1, 1), Negotiated(P::DEVICE_STATE), Status;
    /// Asks whether the transfer of the back end's state succeeded.
    CheckDeviceState       = 43, "CHECK_DEVICE_STATE",       0, 0, (0, 0), Negotiated(P::DEVICE_STATE), Status;
}

impl Request {
    /// Returns the row of [`TABLE`] that describes this message.
    pub fn spec(self) -> &'static MessageSpec {
        &TABLE[self as usize - 1]
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.spec().name)
    }
}

/// The header of every message, 12 bytes in the host's byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Number of the message; see [`Request`].
    pub request: u32,
    /// Combination of [`VERSION`], [`FLAG_REPLY`] and [`FLAG_NEED_REPLY`].
    pub flags: u32,
    /// Size of the payload behind the header, in bytes.
    pub size: u32,
}

impl Header {
    /// Size of a header in bytes.
    pub const LEN: usize = size_of::<Header>();

    /// Returns true if the sender asks for success or failure.
    pub fn need_reply(&self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// Returns true if the message is a reply rather than a request.
    pub fn is_reply(&self) -> bool {
        self.flags & FLAG_REPLY != 0
    }

    /// Returns the protocol version that the sender speaks.
    pub fn version(&self) -> u32 {
        self.flags & VERSION_MASK
    }
}

/// "A vring state description": a ring's index and a number whose meaning depends on the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Index of the ring, below [`MAX_VIRTQUEUES`] when valid.
    pub index: u32,
    /// The ring's size, its base, or 0 or 1 to disable or enable it.
    pub num: u32,
}

/// "A vring address description". Addresses are the front end's own ("user addresses").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// Index of the ring, below [`MAX_VIRTQUEUES`] when valid.
    pub index: u32,
    /// Flags, of which [`VRING_F_LOG`] asks for the used ring's writes to be logged.
    pub flags: u32,
    /// User address of the descriptor table, or of a packed descriptor ring.
    pub desc: u64,
    /// User address of the used ring, or of a packed ring's device event suppression.
    pub used: u64,
    /// User address of the available ring, or of a packed ring's driver event suppression.
    pub avail: u64,
    /// Guest address at which used ring writes are logged.
    pub log: u64,
}

impl VringAddr {
    /// Returns true if the ring lies where the other one does, whatever is said of its log.
    pub fn is_same_place(&self, other: &VringAddr) -> bool {
        (self.desc, self.used, self.avail) == (other.desc, other.used, other.avail)
    }
}

/// "Log description": where the dirty log lies in the file that comes with the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogBase {
    /// Size of the log in bytes.
    pub size: u64,
    /// Offset of the log in its file.
    pub offset: u64,
}

/// "Memory region description": where a region lies in the guest, in the front end and in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryRegion {
    /// Guest physical address of the region's first byte.
    pub guest_addr: u64,
    /// Size of the region in bytes.
    pub size: u64,
    /// Address of the region in the front end's own address space.
    pub user_addr: u64,
    /// Offset of the region in the file that comes with the message.
    pub mmap_offset: u64,
}

impl From<MemoryRegion> for ringferry_memory::RegionSpec {
    fn from(region: MemoryRegion) -> Self {
        let MemoryRegion { guest_addr, size, user_addr, mmap_offset } = region;
        Self { guest_addr, size, user_addr, mmap_offset }
    }
}

impl From<ringferry_memory::RegionSpec> for MemoryRegion {
    fn from(spec: ringferry_memory::RegionSpec) -> Self {
        let ringferry_memory::RegionSpec { guest_addr, size, user_addr, mmap_offset } = spec;
        Self { guest_addr, size, user_addr, mmap_offset }
    }
}

/// The header of a memory table; `count` regions follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryTable {
    /// Number of regions that follow the header.
    pub count: u32,
    /// Padding, ignored by the back end.
    pub padding: u32,
}

/// "Single memory region description": the payload of `ADD_MEM_REG` and `REM_MEM_REG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    /// Padding, ignored by the back end.
    pub padding: u64,
    /// The region to be added or removed.
    pub region: MemoryRegion,
}

/// "Virtio device config space": the header in front of `size` bytes of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigHeader {
    /// Offset of the first byte in the configuration space.
    pub offset: u32,
    /// Number of bytes that follow or are asked for.
    pub size: u32,
    /// 0 for an access to writable fields only, 1 for one of live migration.
    pub flags: u32,
}

/// "Inflight description": an in-flight region within the file that comes with the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InflightDescription {
    /// Size of the region in bytes; 0 in a reply when there is none.
    pub mmap_size: u64,
    /// Offset of the region in its file.
    pub mmap_offset: u64,
    /// Number of virtqueues that the region is for.
    pub num_queues: u16,
    /// Number of entries of the largest of those virtqueues.
    pub queue_size: u16,
    /// Padding, ignored; some peers leave it out.
    pub padding: u32,
}

/// Reads an "inflight description", with or without its padding.
pub(crate) fn inflight_description(payload: &[u8]) -> Option<InflightDescription> {
    let mut bytes = [0; INFLIGHT];
    let known = INFLIGHT - 4;
    if !(known..=INFLIGHT).contains(&payload.len()) {
        return None;
    }
    bytes[..known].copy_from_slice(&payload[..known]);
    InflightDescription::read_from_bytes(&bytes).ok()
}

/// Lists virtio feature bits by number, since their names depend on the device type.
pub(crate) fn bit_numbers(features: u64) -> String {
    let bits = (0..u64::BITS).filter(|bit| features & (1 << bit) != 0);
    bits.map(|bit| format!("bit {bit}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_at_their_numbers() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(row.request as usize, at + 1, "{}", row.name);
            assert!(row.min <= row.max && row.max <= MAX_PAYLOAD, "{}", row.name);
            assert!(row.fds.0 <= row.fds.1 && row.fds.1 <= MAX_FDS, "{}", row.name);
            assert_eq!(MessageSpec::of(row.request as u32).unwrap().name, row.request.to_string());
        }
        assert!(MessageSpec::of(0).is_none());
        assert!(MessageSpec::of(TABLE.len() as u32 + 1).is_none());
        assert!(MessageSpec::of(u32::MAX).is_none());
    }

    #[test]
    fn payloads_have_the_sizes_of_the_specification() {
        assert_eq!(Header::LEN, 12);
        assert_eq!((STATE, ADDR, TABLE_HEADER, REGION, SINGLE, CONFIG), (8, 40, 8, 32, 40, 12));
        assert_eq!(INFLIGHT, 24);
    }

    #[test]
    fn features_are_named_for_people() {
        assert_eq!(bit_numbers(F_VERSION_1 | 1 << 63), "bit 32, bit 63");
        assert_eq!((ProtocolFeatures::MQ | ProtocolFeatures::STATUS).to_string(), "MQ | STATUS");
    }
}
