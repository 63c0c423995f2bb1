//! The targets as libFuzzer runs them: `FUZZ_TARGET=NAME fuzz CORPUS...`.

#![no_main]

#[path = "../targets/mod.rs"]
#[allow(dead_code, reason = "it runs one target")]
mod targets;

use std::sync::OnceLock;

use targets::{TARGETS, Target, memory};

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

static CHOSEN: OnceLock<Target> = OnceLock::new();

fn chosen() -> Target {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    match TARGETS.iter().find(|(other, _)| *other == name) {
        Some((_, target)) => *target,
        None => panic!("FUZZ_TARGET is none of {:?}", TARGETS.map(|(name, _)| name)),
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    memory::within_limit(*CHOSEN.get_or_init(chosen), input);
});
