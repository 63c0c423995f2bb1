//! Computed bytes: casts and quantisation of a tensor, made when they are read.
//!
//! A [`Transform`] is a small value. The length of its output is a pure function of the length of its input, so a
//! virtual file has its size before anything is computed. Output is cut into granules (the bytes of a block, an element
//! or a row), and a read computes the granules that it touches and trims them: every read equals that range of the whole
//! output, and costs memory that does not depend on the tensor's size: input comes in pieces through one buffer for each
//! thread.
//!
//! Some transforms must know something of the whole tensor first, such as the largest value. This is their survey: one
//! pass on all cores, whose short result [`Input::survey`] keeps.
//!
//! Nothing here knows of blobs, files or stores. The loops run over plain slices in a form that compilers vectorise, and
//! their results do not depend on the machine.

mod adaptive;
mod block;
mod cast;
mod float;
mod fp8;
mod granules;
mod int8;
mod quantise;
mod survey;
mod turn;

use std::sync::Arc;

use crate::error::Result;
use fp8::Rows;

pub use block::{Bits, BlockSize};
pub use float::Float;
pub use fp8::Fp8;

/// Elements in a block of [`Transform::Adaptive`].
pub const ADAPTIVE_BLOCK: u64 = adaptive::BLOCK as u64;

/// The tensor that is transformed.
pub trait Input: Sync {
    /// Its length in bytes.
    fn len(&self) -> u64;

    /// Fills `buf` with its bytes from `offset` on, all of them or an error.
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()>;

    /// The result of [`Transform::survey`] for this input, made when first asked for.
    fn survey(&self) -> Result<Arc<[u8]>>;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How output bytes come from the elements of a tensor. `format::amb` describes the arithmetic of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transform {
    /// Every element as fp16.
    F16(Float),
    /// One fp32 scale, then every element as a signed byte.
    Int8(Float),
    /// Blocks of so many elements, each an fp16 scale and its elements in few bits.
    Block(Float, Bits, BlockSize),
    /// A mask, fp16 scales and blocks of 32 elements, a tenth of them as fp16 and the others in 4 bits.
    Adaptive(Float),
    /// Rows of so many elements as 8 bit floats with an fp32 scale for each row; `format::gds` names the encoding.
    Fp8(Float, u64, Fp8),
}

impl Transform {
    /// A word that tells it from every other; it never changes, since inode numbers and memos are made of it.
    pub fn name(self) -> String {
        match self {
            Transform::F16(float) => format!("f16 of {}", float.name()),
            Transform::Int8(float) => format!("int8 of {}", float.name()),
            Transform::Block(float, bits, block) => {
                format!("int{}-{} of {}", bits.count(), block.elements(), float.name())
            }
            Transform::Adaptive(float) => format!("adaptive-{ADAPTIVE_BLOCK} of {}", float.name()),
            Transform::Fp8(float, elements, part) => {
                let part = match part {
                    Fp8::Codes => "e4m3fn",
                    Fp8::Scales => "e4m3fn scales",
                    Fp8::Digest => "e4m3fn digest",
                };
                format!("{part} of {}, rows of {elements}", float.name())
            }
        }
    }

    /// The same for its survey: the parts of an encoded tensor have one in common.
    pub fn survey_name(self) -> String {
        match self {
            Transform::Fp8(float, elements, _) => format!("e4m3fn survey of {}, rows of {elements}", float.name()),
            other => other.name(),
        }
    }

    /// The element type of its input.
    pub fn float(self) -> Float {
        match self {
            Transform::F16(float) | Transform::Int8(float) | Transform::Block(float, ..) => float,
            Transform::Adaptive(float) | Transform::Fp8(float, ..) => float,
        }
    }

    /// The length of the output for an input of `input_len` bytes; `None` if those are no whole elements, or too many.
    pub fn output_len(self, input_len: u64) -> Option<u64> {
        let width = self.float().bytes() as u64;
        let elements = input_len / width;
        if !input_len.is_multiple_of(width) {
            return None;
        }
        match self {
            Transform::F16(_) => elements.checked_mul(2),
            Transform::Int8(_) => elements.checked_add(int8::HEAD),
            Transform::Block(_, bits, block) => {
                elements.div_ceil(block.elements() as u64).checked_mul(bits.granule(block) as u64)
            }
            Transform::Adaptive(_) => adaptive::Parts::of(elements)?.len(),
            Transform::Fp8(_, row, part) => {
                let rows = elements.checked_div(row).filter(|rows| rows * row == elements)?;
                match part {
                    Fp8::Codes => Some(elements),
                    Fp8::Scales => rows.checked_mul(fp8::SCALE),
                    Fp8::Digest => Some(fp8::DIGEST),
                }
            }
        }
    }

    /// Computes the bytes of the output from `offset` on. The caller keeps to [`Transform::output_len`].
    pub fn read(self, input: &dyn Input, offset: u64, out: &mut [u8]) -> Result<()> {
        match self {
            Transform::F16(float) => cast::read(float, input, offset, out),
            Transform::Int8(float) => int8::read(float, input, offset, out),
            Transform::Block(float, bits, block) => block::read(float, bits, block, input, offset, out),
            Transform::Adaptive(float) => adaptive::read(float, input, offset, out),
            Transform::Fp8(float, elements, part) => Rows { float, elements }.read(part, input, offset, out),
        }
    }

    /// Whether anything must be known of the whole input before a byte can be computed.
    pub fn is_surveyed(self) -> bool {
        match self {
            Transform::F16(_) | Transform::Block(..) => false,
            Transform::Int8(_) | Transform::Adaptive(_) => true,
            Transform::Fp8(float, elements, part) => Rows { float, elements }.is_surveyed(part),
        }
    }

    /// What must be known of the whole input before a byte can be computed: nothing, for most. That of
    /// [`Transform::F16`] is only for who wants to know: how many values become infinite, 8 bytes.
    pub fn survey(self, input: &dyn Input) -> Result<Vec<u8>> {
        match self {
            Transform::F16(float) => cast::survey(float, input),
            Transform::Block(..) => Ok(Vec::new()),
            Transform::Int8(float) => int8::survey(float, input),
            Transform::Adaptive(float) => adaptive::survey(float, input),
            Transform::Fp8(float, elements, _) => Rows { float, elements }.survey(input),
        }
    }
}

#[cfg(test)]
mod tests;
