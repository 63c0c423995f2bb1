//! What is fuzzed: a function of bytes for every parser and every border.
//!
//! A function panics if an input breaks an invariant that the format promises, and takes everything else in silence.
//! `tests/fuzz/src/fuzz.rs` gives them to libFuzzer, `tests/fuzz_corpus.rs` replays what was found.

#![allow(clippy::unwrap_used, reason = "a panic is how a target says what it found")]

mod extents;
mod formats;
mod memos;
pub mod memory;
mod names;
mod programs;
mod stores;
mod writes;

/// A function of any bytes.
pub type Target = fn(&[u8]);

/// Every target, by the name of its directories below `corpus/` and `regressions/`.
pub const TARGETS: [(&str, Target); 17] = [
    ("safetensors", formats::safetensors),
    ("milblob", formats::milblob),
    ("mlmodel", programs::mlmodel),
    ("mil_text", programs::mil_text),
    ("mlpackage", formats::mlpackage),
    ("amb", formats::amb),
    ("gguf", formats::gguf),
    ("ollama", formats::ollama),
    ("gds", formats::gds),
    ("recipe", formats::recipe),
    ("names", names::names),
    ("tree_path", names::tree_path),
    ("extents", extents::extents),
    ("import", stores::import),
    ("store", stores::store),
    ("memos", memos::memos),
    ("ingest", writes::ingest),
];

/// Lets go of what targets keep from one input to the next.
pub fn finish() {
    names::finish();
    memos::finish();
}

/// What stands between the parts of inputs that have several: text that mutations can move and repeat.
pub const SEPARATOR: &[u8] = b"\n--\n";

/// The parts of an input; missing ones are empty.
fn parts<const N: usize>(input: &[u8]) -> [&[u8]; N] {
    let mut rest = Some(input);
    std::array::from_fn(|index| {
        let all = rest.take().unwrap_or_default();
        let at = all.windows(SEPARATOR.len()).position(|window| window == SEPARATOR);
        match at {
            // The last part is all that is left, whatever it holds.
            Some(at) if index + 1 < N => {
                rest = Some(&all[at + SEPARATOR.len()..]);
                &all[..at]
            }
            _ => all,
        }
    })
}

/// An error is one line of a length that can be shown.
fn check_line(text: &str) {
    assert!(!text.contains(char::is_control), "more than a line: {text:?}");
    assert!(text.len() <= 4000, "an error of {} bytes", text.len());
}

/// Takes small numbers off an input; zeros when it is at its end.
struct Numbers<'a>(&'a [u8]);

impl<'a> Numbers<'a> {
    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn short(&mut self) -> u64 {
        u64::from(self.byte()) | u64::from(self.byte()) << 8
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
