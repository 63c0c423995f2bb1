//! Blocks of 4 or 5 bit integers, each behind its fp16 scale.

use super::Input;
use super::float::Float;
use super::granules::{self, Granule};
use super::quantise::{levels, max_abs, pack, quantise, scale};
use crate::error::Result;

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
        2 + block.elements() * self.count() / 8
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
    let compute = match (bits, block) {
        (Bits::Four, BlockSize::B32) => compute::<4, 32>,
        (Bits::Four, BlockSize::B128) => compute::<4, 128>,
        (Bits::Five, BlockSize::B32) => compute::<5, 32>,
        (Bits::Five, BlockSize::B128) => compute::<5, 128>,
    };
    granules::read(granule, input, offset, out, |bytes, out| compute(float, bytes, out))
}

fn compute<const BITS: usize, const BLOCK: usize>(float: Float, bytes: &[u8], out: &mut [u8]) {
    let mut blocks = out.chunks_exact_mut(2 + BLOCK * BITS / 8);
    float.for_each_tile(bytes, |values| {
        let (whole, rest) = values.as_chunks::<BLOCK>();
        for (values, out) in whole.iter().zip(&mut blocks) {
            encode::<BITS, BLOCK>(values, out);
        }
        if !rest.is_empty()
            && let Some(out) = blocks.next()
        {
            let mut filled = [0.0; BLOCK];
            filled[..rest.len()].copy_from_slice(rest);
            encode::<BITS, BLOCK>(&filled, out);
        }
    });
}

fn encode<const BITS: usize, const BLOCK: usize>(values: &[f32; BLOCK], out: &mut [u8]) {
    let scale = scale(max_abs(values), levels(BITS));
    let (head, packed) = out.split_at_mut(2);
    head.copy_from_slice(&scale.to_le_bytes());
    let mut codes = [0; BLOCK];
    quantise(values, scale.to_f32(), levels(BITS), &mut codes);
    pack::<BITS>(&codes, packed);
}
