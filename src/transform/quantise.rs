//! From values to small integers and back to bits, on lines of 32 values. A NaN counts as 0.
//!
//! The loops are compiled for several generations of processors; `multiversion` takes the best one when it runs.

use multiversion::multiversion;

use super::float::{TILE, from_half, to_half};

/// Values that always share a scale: every block is made of whole lines.
pub(super) const LINE: usize = 32;
/// Lines of a tile.
pub(super) const LINES: usize = TILE / LINE;

/// The largest quantised value of so many bits: the range is symmetric.
pub(super) const fn levels(bits: usize) -> f32 {
    ((1 << (bits - 1)) - 1) as f32
}

/// The largest absolute value of each line; infinity counts as the largest finite one.
///
/// Neighbours are compared until one value of each line is left: every step is a flat loop, which compilers make vectors
/// of. Of a loop over lines they would make gathers.
#[multiversion(targets("x86_64+avx2+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(super) fn peaks(values: &[f32; TILE], peaks: &mut [f32; LINES]) {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    // Among absolute values the order of the bits is that of the numbers, and integers have a vector maximum.
    let magnitude = |value: f32| {
        let bits = value.to_bits() & 0x7fff_ffff;
        if bits > INFINITY { 0 } else { bits }
    };
    let mut left = [0u32; TILE / 2];
    for (larger, &[a, b]) in left.iter_mut().zip(values.as_chunks().0) {
        *larger = magnitude(a).max(magnitude(b));
    }
    let left: [u32; TILE / 4] = larger_of_two(&left);
    let left: [u32; TILE / 8] = larger_of_two(&left);
    let left: [u32; TILE / 16] = larger_of_two(&left);
    let left: [u32; LINES] = larger_of_two(&left);
    for (peak, bits) in peaks.iter_mut().zip(left) {
        *peak = f32::from_bits(bits).min(f32::MAX);
    }
}

/// Each of `N` from its two neighbours in `values`, which are twice as many.
#[inline(always)]
fn larger_of_two<const N: usize>(values: &[u32]) -> [u32; N] {
    let mut larger = [0; N];
    for (larger, &[a, b]) in larger.iter_mut().zip(values.as_chunks().0) {
        *larger = a.max(b);
    }
    larger
}

/// The scales of blocks with these peaks, as stored, and as each block's values are divided by them.
///
/// They are finite: beyond the range of fp16 the largest values are cut off instead. A block without a scale is divided
/// by infinity: all of it is 0.
#[multiversion(targets("x86_64+avx2+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(super) fn scales(peaks: &[f32; LINES], levels: f32, scales: &mut [u16; LINES], divisors: &mut [f32; LINES]) {
    /// The largest fp16.
    const LARGEST: f32 = 65_504.0;
    for ((&peak, stored), divisor) in peaks.iter().zip(scales).zip(divisors) {
        let scale = peak / levels;
        *stored = to_half(if scale < LARGEST { scale } else { LARGEST });
        *divisor = if *stored == 0 { f32::INFINITY } else { from_half(*stored) };
    }
}

/// Each value over the divisor of its line, rounded half to even, as the low bits of a byte.
#[multiversion(targets("x86_64+avx2+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(super) fn quantise(values: &[f32], divisors: &[f32], levels: f32, codes: &mut [u8]) {
    /// Added to a small number it leaves no bits for a fraction: the sum is rounded to an integer, which its low bits are.
    const ROUNDER: f32 = 12_582_912.0;
    let lines = values.as_chunks::<LINE>().0.iter().zip(codes.as_chunks_mut::<LINE>().0);
    for ((line, codes), &divisor) in lines.zip(divisors) {
        for (code, &value) in codes.iter_mut().zip(line) {
            let ratio = value / divisor;
            let ratio = if ratio.is_nan() { 0.0 } else { ratio };
            let ratio = if ratio < levels { ratio } else { levels };
            let ratio = if ratio > -levels { ratio } else { -levels };
            *code = (ratio + ROUNDER).to_bits() as u8;
        }
    }
}

/// The low 4 bits of each byte, the first of two in the low half. `codes` is made of whole lines.
#[multiversion(targets("x86_64+avx2", "x86_64+ssse3"))]
pub(super) fn pack4(codes: &[u8], out: &mut [u8]) {
    for (codes, out) in codes.as_chunks::<LINE>().0.iter().zip(out.as_chunks_mut::<{ LINE / 2 }>().0) {
        for (&[low, high], out) in codes.as_chunks().0.iter().zip(out) {
            *out = low & 0xf | high << 4;
        }
    }
}

/// The low 5 bits of each byte as one stream, least significant bit first. `codes` is made of whole lines.
pub(super) fn pack5(codes: &[u8], out: &mut [u8]) {
    for (&codes, out) in codes.as_chunks().0.iter().zip(out.as_chunks_mut::<5>().0) {
        let codes = u64::from_le_bytes(codes);
        let pairs = codes & 0x001f_001f_001f_001f | codes >> 3 & 0x03e0_03e0_03e0_03e0;
        let quads = pairs & 0x0000_03ff_0000_03ff | pairs >> 6 & 0x000f_fc00_000f_fc00;
        let [a, b, c, d, e, ..] = (quads & 0x0f_ffff | quads >> 12 & 0xff_fff0_0000).to_le_bytes();
        *out = [a, b, c, d, e];
    }
}
