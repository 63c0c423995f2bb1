//! Element types that transforms read, and fp16, which they write.

use half::f16;
use half::slice::HalfFloatSliceExt;
use multiversion::multiversion;

use crate::dtype::Dtype;

/// A float type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Float {
    F32,
    F16,
    BF16,
}

/// Elements that are converted at a time: what the first cache holds, and whole blocks of every size.
pub(super) const TILE: usize = 1024;

impl Float {
    /// The float type that a dtype is, if it is one.
    pub fn of(dtype: Dtype) -> Option<Float> {
        match dtype {
            Dtype::F32 => Some(Float::F32),
            Dtype::F16 => Some(Float::F16),
            Dtype::BF16 => Some(Float::BF16),
            _ => None,
        }
    }

    /// Its name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Float::F32 => "f32",
            Float::F16 => "f16",
            Float::BF16 => "bf16",
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::BF16 => 2,
        }
    }

    /// The values of `out.len()` elements, exactly.
    pub(super) fn load(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Float::F32 => {
                for (value, &raw) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_le_bytes(raw);
                }
            }
            Float::BF16 => load_bf16(bytes, out),
            Float::F16 => {
                let mut halves = [f16::ZERO; 256];
                for (out, bytes) in out.chunks_mut(256).zip(bytes.chunks(512)) {
                    for (half, &raw) in halves.iter_mut().zip(bytes.as_chunks().0) {
                        *half = f16::from_le_bytes(raw);
                    }
                    halves[..out.len()].convert_to_f32_slice(out);
                }
            }
        }
    }

    /// The bytes themselves as a tile, if they are one already.
    fn in_place(self, bytes: &[u8]) -> Option<&[f32; TILE]> {
        let is_own = self == Float::F32 && cfg!(target_endian = "little");
        bytemuck::try_cast_slice(bytes).ok().filter(|_| is_own)?.try_into().ok()
    }

    /// Cuts `input` into tiles of [`TILE`] values and hands them on in order, the last one filled up with zeros.
    pub(super) fn for_each_tile(self, input: &[u8], mut each: impl FnMut(&[f32; TILE])) {
        let mut tile = [0.0; TILE];
        for bytes in input.chunks(TILE * self.bytes()) {
            if let Some(values) = self.in_place(bytes) {
                each(values);
                continue;
            }
            let (values, rest) = tile.split_at_mut(bytes.len() / self.bytes());
            self.load(bytes, values);
            rest.fill(0.0);
            each(&tile);
        }
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn load_bf16(bytes: &[u8], out: &mut [f32]) {
    for (value, &raw) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16);
    }
}

/// Writes values as fp16, rounded to nearest even; beyond its range they become infinite.
pub(super) fn store_f16(values: &[f32], out: &mut [u8]) {
    let mut halves = [f16::ZERO; 256];
    for (values, out) in values.chunks(256).zip(out.chunks_mut(512)) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        for (raw, half) in out.as_chunks_mut().0.iter_mut().zip(halves) {
            *raw = half.to_le_bytes();
        }
    }
}
