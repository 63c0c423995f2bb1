//! Element types that transforms read, and fp16, which they write.

use multiversion::{multiversion, target::match_target};

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
            Float::F16 => load_f16(bytes, out),
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

#[multiversion(targets("x86_64+avx2+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
fn load_bf16(bytes: &[u8], out: &mut [f32]) {
    for (value, &raw) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16);
    }
}

#[multiversion(targets("x86_64+avx2+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
fn load_f16(bytes: &[u8], out: &mut [f32]) {
    for (value, &raw) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = from_half(u16::from_le_bytes(raw));
    }
}

/// Writes values as fp16, rounded to nearest even; beyond its range they become infinite.
///
/// The processor's own instruction halves the time of a cast of bf16.
#[multiversion(targets("x86_64+avx+f16c"))]
pub(super) fn store_f16(values: &[f32], out: &mut [u8]) {
    let (eights, rest) = values.as_chunks::<8>();
    let (out, out_rest) = out.split_at_mut(16 * eights.len());
    for (out, &eight) in out.as_chunks_mut::<16>().0.iter_mut().zip(eights) {
        *out = match_target! {
            "x86_64+avx+f16c" => {
                use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm256_cvtps_ph};
                // SAFETY: this arm runs only on processors that have the instruction.
                bytemuck::cast(unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(bytemuck::cast(eight)) })
            },
            _ => bytemuck::cast(eight.map(|value| to_half(value).to_le_bytes())),
        };
    }
    for (raw, &value) in out_rest.as_chunks_mut().0.iter_mut().zip(rest) {
        *raw = to_half(value).to_le_bytes();
    }
}

/// The bits of the nearest fp16, of two as near the even one. A NaN is made quiet and keeps what fits of its payload.
///
/// In plain arithmetic and with no branch, so that a loop over it becomes one over vectors; so too [`from_half`].
#[inline(always)]
pub(super) fn to_half(value: f32) -> u16 {
    /// From here on a value is infinite: 2^16. What is rounded up to it is so already.
    const INFINITE: u32 = 0x4780_0000;
    /// From here on it is normal: 2^-14.
    const NORMAL: u32 = 0x3880_0000;
    /// Its last bit is worth as much as that of a subnormal fp16, so the sum with one is rounded to it.
    const ROUNDER: f32 = 0.5;
    let bits = value.to_bits();
    let size = bits & 0x7fff_ffff;
    // The exponents' biases are 127 and 15; of the fraction 10 bits of 23 stay.
    let normal = size.wrapping_sub(112 << 23).wrapping_add(0xfff).wrapping_add(size >> 13 & 1) >> 13;
    let subnormal = (f32::from_bits(size) + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
    let special = if size > f32::INFINITY.to_bits() { 0x7e00 | size >> 13 & 0x3ff } else { 0x7c00 };
    let half = if size < NORMAL { subnormal } else { normal };
    let half = if size < INFINITE { half } else { special };
    (half | bits >> 16 & 0x8000) as u16
}

/// The value of an fp16, exactly.
#[inline(always)]
pub(super) fn from_half(half: u16) -> f32 {
    /// The bits of 2^-14, from which subnormal numbers are counted.
    const NORMAL: u32 = 113 << 23;
    let bits = u32::from(half & 0x7fff) << 13;
    let normal = bits + (112 << 23);
    let subnormal = (f32::from_bits(bits + NORMAL) - f32::from_bits(NORMAL)).to_bits();
    let size = if bits < 1 << 23 { subnormal } else { normal };
    let size = if bits < 31 << 23 { size } else { bits | 255 << 23 };
    f32::from_bits(size | u32::from(half & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_half_is_its_own_value() {
        for bits in 0..=u16::MAX {
            let (own, expected) = (from_half(bits), f16::from_bits(bits).to_f32());
            assert!(own.to_bits() == expected.to_bits() || (own.is_nan() && expected.is_nan()), "{bits:#x}");
            // A NaN that signals comes back quiet.
            assert_eq!(to_half(own), if own.is_nan() { bits | 0x200 } else { bits }, "{bits:#x}");
        }
    }

    #[test]
    fn the_nearest_half_is_taken_and_the_even_one_of_two_as_near() {
        let check = |value: f32| {
            let expected = f16::from_f32(value).to_bits();
            assert_eq!(to_half(value), expected, "{value:e}");
            let mut stored = [0; 18];
            store_f16(&[value; 9], &mut stored);
            assert_eq!(stored.as_chunks().0, [expected.to_le_bytes(); 9], "{value:e}");
        };
        for bits in 0..0x7c00u16 {
            let (low, high) = (f16::from_bits(bits).to_f32(), f16::from_bits(bits + 1).to_f32());
            let middle = if high.is_finite() { (low + high) / 2.0 } else { 65_520.0 };
            for value in [low.next_up(), middle, middle.next_down(), middle.next_up(), high.min(1e5).next_down()] {
                check(value);
                check(-value);
            }
        }
        for value in [0.0, 1e-45, 65_519.996, 65_536.0, f32::MAX, f32::INFINITY, f32::NAN, f32::MIN_POSITIVE] {
            // A NaN that signals, and one with a payload, too.
            check(f32::from_bits(value.to_bits() | 0x7fa0_2000));
            check(value);
            check(-value);
        }
    }
}
