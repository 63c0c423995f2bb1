//! Blocks of 4 or 5 bit integers, each behind its fp16 scale.

use half::f16;

use super::Input;
use super::float::{Float, TILE};
use super::granules::{self, Granule};
use super::quantise::{LINE, LINES, levels, pack4, pack5, peaks, quantise, scales};
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
    let levels = levels(bits.count());
    let lines_in_block = block.elements() / LINE;
    let mut packed = [0; TILE * 5 / 8];
    let mut codes = [0; TILE];
    let place = match (bits, block) {
        (Bits::Four, BlockSize::B32) => place::<16>,
        (Bits::Four, BlockSize::B128) => place::<64>,
        (Bits::Five, BlockSize::B32) => place::<20>,
        (Bits::Five, BlockSize::B128) => place::<80>,
    };
    let mut tiles = out.chunks_mut(LINES / lines_in_block * bits.granule(block));
    float.for_each_tile(bytes, |tile| {
        let mut line_peaks = [0.0; LINES];
        peaks(tile, &mut line_peaks);
        let mut block_peaks = [0.0; LINES];
        let blocks_in_tile = LINES / lines_in_block;
        for (peak, lines) in block_peaks.iter_mut().zip(line_peaks.chunks_exact(lines_in_block)) {
            *peak = lines.iter().copied().fold(0.0, f32::max);
        }
        let (mut stored, mut divisors) = ([f16::ZERO; LINES], [0.0; LINES]);
        scales(&block_peaks[..blocks_in_tile], levels, &mut stored[..blocks_in_tile], &mut divisors[..blocks_in_tile]);
        let mut by_line = [0.0; LINES];
        for (lines, &divisor) in by_line.chunks_exact_mut(lines_in_block).zip(&divisors) {
            lines.fill(divisor);
        }
        quantise(tile, &by_line, levels, &mut codes);
        match bits {
            Bits::Four => pack4(&codes, &mut packed),
            Bits::Five => pack5(&codes, &mut packed),
        }
        if let Some(out) = tiles.next() {
            place(&stored, &packed, out);
        }
    });
}

/// Puts each scale before its block of `BODY` bytes, for as many blocks as `out` has room for.
fn place<const BODY: usize>(scales: &[f16], packed: &[u8], out: &mut [u8]) {
    let blocks = out.chunks_exact_mut(SCALE + BODY);
    for ((scale, body), out) in scales.iter().zip(packed.as_chunks::<BODY>().0).zip(blocks) {
        let (head, rest) = out.split_at_mut(SCALE);
        head.copy_from_slice(&scale.to_le_bytes());
        rest.copy_from_slice(body);
    }
}
