//! Small made-up models, for the demo and the tests: a language model as Hugging Face lays it out, and Core ML
//! packages that compute with some of its tensors.
//!
//! The weights are noise, but always the same noise: what is written depends on the arguments alone. Tensors are
//! written as they are made up, so memory does not grow with the model.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Result};

mod language_model;
mod package;

pub use language_model::LanguageModel;
pub use package::write_package;

/// Writes a language model of one safetensors file in F32; [`LanguageModel`] has more to choose from.
pub fn write_language_model(dir: &Path, seed: u64, hidden: u64, layers: u64, vocabulary: u64) -> Result<()> {
    LanguageModel::new(seed, hidden, layers, vocabulary).write(dir)
}

/// A tensor of noise around a mean.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// F32, or BF16, which is the upper half of the same F32.
    pub dtype: Dtype,
    /// The dimensions.
    pub shape: Vec<u64>,
    seed: u64,
    mean: f32,
    spread: f32,
}

impl Tensor {
    fn elements(&self) -> Result<u64> {
        Dtype::elements(&self.shape).ok_or_else(|| too_large(&self.name))
    }

    /// Size in bytes.
    pub fn size(&self) -> Result<u64> {
        self.dtype.bytes(&self.shape).ok_or_else(|| too_large(&self.name))
    }

    /// The element at `index` in row-major order.
    fn element(&self, index: u64) -> f32 {
        // The upper 24 bits are as many as an F32 holds.
        let noise = (mix(self.seed.wrapping_add(index)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        self.mean + self.spread * noise
    }

    /// Writes the elements.
    fn write(&self, out: &mut impl Write, elements: u64) -> io::Result<()> {
        for index in 0..elements {
            let bytes = self.element(index).to_le_bytes();
            out.write_all(if self.dtype == Dtype::BF16 { &bytes[2..] } else { &bytes })?;
        }
        Ok(())
    }
}

/// Scrambles a number (the last steps of splitmix64): neighbours get unrelated results.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn too_large(what: &str) -> Error {
    Error::Invalid(format!("{what} is too large; choose smaller numbers"))
}

/// Writes a small file.
fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).at(path)
}

/// Writes a large file piece by piece.
fn write_streamed(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).at(path)?);
    write(&mut file).and_then(|()| file.flush()).at(path)
}

#[cfg(test)]
mod tests;
