//! Random messages, most of them nearly right: nothing panics, every ring that runs is one that
//! was described, and no descriptor stays open.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use proptest::prelude::*;
use ringferry_memory::SharedMem;
use ringferry_sys::eventfd::{EventFd, EventId};
use ringferry_vhost_user::message::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, F_RING_PACKED, F_VERSION_1, FLAG_NEED_REPLY, InflightDescription,
    LogBase, MemoryRegion, NO_FD, Request, SingleRegion, TABLE, VERSION, VringAddr, VringState,
};
use zerocopy::IntoBytes;

use crate::rig::{Rig, USER, copies_of, mem_table, offer, ring_addr};

/// A message to be sent; descriptors are chosen from a small set by number.
#[derive(Debug, Clone)]
struct Message {
    request: u32,
    flags: u32,
    payload: Vec<u8>,
    fds: Vec<usize>,
}

const EVENT: usize = 0;
const MEMORY: usize = 1;
const PIPE: usize = 2;

fn addr() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => (0u64..16).prop_map(|page| USER + page * 0x1000),
        1 => (0u64..0x1_0000).prop_map(|offset| USER + offset),
        1 => any::<u64>(),
    ]
}

fn region() -> impl Strategy<Value = MemoryRegion> {
    let place = prop_oneof![4 => Just((0, 0x1_0000)), 2 => (0u64..4).prop_map(|at| (at * 0x4000, 0x4000)), 1 => any::<(u64, u64)>()];
    (place, prop_oneof![8 => Just(0u64), 1 => any::<u64>()]).prop_map(|((at, size), mmap_offset)| {
        MemoryRegion { guest_addr: at, size, user_addr: USER.wrapping_add(at), mmap_offset }
    })
}

fn index() -> impl Strategy<Value = u32> {
    prop_oneof![16 => 0u32..4, 1 => any::<u32>()]
}

fn num() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => (0u32..16).prop_map(|shift| 1 << shift),
        4 => 0u32..2,
        4 => 1u32..1000,
        4 => (0u32..256).prop_map(|at| 0x8000_8000 | at << 16 | at),
        1 => any::<u32>(),
    ]
}

/// Counts the copies of a file that another process would be handed.
fn handed_copies(rig: &Rig, file: BorrowedFd<'_>) -> usize {
    let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
    let (wanted, mut copies) = (inode(file), 0);
    let mut put = |fd: BorrowedFd<'_>, _: Option<EventId>| {
        copies += usize::from(inode(fd) == wanted);
        Ok(0)
    };
    rig.session.state(&mut put).unwrap();
    copies
}

const EVENTS: &[Request] = &[Request::SetVringKick, Request::SetVringCall, Request::SetVringErr];
const STATES: &[Request] =
    &[Request::SetVringNum, Request::SetVringBase, Request::GetVringBase, Request::SetVringEnable];
const FEATURES: &[u64] = &[
    F_VERSION_1 | F_PROTOCOL_FEATURES | F_LOG_ALL,
    F_VERSION_1 | F_PROTOCOL_FEATURES | F_LOG_ALL | F_RING_PACKED,
    F_VERSION_1 | F_PROTOCOL_FEATURES,
    F_VERSION_1 | F_PROTOCOL_FEATURES | F_RING_PACKED,
    F_VERSION_1 | F_RING_PACKED,
    F_VERSION_1,
    0,
];

/// Request, payload, and descriptors chosen from a small set by number.
type Body = (u32, Vec<u8>, Vec<usize>);

fn body(request: Request, payload: &[u8], fds: Vec<usize>) -> Body {
    (request as u32, payload.to_vec(), fds)
}

fn vring_state() -> impl Strategy<Value = Body> {
    (prop::sample::select(STATES), index(), num())
        .prop_map(|(request, index, num)| body(request, VringState { index, num }.as_bytes(), vec![]))
}

fn vring_addr() -> impl Strategy<Value = Body> {
    (index(), addr(), addr(), addr(), any::<bool>(), 0u32..2).prop_map(
        |(index, desc, avail, used, good, flags)| {
            let random = VringAddr { index, flags, desc, used, avail, log: 0 };
            let addr = if good { VringAddr { index, flags, ..ring_addr(index % 4) } } else { random };
            body(Request::SetVringAddr, addr.as_bytes(), vec![])
        },
    )
}

fn vring_event() -> impl Strategy<Value = Body> {
    (prop::sample::select(EVENTS), index(), any::<bool>(), 0usize..20).prop_map(
        |(request, index, poll, kind)| {
            let fds = match kind {
                0 => vec![PIPE],
                1 => vec![EVENT, EVENT],
                _ if poll => vec![],
                _ => vec![EVENT],
            };
            body(request, (u64::from(index) | if poll { NO_FD } else { 0 }).as_bytes(), fds)
        },
    )
}

fn memory() -> impl Strategy<Value = Body> {
    let table = prop::collection::vec(region(), 0..3).prop_map(|regions| {
        let fds = vec![MEMORY; regions.len()];
        body(Request::SetMemTable, &mem_table(regions.into_iter()), fds)
    });
    let slot = (region(), any::<bool>()).prop_map(|(region, add)| {
        let (request, fds) =
            if add { (Request::AddMemReg, vec![MEMORY]) } else { (Request::RemMemReg, vec![]) };
        body(request, SingleRegion { padding: 0, region }.as_bytes(), fds)
    });
    prop_oneof![table, slot]
}

fn device() -> impl Strategy<Value = Body> {
    prop_oneof![
        2 => prop::sample::select(FEATURES).prop_map(|bits| body(Request::SetFeatures, bits.as_bytes(), vec![])),
        1 => (0u64..16).prop_map(|status| body(Request::SetStatus, status.as_bytes(), vec![])),
        1 => Just(body(Request::ResetDevice, &[], vec![])),
    ]
}

fn inflight() -> impl Strategy<Value = Body> {
    let number = || prop_oneof![16 => 0u16..5, 1 => any::<u16>()];
    let size = || prop_oneof![8 => Just(0x1_0000u64), 4 => 0u64..0x1_0000, 1 => any::<u64>()];
    let offset = prop_oneof![8 => Just(0u64), 1 => 0u64..0x1_0000, 1 => any::<u64>()];
    let queue = prop_oneof![8 => 1u16..512, 1 => any::<u16>()];
    (number(), queue, size(), offset, any::<bool>()).prop_map(
        |(num_queues, queue_size, mmap_size, mmap_offset, get)| {
            let description =
                InflightDescription { mmap_size, mmap_offset, num_queues, queue_size, padding: 0 };
            let (request, fds) =
                if get { (Request::GetInflightFd, vec![]) } else { (Request::SetInflightFd, vec![MEMORY]) };
            body(request, description.as_bytes(), fds)
        },
    )
}

fn log_base() -> impl Strategy<Value = Body> {
    let size = prop_oneof![8 => Just(8u64), 2 => 0u64..0x2_0000, 1 => any::<u64>()];
    let offset = prop_oneof![8 => Just(0u64), 1 => any::<u64>()];
    let file = prop_oneof![8 => Just(MEMORY), 1 => Just(PIPE)];
    (size, offset, file).prop_map(|(size, offset, file)| {
        body(Request::SetLogBase, LogBase { size, offset }.as_bytes(), vec![file])
    })
}

/// Any row, with a payload and descriptors around its bounds.
fn any_row() -> impl Strategy<Value = Body> {
    let fds = prop::collection::vec(0usize..3, 0..4);
    (prop::sample::select(TABLE), any::<[u8; 64]>(), 0usize..3, fds).prop_map(|(row, bytes, more, fds)| {
        let len = (row.min + more).saturating_sub(1).min(64);
        body(row.request, &bytes[..len], fds)
    })
}

fn anything() -> impl Strategy<Value = Body> {
    let payload = prop::collection::vec(any::<u8>(), 0..300);
    (any::<u32>(), payload, prop::collection::vec(0usize..3, 0..33))
}

fn message() -> impl Strategy<Value = Message> {
    let flags = prop_oneof![32 => Just(VERSION), 32 => Just(VERSION | FLAG_NEED_REPLY), 1 => any::<u32>()];
    let body = prop_oneof![
        6 => vring_state(),
        4 => vring_addr(),
        6 => vring_event(),
        6 => memory(),
        4 => device(),
        3 => inflight(),
        3 => log_base(),
        3 => any_row(),
        1 => anything(),
    ];
    (body, flags).prop_map(|((request, payload, fds), flags)| Message { request, flags, payload, fds })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_messages_never_panic_and_leak_no_descriptor(
        packed: bool,
        messages in prop::collection::vec(message(), 1..60),
    ) {
        let event = EventFd::new().unwrap();
        let mem = SharedMem::new("guest", 0x1_0000).unwrap();
        let (_reader, pipe) = std::io::pipe().unwrap();
        let all: [BorrowedFd<'_>; 3] = [event.as_fd(), mem.fd(), pipe.as_fd()];
        let fresh = || Rig::logging(packed);
        let mut rig = fresh();
        for message in &messages {
            let fds: Vec<_> = message.fds.iter().map(|kind| all[*kind]).collect();
            rig.send(message.request, message.flags, &message.payload, &fds);
            // The rig's device asserts what it may rely on.
            if rig.serve().is_err() {
                prop_assert!(rig.dev.rings.is_empty());
                rig = fresh();
            }
            while rig.reply_with_fds().is_some() {}
            let running: Vec<_> = rig.session.rings().map(|ring| ring.started).collect();
            for (index, started) in running.iter().enumerate() {
                prop_assert_eq!(rig.dev.rings.contains_key(&(index as u16)), *started);
            }
            for ring in rig.dev.rings.values() {
                prop_assert_eq!(ring.log.as_ref().map(Arc::as_ptr), rig.session.dirty_log().map(Arc::as_ptr));
                prop_assert!(rig.session.unlogged().is_none());
            }
            prop_assert_eq!(copies_of(mem.fd()), 1 + handed_copies(&rig, mem.fd()), "ours, and what is kept for a hand-over");
            prop_assert_eq!(copies_of(&pipe), 2, "both ends");
            // Ours; kick, call and error of each ring, held twice while it runs; the back end's socket.
            prop_assert!(copies_of(&event) <= 2 + 6 * usize::from(offer().max_queues));
        }
        rig.session.disconnect(&mut rig.dev);
        prop_assert!(rig.dev.rings.is_empty());
        prop_assert_eq!(copies_of(&event), 1);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 1..2000), step in 1usize..500) {
        let mut rig = Rig::negotiated();
        for part in bytes.chunks(step) {
            rig.peer.send(part, &[]).unwrap();
            if rig.serve().is_err() {
                break;
            }
        }
    }
}
