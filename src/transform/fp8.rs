//! Signed 8 bit floats (e4m3fn) with an fp32 scale for each output row, and the digest of all of them.
//!
//! A row is what one index of the first dimension selects. Its scale is its largest finite absolute value over 448, the
//! largest that e4m3fn has, and no subnormal number: some devices would take one for 0. A row without such a value has the
//! scale 1. An element is divided by its row's scale in fp32 and rounded to the nearest e4m3fn, halves to the even one;
//! what is larger than 448, which infinity is, becomes 448. The sign stays, also that of zeros. A NaN stays one, 0x7f or 0xff.

use multiversion::multiversion;

use super::Input;
use super::float::{Float, TILE, from_half};
use super::granules::{BATCH, with_scratch};
use super::int8::foreign;
use super::survey::PART;
use crate::digest::Hasher;
use crate::error::Result;

/// The largest number of the encoding.
const MAX: f32 = 448.0;
/// Bytes of a scale.
pub(super) const SCALE: u64 = 4;
/// Characters of a digest.
pub(super) const DIGEST: u64 = 64;
/// Input bytes of a row from which on no read of codes looks for its scale itself: it would read the whole row.
const LONG: u64 = 1 << 20;
/// Input bytes of a row from which on the survey keeps its scale: all of them are then a 64th of the tensor at the most.
const KEPT: u64 = 256;

/// Which of the files of an encoded tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// The elements, a byte each.
    Codes,
    /// The scales, little-endian fp32.
    Scales,
    /// The sha256 of the elements, in lower-case hexadecimal.
    Digest,
}

/// The rows of a tensor, each of so many elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub float: Float,
    pub elements: u64,
}

impl Rows {
    fn bytes(self) -> u64 {
        self.elements * self.float.bytes() as u64
    }

    fn count(self, input: &dyn Input) -> u64 {
        input.len() / self.bytes()
    }

    fn are_long(self) -> bool {
        self.bytes() > LONG
    }

    fn are_scales_kept(self) -> bool {
        self.bytes() >= KEPT
    }

    /// Whether a reader of this part needs the survey.
    pub fn is_surveyed(self, part: Fp8) -> bool {
        match part {
            Fp8::Codes => self.are_long(),
            Fp8::Scales => self.are_scales_kept(),
            Fp8::Digest => true,
        }
    }

    /// The digest of the codes, and behind it the scales if they are kept.
    pub fn survey(self, input: &dyn Input) -> Result<Vec<u8>> {
        let mut survey = vec![0; DIGEST as usize];
        if self.are_long() {
            survey.resize(usize::try_from(DIGEST + self.count(input) * SCALE).map_err(|_| foreign())?, 0);
            self.read_scales(input, 0, &mut survey[DIGEST as usize..])?;
        }
        let (mut hasher, mut at, mut codes) = (Hasher::new(), 0, Vec::new());
        let len = self.count(input) * self.elements;
        while at < len {
            // Whole rows, where they are short: no scale is found twice.
            let rows = (PART as u64 / self.elements).max(1) * self.elements;
            let piece = if self.are_long() { PART as u64 } else { rows };
            codes.resize((len - at).min(piece) as usize, 0);
            match self.are_long() {
                true => self.read_long(input, &survey[DIGEST as usize..], at, &mut codes)?,
                false => self.read_short(input, at, &mut codes, |scale| {
                    if self.are_scales_kept() {
                        survey.extend(scale.to_le_bytes());
                    }
                })?,
            }
            hasher.update(&codes);
            at += codes.len() as u64;
        }
        survey[..DIGEST as usize].copy_from_slice(hasher.finish().hex().as_bytes());
        Ok(survey)
    }

    pub fn read(self, part: Fp8, input: &dyn Input, offset: u64, out: &mut [u8]) -> Result<()> {
        let known = |from: u64, out: &mut [u8]| {
            let survey = input.survey()?;
            let from = usize::try_from(from).unwrap_or(usize::MAX);
            let range = survey.get(from..from.saturating_add(out.len())).ok_or_else(foreign)?;
            out.copy_from_slice(range);
            Ok(())
        };
        match part {
            Fp8::Codes if self.are_long() => {
                let survey = input.survey()?;
                self.read_long(input, survey.get(DIGEST as usize..).ok_or_else(foreign)?, offset, out)
            }
            Fp8::Codes => self.read_short(input, offset, out, |_| ()),
            Fp8::Scales if self.are_scales_kept() => known(DIGEST + offset, out),
            Fp8::Scales => self.read_scales(input, offset, out),
            Fp8::Digest => known(offset, out),
        }
    }

    /// Whole rows are read, their scales found, and what is asked for is encoded. `found` is told of each scale.
    fn read_short(self, input: &dyn Input, offset: u64, mut out: &mut [u8], mut found: impl FnMut(f32)) -> Result<()> {
        let (mut row, mut skip) = (offset / self.elements, (offset % self.elements) as usize);
        let (elements, bytes) = (self.elements as usize, self.bytes() as usize);
        let batch = (BATCH / bytes).max(1);
        with_scratch(batch * bytes, |scratch| {
            while !out.is_empty() {
                let count = (skip + out.len()).div_ceil(elements).min(batch);
                let rows = &mut scratch[..count * bytes];
                input.read(row * self.bytes(), rows)?;
                for values in rows.chunks_exact(bytes) {
                    let len = (elements - skip).min(out.len());
                    let (now, later) = std::mem::take(&mut out).split_at_mut(len);
                    let scale = scale(self.peak(values));
                    found(scale);
                    self.encode(&values[skip * self.float.bytes()..][..len * self.float.bytes()], scale, now);
                    (out, skip) = (later, 0);
                }
                row += count as u64;
            }
            Ok(())
        })
    }

    /// The scales are known: only what is asked for is read.
    fn read_long(self, input: &dyn Input, scales: &[u8], offset: u64, mut out: &mut [u8]) -> Result<()> {
        let (width, mut at) = (self.float.bytes(), offset);
        let scales = scales.as_chunks().0;
        with_scratch(BATCH, |scratch| {
            while !out.is_empty() {
                let (row, skip) = (at / self.elements, at % self.elements);
                let scale = scales.get(row as usize).copied().map(f32::from_le_bytes).ok_or_else(foreign)?;
                let len = out.len().min(BATCH / width).min((self.elements - skip) as usize);
                let values = &mut scratch[..len * width];
                input.read(at * width as u64, values)?;
                let (now, later) = std::mem::take(&mut out).split_at_mut(len);
                self.encode(values, scale, now);
                at += len as u64;
                out = later;
            }
            Ok(())
        })
    }

    fn read_scales(self, input: &dyn Input, offset: u64, mut out: &mut [u8]) -> Result<()> {
        let (mut row, mut skip) = (offset / SCALE, (offset % SCALE) as usize);
        let mut scratch = Vec::new();
        while !out.is_empty() {
            let rows = (skip + out.len()).div_ceil(SCALE as usize) as u64;
            let batch = (PART as u64 / self.bytes()).clamp(1, rows);
            let mut peaks = vec![0.0f32; batch as usize];
            // A long row comes in several pieces, short ones come many in one.
            let (start, end) = (row * self.bytes(), (row + batch) * self.bytes());
            let mut at = start;
            while at < end {
                scratch.resize((end - at).min(PART as u64) as usize, 0);
                input.read(at, &mut scratch)?;
                let index = ((at - start) / self.bytes()) as usize;
                let pieces = scratch.chunks(self.bytes().min(PART as u64) as usize);
                for (peak, values) in peaks[index..].iter_mut().zip(pieces) {
                    *peak = peak.max(self.peak(values));
                }
                at += scratch.len() as u64;
            }
            for peak in peaks {
                let len = (SCALE as usize - skip).min(out.len());
                let (now, later) = out.split_at_mut(len);
                now.copy_from_slice(&scale(peak).to_le_bytes()[skip..skip + len]);
                (out, skip) = (later, 0);
            }
            row += batch;
        }
        Ok(())
    }

    /// The largest finite absolute value.
    fn peak(self, bytes: &[u8]) -> f32 {
        match self.float {
            // Among absolute values the order of the bits is that of the numbers, also of those that bf16 has left out.
            Float::BF16 => f32::from_bits(u32::from(peak16(bytes, 0x7f80)) << 16),
            Float::F16 => from_half(peak16(bytes, 0x7c00)),
            Float::F32 => f32::from_bits(peak32(bytes)),
        }
    }

    fn encode(self, bytes: &[u8], scale: f32, out: &mut [u8]) {
        let mut tile = [0.0; TILE];
        for (bytes, out) in bytes.chunks(TILE * self.float.bytes()).zip(out.chunks_mut(TILE)) {
            let values = &mut tile[..out.len()];
            self.float.load(bytes, values);
            encode(values, scale, out);
        }
    }
}

/// The scale of a row with this peak.
fn scale(peak: f32) -> f32 {
    if peak == 0.0 { 1.0 } else { (peak / MAX).max(f32::MIN_POSITIVE) }
}

#[multiversion(targets("x86_64+avx2", "x86_64+sse4.1"))]
fn peak16(bytes: &[u8], infinity: u16) -> u16 {
    let (lines, rest) = bytes.as_chunks::<2>().0.as_chunks::<16>();
    let magnitude = |raw: &[u8; 2]| {
        let bits = u16::from_le_bytes(*raw) & 0x7fff;
        if bits >= infinity { 0 } else { bits }
    };
    let mut lanes = [0; 16];
    for line in lines {
        for (lane, raw) in lanes.iter_mut().zip(line) {
            *lane = magnitude(raw).max(*lane);
        }
    }
    lanes.into_iter().chain(rest.iter().map(magnitude)).fold(0, u16::max)
}

#[multiversion(targets("x86_64+avx2", "x86_64+sse4.1"))]
fn peak32(bytes: &[u8]) -> u32 {
    let (lines, rest) = bytes.as_chunks::<4>().0.as_chunks::<16>();
    let magnitude = |raw: &[u8; 4]| {
        let bits = u32::from_le_bytes(*raw) & 0x7fff_ffff;
        if bits >= f32::INFINITY.to_bits() { 0 } else { bits }
    };
    let mut lanes = [0; 16];
    for line in lines {
        for (lane, raw) in lanes.iter_mut().zip(line) {
            *lane = magnitude(raw).max(*lane);
        }
    }
    lanes.into_iter().chain(rest.iter().map(magnitude)).fold(0, u32::max)
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2", "x86_64+sse4.1"))]
fn encode(values: &[f32], scale: f32, out: &mut [u8]) {
    /// Values from here on are normal in e4m3fn.
    const NORMAL: f32 = 0.015_625;
    /// Its last bit is worth 1/512, as that of the subnormal numbers: the sum with one of them is rounded to it.
    const ROUNDER: f32 = 16_384.0;
    for (out, &value) in out.iter_mut().zip(values) {
        let ratio = value / scale;
        let sign = (value.to_bits() >> 24) & 0x80;
        let size = ratio.abs();
        let size = if size < MAX { size } else { MAX };
        let bits = size.to_bits();
        // Three bits of the fraction stay; the exponents' biases are 127 and 7.
        let normal = ((bits + 0x7_ffff + ((bits >> 20) & 1)) >> 20).wrapping_sub(120 << 3);
        let subnormal = (size + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
        let code = if size < NORMAL { subnormal } else { normal };
        let code = if value.is_nan() { 0x7f } else { code };
        *out = (code | sign) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code, from its definition.
    fn decode(code: u8) -> f32 {
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let size = match exponent {
            0 => fraction / 512.0,
            15 if fraction == 7.0 => f32::NAN,
            _ => (1.0 + fraction / 8.0) * 2.0f32.powi(exponent - 7),
        };
        if code & 0x80 == 0 { size } else { -size }
    }

    fn encode_one(value: f32) -> u8 {
        let mut code = [0];
        encode(&[value], 1.0, &mut code);
        code[0]
    }

    #[test]
    fn every_code_is_its_own_encoding() {
        for code in 0..=255 {
            assert_eq!(encode_one(decode(code)), code, "{code:#x}");
        }
    }

    #[test]
    fn between_two_codes_the_nearer_wins_and_the_even_one_of_two_as_near() {
        for code in 0..0x7e {
            let (low, high) = (decode(code), decode(code + 1));
            let middle = (low + high) / 2.0;
            let even = code + (code & 1);
            for (value, expected) in [(middle, even), (middle.next_down(), code), (middle.next_up(), code + 1)] {
                assert_eq!(encode_one(value), expected, "{value}");
                assert_eq!(encode_one(-value), expected | 0x80, "-{value}");
            }
        }
    }

    #[test]
    fn what_is_too_large_is_cut_off_and_what_is_no_number_stays_none() {
        for (value, code) in [
            (449.0, 0x7e),
            (480.0, 0x7e),
            (f32::MAX, 0x7e),
            (f32::NEG_INFINITY, 0xfe),
            (f32::NAN, 0x7f),
            (-f32::NAN, 0xff),
            (1e-45, 0),
            (-0.0, 0x80),
        ] {
            assert_eq!(encode_one(value), code, "{value}");
        }
    }

    #[test]
    fn scales() {
        assert_eq!(scale(0.0), 1.0);
        assert_eq!(scale(448.0), 1.0);
        assert_eq!(scale(1e-45), f32::MIN_POSITIVE);
        let peak = |values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            Rows { float: Float::F32, elements: 1 }.peak(&bytes)
        };
        assert_eq!(peak(&[1.0, -3.0, f32::NAN, f32::INFINITY, 2.0]), 3.0);
        assert_eq!(peak(&[f32::NAN, f32::NEG_INFINITY, 0.0]), 0.0);
    }
}
