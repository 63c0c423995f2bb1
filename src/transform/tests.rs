use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

const ALL: [fn(Float) -> Transform; 7] = [
    Transform::F16,
    Transform::Int8,
    |float| Transform::Block(float, Bits::Four, BlockSize::B32),
    |float| Transform::Block(float, Bits::Four, BlockSize::B128),
    |float| Transform::Block(float, Bits::Five, BlockSize::B32),
    |float| Transform::Block(float, Bits::Five, BlockSize::B128),
    Transform::Adaptive,
];

struct Memory {
    bytes: Vec<u8>,
    survey: Arc<[u8]>,
}

impl Input for Memory {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        buf.copy_from_slice(&self.bytes[offset as usize..][..buf.len()]);
        Ok(())
    }

    fn survey(&self) -> Result<Arc<[u8]>> {
        Ok(self.survey.clone())
    }
}

fn input(transform: Transform, values: &[f32]) -> Memory {
    let bytes = values.iter().flat_map(|&value| match transform.float() {
        Float::F32 => value.to_le_bytes().to_vec(),
        Float::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Float::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    });
    let mut input = Memory { bytes: bytes.collect(), survey: Arc::from([]) };
    input.survey = transform.survey(&input).expect("memory is readable").into();
    input
}

fn read(transform: Transform, input: &Memory, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0xAA; len];
    transform.read(input, offset, &mut out).expect("memory is readable");
    out
}

fn whole(transform: Transform, input: &Memory) -> Vec<u8> {
    let len = transform.output_len(input.len()).expect("whole elements");
    read(transform, input, 0, len as usize)
}

fn float() -> impl Strategy<Value = Float> {
    prop_oneof![Just(Float::F32), Just(Float::F16), Just(Float::BF16)]
}

/// Many sizes around the blocks' and the tiles', values of many magnitudes.
fn values() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![8 => -2.0f32..2.0, 1 => -1e4f32..1e4, 1 => Just(0.0f32), 1 => -1e-3f32..1e-3];
    let len = prop_oneof![1usize..300, 1000usize..1100, 4000usize..4200];
    len.prop_flat_map(move |len| prop::collection::vec(value.clone(), len))
}

/// The integers of a bit stream.
fn unpack(bits: usize, bytes: &[u8], count: usize) -> Vec<i32> {
    let bit = |at: usize| i32::from(bytes[at / 8] >> (at % 8) & 1);
    let code = |index: usize| (0..bits).map(|at| bit(index * bits + at) << at).sum::<i32>();
    (0..count).map(|index| (code(index) << (32 - bits)) >> (32 - bits)).collect()
}

/// Each value is the scale times its integer, to half a scale; a scale below the normal fp16 numbers is itself inexact.
fn check_block(values: &[f32], scale: f32, integers: &[i32]) -> Result<(), TestCaseError> {
    for (&value, &integer) in values.iter().zip(integers) {
        let error = (value - scale * integer as f32).abs();
        let largest = values.iter().fold(0.0f32, |max, value| max.max(value.abs()));
        if scale >= 6.2e-5 {
            prop_assert!(error <= scale / 2.0 * 1.0001, "{value} {scale} {integer}");
        }
        prop_assert!(error <= largest);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_range_is_that_of_the_whole(
        values in values(), float in float(), index in 0..ALL.len(),
        a in any::<prop::sample::Index>(), len in prop_oneof![0usize..40, 0usize..10_000],
    ) {
        let transform = ALL[index](float);
        let input = input(transform, &values);
        let whole = whole(transform, &input);
        let offset = a.index(whole.len());
        let len = len.min(whole.len() - offset);
        prop_assert_eq!(&read(transform, &input, offset as u64, len), &whole[offset..offset + len]);
    }

    #[test]
    fn errors_are_at_most_half_a_scale(values in values(), index in 1..6usize) {
        let transform = ALL[index](Float::F32);
        let bytes = whole(transform, &input(transform, &values));
        let Transform::Block(_, bits, block) = transform else {
            let scale = f32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
            return check_block(&values, scale, &unpack(8, &bytes[4..], values.len()));
        };
        for (values, bytes) in values.chunks(block.elements()).zip(bytes.chunks(bits.granule(block))) {
            let scale = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            let integers = unpack(bits.count(), &bytes[2..], block.elements());
            check_block(values, scale, &integers)?;
            prop_assert!(integers[values.len()..].iter().all(|&integer| integer == 0));
        }
    }

    #[test]
    fn adaptive_keeps_a_tenth_as_it_is(values in values()) {
        let transform = Transform::Adaptive(Float::F32);
        let bytes = whole(transform, &input(transform, &values));
        let blocks: Vec<&[f32]> = values.chunks(32).collect();
        let (mask, rest) = bytes.split_at(blocks.len().div_ceil(8));
        let kept: Vec<bool> = (0..blocks.len()).map(|block| mask[block / 8] >> (block % 8) & 1 == 1).collect();
        let count = kept.iter().filter(|&&kept| kept).count();
        prop_assert_eq!(count, blocks.len().div_ceil(10));
        prop_assert_eq!(mask.iter().map(|byte| byte.count_ones()).sum::<u32>() as usize, count);
        let (scales, mut weights) = rest.split_at(2 * (blocks.len() - count));
        let mut scales = scales.chunks(2).map(|bytes| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32());
        for (values, kept) in blocks.into_iter().zip(kept) {
            let (block, rest) = weights.split_at(if kept { 64 } else { 16 });
            weights = rest;
            if kept {
                let expected: Vec<u8> = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
                prop_assert_eq!(&block[..expected.len()], &expected);
            } else {
                check_block(values, scales.next().expect("one for each"), &unpack(4, block, 32))?;
            }
        }
        prop_assert!(weights.is_empty() && scales.next().is_none());
    }
}

proptest! {
    #[test]
    fn a_range_of_fp8_rows_is_that_of_the_whole(
        values in values(), float in float(), row in 1usize..700, part in 0..3usize,
        a in any::<prop::sample::Index>(), len in prop_oneof![0usize..40, 0usize..10_000],
    ) {
        let whole_rows = values.len() / row * row;
        prop_assume!(whole_rows > 0);
        let transform = Transform::Fp8(float, row as u64, [Fp8::Codes, Fp8::Scales, Fp8::Digest][part]);
        let input = input(transform, &values[..whole_rows]);
        let whole = whole(transform, &input);
        let offset = a.index(whole.len());
        let len = len.min(whole.len() - offset);
        prop_assert_eq!(&read(transform, &input, offset as u64, len), &whole[offset..offset + len]);
    }
}

#[test]
fn long_fp8_rows_are_those_of_the_same_values() {
    // Row lengths on both sides of the one from which on the scales are surveyed.
    let row = (1 << 19) + 3;
    let values: Vec<f32> = (0..2 * row).map(|index| ((index * 7919 % 1009) as f32 - 500.0) * 0.01).collect();
    let of = |float, part| {
        let transform = Transform::Fp8(float, row as u64, part);
        whole(transform, &input(transform, &values))
    };
    let exact: Vec<f32> = values.iter().map(|&value| f16::from_f32(value).to_f32()).collect();
    let transform = Transform::Fp8(Float::F32, row as u64, Fp8::Codes);
    assert!(of(Float::F16, Fp8::Codes) == whole(transform, &input(transform, &exact)));
    let scales: Vec<f32> =
        of(Float::F32, Fp8::Scales).as_chunks().0.iter().map(|&raw| f32::from_le_bytes(raw)).collect();
    let peak = |values: &[f32]| values.iter().fold(0.0f32, |max, value| max.max(value.abs()));
    assert_eq!(scales, [peak(&values[..row]) / 448.0, peak(&values[row..]) / 448.0]);
    let digest = crate::digest::Digest::of(&of(Float::F32, Fp8::Codes)).hex().into_bytes();
    assert_eq!(of(Float::F32, Fp8::Digest), digest);
}

#[test]
fn bytes_of_small_blocks() {
    let transform = Transform::Block(Float::F32, Bits::Four, BlockSize::B32);
    // The scale is 1; halves go to the even neighbour.
    let bytes = whole(transform, &input(transform, &[7.0, -7.0, 0.5, 1.5, -2.5, f32::NAN]));
    assert_eq!(bytes[..5], [0x00, 0x3c, 0x97, 0x20, 0x0e]);
    assert!(bytes.len() == 18 && bytes[5..].iter().all(|&byte| byte == 0));
    let transform = Transform::Block(Float::F32, Bits::Five, BlockSize::B32);
    let bytes = whole(transform, &input(transform, &[15.0, -15.0, 1.0]));
    // 01111, 10001, 00001 from the least significant bit on.
    assert_eq!(bytes[..4], [0x00, 0x3c, 0b0010_1111, 0b0000_0110]);
}

#[test]
fn values_that_are_no_numbers() {
    let odd = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0, f32::MAX, -0.0, f32::MIN_POSITIVE, 1e-40];
    for transform in ALL.map(|transform| transform(Float::F32)) {
        let input = input(transform, &odd);
        let bytes = whole(transform, &input);
        match transform {
            Transform::F16(_) => assert_eq!(bytes[..4], [0x00, 0x7c, 0x00, 0xfc]),
            Transform::Int8(_) => assert_eq!(bytes[4..], [127, 0x81, 0, 0, 127, 0, 0, 0]),
            Transform::Block(..) => assert_eq!(bytes[..2], f16::MAX.to_le_bytes()),
            Transform::Adaptive(_) => assert_eq!(bytes[0], 1),
            Transform::Fp8(..) => {}
        }
    }
    let transform = Transform::Block(Float::F32, Bits::Four, BlockSize::B128);
    assert!(whole(transform, &input(transform, &[1e-9; 130])).iter().all(|&byte| byte == 0));
}

#[test]
fn equal_blocks_are_kept_from_the_first_on() {
    let transform = Transform::Adaptive(Float::F32);
    let input = input(transform, &[1.0; 32 * 25]);
    assert_eq!(whole(transform, &input)[..4], [0b111, 0, 0, 0]);
    let mut values = [1.0; 32 * 25];
    values[32 * 24] = 5.0;
    let input = self::input(transform, &values);
    assert_eq!(whole(transform, &input)[..4], [0b11, 0, 0, 1]);
}

#[test]
fn lengths() {
    for transform in ALL.map(|transform| transform(Float::BF16)) {
        assert_eq!(transform.output_len(3), None);
    }
    let of = |index: usize, elements: u64| ALL[index](Float::F32).output_len(4 * elements);
    let lengths: Vec<_> = (0..ALL.len()).map(|index| of(index, 1000)).collect();
    let adaptive = 4 + 2 * 28 + 64 * 4 + 16 * 28;
    assert_eq!(lengths, [2000, 1004, 18 * 32, 66 * 8, 22 * 32, 82 * 8, adaptive].map(Some));
    // The scores of more blocks are not held in memory.
    assert!([(8 << 30, true), ((8 << 30) + 1, false)].iter().all(|(len, fits)| of(6, *len).is_some() == *fits));
}
