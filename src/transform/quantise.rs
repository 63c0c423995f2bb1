//! From values to small integers and back to bits. A NaN counts as 0.

use half::f16;

/// The largest absolute value; infinity counts as the largest finite one.
pub(super) fn max_abs(values: &[f32]) -> f32 {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    // Among absolute values the order of the bits is that of the numbers, and integers have a vector maximum.
    let max = values.iter().fold(0, |max: u32, value| {
        let bits = value.to_bits() & 0x7fff_ffff;
        max.max(if bits > INFINITY { 0 } else { bits })
    });
    f32::from_bits(max).min(f32::MAX)
}

/// The largest quantised value of so many bits: the range is symmetric.
pub(super) const fn levels(bits: usize) -> f32 {
    ((1 << (bits - 1)) - 1) as f32
}

/// The scale of a block, as stored. Finite: beyond the range of fp16 the largest values are cut off instead.
pub(super) fn scale(max: f32, levels: f32) -> f16 {
    f16::from_f32((max / levels).min(f16::MAX.to_f32()))
}

/// Each value divided by the scale and rounded half to even, as the low bits of a byte. With no scale all are 0.
pub(super) fn quantise(values: &[f32], scale: f32, levels: f32, out: &mut [u8]) {
    /// Added to a small number it leaves no bits for a fraction: the sum is rounded to an integer, which its low bits are.
    const ROUNDER: f32 = 12_582_912.0;
    if scale == 0.0 {
        return out.fill(0);
    }
    for (out, &value) in out.iter_mut().zip(values) {
        let value = if value.is_nan() { 0.0 } else { value };
        let ratio = value / scale;
        let ratio = if ratio < levels { ratio } else { levels };
        let ratio = if ratio > -levels { ratio } else { -levels };
        *out = (ratio + ROUNDER).to_bits() as u8;
    }
}

/// The low `BITS` bits of each byte as one stream, least significant bit first. `codes` is a multiple of 8.
pub(super) fn pack<const BITS: usize>(codes: &[u8], out: &mut [u8]) {
    for (&codes, out) in codes.as_chunks::<8>().0.iter().zip(out.chunks_exact_mut(BITS)) {
        let codes = u64::from_le_bytes(codes);
        let packed = match BITS {
            4 => {
                let pairs = codes & 0x0f0f_0f0f_0f0f_0f0f;
                let pairs = (pairs | pairs >> 4) & 0x00ff_00ff_00ff_00ff;
                let quads = (pairs | pairs >> 8) & 0x0000_ffff_0000_ffff;
                quads | quads >> 16
            }
            _ => {
                let pairs = codes & 0x001f_001f_001f_001f | codes >> 3 & 0x03e0_03e0_03e0_03e0;
                let quads = pairs & 0x0000_03ff_0000_03ff | pairs >> 6 & 0x000f_fc00_000f_fc00;
                quads & 0x0f_ffff | quads >> 12 & 0xff_fff0_0000
            }
        };
        out.copy_from_slice(&packed.to_le_bytes()[..BITS]);
    }
}
