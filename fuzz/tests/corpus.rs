//! The seeds reach what they say, the files are the seeds, and every committed input passes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ringferry_fuzz::{TARGETS, Target, seeds};

/// Held by each test: a target that counts open descriptors wants the process for itself.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

fn find(name: &str) -> Target {
    TARGETS.iter().find(|(target, _)| *target == name).expect("a target").1
}

#[test]
fn every_seed_reaches_what_it_says() {
    let _alone = alone();
    let mut wrong = Vec::new();
    for seed in seeds::all() {
        let reached = find(seed.target)(&seed.bytes);
        if reached != seed.reaches {
            wrong.push(format!("{}/{}: {reached:?}, not {:?}", seed.target, seed.name, seed.reaches));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn the_files_are_the_seeds() {
    let _alone = alone();
    let mut seeds: BTreeMap<_, _> =
        seeds::all().into_iter().map(|seed| (corpus(seed.target).join(seed.name), seed.bytes)).collect();
    for (path, bytes) in &seeds {
        let written = fs::read(path).unwrap_or_default();
        assert!(written == *bytes, "{}: run `cargo run --bin seeds` in fuzz/", path.display());
    }
    for (target, _) in TARGETS {
        for entry in fs::read_dir(corpus(target)).expect("a corpus") {
            let path = entry.expect("an entry").path();
            let finding = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("finding-"));
            assert!(seeds.remove(&path).is_some() || finding, "{} is no seed", path.display());
        }
    }
}

#[test]
fn every_committed_input_passes() {
    let _alone = alone();
    let mut count = 0;
    for (name, target) in TARGETS {
        for entry in fs::read_dir(corpus(name)).expect("a corpus") {
            target(&fs::read(entry.expect("an entry").path()).expect("an input"));
            count += 1;
        }
    }
    assert!(count > TARGETS.len(), "{count} inputs");
}

#[test]
fn any_bytes_are_a_script() {
    let _alone = alone();
    for (_, target) in TARGETS {
        for len in 0..64 {
            target(&vec![0; len]);
            target(&vec![0xff; len]);
            target(&(0..len as u8).map(|i| i.wrapping_mul(37)).collect::<Vec<_>>());
        }
    }
}
