//! Burst forwarding: sorted by output, one flush and one update each, drops by reason, buffers back where they belong.

mod tx_common;

use std::collections::VecDeque;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;

use ringferry_memory::{GuestMemory, ReadSlice};
use ringferry_nic::driver::{Completion, Refused, RxDriver, Segment, Start};
use ringferry_nic::forward::Forwarder;
use ringferry_nic::limits::{RxLimits, RxMode};
use ringferry_nic::rx::{PolicyKind, RxConfig, RxQueue};
use ringferry_nic::tx::{NoHash, QueueSelector, TxConfig, TxQueue};
use ringferry_packet::buffer::{Chain, Pools};
use ringferry_packet::vnet::{F_DATA_VALID, F_NEEDS_CSUM, GSO_TCPV4, Header};
use tx_common::{HEADER, Ring, World, available};

const INPUT: u16 = 256;

/// A receive ring whose device fills the buffer that was posted last, first: parts of a packet do not adjoin.
struct LastFirst {
    memory: Arc<GuestMemory>,
    posted: Vec<(Segment, u16)>,
    done: VecDeque<Completion>,
}

impl LastFirst {
    fn arrive(&mut self, header: Header, frame: &[u8]) {
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(frame);
        let mut rest = &bytes[..];
        let (mut first, mut buffers) = (None, 0u16);
        while !rest.is_empty() {
            let (segment, token) = self.posted.pop().expect("no buffer is posted");
            let mut memory = self.memory.translator();
            let n = memory.write(segment.addr, segment.len as usize).unwrap().copy_from(rest);
            rest = &rest[n..];
            self.done.push_back(Completion { token, len: n as u32 });
            first.get_or_insert(segment.addr);
            buffers += 1;
        }
        let mut memory = self.memory.translator();
        memory.write(first.unwrap() + 10, 2).unwrap().copy_from(&buffers.to_le_bytes());
    }
}

impl RxDriver for LastFirst {
    fn limits(&self) -> RxLimits {
        let mode = RxMode::Mergeable;
        RxLimits { ring: INPUT, header_len: HEADER, mode, max_frame: 65_550, max_segs: 1 }
    }

    fn room(&self) -> usize {
        usize::from(INPUT) - self.posted.len() - self.done.len()
    }

    fn post(&mut self, segments: &[Segment]) -> Result<u16, Refused> {
        let used = |token: u16| {
            self.posted.iter().any(|(_, of)| *of == token) || self.done.iter().any(|done| done.token == token)
        };
        let token = (0..).find(|token| !used(*token)).unwrap();
        self.posted.push((segments[0], token));
        Ok(token)
    }

    fn flush(&mut self) -> bool {
        false
    }

    fn completed(&mut self, most: usize, each: impl FnMut(Completion)) -> usize {
        let count = most.min(self.done.len());
        self.done.drain(..count).for_each(each);
        count
    }

    fn start(&mut self, front: ReadSlice<'_>) -> Start {
        let header = Header::from_bytes(&front.array().unwrap());
        Start { header, buffers: header.num_buffers, hash: None }
    }
}

/// A network that packets come from, and outputs.
struct Router {
    world: World,
    pools: Pools,
    input: RxQueue<LastFirst>,
    outputs: Vec<TxQueue<Ring>>,
}

fn router(outputs: usize, ring: u16) -> Router {
    let mut world = World::new();
    let memory = Arc::clone(&world.memory);
    let driver = LastFirst { memory, posted: Vec::new(), done: VecDeque::new() };
    let pools = world.pools(600);
    let fragments = world.fragments(64);
    // Nothing is copied: what is forwarded is what was received.
    let config = RxConfig { copy_break: 0, policy: PolicyKind::FixedMtu, ..RxConfig::default() };
    let mut input = RxQueue::attach(driver, fragments, config).unwrap();
    input.refill();
    let attach = |_| TxQueue::attach(Ring::new(ring, 4), &pools, TxConfig::default()).unwrap();
    let outputs = (0..outputs).map(attach).collect();
    Router { world, pools, input, outputs }
}

impl Router {
    fn arrive(&mut self, frames: impl IntoIterator<Item = (Header, Vec<u8>)>) {
        for (header, bytes) in frames {
            self.input.driver().arrive(header, &bytes);
        }
    }

    /// Completes all packets that were published to an output's device, and returns their frames.
    fn taken(&mut self, output: usize) -> Vec<Vec<u8>> {
        let sent = self.outputs[output].driver().complete(usize::MAX);
        sent.iter().map(|sent| self.world.read(&sent.segments)[HEADER..].to_vec()).collect()
    }
}

fn plain(first: u8, len: usize) -> (Header, Vec<u8>) {
    let mut bytes = vec![0xaa; len];
    bytes[0] = first;
    (Header::default(), bytes)
}

/// The output is in the first byte.
fn by_first_byte(chain: &mut Chain) -> Option<usize> {
    let mut first = [0];
    chain.copy_to(&mut first);
    Some(first[0].into())
}

#[test]
fn a_burst_is_sorted_and_each_output_rung_once() {
    let mut r = router(3, 64);
    r.arrive([0, 1, 0, 1, 1, 0, 7].into_iter().enumerate().map(|(n, to)| plain(to, 60 + n)));
    let mut forwarder = Forwarder::new(3, 32);
    let mut rung = Vec::new();
    let taken =
        forwarder.forward(&mut r.input, &mut r.outputs, &mut r.pools, by_first_byte, |n, _| rung.push(n));
    assert_eq!((taken, rung), (7, vec![0, 1]));
    let lens = |frames: Vec<Vec<u8>>| frames.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(lens(r.taken(0)), [60, 62, 65]);
    assert_eq!(lens(r.taken(1)), [61, 63, 64]);
    assert!(r.taken(2).is_empty());
    assert_eq!(r.outputs.iter_mut().map(|output| output.driver().flushes).collect::<Vec<_>>(), [1, 1, 0]);
    let stats = forwarder.stats();
    assert_eq!((stats.received, stats.forwarded, stats.groups, stats.no_output), (7, 6, 2, 1));
    assert_eq!((stats.bytes, stats.dropped()), (60 + 62 + 65 + 61 + 63 + 64, 1));
    let nothing =
        forwarder.forward(&mut r.input, &mut r.outputs, &mut r.pools, by_first_byte, |_, _| panic!());
    assert_eq!(nothing, 0);
}

#[test]
fn a_burst_ends_where_it_is_told() {
    let mut r = router(1, 64);
    r.arrive((0..40).map(|_| plain(0, 60)));
    let mut forwarder = Forwarder::new(1, 16);
    let mut bursts = Vec::new();
    for _ in 0..4 {
        bursts.push(forwarder.forward(&mut r.input, &mut r.outputs, &mut r.pools, by_first_byte, |_, _| {}));
    }
    assert_eq!(bursts, [16, 16, 8, 0]);
}

#[test]
fn forwarded_buffers_are_posted_again_by_the_queue_they_came_from() {
    let mut r = router(2, 32);
    let all = available(&r.pools);
    let mut forwarder = Forwarder::new(2, 32);
    let mut selector = QueueSelector::new(0, 2, NoHash::RoundRobin);
    for _ in 0..100 {
        r.arrive((0..16).map(|n| plain(n, 600)));
        forwarder.forward(
            &mut r.input,
            &mut r.outputs,
            &mut r.pools,
            |chain| Some(selector.select(chain.hash)),
            |_, _| {},
        );
        assert_eq!((r.taken(0).len(), r.taken(1).len()), (8, 8));
        r.input.top_up();
    }
    let stats = forwarder.stats();
    assert_eq!((stats.forwarded, stats.dropped(), selector.no_hash()), (1600, 0, 1600));
    // Only what is in the rings was ever carved, and the pools have lent nothing.
    let rx = r.input.stats();
    assert!(rx.carved < 512 && rx.recycled > 1000, "{rx:?}");
    assert_eq!(available(&r.pools), all);
}

#[test]
fn a_full_output_drops_its_own_packets_only() {
    let mut r = router(2, 8);
    r.arrive((0..40).map(|n| plain(n % 2, 60)));
    let mut forwarder = Forwarder::new(2, 64);
    let mut rung = Vec::new();
    forwarder.forward(
        &mut r.input,
        &mut r.outputs,
        &mut r.pools,
        by_first_byte,
        // The second device completes what it is rung for.
        |number, output| {
            rung.push(number);
            if number == 1 {
                output.driver().complete(usize::MAX);
            }
        },
    );
    let stats = forwarder.stats();
    assert_eq!((stats.received, stats.forwarded, stats.ring_full, stats.dropped()), (40, 28, 12, 12));
    assert_eq!(r.outputs[0].stats().map.dropped.ring_full, 12);
    assert_eq!((r.outputs[0].stats().packets(), r.outputs[1].stats().packets()), (8, 20));
    assert_eq!(r.taken(0).len(), 8);
}

#[test]
fn a_broken_output_and_empty_pools_have_their_own_counters() {
    let mut r = router(2, 64);
    let all = available(&r.pools);
    r.outputs[0].driver().refuse = Some(Refused::Broken);
    // Packets of six parts need copies, which there are no buffers for.
    r.arrive((0..6).map(|n| plain(n % 2, [60, 9000][usize::from(n % 2)])));
    for pool in [&mut r.pools.small, &mut r.pools.frame, &mut r.pools.large] {
        pool.faults().fail_alloc = NonZeroU32::new(1);
    }
    let mut forwarder = Forwarder::new(2, 64);
    forwarder.forward(&mut r.input, &mut r.outputs, &mut r.pools, by_first_byte, |_, _| {});
    let stats = forwarder.stats();
    assert_eq!((stats.received, stats.forwarded, stats.no_buffers), (6, 0, 3));
    assert_eq!((stats.unsendable, stats.dropped(), r.outputs[0].stats().broken), (3, 6, 3));
    assert_eq!(r.outputs[1].stats().map.dropped.no_buffers, 3);
    assert_eq!(available(&r.pools), all);
}

#[test]
fn what_devices_say_of_frames_is_checked_and_made_fit_for_sending() {
    let mut r = router(1, 64);
    let csum = Header { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Header::default() };
    let outside = Header { csum_start: 5000, ..csum };
    let gso_of_nothing = Header { gso_type: GSO_TCPV4, gso_size: 0, ..csum };
    let valid = Header { flags: F_DATA_VALID, ..Header::default() };
    let headers = [csum, outside, valid, gso_of_nothing];
    r.arrive(headers.map(|header| (header, plain(0, 100).1)));
    let mut forwarder = Forwarder::new(1, 64);
    let mut seen = Vec::new();
    let choose = |chain: &mut Chain| {
        seen.push(chain.header);
        Some(0)
    };
    forwarder.forward(&mut r.input, &mut r.outputs, &mut r.pools, choose, |_, _| {});
    assert_eq!(seen, [csum, Header::default()]);
    let stats = forwarder.stats();
    assert_eq!((stats.received, stats.forwarded, stats.bad_header), (4, 2, 2));
}

/// Under all faults of the pools together: every packet is forwarded as it came or counted, and every buffer is
/// somewhere.
#[test]
fn forwarding_under_faults_loses_nothing_uncounted() {
    for (split, fail, defrag) in [(1, 0, 0), (17, 3, 0), (50, 0, 128), (5, 2, 200)] {
        let mut r = router(2, 32);
        let all = available(&r.pools);
        let mut forwarder = Forwarder::new(2, 32);
        let mut out = 0;
        for round in 0..40 {
            r.arrive((0..24).map(|n| plain(n % 2, 60 + usize::from(n % 6) * 1500 + round)));
            r.pools.frame.faults().split = NonZeroUsize::new(split);
            r.pools.large.faults().fail_alloc = NonZeroU32::new(fail);
            r.pools.large.faults().fail_defrag = defrag;
            while forwarder.forward(&mut r.input, &mut r.outputs, &mut r.pools, by_first_byte, |_, _| {}) > 0
            {
            }
            for output in 0..2 {
                for bytes in r.taken(output) {
                    assert_eq!(usize::from(bytes[0]), output);
                    assert!(bytes[1..].iter().all(|byte| *byte == 0xaa));
                    out += 1;
                }
            }
            r.input.refill();
            r.pools.frame.faults().split = None;
            r.pools.large.faults().fail_alloc = None;
            r.pools.large.faults().fail_defrag = 0;
        }
        let stats = forwarder.stats();
        assert_eq!((stats.received, stats.forwarded), (40 * 24, out));
        assert_eq!(stats.received, stats.forwarded + stats.dropped());
        let sum: u64 =
            r.outputs.iter().map(|output| output.stats().packets() + output.stats().dropped()).sum();
        assert_eq!(sum, stats.received);
        assert!(r.outputs[1].stats().map.collapsed + r.outputs[1].stats().map.defragged > 0);
        for output in r.outputs {
            output.detach(&mut r.pools);
        }
        assert_eq!(available(&r.pools), all, "{split} {fail} {defrag}");
    }
}
