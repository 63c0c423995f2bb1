//! One pass over a whole input on all cores.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Input;
use super::granules::with_scratch;
use crate::cores::cores;
use crate::error::Result;

/// Input bytes that a core reads at a time, which its second cache holds.
pub(super) const PART: usize = 256 << 10;

/// Hands out the items of `parts`, each with the input bytes that `range` says are its own, [`PART`] at the most. The first
/// error ends it.
pub(super) fn for_each_part<T: Send>(
    input: &dyn Input,
    parts: impl Iterator<Item = T> + Send,
    range: impl Fn(&T) -> (u64, usize) + Sync,
    work: impl Fn(T, &[u8]) + Sync,
) -> Result<()> {
    let (parts, failed) = (Mutex::new(parts), AtomicBool::new(false));
    let worker = || {
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        with_scratch(PART, |scratch| {
            while let Some(part) = next().filter(|_| !failed.load(Ordering::Relaxed)) {
                let (offset, len) = range(&part);
                let bytes = &mut scratch[..len];
                input.read(offset, bytes).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
                work(part, bytes);
            }
            Ok(())
        })
    };
    let threads = input.len().div_ceil(PART as u64).min(cores() as u64);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(worker)).collect();
        let own = worker();
        let others =
            others.into_iter().map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        others.fold(own, Result::and)
    })
}
