//! Runs of a few milliseconds: what is counted must be right, however long it took.

use std::time::Duration;

use super::case::{LIMITS, Path, SENDS, Synthetic};
use super::*;
use crate::experiment::{Run, Sample, Source};
use crate::frames::stream::{HEADERS, PAYLOAD};
use crate::stop::Stop;

fn measured(case: Synthetic) -> Sample {
    let stop = Stop::new();
    // No processors: threads are not pinned, and share what there is.
    let run = Run { seconds: Duration::from_millis(1), seed: 1, round: 1, sample: 1, cpus: &[], stop: &stop };
    stream::measure(&case, &run).unwrap()
}

#[test]
fn no_packet_is_dropped_for_its_shape_and_each_has_one_outcome() {
    for limit in LIMITS {
        for send in SENDS {
            let sample = measured(Synthetic { path: Path::Null, send, limit, coalesces: false });
            let extra = |name: &str| sample.extra[name];
            let outcomes = extra("direct") + extra("collapsed") + extra("defragged");
            assert_eq!(outcomes, extra("packets"), "{send} {limit}");
            assert_eq!(extra("dropped"), 0.0);
            assert!(extra("segments/packet") <= f64::from(limit) && sample.value > 0.0);
            assert!(extra("copied bytes/packet") <= (PAYLOAD + HEADERS) as f64);
            // A buffer for each send, and one for the headers: what fits goes as it is.
            let most = 2 + PAYLOAD.div_ceil(send.min(16 << 10));
            if most <= usize::from(limit) {
                assert_eq!(extra("direct"), extra("packets"), "{send} {limit}");
                assert_eq!(extra("copied bytes/packet"), 0.0);
            }
            if PAYLOAD / send > usize::from(limit) {
                assert_eq!(extra("direct"), 0.0, "{send} {limit}");
            }
        }
    }
}

#[test]
fn what_a_stack_coalesced_needs_no_copy_whatever_the_sends() {
    for send in SENDS {
        let extra = measured(Synthetic { path: Path::Null, send, limit: LIMITS[0], coalesces: true }).extra;
        assert_eq!((extra["direct"], extra["copied bytes/packet"]), (extra["packets"], 0.0), "{send}");
    }
}

#[test]
fn every_byte_of_a_stream_arrives_through_a_virtqueue() {
    for (send, limit) in [(64, 8), (512, 32), (1024, 64), (4096, 16), (256 << 10, 8)] {
        let sample = measured(Synthetic { path: Path::Virtio, send, limit, coalesces: send == 1024 });
        assert!(sample.extra["packets"] >= 200.0 && sample.extra["dropped"] == 0.0, "{send} {limit}");
    }
}

#[test]
fn frames_arrive_with_and_without_the_planner() {
    let stop = Stop::new();
    let run = Run { seconds: Duration::from_millis(1), seed: 1, round: 1, sample: 1, cpus: &[], stop: &stop };
    for case in Direct::all() {
        // Every frame is looked at; one that is missing or wrong is an error.
        direct::measure(&case, &run).unwrap();
    }
}

#[test]
fn what_cannot_be_measured_is_missing_with_the_reason() {
    let plan = Txmap.plan(&Setup::planning(1, &[("kernel", "32")])).unwrap();
    for row in &plan.rows {
        let path = row.labels.get("path").unwrap();
        match &row.source {
            Source::Measured(_) => assert_eq!(path, "null"),
            Source::Missing(missing) if path == "virtio" => {
                assert!(missing.reason.contains("two processors"));
            }
            Source::Missing(missing) => assert!(missing.reason.contains("cannot start /nonexistent")),
        }
    }
    assert_eq!(plan.rows.len(), 90 + 4 + 11);
    assert_eq!(Txmap.plan(&Setup::planning(2, &[("kernel", "off")])).unwrap().rows.len(), 90 + 4);
    assert!(Txmap.plan(&Setup::planning(2, &[("kernel", "some")])).is_err());
}

#[test]
fn a_child_refuses_what_it_does_not_know() {
    assert!(Txmap.child("ringferry".as_ref(), &["nonsense".into()]).is_err());
}
