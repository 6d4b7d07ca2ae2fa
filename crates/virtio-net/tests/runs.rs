//! The short way of the device's receiveq, [`Receiveq::deliver_run`], does what [`Receiveq::deliver`] does frame by frame: the same bytes in the
//! same buffers, the same used elements, and the same refusals, whatever buffers the driver has posted.

mod common;

use common::{BORDER, BUFFERS, END, Piece, Raw, payload, readable, writable};
use proptest::prelude::*;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::Fault;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::device::{Receiveq, Refused, Run, RunEnd};

/// Entries of the ring, and of chains that a test posts at most.
const SIZE: u16 = 64;

/// A chain that a driver may post, mostly an ordinary one.
#[derive(Clone, Copy, Debug)]
enum Posted {
    /// One buffer.
    Whole(u32),
    /// Two buffers.
    Halves(u32, u32),
    /// One buffer that lies across two regions of memory.
    Border(u32),
    /// A buffer that may not be written.
    Readable,
    /// A buffer outside memory.
    Nowhere,
}

fn posted() -> impl Strategy<Value = Posted> {
    prop_oneof![
        20 => (0u32..2000).prop_map(Posted::Whole),
        20 => Just(Posted::Whole(1526)),
        3 => (0u32..100, 0u32..1600).prop_map(|(a, b)| Posted::Halves(a, b)),
        2 => (1u32..1600).prop_map(Posted::Border),
        1 => Just(Posted::Readable),
        1 => Just(Posted::Nowhere),
    ]
}

/// A guest with these chains, each in a place of its own, and the device's receiveq.
fn guest(posted: &[Posted], features: Features) -> (Raw, Receiveq<ringferry_memory::Area>) {
    let mut raw = Raw::new(SIZE);
    for (at, posted) in (BUFFERS..).step_by(2048).zip(posted) {
        let pieces: Vec<Piece> = match *posted {
            Posted::Whole(len) => vec![writable(at, len as usize)],
            Posted::Halves(a, b) => vec![writable(at, a as usize), writable(at + u64::from(a), b as usize)],
            Posted::Border(len) => vec![writable(BORDER - 100, len as usize)],
            Posted::Readable => vec![readable(at, 1526)],
            Posted::Nowhere => vec![writable(END, 1526)],
        };
        raw.chain(&pieces);
    }
    let receiveq = Receiveq::new(raw.device(features), features);
    (raw, receiveq)
}

/// What a driver sees in the end: refusals, used elements, its memory, and whether the device has broken the ring.
type Outcome = (Vec<Result<(), Refused>>, Vec<(u32, u32)>, Vec<u8>, Option<Fault>);

fn outcome(
    mut raw: Raw,
    mut receiveq: Receiveq<ringferry_memory::Area>,
    answers: Vec<Result<(), Refused>>,
) -> Outcome {
    receiveq.flush();
    let memory = raw.read(BUFFERS, (END - BUFFERS) as usize);
    (answers, raw.used(), memory, receiveq.ring().fault())
}

/// Delivers the picked frames one by one.
fn one_by_one(posted: &[Posted], features: Features, burst: &Burst<'_>, picks: &[u32]) -> Outcome {
    let (raw, mut receiveq) = guest(posted, features);
    receiveq.expect(picks.len());
    let mut answers = Vec::new();
    for pick in picks {
        let frame = &burst.frames()[*pick as usize];
        let mut translator = raw.memory.translator();
        answers.push(receiveq.deliver(&mut translator, frame.header, frame.prefix(), burst.rest(frame)));
    }
    outcome(raw, receiveq, answers)
}

/// Delivers them in runs, and one by one what ends a run, as long as there may be another one. Also returns the runs.
fn in_runs(posted: &[Posted], features: Features, burst: &Burst<'_>, picks: &[u32]) -> (Outcome, Vec<Run>) {
    let (raw, mut receiveq) = guest(posted, features);
    receiveq.expect(picks.len());
    let (mut answers, mut left, mut runs) = (Vec::new(), picks, Vec::<Run>::new());
    while !left.is_empty() {
        let mut translator = raw.memory.translator();
        if runs.last().is_none_or(|run| run.end != RunEnd::Queue) {
            let run = receiveq.deliver_run(&mut translator, burst, left);
            let lens = left[..run.frames].iter().map(|pick| u64::from(burst.frames()[*pick as usize].len));
            assert_eq!(run.bytes, lens.sum::<u64>());
            answers.extend(std::iter::repeat_n(Ok(()), run.frames));
            left = &left[run.frames..];
            assert_eq!(run.end == RunEnd::Complete, left.is_empty());
            runs.push(run);
        }
        let Some((next, rest)) = left.split_first() else { break };
        let frame = &burst.frames()[*next as usize];
        answers.push(receiveq.deliver(&mut translator, frame.header, frame.prefix(), burst.rest(frame)));
        left = rest;
    }
    (outcome(raw, receiveq, answers), runs)
}

/// The numbers of frames of these runs, and how the last one ended.
fn shape(runs: &[Run]) -> (Vec<usize>, RunEnd) {
    (runs.iter().map(|run| run.frames).collect(), runs[runs.len() - 1].end)
}

fn burst_of(frames: &[(Header, Vec<u8>)]) -> Burst<'_> {
    let mut burst = Burst::new();
    for (header, frame) in frames {
        // In two pieces, so that the second is behind the prefix or inside it.
        let (first, rest) = frame.split_at(frame.len().min(100));
        let mut frame = burst.build(*header, frame.len() as u32);
        [first, rest].into_iter().for_each(|piece| frame.piece(piece.into()));
        frame.finish();
    }
    burst
}

const MERGEABLE: Features = Features::VERSION_1.union(Features::MRG_RXBUF);

#[test]
fn ordinary_frames_are_one_run() {
    let frames: Vec<_> = (0..32).map(|i| (Header::default(), payload(i, 60 + 40 * i as usize))).collect();
    let (burst, picks) = (burst_of(&frames), (0..32).collect::<Vec<_>>());
    let posted = [Posted::Whole(1526); 40];
    for features in [Features::VERSION_1, MERGEABLE] {
        let (outcome, runs) = in_runs(&posted, features, &burst, &picks);
        assert_eq!(shape(&runs), (vec![32], RunEnd::Complete));
        assert_eq!(outcome, one_by_one(&posted, features, &burst, &picks));
        assert_eq!(outcome.1.len(), 32);
    }
}

#[test]
fn a_legacy_header_and_a_broken_ring_have_no_short_way() {
    let frames = [(Header::default(), payload(1, 100))];
    let burst = burst_of(&frames);
    let (_, runs) = in_runs(&[Posted::Whole(1526)], Features::empty(), &burst, &[0]);
    assert_eq!(runs, [Run::NONE]);
    let (raw, mut receiveq) = guest(&[Posted::Whole(1526)], Features::VERSION_1);
    receiveq.ring().break_with(Fault::Unusable);
    assert_eq!(receiveq.deliver_run(&mut raw.memory.translator(), &burst, &[0]), Run::NONE);
}

#[test]
fn a_frame_that_does_not_fit_one_buffer_ends_its_run_and_the_next_begins_behind_it() {
    let lens = [100, 1800, 200, 300, 1700, 1900, 400, 1600];
    let frames: Vec<_> = (0..).zip(lens).map(|(i, len)| (Header::default(), payload(i, len))).collect();
    let (burst, picks) = (burst_of(&frames), (0..8).collect::<Vec<_>>());
    let posted = [Posted::Whole(1526); 20];
    // Spread over two buffers, or refused, which leaves the buffer to the next frame.
    for features in [MERGEABLE, Features::VERSION_1] {
        let (outcome, runs) = in_runs(&posted, features, &burst, &picks);
        assert_eq!(shape(&runs), (vec![1, 2, 0, 1], RunEnd::Frame));
        assert_eq!(outcome, one_by_one(&posted, features, &burst, &picks));
    }
}

#[test]
fn a_buffer_at_the_border_of_two_regions_ends_a_run_and_not_those_of_the_burst() {
    let frames: Vec<_> = (0..6).map(|i| (Header::default(), payload(i, 1000))).collect();
    let (burst, picks) = (burst_of(&frames), (0..6).collect::<Vec<_>>());
    let mut posted = [Posted::Whole(1526); 8];
    posted[2] = Posted::Border(1526);
    let (outcome, runs) = in_runs(&posted, MERGEABLE, &burst, &picks);
    assert_eq!(shape(&runs), (vec![2, 3], RunEnd::Complete));
    assert_eq!(outcome, one_by_one(&posted, MERGEABLE, &burst, &picks));
}

#[test]
fn a_lack_of_buffers_ends_the_runs_of_a_burst_and_so_does_a_chain_of_several() {
    let frames: Vec<_> = (0..6).map(|i| (Header::default(), payload(i, 100))).collect();
    let (burst, picks) = (burst_of(&frames), (0..6).collect::<Vec<_>>());
    let mut several = [Posted::Whole(1526); 8];
    several[3] = Posted::Halves(12, 1514);
    for (posted, ran) in [(&several[..0], 0), (&several[..3], 3), (&several[..], 3)] {
        let (outcome, runs) = in_runs(posted, MERGEABLE, &burst, &picks);
        assert_eq!(shape(&runs), (vec![ran], RunEnd::Queue));
        assert_eq!(outcome, one_by_one(posted, MERGEABLE, &burst, &picks));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn runs_do_what_is_done_frame_by_frame(
        posted in proptest::collection::vec(posted(), 0..30),
        lens in proptest::collection::vec((14usize..1600, any::<bool>(), any::<bool>()), 1..33),
        mergeable in any::<bool>(),
        offset in 0u64..1000,
    ) {
        let features = if mergeable { MERGEABLE } else { Features::VERSION_1 };
        let header = |sum| if sum {
            Header { flags: 1, csum_start: 34, csum_offset: 16, ..Header::default() }
        } else {
            Header::default()
        };
        let frames: Vec<_> =
            (offset..).zip(&lens).map(|(number, (len, sum, _))| (header(*sum), payload(number, *len))).collect();
        let burst = burst_of(&frames);
        let picks: Vec<u32> = (0u32..).zip(&lens).filter(|(_, (.., picked))| *picked).map(|(at, _)| at).collect();
        let (outcome, _) = in_runs(&posted, features, &burst, &picks);
        prop_assert_eq!(outcome, one_by_one(&posted, features, &burst, &picks));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// What is foreseen of frames is what becomes of them, and asking takes nothing: not a buffer, and not the ring of a driver that breaks the rules.
    #[test]
    fn what_becomes_of_frames_is_foreseen(
        posted in proptest::collection::vec(posted(), 0..12),
        lens in proptest::collection::vec(14usize..4000, 1..20),
        mergeable in any::<bool>(),
    ) {
        // Whether a buffer is mapped is found only when it is written to.
        let posted: Vec<_> =
            posted.into_iter().filter(|posted| !matches!(posted, Posted::Nowhere | Posted::Border(_))).collect();
        let features = if mergeable { MERGEABLE } else { Features::VERSION_1 };
        let (mut raw, mut receiveq) = guest(&posted, features);
        let before = raw.read(BUFFERS, (END - BUFFERS) as usize);
        let foreseen = receiveq.probe(&mut raw.memory.translator(), lens.iter().copied());
        receiveq.flush();
        prop_assert!(raw.used().is_empty() && receiveq.ring().fault().is_none());
        prop_assert_eq!(raw.read(BUFFERS, (END - BUFFERS) as usize), before);
        let frames: Vec<_> = lens.iter().map(|len| payload(1, *len)).collect();
        let answers = frames.iter().map(|frame| {
            receiveq.deliver(&mut raw.memory.translator(), Header::default(), frame, &[])
        });
        prop_assert_eq!(answers.collect::<Vec<_>>(), foreseen);
    }
}
