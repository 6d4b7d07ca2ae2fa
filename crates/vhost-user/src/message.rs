//! The one table of vhost-user messages, and the shapes of their payloads.
//!
//! A row of [`TABLE`] says everything the two ends need to know of a message before they look at
//! its content: how large its payload may be, how many descriptors come with it, which feature
//! opens it, and what answers it. Both ends and the tests read the same rows.
//!
//! Numbers on the socket are in the byte order of the machine (vhost-user, "Message
//! Specification").

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the protocol, bits 0 and 1 of a header's flags.
pub const VERSION: u32 = 1;
/// The two version bits.
pub const VERSION_MASK: u32 = 0x3;
/// Header flag: this is a reply.
pub const FLAG_REPLY: u32 = 1 << 2;
/// Header flag: the sender wants success or failure reported (protocol feature `REPLY_ACK`).
pub const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Virtio feature bit 30, reserved by VIRTIO and taken by vhost-user to say that protocol features
/// exist.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Feature bit 26: the front end wants writes to its memory logged (live migration).
pub const F_LOG_ALL: u64 = 1 << 26;
/// Feature bit 32 of every modern device.
pub const F_VERSION_1: u64 = 1 << 32;
/// Feature bit 33: ring and buffer addresses go through an IOMMU.
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;
/// Feature bit 34: rings are packed. Sizes, addresses and bases mean something else then.
pub const F_RING_PACKED: u64 = 1 << 34;

/// Bytes of the largest payload we read. The largest that a sane peer sends is a memory table of
/// [`MAX_FDS`] regions (1032 bytes) or a crypto session (about 1 KiB); a page leaves room and bounds
/// what one connection may cost.
pub const MAX_PAYLOAD: usize = 4096;
/// Descriptors taken with one message. The specification speaks of 8 regions in a memory table;
/// rust-vmm front ends send up to 32.
pub const MAX_FDS: usize = 32;
/// Virtqueues that the protocol can address: a kick carries its index in 8 bits.
pub const MAX_VIRTQUEUES: u16 = 256;
/// Bytes of configuration space that one message may carry.
pub const MAX_CONFIG: usize = 256;
/// Memory slots that QEMU's virtio-net can use at most on x86 (`VHOST_USER_MAX_RAM_SLOTS`).
pub const MAX_MEM_SLOTS: usize = 509;

/// Payload bit of the kick, call and error messages: no descriptor comes with the message.
pub const NO_FD: u64 = 1 << 8;
/// Payload bits of the kick, call and error messages that hold the ring's index.
pub const RING_INDEX_MASK: u64 = 0xff;

bitflags::bitflags! {
    /// Extensions of the protocol itself, negotiated beside the virtio features.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct ProtocolFeatures: u64 {
        /// `GET_QUEUE_NUM`: several queues.
        const MQ = 1 << 0;
        /// Dirty log in shared memory.
        const LOG_SHMFD = 1 << 1;
        /// `SEND_RARP`.
        const RARP = 1 << 2;
        /// Any message may ask for success or failure.
        const REPLY_ACK = 1 << 3;
        /// `NET_SET_MTU`.
        const NET_MTU = 1 << 4;
        /// A socket for requests of the back end.
        const BACKEND_REQ = 1 << 5;
        /// `SET_VRING_ENDIAN`.
        const CROSS_ENDIAN = 1 << 6;
        /// Crypto sessions.
        const CRYPTO_SESSION = 1 << 7;
        /// Post-copy migration.
        const PAGEFAULT = 1 << 8;
        /// Configuration space.
        const CONFIG = 1 << 9;
        /// The back end's requests may carry descriptors.
        const BACKEND_SEND_FD = 1 << 10;
        /// Doorbells mapped into the guest.
        const HOST_NOTIFIER = 1 << 11;
        /// In-flight tracking in shared memory.
        const INFLIGHT_SHMFD = 1 << 12;
        /// `RESET_DEVICE`.
        const RESET_DEVICE = 1 << 13;
        /// Kicks and calls as messages.
        const INBAND_NOTIFICATIONS = 1 << 14;
        /// Memory regions one by one.
        const CONFIGURE_MEM_SLOTS = 1 << 15;
        /// Device status.
        const STATUS = 1 << 16;
        /// Xen memory.
        const XEN_MMAP = 1 << 17;
        /// Shared dma-buf objects.
        const SHARED_OBJECT = 1 << 18;
        /// Transfer of the back end's state.
        const DEVICE_STATE = 1 << 19;
        /// `GET_VRING_BASE` that leaves requests in flight.
        const GET_VRING_BASE_INFLIGHT = 1 << 20;
    }
}

impl fmt::Display for ProtocolFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bitflags::parser::to_writer(self, f)
    }
}

/// What must have happened before a message is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Nothing: allowed at any time, any number of times.
    Nothing,
    /// The back end offers protocol features at all (bit 30 in its features). Such a message may
    /// come before `SET_FEATURES`, and QEMU's do.
    ProtocolFeatures,
    /// The back end offers this protocol feature ("is present in `GET_PROTOCOL_FEATURES`").
    Offered(ProtocolFeatures),
    /// Both ends agreed on this protocol feature.
    Negotiated(ProtocolFeatures),
    /// Both ends agreed on this virtio feature.
    Virtio(u64),
}

/// What a message is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Nothing, unless the sender set [`FLAG_NEED_REPLY`] and `REPLY_ACK` is negotiated: then zero
    /// for success, anything else for failure.
    Ack,
    /// Always a number that says success (zero) or failure.
    Status,
    /// Always a value of its own, which has no way to say "failed": who cannot answer must close
    /// the connection, or the sender waits for ever.
    Value,
    /// Always configuration space; without payload it means failure.
    Config,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Which message.
    pub request: Request,
    /// Its name in the specification without the common prefix `VHOST_USER_`.
    pub name: &'static str,
    /// Smallest payload in bytes.
    pub min: usize,
    /// Largest payload in bytes.
    pub max: usize,
    /// Fewest and most descriptors that come with it.
    pub fds: (usize, usize),
    /// What opens it.
    pub needs: Needs,
    /// What answers it.
    pub reply: Reply,
}

impl Row {
    /// The row of a request number, if the number is one of the specification's.
    pub fn of(number: u32) -> Option<&'static Row> {
        // Numbers run from 1 without a gap; a test holds the table to that.
        TABLE.get((number as usize).checked_sub(1)?)
    }
}

macro_rules! messages {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal,
        $min:expr, $max:expr, $fds:expr, $needs:expr, $reply:ident;)*) => {
        /// The messages of a front end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Request {
            $($(#[$doc])* $variant = $number,)*
        }

        /// All messages of a front end, in the order of their numbers.
        pub const TABLE: &[Row] = &[
            $(Row {
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
const CONFIG: usize = size_of::<ConfigHeader>();
/// Some peers leave out the padding at the end.
const INFLIGHT: usize = size_of::<InflightDescription>();

messages! {
    //                    number, name in the specification, payload min and max, fds, needs, reply
    /// The virtio features on offer.
    GetFeatures            =  1, "GET_FEATURES",             0, 0, (0, 0), Nothing, Value;
    /// The virtio features agreed on.
    SetFeatures            =  2, "SET_FEATURES",             U64, U64, (0, 0), Nothing, Ack;
    /// Start of a session.
    SetOwner               =  3, "SET_OWNER",                0, 0, (0, 0), Nothing, Ack;
    /// Deprecated; has no effect.
    ResetOwner             =  4, "RESET_OWNER",              0, 0, (0, 0), Nothing, Ack;
    /// The whole memory map.
    SetMemTable            =  5, "SET_MEM_TABLE",            TABLE_HEADER, TABLE_HEADER + MAX_FDS * REGION, (0, MAX_FDS), Nothing, Ack;
    /// Dirty log memory.
    SetLogBase             =  6, "SET_LOG_BASE",             U64, 2 * U64, (0, 1), Negotiated(P::LOG_SHMFD), Status;
    /// Event of the dirty log.
    SetLogFd               =  7, "SET_LOG_FD",               0, U64, (0, 1), Negotiated(P::LOG_SHMFD), Ack;
    /// Entries of a ring.
    SetVringNum            =  8, "SET_VRING_NUM",            STATE, STATE, (0, 0), Nothing, Ack;
    /// Addresses of a ring.
    SetVringAddr           =  9, "SET_VRING_ADDR",           ADDR, ADDR, (0, 0), Nothing, Ack;
    /// Where a ring resumes.
    SetVringBase           = 10, "SET_VRING_BASE",           STATE, STATE, (0, 0), Nothing, Ack;
    /// Stops a ring and tells where.
    GetVringBase           = 11, "GET_VRING_BASE",           STATE, STATE, (0, 0), Nothing, Value;
    /// Event for "buffers available"; starts a ring.
    SetVringKick           = 12, "SET_VRING_KICK",           U64, U64, (0, 1), Nothing, Ack;
    /// Event for "buffers used".
    SetVringCall           = 13, "SET_VRING_CALL",           U64, U64, (0, 1), Nothing, Ack;
    /// Event for "ring broken".
    SetVringErr            = 14, "SET_VRING_ERR",            U64, U64, (0, 1), Nothing, Ack;
    /// The protocol features on offer.
    GetProtocolFeatures    = 15, "GET_PROTOCOL_FEATURES",    0, 0, (0, 0), Needs::ProtocolFeatures, Value;
    /// The protocol features agreed on.
    SetProtocolFeatures    = 16, "SET_PROTOCOL_FEATURES",    U64, U64, (0, 0), Needs::ProtocolFeatures, Ack;
    /// How many queues (queue pairs of a network device).
    GetQueueNum            = 17, "GET_QUEUE_NUM",            0, 0, (0, 0), Offered(P::MQ), Value;
    /// Enables or disables a ring.
    SetVringEnable         = 18, "SET_VRING_ENABLE",         STATE, STATE, (0, 0), Needs::ProtocolFeatures, Ack;
    /// Announce a migrated guest.
    SendRarp               = 19, "SEND_RARP",                U64, U64, (0, 0), Offered(P::RARP), Ack;
    /// The MTU the guest is told.
    NetSetMtu              = 20, "NET_SET_MTU",              U64, U64, (0, 0), Offered(P::NET_MTU), Ack;
    /// Socket for the back end's own requests.
    SetBackendReqFd        = 21, "SET_BACKEND_REQ_FD",       0, 0, (1, 1), Offered(P::BACKEND_REQ), Ack;
    /// IOMMU translation.
    IotlbMsg               = 22, "IOTLB_MSG",                26, 32, (0, 0), Needs::Virtio(F_ACCESS_PLATFORM), Status;
    /// Byte order of a legacy ring.
    SetVringEndian         = 23, "SET_VRING_ENDIAN",         STATE, STATE, (0, 0), Negotiated(P::CROSS_ENDIAN), Ack;
    /// Reads configuration space.
    GetConfig              = 24, "GET_CONFIG",               CONFIG, CONFIG + MAX_CONFIG, (0, 0), Negotiated(P::CONFIG), Config;
    /// Writes configuration space.
    SetConfig              = 25, "SET_CONFIG",               CONFIG, CONFIG + MAX_CONFIG, (0, 0), Negotiated(P::CONFIG), Ack;
    /// Crypto session.
    CreateCryptoSession    = 26, "CREATE_CRYPTO_SESSION",    0, MAX_PAYLOAD, (0, 0), Negotiated(P::CRYPTO_SESSION), Value;
    /// Crypto session.
    CloseCryptoSession     = 27, "CLOSE_CRYPTO_SESSION",     U64, U64, (0, 0), Negotiated(P::CRYPTO_SESSION), Ack;
    /// Post-copy migration.
    PostcopyAdvise         = 28, "POSTCOPY_ADVISE",          0, 0, (0, 0), Negotiated(P::PAGEFAULT), Value;
    /// Post-copy migration.
    PostcopyListen         = 29, "POSTCOPY_LISTEN",          0, 0, (0, 0), Negotiated(P::PAGEFAULT), Ack;
    /// Post-copy migration.
    PostcopyEnd            = 30, "POSTCOPY_END",             0, 0, (0, 0), Negotiated(P::PAGEFAULT), Status;
    /// A region to track in-flight buffers in.
    GetInflightFd          = 31, "GET_INFLIGHT_FD",          INFLIGHT - 4, INFLIGHT, (0, 0), Negotiated(P::INFLIGHT_SHMFD), Value;
    /// The region of this connection, or of one before it.
    SetInflightFd          = 32, "SET_INFLIGHT_FD",          INFLIGHT - 4, INFLIGHT, (1, 1), Negotiated(P::INFLIGHT_SHMFD), Ack;
    /// Socket of a GPU.
    GpuSetSocket           = 33, "GPU_SET_SOCKET",           0, 0, (1, 1), Nothing, Ack;
    /// Back to the initial state.
    ResetDevice            = 34, "RESET_DEVICE",             0, 0, (0, 0), Negotiated(P::RESET_DEVICE), Ack;
    /// A kick as a message.
    VringKick              = 35, "VRING_KICK",               STATE, STATE, (0, 0), Negotiated(P::INBAND_NOTIFICATIONS), Ack;
    /// How many memory regions.
    GetMaxMemSlots         = 36, "GET_MAX_MEM_SLOTS",        0, 0, (0, 0), Negotiated(P::CONFIGURE_MEM_SLOTS), Value;
    /// One region more.
    AddMemReg              = 37, "ADD_MEM_REG",              SINGLE, SINGLE, (1, 1), Negotiated(P::CONFIGURE_MEM_SLOTS), Ack;
    /// One region less. Some front ends send a descriptor, which is closed unused.
    RemMemReg              = 38, "REM_MEM_REG",              SINGLE, SINGLE, (0, 1), Negotiated(P::CONFIGURE_MEM_SLOTS), Ack;
    /// Device status.
    SetStatus              = 39, "SET_STATUS",               U64, U64, (0, 0), Negotiated(P::STATUS), Ack;
    /// Device status.
    GetStatus              = 40, "GET_STATUS",               0, 0, (0, 0), Negotiated(P::STATUS), Value;
    /// dma-buf of an object.
    GetSharedObject        = 41, "GET_SHARED_OBJECT",        16, 16, (0, 0), Negotiated(P::SHARED_OBJECT), Value;
    /// Channel for the back end's state.
    SetDeviceStateFd       = 42, "SET_DEVICE_STATE_FD",      STATE, STATE, (1, 1), Negotiated(P::DEVICE_STATE), Status;
    /// Result of a state transfer.
    CheckDeviceState       = 43, "CHECK_DEVICE_STATE",       0, 0, (0, 0), Negotiated(P::DEVICE_STATE), Status;
}

impl Request {
    /// The row of this message.
    pub fn row(self) -> &'static Row {
        &TABLE[self as usize - 1]
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)
    }
}

/// What every message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Number of the message; see [`Request`].
    pub request: u32,
    /// [`VERSION`], [`FLAG_REPLY`], [`FLAG_NEED_REPLY`].
    pub flags: u32,
    /// Bytes of payload behind the header.
    pub size: u32,
}

impl Header {
    /// Bytes of a header.
    pub const LEN: usize = size_of::<Header>();

    /// Whether the sender wants to be told success or failure.
    pub fn need_reply(&self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// Whether this is a reply.
    pub fn is_reply(&self) -> bool {
        self.flags & FLAG_REPLY != 0
    }

    /// The version the sender speaks.
    pub fn version(&self) -> u32 {
        self.flags & VERSION_MASK
    }
}

/// "A vring state description": a ring and a number that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// The ring.
    pub index: u32,
    /// Size, base or switch, depending on the message.
    pub num: u32,
}

/// "A vring address description". Addresses are the front end's own ("user addresses").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// The ring.
    pub index: u32,
    /// Bit 0: log writes to the used ring.
    pub flags: u32,
    /// User address of the descriptor table.
    pub desc: u64,
    /// User address of the used ring.
    pub used: u64,
    /// User address of the available ring.
    pub avail: u64,
    /// Guest address at which used ring writes are logged.
    pub log: u64,
}

/// "Memory region description".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryRegion {
    /// Guest physical address.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// Address in the front end.
    pub user_addr: u64,
    /// Offset in the file.
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

/// What a memory table begins with; `count` regions follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryTable {
    /// Regions that follow.
    pub count: u32,
    /// Ignored.
    pub padding: u32,
}

/// "Single memory region description".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    /// Ignored.
    pub padding: u64,
    /// The region.
    pub region: MemoryRegion,
}

/// "Virtio device config space": `size` bytes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigHeader {
    /// First byte in the configuration space.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
    /// 0: writable fields only; 1: live migration.
    pub flags: u32,
}

/// "Inflight description": a region in the file that comes with the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InflightDescription {
    /// Bytes of the region; 0 in an answer: there is none.
    pub mmap_size: u64,
    /// Where in the file it begins.
    pub mmap_offset: u64,
    /// Virtqueues it is for.
    pub num_queues: u16,
    /// Entries of the largest of them.
    pub queue_size: u16,
    /// Ignored.
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

/// Virtio feature bits, by number: what they mean is the device type's business.
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
            assert_eq!(Row::of(row.request as u32).unwrap().name, row.request.to_string());
        }
        assert!(Row::of(0).is_none());
        assert!(Row::of(TABLE.len() as u32 + 1).is_none());
        assert!(Row::of(u32::MAX).is_none());
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
