//! One run against DPDK's device: testpmd with `net_vhost` in `txonly` mode, over a vhost-user socket.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringferry_nic::rx::PolicyKind;
use ringferry_rig::front::{ring, wanted};
use ringferry_rig::testpmd::MEGABYTES;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::process;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, connect_device};

use super::ours::{Checker, check, checked};
use super::sink::{RING, Sink, features};
use super::window::Window;
use super::workload::{GSO, Sequence, Workload};
use crate::experiment::{RowError, Run, Sample};
use crate::experiments::peers::case::{Case, Direction, Ring, Who};
use crate::experiments::peers::huge_pages::HugePages;
use crate::experiments::peers::testpmd::{self, Part, Place};
use crate::experiments::txmap::clock::{PATIENCE, joined, pin};

/// Why testpmd cannot send this, if it cannot. It sends frames of one length, or ends each after a random number of
/// segments: two segments make a mix of two lengths, one to one.
pub(super) fn impossible(workload: Workload, acks: usize) -> Option<&'static str> {
    match workload {
        Workload::Small | Workload::Mtu | Workload::Gso => None,
        Workload::Imix => Some("testpmd's txonly mode mixes lengths evenly only, not 7 : 4 : 1"),
        Workload::Bimodal if acks == 1 => None,
        Workload::Bimodal => Some("testpmd's txonly mode mixes two lengths one to one only"),
    }
}

pub(super) fn measure(
    policy: PolicyKind,
    workload: Workload,
    program: &Path,
    run: &Run<'_>,
) -> Result<Sample, RowError> {
    let (Some(driver_cpu), Some(cpu)) = (run.cpu(0), run.cpu(1)) else {
        return Err(RowError::failed("needs two processors, one for each side"));
    };
    let folder = crate::experiments::folder()?;
    let socket = folder.path().join("vhost.sock");
    let pages = HugePages::reserve(MEGABYTES << 20, run.stop)?;
    let mixed = workload == Workload::Bimodal;
    let sequence = Sequence::new(&workload.mix(1), run.seed);
    let case = Case {
        driver: Who::Ringferry,
        device: Who::Dpdk,
        ring: Ring::PackedInOrder,
        // Of a mix, a frame lies in one of its buffers, or the short ones would have to be cut out of them.
        mergeable: !mixed,
        size: sequence.longest(),
        direction: Direction::Receive,
        queue: RING,
    };
    let huge_pages = pages.is_some();
    let place = Place { program, cpu, socket: &socket, folder: folder.path(), huge_pages };
    let mut testpmd = testpmd::start(Part::Device, &case, &place, run.stop)?;
    testpmd.wait_ready()?;
    if mixed {
        testpmd.command(&format!("set txpkts 64,{}", GSO - 64))?;
        testpmd.command("set txsplit rand")?;
    }
    let (connected, peer) = (AtomicBool::new(false), testpmd.id());
    let measured = std::thread::scope(|scope| {
        let driver = scope.spawn(|| -> Result<Sample, RowError> {
            pin(Some(driver_cpu))?;
            let mut sink = Sink::new(policy)?;
            let _connection = connect(&mut sink, &socket)?;
            connected.store(true, Ordering::Release);
            let mut checker = Checker::new(&sequence);
            check(&mut sink, run, checked(&sequence), || true, |packet| checker.txonly(packet))?;
            let used = || Ok([process::cpu_time(std::process::id())?, process::cpu_time(peer)?]);
            Ok(Window::measure(&mut sink, run, used, || true)?.sample())
        });
        let deadline = Instant::now() + PATIENCE;
        while !connected.load(Ordering::Acquire) && !driver.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        // Without it the driver waits for its first frame, and says so.
        let begun = if driver.is_finished() { Ok(()) } else { testpmd.begin(0).map_err(RowError::from) };
        let measured = joined(driver.join());
        begun.and(measured)
    });
    let sample = measured.map_err(|error| error.with_peer(&mut testpmd))?;
    Ok(sample.with("huge pages", f64::from(u8::from(huge_pages))))
}

/// Starts the device that listens at `socket` with the rings of `sink`; buffers are posted. It stops when the
/// connection is closed.
fn connect(sink: &mut Sink, socket: &Path) -> Result<(Connection, [EventFd; 4]), RowError> {
    let stream = Stream::connect(socket)?;
    let mut connection = connect_device(stream, &wanted(features(), features())).map_err(RowError::failed)?;
    let events = [EventFd::new()?, EventFd::new()?, EventFd::new()?, EventFd::new()?];
    let kick = events[0].try_clone()?;
    let plan = |at: usize| ring(&sink.rings[at], &events[at], Some(&events[2 + at]));
    connection.start(&[sink.region()], &[plan(0), plan(1)]).map_err(RowError::failed)?;
    sink.kick = Some(kick);
    sink.begin();
    Ok((connection, events))
}
