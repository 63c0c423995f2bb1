//! Blocks of 32: those with the largest peaks stay fp16, the others are 4 bit integers with a scale.
//!
//! The output is a mask with a bit for each block, the scales, and the blocks. The survey is the mask and behind it, for
//! every 512 blocks, how many were kept before them: enough to find any block's place by looking at few bytes.

use multiversion::{multiversion, target::target_cfg_f};

use super::Input;
use super::float::{Float, TILE, store_f16};
use super::granules::{BATCH, with_scratch};
use super::int8::foreign;
use super::quantise::{LINE, LINES, levels, pack4, peaks, quantise, scales};
use super::survey::{PART, for_each_part};
use super::turn::{Turn, Turns};
use crate::error::{Error, Result};

/// Elements of a block.
pub(super) const BLOCK: usize = LINE;
/// Bytes of a block that is kept in fp16.
const KEPT: u64 = 64;
/// Bytes of one in 4 bits, and of its scale.
const PACKED: u64 = 16;
const SCALE: u64 = 2;
/// Blocks that are handled together: those of a tile.
const GROUP: u64 = LINES as u64;
/// Blocks for which the survey has one count.
const STRIDE: u64 = 512;

/// Blocks of a tensor at the most, which are 8 Gi elements: all of their scores are in memory at once.
const MOST: u64 = 1 << 28;

/// Blocks of a tensor from which on it is surveyed when no other of its size is: their scores are 64 MiB.
const LARGE: u64 = 1 << 24;

/// Who surveys a large tensor. A survey has all cores, so two at once would not end sooner.
static LARGE_ONES: Turns = Turns::new();

/// The lengths of the output's parts, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    blocks: u64,
    kept: u64,
    mask: u64,
    scales: u64,
    weights: u64,
}

impl Parts {
    /// `None` if there are too many elements.
    pub fn of(elements: u64) -> Option<Parts> {
        let blocks = Some(elements.div_ceil(BLOCK as u64)).filter(|blocks| *blocks <= MOST)?;
        let kept = blocks.div_ceil(10);
        let weights = kept.checked_mul(KEPT)?.checked_add((blocks - kept).checked_mul(PACKED)?)?;
        Some(Parts { blocks, kept, mask: blocks.div_ceil(8), scales: (blocks - kept) * SCALE, weights })
    }

    pub fn len(self) -> Option<u64> {
        (self.mask + self.scales).checked_add(self.weights)
    }
}

/// Which blocks are kept.
struct Mask<'a> {
    parts: Parts,
    bits: &'a [u8],
    counts: &'a [[u8; 8]],
}

impl<'a> Mask<'a> {
    fn of(parts: Parts, survey: &'a [u8]) -> Option<Mask<'a>> {
        let (bits, counts) = survey.split_at_checked(usize::try_from(parts.mask).ok()?)?;
        let (counts, rest) = counts.as_chunks();
        let whole = counts.len() as u64 == parts.blocks.div_ceil(STRIDE) && rest.is_empty();
        whole.then_some(Mask { parts, bits, counts })
    }

    /// How many blocks are kept before this stride; never more than there are, whatever a survey says that is another's.
    fn before(&self, stride: u64) -> u64 {
        u64::from_le_bytes(self.counts[stride as usize]).min(stride * STRIDE)
    }

    /// How many blocks a group has.
    fn blocks(&self, group: u64) -> u64 {
        GROUP.min(self.parts.blocks - group * GROUP)
    }

    /// A bit for each block of a group, 1 for those that are kept.
    fn group(&self, group: u64) -> u32 {
        let bytes = self.bits[(group * 4) as usize..].iter().take(4);
        let bits = bytes.rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
        bits & (u32::MAX >> (GROUP - self.blocks(group)))
    }

    /// The last group that starts at `at` or before, and its start, when kept and packed blocks have these lengths.
    fn find(&self, at: u64, kept: u64, packed: u64) -> (u64, u64) {
        let start = |stride: u64| self.before(stride) * kept + (stride * STRIDE - self.before(stride)) * packed;
        let (mut low, mut high) = (0, self.counts.len() as u64);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if start(middle) <= at { low = middle } else { high = middle }
        }
        let (mut group, mut start) = (low * STRIDE / GROUP, start(low));
        loop {
            let ones = u64::from(self.group(group).count_ones());
            let len = ones * kept + (GROUP - ones) * packed;
            if start + len > at || (group + 1) * GROUP >= self.parts.blocks {
                return (group, start);
            }
            (group, start) = (group + 1, start + len);
        }
    }
}

pub(super) fn read(float: Float, input: &dyn Input, offset: u64, mut out: &mut [u8]) -> Result<()> {
    let survey = input.survey()?;
    let parts = Parts::of(input.len() / float.bytes() as u64).ok_or_else(foreign)?;
    let mask = Mask::of(parts, &survey).ok_or_else(foreign)?;
    let mut at = offset;
    for (len, part) in [(parts.mask, Part::Mask), (parts.scales, Part::Scales), (parts.weights, Part::Weights)] {
        let here = usize::try_from(len.saturating_sub(at)).unwrap_or(usize::MAX).min(out.len());
        let (now, later) = out.split_at_mut(here);
        match part {
            _ if here == 0 => {}
            Part::Mask => now.copy_from_slice(&mask.bits[at as usize..at as usize + here]),
            Part::Scales => walk(float, input, &mask, at, now, (0, SCALE), put_scales)?,
            Part::Weights => walk(float, input, &mask, at, now, (KEPT, PACKED), put_blocks)?,
        }
        at = at.saturating_sub(len);
        out = later;
    }
    Ok(())
}

enum Part {
    Mask,
    Scales,
    Weights,
}

/// The output of one group.
type Output = [u8; GROUP as usize * KEPT as usize];

/// Fills `out` from `at` on with what `put` makes of each group: of kept blocks and of packed ones these lengths.
fn walk(
    float: Float,
    input: &dyn Input,
    mask: &Mask<'_>,
    at: u64,
    mut out: &mut [u8],
    (kept, packed): (u64, u64),
    put: impl Fn(&[f32; TILE], u32, &mut Output),
) -> Result<()> {
    let width = (TILE * float.bytes()) as u64;
    let (mut group, start) = mask.find(at, kept, packed);
    let mut skip = (at - start) as usize;
    let mut output = [0; size_of::<Output>()];
    let mut is_foreign = false;
    with_scratch(BATCH, |scratch| {
        while !out.is_empty() {
            // An estimate is enough: what is too little is made up for in the next round.
            let wanted = ((out.len() + skip) as u64).div_ceil(GROUP * packed).min(scratch.len() as u64 / width);
            let from = group * width;
            // A survey that keeps other blocks than there are leads past the end.
            let left = input.len().checked_sub(from).filter(|left| *left > 0).ok_or_else(foreign)?;
            let bytes = &mut scratch[..(wanted * width).min(left) as usize];
            input.read(from, bytes)?;
            float.for_each_tile(bytes, |tile| {
                if out.is_empty() {
                    return;
                }
                let bits = mask.group(group);
                put(tile, bits, &mut output);
                let (ones, blocks) = (u64::from(bits.count_ones()), mask.blocks(group));
                let Some(made) = output.get(skip..(ones * kept + (blocks - ones) * packed) as usize) else {
                    (out, is_foreign) = (&mut [], true);
                    return;
                };
                let len = made.len().min(out.len());
                let (now, later) = std::mem::take(&mut out).split_at_mut(len);
                now.copy_from_slice(&made[..len]);
                (out, skip, group) = (later, 0, group + 1);
            });
        }
        if is_foreign { Err(foreign()) } else { Ok(()) }
    })
}

/// How many blocks of a group are kept before this one.
fn kept_before(bits: u32, block: usize) -> usize {
    (bits & ((1 << block) - 1)).count_ones() as usize
}

/// The scales of the blocks that are not kept.
fn put_scales(tile: &[f32; TILE], bits: u32, out: &mut Output) {
    let (stored, _) = scales_of(tile);
    // What stands where a kept block's scale would be is overwritten by the next, or lies behind the end.
    for (block, scale) in stored.iter().enumerate() {
        let at = (block - kept_before(bits, block)) * SCALE as usize;
        out[at..at + SCALE as usize].copy_from_slice(&scale.to_le_bytes());
    }
}

/// The blocks.
fn put_blocks(tile: &[f32; TILE], bits: u32, out: &mut Output) {
    const PACKED_LEN: usize = PACKED as usize;
    let packed = packed(tile);
    let place = |block| block * PACKED_LEN + kept_before(bits, block) * (KEPT - PACKED) as usize;
    for (block, packed) in packed.iter().enumerate() {
        out[place(block)..][..PACKED_LEN].copy_from_slice(packed);
    }
    let mut left = bits;
    while left != 0 {
        let block = left.trailing_zeros() as usize;
        store_f16(&tile[block * BLOCK..][..BLOCK], &mut out[place(block)..][..KEPT as usize]);
        left &= left - 1;
    }
}

/// The scales of the blocks of a tile, and what their values are divided by.
fn scales_of(tile: &[f32; TILE]) -> ([u16; LINES], [f32; LINES]) {
    let (mut tops, mut stored, mut divisors) = ([0.0; LINES], [0; LINES], [0.0; LINES]);
    peaks(tile, &mut tops);
    scales(&tops, levels(4), &mut stored, &mut divisors);
    (stored, divisors)
}

/// The blocks of a tile in 4 bits.
fn packed(tile: &[f32; TILE]) -> [[u8; PACKED as usize]; LINES] {
    let (_, divisors) = scales_of(tile);
    let mut codes = [0; TILE];
    quantise(tile, &divisors, levels(4), &mut codes);
    let mut packed = [[0; PACKED as usize]; LINES];
    pack4(&codes, packed.as_flattened_mut());
    packed
}

/// Chooses the blocks that are kept.
pub(super) fn survey(float: Float, input: &dyn Input) -> Result<Vec<u8>> {
    let parts = Parts::of(input.len() / float.bytes() as u64).ok_or_else(foreign)?;
    let width = BLOCK * float.bytes();
    let in_part = PART / width;
    let turn = (parts.blocks >= LARGE).then(|| LARGE_ONES.take());
    let mut scores = Vec::new();
    let blocks = usize::try_from(parts.blocks).map_err(|_| foreign())?;
    scores.try_reserve_exact(blocks).map_err(|_| {
        let bytes = size_of::<u32>() as u64 * parts.blocks;
        Error::Invalid(format!("a tensor of {} bytes needs {bytes} bytes of memory for its scores", input.len()))
    })?;
    scores.resize(blocks, 0u32);
    let range = |(index, scores): &(usize, &mut [u32])| {
        let from = *index as u64 * (in_part * width) as u64;
        (from, ((scores.len() * width) as u64).min(input.len() - from) as usize)
    };
    for_each_part(input, scores.chunks_mut(in_part).enumerate(), range, |(_, scores), bytes| {
        turn.iter().for_each(Turn::step);
        let mut tiles = scores.chunks_mut(LINES);
        float.for_each_tile(bytes, |tile| {
            if let Some(scores) = tiles.next() {
                score(tile, scores);
            }
        });
    })?;
    Ok(choose(&scores, parts))
}

/// Square of the largest value over the sum of all squares, as bits, whose order is that of the numbers.
fn score(tile: &[f32; TILE], scores: &mut [u32]) {
    let (mut tops, mut sums, mut ratios) = ([0.0; LINES], [0.0; LINES], [0; LINES]);
    peaks(tile, &mut tops);
    energies(tile, &mut sums);
    // No finite values have such a sum.
    if !sums.iter().all(|sum| sum.is_finite()) {
        let finite = |value: f32| if value.is_nan() { 0.0 } else { value.clamp(f32::MIN, f32::MAX) };
        energies(&tile.map(finite), &mut sums);
    }
    compare(&tops, &sums, &mut ratios);
    scores.copy_from_slice(&ratios[..scores.len()]);
}

/// The sum of the squares of each line.
///
/// The order of the additions is part of the format: another one may round another way and keep another block. A square is
/// exact in fp64, so it makes no difference whether it is made and added in one step.
#[multiversion(targets("x86_64+avx2+fma+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2+fma"))]
fn energies(tile: &[f32; TILE], energies: &mut [f64; LINES]) {
    for (line, energy) in tile.as_chunks::<BLOCK>().0.iter().zip(energies) {
        // Seen one by one, lines are summed in vectors; a loop over them would be turned into gathers.
        let line = std::hint::black_box(line);
        let mut sums = [0.0f64; 8];
        for eight in line.as_chunks::<8>().0 {
            for (sum, &value) in sums.iter_mut().zip(eight) {
                let value = f64::from(value);
                let in_one = target_cfg_f!(target_feature = "fma");
                *sum = if in_one { value.mul_add(value, *sum) } else { value * value + *sum };
            }
        }
        let [a, b, c, d, e, f, g, h] = sums;
        *energy = ((a + e) + (c + g)) + ((b + f) + (d + h));
    }
}

/// The score of each line.
#[multiversion(targets("x86_64+avx2+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
fn compare(tops: &[f32; LINES], sums: &[f64; LINES], scores: &mut [u32; LINES]) {
    for ((score, &top), &sum) in scores.iter_mut().zip(tops).zip(sums) {
        let ratio = (f64::from(top) * f64::from(top) / sum) as f32;
        *score = if sum == 0.0 { 0 } else { ratio.to_bits() };
    }
}

/// The survey of these scores: the largest are kept, of equal ones those that come first.
fn choose(scores: &[u32], parts: Parts) -> Vec<u8> {
    let (least, mut ties) = threshold(scores, parts.kept);
    let mut bits = vec![0u8; scores.len().div_ceil(8)];
    let mut counts = Vec::with_capacity(scores.len().div_ceil(STRIDE as usize) * 8);
    let mut before = 0u64;
    for (scores, bits) in scores.chunks(STRIDE as usize).zip(bits.chunks_mut(STRIDE as usize / 8)) {
        counts.extend(before.to_le_bytes());
        for (scores, bits) in scores.chunks(8).zip(bits) {
            for (index, &score) in scores.iter().enumerate() {
                let tie = score == least && ties > 0;
                ties -= u64::from(tie);
                *bits |= u8::from(score > least || tie) << index;
            }
            before += u64::from(bits.count_ones());
        }
    }
    bits.extend(counts);
    bits
}

/// The `kept`th largest score, and how many of the scores equal to it are kept. Looks at 16 bits at a time.
fn threshold(scores: &[u32], kept: u64) -> (u32, u64) {
    // One table for both: making it takes longer than counting.
    let mut counts = vec![0u64; 1 << 16];
    let mut nth = |halves: &mut dyn Iterator<Item = u32>, kept: u64| {
        counts.fill(0);
        halves.for_each(|half| counts[half as usize] += 1);
        let mut left = kept;
        for (half, &count) in counts.iter().enumerate().rev() {
            if count >= left {
                return (half as u32, left);
            }
            left -= count;
        }
        (0, left)
    };
    let (high, left) = nth(&mut scores.iter().map(|score| score >> 16), kept);
    let same = scores.iter().filter(|&score| score >> 16 == high);
    let (low, left) = nth(&mut same.map(|score| score & 0xffff), left);
    (high << 16 | low, left)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Endless, and read to find out who reads.
    struct Watched(u64);

    impl Input for Watched {
        fn len(&self) -> u64 {
            self.0
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
            Err(Error::Invalid(if LARGE_ONES.is_taken() { "alone" } else { "among others" }.into()))
        }

        fn survey(&self) -> Result<std::sync::Arc<[u8]>> {
            unreachable!("the survey asks for none")
        }
    }

    #[test]
    fn a_large_tensor_is_surveyed_when_no_other_is() {
        let told = |blocks: u64| survey(Float::F16, &Watched(blocks * BLOCK as u64 * 2)).unwrap_err().to_string();
        assert_eq!((told(LARGE - 1), told(LARGE)), ("among others".into(), "alone".into()));
    }

    /// The page's words in plain arithmetic.
    fn plain(line: &[f32]) -> u32 {
        let line = line.iter().map(|value| if value.is_nan() { 0.0 } else { value.abs().min(f32::MAX) });
        let (mut sums, mut top) = ([0.0f64; 8], 0.0);
        for (index, value) in line.enumerate() {
            let square = f64::from(value) * f64::from(value);
            sums[index % 8] += square;
            top = value.max(top);
        }
        let sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
        if sum == 0.0 { 0 } else { ((f64::from(top) * f64::from(top) / sum) as f32).to_bits() }
    }

    #[test]
    fn scores_are_those_of_plain_arithmetic() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -0.0, 1e-45, f32::MIN_POSITIVE];
        let mut state = 1u32;
        for round in 0..200 {
            let mut tile: [f32; TILE] = std::array::from_fn(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Every fourth tile has any bits at all, the others values of all sizes that occur.
                if round % 4 == 0 { f32::from_bits(state) } else { (state as f32 - 2e9) * 2f32.powi(round % 60 - 60) }
            });
            tile[..BLOCK].fill(0.0);
            tile[round as usize..][..odd.len()].copy_from_slice(if round % 2 == 0 { &odd } else { &[1.5; 7] });
            let mut scores = [0; LINES];
            score(&tile, &mut scores);
            assert_eq!(scores.to_vec(), tile.chunks(BLOCK).map(plain).collect::<Vec<_>>());
        }
    }
}
