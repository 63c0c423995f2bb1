//! Reads of outputs that are made of equal granules.

use std::cell::Cell;

use super::Input;
use crate::error::Result;

/// Input bytes that are read at a time: few system calls, and the bytes are still in the cache when they are used.
pub(super) const BATCH: usize = 512 << 10;

thread_local! {
    /// Reads of one thread follow each other, so one buffer serves them all.
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Lends a buffer of `len` bytes, in which there is anything.
pub(super) fn with_scratch<T>(len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut scratch = SCRATCH.take();
    if scratch.len() < len {
        scratch.resize(len, 0);
    }
    let made = work(&mut scratch[..len]);
    SCRATCH.set(scratch);
    made
}

/// So many output bytes for so many input bytes; the input's last granule may be short.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granule {
    pub input: usize,
    pub output: usize,
}

/// Fills `out` with the output from `offset` on. `compute` is handed whole granules.
pub(super) fn read(
    granule: Granule,
    input: &dyn Input,
    offset: u64,
    mut out: &mut [u8],
    compute: impl Fn(&[u8], &mut [u8]),
) -> Result<()> {
    let (input_size, output_size) = (granule.input as u64, granule.output as u64);
    let mut index = offset / output_size;
    let mut skip = (offset % output_size) as usize;
    let batch = (BATCH / granule.input).max(1);
    let mut edge = Vec::new();
    with_scratch(batch * granule.input, |scratch| {
        while !out.is_empty() {
            let whole = (out.len() / granule.output).min(batch);
            let cut = skip > 0 || whole == 0;
            let count = if cut { 1 } else { whole };
            let start = index * input_size;
            let len = (count * granule.input).min(usize::try_from(input.len() - start).unwrap_or(usize::MAX));
            let bytes = &mut scratch[..len];
            input.read(start, bytes)?;
            let asked = std::mem::take(&mut out);
            let done = if cut {
                edge.resize(granule.output, 0);
                compute(bytes, &mut edge);
                let len = (granule.output - skip).min(asked.len());
                asked[..len].copy_from_slice(&edge[skip..skip + len]);
                len
            } else {
                compute(bytes, &mut asked[..count * granule.output]);
                count * granule.output
            };
            (out, skip) = (&mut asked[done..], 0);
            index += count as u64;
        }
        Ok(())
    })
}
