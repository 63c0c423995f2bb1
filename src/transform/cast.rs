//! Elements as fp16.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Input;
use super::float::{Float, TILE, store_f16};
use super::granules::{self, Granule};
use super::survey::{PART, for_each_part};
use crate::error::Result;

pub(super) fn read(float: Float, input: &dyn Input, offset: u64, out: &mut [u8]) -> Result<()> {
    let granule = Granule { input: float.bytes(), output: 2 };
    granules::read(granule, input, offset, out, |bytes, out| {
        let mut tiles = out.chunks_mut(2 * TILE);
        float.for_each_tile(bytes, |values| {
            if let Some(out) = tiles.next() {
                store_f16(&values[..out.len() / 2], out);
            }
        });
    })
}

/// How many finite values become infinite: those from halfway between the largest fp16 and what would be the next.
pub(super) fn survey(float: Float, input: &dyn Input) -> Result<Vec<u8>> {
    const LIMIT: u32 = 65_520.0f32.to_bits();
    let len = input.len();
    let starts = (0..len).step_by(PART);
    let part = |&start: &u64| (start, usize::try_from(len - start).unwrap_or(usize::MAX).min(PART));
    let count = AtomicU64::new(0);
    for_each_part(input, starts, part, |_, bytes| {
        let mut part = 0u64;
        float.for_each_tile(bytes, |values| {
            // Among absolute values the order of the bits is that of the numbers.
            let over = |value: &f32| (LIMIT..f32::INFINITY.to_bits()).contains(&(value.to_bits() & 0x7fff_ffff));
            part += values.iter().map(|value| u64::from(over(value))).sum::<u64>();
        });
        count.fetch_add(part, Ordering::Relaxed);
    })?;
    Ok(count.into_inner().to_le_bytes().to_vec())
}
