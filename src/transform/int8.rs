//! Signed bytes with one fp32 scale for the whole tensor, which the survey finds.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Input;
use super::float::{Float, TILE};
use super::granules::{self, Granule};
use super::quantise::{LINES, levels, peaks, quantise};
use super::survey::{PART, for_each_part};
use crate::error::{Error, Result};

/// Bytes of the scale, which stands first.
pub(super) const HEAD: u64 = 4;

pub(super) fn read(float: Float, input: &dyn Input, offset: u64, out: &mut [u8]) -> Result<()> {
    let survey = input.survey()?;
    let scale: [u8; HEAD as usize] = survey[..].try_into().map_err(|_| foreign())?;
    let skip = offset.min(HEAD) as usize;
    let (head, body) = out.split_at_mut((HEAD as usize - skip).min(out.len()));
    head.copy_from_slice(&scale[skip..skip + head.len()]);
    let scale = f32::from_le_bytes(scale);
    let granule = Granule { input: float.bytes(), output: 1 };
    // Without a scale all is 0.
    let divisors = [if scale == 0.0 { f32::INFINITY } else { scale }; LINES];
    granules::read(granule, input, offset.saturating_sub(HEAD), body, |bytes, out| {
        let mut tiles = out.chunks_mut(TILE);
        let mut codes = [0; TILE];
        float.for_each_tile(bytes, |tile| {
            if let Some(out) = tiles.next() {
                quantise(tile, &divisors, levels(8), &mut codes);
                out.copy_from_slice(&codes[..out.len()]);
            }
        });
    })
}

/// The scale: the largest absolute value is 127.
pub(super) fn survey(float: Float, input: &dyn Input) -> Result<Vec<u8>> {
    let len = input.len();
    let starts = (0..len).step_by(PART);
    let part = |&start: &u64| (start, usize::try_from(len - start).unwrap_or(usize::MAX).min(PART));
    // Among absolute values the order of the bits is that of the numbers.
    let max = AtomicU32::new(0);
    for_each_part(input, starts, part, |_, bytes| {
        let mut part = 0.0f32;
        float.for_each_tile(bytes, |tile| {
            let mut lines = [0.0; LINES];
            peaks(tile, &mut lines);
            part = lines.into_iter().fold(part, f32::max);
        });
        max.fetch_max(part.to_bits(), Ordering::Relaxed);
    })?;
    let scale = f32::from_bits(max.into_inner()) / levels(8);
    Ok(scale.to_le_bytes().to_vec())
}

/// The error of a survey that is none of ours: it was checked before, so this is a fault of the program.
pub(super) fn foreign() -> Error {
    Error::Invalid("what is known of a tensor does not belong to it".into())
}
