//! The two sides of the exchange that is measured: one adds and reaps buffers, the other takes and
//! returns them.
//!
//! Three pairs of sides: our ring with shadows, the same without, and the *null ring*, two indexes that
//! are handed to and fro with nothing behind them. The cost of the null ring is that of the harness and of
//! the travelling cache lines.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, SharedMem, Words};
use ringferry_ring::{
    Buffer, Chain, Chains, Device, Driver, IndirectTables, Parts, RingFeatures, part_bytes,
};

use super::unshadowed::Unshadowed;
use super::variant::{Kind, Variant};
use crate::experiment::RowError;

/// Where everything lies in guest memory. Any multiple of a page will do.
const BASE: u64 = 0x10_0000;
/// Rings' parts and the null ring's indexes start on lines of their own, two of them because processors
/// prefetch lines in pairs.
const LINE_PAIR: usize = 128;
/// Bytes of a buffer; none of them is ever touched.
const BUFFER: u32 = 64;
/// Buffers of an indirect chain: a single one never goes into a table.
const INDIRECT: usize = 2;

/// The side that adds and reaps. The peer sees what was added after `publish`.
pub trait Front: Send {
    /// Adds up to `max` buffers and returns how many; none unless there is room for all of them.
    fn add(&mut self, max: usize) -> usize;
    /// Shows them to the other side; whether that wants a kick.
    fn publish(&mut self) -> bool;
    /// Takes back what was returned; how many.
    fn reap(&mut self) -> usize;
    /// Asks for calls; true when there is something to reap already.
    fn arm(&mut self) -> bool;
    /// Asks for no more calls.
    fn disarm(&mut self);
    /// Checks that the ring still works.
    fn check(&self) -> Result<(), RowError>;
}

/// The side that takes and returns.
pub trait Back: Send {
    /// Takes up to `max` buffers, returns them and publishes: how many, and whether the other side wants
    /// a call.
    fn turn(&mut self, max: usize) -> (usize, bool);
    /// Asks for kicks; true when there is something to take already.
    fn arm(&mut self) -> bool;
    /// Asks for no more kicks.
    fn disarm(&mut self);
    /// Checks that the ring still works.
    fn check(&self) -> Result<(), RowError>;
}

/// A function over two sides of any types.
pub trait Visit {
    type Output;
    /// Called with both sides of a fresh ring.
    fn visit(self, front: impl Front, back: impl Back) -> Self::Output;
}

/// Makes the two sides of a variant over fresh memory and hands them to `visitor`. The types are known to
/// the compiler there, as they are in a program that uses the rings.
pub fn with_sides<V: Visit>(variant: &Variant, size: u16, visitor: V) -> Result<V::Output, RowError> {
    match variant.kind {
        Kind::Null => {
            let (front, back) = null(size)?;
            Ok(visitor.visit(front, back))
        }
        Kind::Ring { shadow: true, .. } => {
            let (front, back) = ring(variant, size, |area| area)?;
            Ok(visitor.visit(front, back))
        }
        Kind::Ring { shadow: false, .. } => {
            let (front, back) = ring(variant, size, Unshadowed)?;
            Ok(visitor.visit(front, back))
        }
    }
}

/// A map with one region of at least `size` bytes.
fn memory(size: usize) -> Result<Arc<GuestMemory>, RowError> {
    let region = SharedMem::new("ringferry-lab", size)?.map_at(BASE).map_err(RowError::failed)?;
    Ok(Arc::new(GuestMemory::new(vec![region]).map_err(RowError::failed)?))
}

fn ring<A: Words + Clone + Send>(
    variant: &Variant,
    size: u16,
    wrap: impl Fn(Area) -> A,
) -> Result<(RingFront<A>, RingBack<A>), RowError>
where
    Driver<A, u16>: Send,
    Device<A>: Send,
{
    let Kind::Ring { packed, in_order, indirect, .. } = variant.kind else {
        return Err(RowError::failed("the null ring has no parts"));
    };
    let features = RingFeatures { indirect, event_idx: variant.notified, packed, in_order };
    let tables = usize::from(size) * INDIRECT * 16;
    let mut lengths = part_bytes(size, packed).to_vec();
    lengths.push(tables);
    let mut starts = Vec::new();
    let mut end = 0usize;
    for length in &lengths {
        starts.push(end);
        end = (end + length).next_multiple_of(LINE_PAIR);
    }
    let memory = memory(end)?;
    let area = |part: usize| {
        let area = memory.area(BASE + starts[part] as u64, lengths[part]);
        area.map(&wrap).ok_or_else(|| RowError::failed("ring memory is too small"))
    };
    let parts = || Ok::<_, RowError>(Parts { size, desc: area(0)?, driver: area(1)?, device: area(2)? });
    let tables = IndirectTables { area: area(3)?, addr: BASE + starts[3] as u64, entries: INDIRECT as u16 };
    let tables = indirect.then_some(tables);
    let driver = Driver::new(parts()?, features, tables).map_err(RowError::failed)?;
    // A packed ring begins at descriptor 0 with its wrap counter set (VIRTIO 1.4, 2.8.1).
    let base = if packed { 1 << 15 } else { 0 };
    let device = Device::new(parts()?, features, base, None).map_err(RowError::failed)?;
    let buffers = vec![Buffer { addr: BASE, len: BUFFER }; if indirect { INDIRECT } else { 1 }];
    Ok((RingFront { driver, buffers }, RingBack { device, memory, chains: Chains::new() }))
}

struct RingFront<A: Words> {
    driver: Driver<A, u16>,
    buffers: Vec<Buffer>,
}

impl<A: Words> Front for RingFront<A>
where
    Driver<A, u16>: Send,
{
    #[inline]
    fn add(&mut self, max: usize) -> usize {
        if usize::from(self.driver.free()) < max {
            return 0;
        }
        // Each chain takes one descriptor of the ring: a single buffer, or a table.
        (0..max).take_while(|i| self.driver.add(&self.buffers, &[], *i as u16).is_ok()).count()
    }

    #[inline]
    fn publish(&mut self) -> bool {
        self.driver.publish()
    }

    #[inline]
    fn reap(&mut self) -> usize {
        let mut reaped = 0;
        while self.driver.collect().is_some() {
            reaped += 1;
        }
        reaped
    }

    fn arm(&mut self) -> bool {
        self.driver.enable_calls()
    }

    fn disarm(&mut self) {
        self.driver.disable_calls();
    }

    fn check(&self) -> Result<(), RowError> {
        self.driver.fault().map_or(Ok(()), |fault| Err(RowError::failed(format!("driver: {fault}"))))
    }
}

struct RingBack<A: Words> {
    device: Device<A>,
    memory: Arc<GuestMemory>,
    chains: Chains,
}

impl<A: Words> Back for RingBack<A>
where
    Device<A>: Send,
{
    #[inline]
    fn turn(&mut self, max: usize) -> (usize, bool) {
        self.chains.clear();
        let taken = self.device.take(max, &mut self.memory.translator(), &mut self.chains);
        if taken == 0 {
            return (0, false);
        }
        self.device.complete_all(self.chains.iter().map(|chain: &Chain| chain.done(0)));
        (taken, self.device.publish())
    }

    fn arm(&mut self) -> bool {
        self.device.enable_kicks()
    }

    fn disarm(&mut self) {
        self.device.disable_kicks();
    }

    fn check(&self) -> Result<(), RowError> {
        self.device.fault().map_or(Ok(()), |fault| Err(RowError::failed(format!("device: {fault}"))))
    }
}

/// Offsets of the null ring's words: each index on a line of its own, and whether its reader sleeps.
const ADDED: usize = 0;
const RETURNED: usize = LINE_PAIR;
const FRONT_SLEEPS: usize = 2 * LINE_PAIR;
const BACK_SLEEPS: usize = 3 * LINE_PAIR;

fn null(size: u16) -> Result<(NullFront, NullBack), RowError> {
    let area = memory(4 * LINE_PAIR)?.area(BASE, 4 * LINE_PAIR);
    let area = area.ok_or_else(|| RowError::failed("ring memory is too small"))?;
    let front = NullFront { area: area.clone(), size, added: 0, reaped: 0 };
    Ok((front, NullBack { area, returned: 0 }))
}

struct NullFront {
    area: Area,
    size: u16,
    added: u16,
    reaped: u16,
}

impl Front for NullFront {
    #[inline]
    fn add(&mut self, max: usize) -> usize {
        let free = self.size - self.added.wrapping_sub(self.reaped);
        if usize::from(free) < max {
            return 0;
        }
        self.added = self.added.wrapping_add(max as u16);
        max
    }

    #[inline]
    fn publish(&mut self) -> bool {
        self.area.store16_release(ADDED, self.added);
        Area::full_fence();
        self.area.load16(BACK_SLEEPS) != 0
    }

    #[inline]
    fn reap(&mut self) -> usize {
        let returned = self.area.load16_acquire(RETURNED);
        let reaped = returned.wrapping_sub(self.reaped);
        self.reaped = returned;
        usize::from(reaped)
    }

    fn arm(&mut self) -> bool {
        self.area.store16(FRONT_SLEEPS, 1);
        Area::full_fence();
        self.area.load16_acquire(RETURNED) != self.reaped
    }

    fn disarm(&mut self) {
        self.area.store16(FRONT_SLEEPS, 0);
    }

    fn check(&self) -> Result<(), RowError> {
        Ok(())
    }
}

struct NullBack {
    area: Area,
    returned: u16,
}

impl Back for NullBack {
    #[inline]
    fn turn(&mut self, max: usize) -> (usize, bool) {
        let added = self.area.load16_acquire(ADDED);
        let taken = usize::from(added.wrapping_sub(self.returned)).min(max);
        if taken == 0 {
            return (0, false);
        }
        self.returned = self.returned.wrapping_add(taken as u16);
        self.area.store16_release(RETURNED, self.returned);
        Area::full_fence();
        (taken, self.area.load16(FRONT_SLEEPS) != 0)
    }

    fn arm(&mut self) -> bool {
        self.area.store16(BACK_SLEEPS, 1);
        Area::full_fence();
        self.area.load16_acquire(ADDED) != self.returned
    }

    fn disarm(&mut self) {
        self.area.store16(BACK_SLEEPS, 0);
    }

    fn check(&self) -> Result<(), RowError> {
        Ok(())
    }
}
