//! Measures the planner with packets that need none: frames in one buffer each, by the framework's queue, and
//! straight into the ring.

use std::time::Instant;

use ringferry_nic::driver::{Segment, TxDriver, TxPacket};
use ringferry_nic::tx::{TxConfig, TxQueue};
use ringferry_packet::buffer::{Chain, Pools, PoolsLayout};
use ringferry_packet::vnet::Header;

use super::case::{Direct, Path};
use super::clock::{Finally, Gauge, Over, joined, pin, sleep, wait};
use super::paths;
use crate::experiment::{RowError, Run, Sample};

/// Bytes of a frame: the smallest, of which there are most.
pub(super) const FRAME: usize = 64;

/// Frames between two looks at the ring.
const BURST: usize = 32;

/// Segments that the ring would take.
const SEGMENTS: u16 = 32;

/// Frames before anything is timed.
const WARM_UP: u64 = 10_000;

/// Buffers of each size: the ring full twice.
fn layout() -> PoolsLayout {
    PoolsLayout::new(512, 16 << 10)
}

/// A way into the ring.
trait Way {
    /// Makes room for a burst.
    fn make_room(&mut self, pools: &mut Pools);
    /// Sends a frame; gives it back when there is no room.
    fn send(&mut self, chain: Chain, pools: &mut Pools) -> Result<(), Chain>;
    /// Shows the device what was sent.
    fn flush(&mut self);
}

/// The framework's queue.
struct Framework<D>(TxQueue<D>);

impl<D: TxDriver> Way for Framework<D> {
    #[inline]
    fn make_room(&mut self, pools: &mut Pools) {
        self.0.make_room(BURST, pools);
    }

    #[inline]
    fn send(&mut self, chain: Chain, pools: &mut Pools) -> Result<(), Chain> {
        self.0.send(chain, pools).map_err(|unsent| unsent.chain)
    }

    #[inline]
    fn flush(&mut self) {
        self.0.flush();
    }
}

/// The code of a driver that knows its packets: one buffer each, always with head room. No limits, no planner,
/// no counters.
struct Straight<D> {
    driver: D,
    header_room: usize,
    chains: Vec<Option<Chain>>,
    in_flight: usize,
}

impl<D: TxDriver> Straight<D> {
    fn new(driver: D) -> Self {
        let limits = driver.limits();
        let chains = std::iter::repeat_with(|| None).take(limits.ring.into()).collect();
        Self { driver, header_room: limits.header_room, chains, in_flight: 0 }
    }
}

impl<D: TxDriver> Way for Straight<D> {
    #[inline]
    fn make_room(&mut self, pools: &mut Pools) {
        // As the framework: when room is short, or a quarter of the ring was used.
        if self.driver.room() > BURST && self.in_flight < self.chains.len() / 4 {
            return;
        }
        let Self { driver, chains, in_flight, header_room } = self;
        driver.completed(usize::MAX, |token| {
            if let Some(mut chain) = chains.get_mut(usize::from(token)).and_then(Option::take) {
                if let Some(first) = chain.first_mut() {
                    first.write().skip(*header_room).prefetch();
                }
                *in_flight -= 1;
                pools.recycle_chain(chain);
            }
        });
    }

    #[inline]
    fn send(&mut self, mut chain: Chain, _: &mut Pools) -> Result<(), Chain> {
        let (header, len) = (chain.header, chain.len());
        chain.push(self.header_room);
        let Some(first) = chain.first_mut() else { return Err(chain) };
        let segment = Segment { addr: first.addr(), len: first.len() as u32 };
        let room = first.write().first(self.header_room);
        let packet = TxPacket { header: &header, len, room, segments: &[segment] };
        let Ok(token) = self.driver.encap(&packet) else {
            chain.pull(self.header_room);
            return Err(chain);
        };
        self.in_flight += 1;
        self.chains[usize::from(token)] = Some(chain);
        Ok(())
    }

    #[inline]
    fn flush(&mut self) {
        self.driver.flush();
    }
}

/// Sends up to a burst of frames; returns how many.
#[inline]
fn burst(way: &mut impl Way, pools: &mut Pools) -> u64 {
    way.make_room(pools);
    let mut sent = 0;
    for _ in 0..BURST {
        let Some(mut buf) = pools.alloc(FRAME) else { break };
        // 42 bytes of headers are written, as by others that send for measurements; the rest is what it was.
        buf.room().copy_from(&HEADERS);
        buf.grow(FRAME);
        let mut chain = Chain::from(buf);
        chain.header = Header::default();
        if let Err(chain) = way.send(chain, pools) {
            pools.recycle_chain(chain);
            break;
        }
        sent += 1;
    }
    way.flush();
    sent
}

/// Ethernet, and bytes that nobody looks at.
const HEADERS: [u8; 42] = {
    let mut headers = [0; 42];
    headers[0] = 2;
    headers[6] = 2;
    headers[12] = 8;
    headers
};

/// Measures one run, in millions of frames per second.
pub(super) fn measure(case: &Direct, run: &Run<'_>) -> Result<Sample, RowError> {
    match (case.path, case.planner) {
        (Path::Null, planner) => {
            let (driver, pools) = paths::null(SEGMENTS, layout())?;
            match planner {
                true => null(Framework(attach(driver, &pools)?), pools, run),
                false => null(Straight::new(driver), pools, run),
            }
        }
        (Path::Virtio, planner) => {
            let (driver, pools, end) = paths::virtio(SEGMENTS, layout())?;
            match planner {
                true => virtio(Framework(attach(driver, &pools)?), pools, end, run),
                false => virtio(Straight::new(driver), pools, end, run),
            }
        }
    }
}

fn attach<D: TxDriver>(driver: D, pools: &Pools) -> Result<TxQueue<D>, RowError> {
    TxQueue::attach(driver, pools, TxConfig::default()).map_err(RowError::failed)
}

fn null(mut way: impl Way + Send, mut pools: Pools, run: &Run<'_>) -> Result<Sample, RowError> {
    let body = move || -> Result<Sample, RowError> {
        pin(run.cpu(0))?;
        let mut sent = 0;
        while sent < WARM_UP {
            sent += burst(&mut way, &mut pools);
        }
        let (from, begin) = (sent, Instant::now());
        while begin.elapsed() < run.seconds {
            // Many bursts to a look at the clock.
            for _ in 0..64 {
                sent += burst(&mut way, &mut pools);
            }
            if run.stopped() {
                return Err(RowError::Stopped);
            }
        }
        Ok(Sample::new((sent - from) as f64 / begin.elapsed().as_secs_f64() / 1e6))
    };
    joined(std::thread::scope(|scope| scope.spawn(body).join()))
}

fn virtio(
    mut way: impl Way + Send,
    mut pools: Pools,
    end: paths::End,
    run: &Run<'_>,
) -> Result<Sample, RowError> {
    let (taken, over) = (&Gauge::default(), &Over::default());
    std::thread::scope(|scope| {
        let _finally = Finally([over]);
        let sender = scope.spawn(move || -> Result<(), RowError> {
            pin(run.cpu(0))?;
            while !over.told() {
                burst(&mut way, &mut pools);
            }
            Ok(())
        });
        let taker = scope.spawn(move || -> Result<(), RowError> {
            pin(run.cpu(1))?;
            let mut taker = end.taker();
            while !over.told() {
                let count =
                    taker.round(|number, frame| match frame.len() == FRAME && frame[..42] == HEADERS {
                        true => Ok(()),
                        false => Err(RowError::failed(format!("frame {number} was damaged"))),
                    })?;
                taken.set(count);
            }
            Ok(())
        });
        let alive = || !sender.is_finished() && !taker.is_finished();
        let measured = wait(run, "frames to arrive", alive, || Ok(taken.get() >= WARM_UP)).and_then(|()| {
            let from = taken.get();
            let time = sleep(run, run.seconds, alive)?;
            Ok((taken.get() - from) as f64 / time.as_secs_f64())
        });
        over.tell();
        joined(sender.join())?;
        joined(taker.join())?;
        Ok(Sample::new(measured? / 1e6))
    })
}
