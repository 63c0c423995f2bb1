//! Replays what fuzzing found and what it began with: no input may panic, break an invariant of its format or allocate
//! more than a small multiple of its length.
//!
//! `contrib/fuzz.sh` looks for more of them; see the page on fuzzing in the crate's documentation.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

#[path = "fuzz/targets/mod.rs"]
mod targets;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use targets::{TARGETS, memory};

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

fn inputs(target: &str, kind: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz").join(kind).join(target);
    // Where nothing was ever found there is no directory.
    let mut files: Vec<PathBuf> = fs::read_dir(&dir).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

// One test, since the allocator counts for the whole process.
#[test]
fn every_input_is_taken_or_refused() {
    let mut failed = Vec::new();
    for (name, target) in TARGETS {
        let corpus = inputs(name, "corpus");
        assert!(corpus.len() >= 5, "{name} has {} inputs: its corpus is gone", corpus.len());
        for path in corpus.into_iter().chain(inputs(name, "regressions")) {
            let input = fs::read(&path).unwrap();
            let run = AssertUnwindSafe(|| memory::within_limit(target, &input));
            if catch_unwind(run).is_err() {
                failed.push(path);
            }
        }
    }
    targets::finish();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn every_directory_has_a_target() {
    for kind in ["corpus", "regressions"] {
        for dir in inputs("", kind) {
            let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
            assert!(TARGETS.iter().any(|(target, _)| *target == name), "{kind}/{name} is nobody's");
        }
    }
}
