//! The set of port kinds, as the engine's only instance of [`Queues`].
//!
//! [`AnyQueues`] is an enum and not a trait object, so that each call of the engine for a burst is one well
//! predicted branch, behind which everything is inlined for the kind. A kind of port is one row of `kinds!`
//! and one folder beside this file.

use std::sync::Arc;

use ringferry_memory::{GuestMemory, ReadSlice, Translator, WriteSlice};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::Unanswered;
use ringferry_virtio_net::device::Run;

use super::tap::queues::TapQueues;
use super::vhost::queues::VhostQueues;
use super::xdp::queues::XdpQueues;
use super::xen::queues::{VifQueues, VifState};
use crate::counters::DropReason;
use crate::plane::queues::Room;
use crate::plane::{Delivery, DirectRead, FrameCost, Lease, Queues, Taken, Watch};

/// The state of one direction of a queue, for display.
#[derive(Clone, Debug)]
pub struct QueueState {
    /// Index of the ring in its device, as [`queue_index`](ringferry_virtio_net::queue_index) has it; a Xen guest's queues count as pairs.
    pub index: u16,
    /// Next entry of the available ring that the switch reads.
    pub last_avail: u16,
    /// Next entry of the used ring that the switch writes.
    pub last_used: u16,
    /// Entries that the driver has made available and that were not taken; `None` if that is not known.
    pub available: Option<u16>,
    /// The position behind those entries: while it stays, the driver makes nothing available. `None` if that is not known.
    pub posted: Option<u16>,
    /// What a driver that asks for calls by position has not looked at; `None` if that is not known.
    pub unanswered: Option<Unanswered>,
    /// The reason why the ring broke; `None` while it works.
    pub broken: Option<String>,
    /// State of a Xen guest's queue and its pages; only with its transmit ring.
    pub pages: Option<VifState>,
}

/// Makes the enums of all kinds, and `each!`, from one table: variant and queue side.
macro_rules! kinds {
    ($($kind:ident($queues:ty),)+) => {
        /// The queues of a port of any kind, in one worker.
        pub enum AnyQueues { $(#[doc = concat!("See [`", stringify!($queues), "`].")] $kind($queues),)+ }
        /// [`Queues::Loan`] of any kind.
        pub enum AnyLoan { $($kind(<$queues as Queues>::Loan),)+ }
        /// [`Queues::Start`] of any kind.
        #[allow(clippy::large_enum_variant, reason = "it travels in a box")]
        pub enum AnyStart { $($kind(<$queues as Queues>::Start),)+ }
        /// [`Queues::Stopped`] of any kind.
        pub enum AnyStopped { $($kind(<$queues as Queues>::Stopped),)+ }
        /// [`Queues::Request`] of any kind.
        #[allow(dead_code, reason = "some kinds have no requests of their own")]
        pub enum AnyRequest { $($kind(<$queues as Queues>::Request),)+ }
        /// [`Queues::Detached`] of any kind.
        pub enum AnyDetached { $($kind(<$queues as Queues>::Detached),)+ }

        /// Matches an [`AnyQueues`] and evaluates the same expression with the queues of each kind.
        macro_rules! each {
            ($any:expr, $name:ident => $body:expr) => {
                match $any { $(AnyQueues::$kind($name) => $body,)+ }
            };
        }

        impl Queues for AnyQueues {
            type Loan = AnyLoan;
            type Start = AnyStart;
            type Stopped = AnyStopped;
            type Request = AnyRequest;
            type Detached = AnyDetached;
            type State = QueueState;

            #[inline]
            fn lease(&mut self, queue: u16, max: usize) -> Lease<AnyLoan> {
                match self {
                    $(AnyQueues::$kind(queues) => match queues.lease(queue, max) {
                        Lease::Empty => Lease::Empty,
                        Lease::Exhausted => Lease::Exhausted,
                        Lease::Frames(loan) => Lease::Frames(AnyLoan::$kind(loan)),
                    },)+
                }
            }

            #[inline]
            fn frames<'m>(&mut self, queue: u16, loan: &'m AnyLoan, max: usize, burst: &mut Burst<'m>) -> Taken {
                match (self, loan) {
                    $((AnyQueues::$kind(queues), AnyLoan::$kind(loan)) => queues.frames(queue, loan, max, burst),)+
                    // The kind of a port does not change between the lease and this call.
                    _ => Taken { any: false, forward: false, private: false, exhausted: false, further: 0 },
                }
            }

            #[inline]
            fn complete(&mut self, queue: u16, loan: AnyLoan) {
                match (self, loan) {
                    $((AnyQueues::$kind(queues), AnyLoan::$kind(loan)) => queues.complete(queue, loan),)+
                    _ => {}
                }
            }

            fn start(&mut self, start: AnyStart, watch: Watch<'_>) -> Option<u16> {
                match (self, start) {
                    $((AnyQueues::$kind(queues), AnyStart::$kind(start)) => queues.start(start, watch),)+
                    _ => None,
                }
            }

            fn stop(&mut self, index: u16, watch: Watch<'_>) -> Option<(AnyStopped, Option<u16>)> {
                match self {
                    $(AnyQueues::$kind(queues) => {
                        let (stopped, queue) = queues.stop(index, watch)?;
                        Some((AnyStopped::$kind(stopped), queue))
                    })+
                }
            }

            fn request(&mut self, request: AnyRequest, watch: Watch<'_>) {
                match (self, request) {
                    $((AnyQueues::$kind(queues), AnyRequest::$kind(request)) => queues.request(request, watch),)+
                    _ => {}
                }
            }

            fn detach(&mut self, queue: u16, watch: Watch<'_>) -> Option<AnyDetached> {
                match self {
                    $(AnyQueues::$kind(queues) => queues.detach(queue, watch).map(AnyDetached::$kind),)+
                }
            }

            fn attach(&mut self, queue: u16, detached: AnyDetached, watch: Watch<'_>) -> bool {
                match (self, detached) {
                    $((AnyQueues::$kind(queues), AnyDetached::$kind(detached)) => {
                        queues.attach(queue, detached, watch)
                    })+
                    _ => false,
                }
            }

            #[inline]
            fn backlog(&mut self, queue: u16) -> usize {
                each!(self, queues => queues.backlog(queue))
            }

            #[inline]
            fn arm(&mut self, queue: u16) -> bool {
                each!(self, queues => queues.arm(queue))
            }

            #[inline]
            fn is_kickless(&mut self, queue: u16) -> bool {
                each!(self, queues => queues.is_kickless(queue))
            }

            fn wake(&mut self, queue: u16, hangup: bool, watch: Watch<'_>) -> bool {
                each!(self, queues => queues.wake(queue, hangup, watch))
            }

            fn pause(&mut self, queue: u16, watch: Watch<'_>) {
                each!(self, queues => queues.pause(queue, watch));
            }

            fn resume(&mut self, queue: u16, watch: Watch<'_>) {
                each!(self, queues => queues.resume(queue, watch));
            }

            #[inline]
            fn frame_cost(&self) -> FrameCost {
                each!(self, queues => queues.frame_cost())
            }

            #[inline]
            fn offloads_tagged(&self) -> bool {
                each!(self, queues => queues.offloads_tagged())
            }

            #[inline]
            fn expect(&mut self, frames: usize) {
                each!(self, queues => queues.expect(frames));
            }

            #[inline]
            fn deliver(
                &mut self,
                queue: u16,
                header: Header,
                first: &[u8],
                rest: &[ReadSlice<'_>],
                len: u64,
            ) -> Result<Delivery, DropReason> {
                each!(self, queues => queues.deliver(queue, header, first, rest, len))
            }

            #[inline]
            fn deliver_run(&mut self, queue: u16, burst: &Burst<'_>, picks: &[u32]) -> Run {
                each!(self, queues => queues.deliver_run(queue, burst, picks))
            }

            fn probe(&mut self, queue: u16, packets: &[(Header, Vec<u8>)]) -> Vec<Result<Delivery, DropReason>> {
                each!(self, queues => queues.probe(queue, packets))
            }

            #[inline]
            fn flush(&mut self) -> usize {
                each!(self, queues => queues.flush())
            }

            fn close(&mut self, watch: Watch<'_>) {
                each!(self, queues => queues.close(watch));
            }

            fn take_out_of_service(&mut self, why: &str, watch: Watch<'_>) {
                each!(self, queues => queues.take_out_of_service(why, watch));
            }

            fn inspect(&mut self, states: &mut Vec<QueueState>) {
                each!(self, queues => queues.inspect(states));
            }

            #[inline]
            fn reads_directly(&self) -> bool {
                each!(self, queues => queues.reads_directly())
            }

            fn direct_memory(&mut self, queue: u16) -> Option<Arc<GuestMemory>> {
                each!(self, queues => queues.direct_memory(queue))
            }

            fn room<'m>(
                &mut self,
                queue: u16,
                translator: &mut Translator<'m>,
                prefix: usize,
                most: usize,
                room: &mut Room<'m>,
            ) -> bool {
                each!(self, queues => queues.room(queue, translator, prefix, most, room))
            }

            fn read_direct(&mut self, room: &mut [WriteSlice<'_>]) -> DirectRead {
                each!(self, queues => queues.read_direct(room))
            }
        }
    };
}

kinds! {
    Vhost(VhostQueues),
    Tap(TapQueues),
    Xen(VifQueues),
    Xdp(XdpQueues),
}

/// The control plane's handles of the workers.
pub type Workers = crate::plane::Workers<AnyQueues>;

/// Stores a queue at its index, and extends the list if need be.
pub(super) fn put<T>(queues: &mut Vec<Option<T>>, at: usize, queue: T) -> &mut T {
    if queues.len() <= at {
        queues.resize_with(at + 1, || None);
    }
    queues[at].insert(queue)
}
