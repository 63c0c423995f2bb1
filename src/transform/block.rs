//! Blocks of 4 or 5 bit integers, each behind its fp16 scale.

use super::Input;
use super::float::{Float, TILE};
use super::granules::{self, Granule};
use super::quantise::{LINES, levels, pack4, pack5, peaks, quantise, scales};
use crate::error::Result;

/// Bytes of a block's scale.
const SCALE: usize = 2;

/// Width of a quantised element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bits {
    /// -7 to 7.
    Four,
    /// -15 to 15.
    Five,
}

/// Elements that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum BlockSize {
    B32,
    B128,
}

impl Bits {
    /// Their number.
    pub fn count(self) -> usize {
        match self {
            Bits::Four => 4,
            Bits::Five => 5,
        }
    }

    /// Bytes of a block with its scale.
    pub(super) fn granule(self, block: BlockSize) -> usize {
        SCALE + block.elements() * self.count() / 8
    }
}

impl BlockSize {
    /// Their number.
    pub fn elements(self) -> usize {
        match self {
            BlockSize::B32 => 32,
            BlockSize::B128 => 128,
        }
    }
}

pub(super) fn read(
    float: Float,
    bits: Bits,
    block: BlockSize,
    input: &dyn Input,
    offset: u64,
    out: &mut [u8],
) -> Result<()> {
    let granule = Granule { input: block.elements() * float.bytes(), output: bits.granule(block) };
    granules::read(granule, input, offset, out, |bytes, out| compute(float, bits, block, bytes, out))
}

fn compute(float: Float, bits: Bits, block: BlockSize, bytes: &[u8], out: &mut [u8]) {
    match (bits, block) {
        (Bits::Four, BlockSize::B32) => encode::<1, 16>(float, bits, bytes, out),
        (Bits::Four, BlockSize::B128) => encode::<4, 64>(float, bits, bytes, out),
        (Bits::Five, BlockSize::B32) => encode::<1, 20>(float, bits, bytes, out),
        (Bits::Five, BlockSize::B128) => encode::<4, 80>(float, bits, bytes, out),
    }
}

/// Blocks of so many `LINE`s, and of `BODY` bytes when packed.
fn encode<const IN_BLOCK: usize, const BODY: usize>(float: Float, bits: Bits, bytes: &[u8], out: &mut [u8]) {
    let levels = levels(bits.count());
    let (mut codes, mut packed) = ([0; TILE], [0; TILE * 5 / 8]);
    let (mut tops, mut stored, mut divisors) = ([0.0; LINES], [0; LINES], [0.0; LINES]);
    let mut tiles = out.chunks_mut(LINES / IN_BLOCK * (SCALE + BODY));
    float.for_each_tile(bytes, |tile| {
        peaks(tile, &mut tops);
        for tops in tops.as_chunks_mut::<IN_BLOCK>().0 {
            *tops = [tops.iter().copied().fold(0.0, f32::max); IN_BLOCK];
        }
        scales(&tops, levels, &mut stored, &mut divisors);
        quantise(tile, &divisors, levels, &mut codes);
        match bits {
            Bits::Four => pack4(&codes, &mut packed),
            Bits::Five => pack5(&codes, &mut packed),
        }
        let blocks = tiles.next().unwrap_or_default().chunks_exact_mut(SCALE + BODY);
        let scales = stored.iter().step_by(IN_BLOCK);
        for ((scale, body), out) in scales.zip(packed.as_chunks::<BODY>().0).zip(blocks) {
            let (head, rest) = out.split_at_mut(SCALE);
            head.copy_from_slice(&scale.to_le_bytes());
            rest.copy_from_slice(body);
        }
    });
}
