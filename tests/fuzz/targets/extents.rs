//! Extent maps against a plain vector of bytes.

use std::sync::LazyLock;

use wmount::digest::Digest;
use wmount::error::{Error, Result};
use wmount::extent::{Blobs, Computed, ExtentMap};
use wmount::transform::{Bits, BlockSize, Float, Fp8, Transform};

use super::Numbers;

/// The longest file that is put together.
const MOST: usize = 1 << 16;

/// The blobs, made once: hashing them takes longer than all else.
static BLOBS: LazyLock<Patterns> = LazyLock::new(Patterns::new);

/// Blobs that follow a pattern.
struct Patterns([(Digest, Vec<u8>); 4]);

impl Patterns {
    fn new() -> Patterns {
        let blob = |len: usize, step: usize| {
            let bytes: Vec<u8> = (0..len).map(|at| (at * step + at / 251) as u8).collect();
            (Digest::of(&bytes), bytes)
        };
        Patterns([blob(1, 1), blob(100, 3), blob(1000, 7), blob(20_000, 37)])
    }
}

impl Blobs for Patterns {
    fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
        let blob = self.0.iter().find(|(other, _)| other == digest).and_then(|(_, bytes)| bytes.get(offset as usize..));
        let missing = || Error::Damaged { digest: *digest, fault: "a range that no blob has was read".into() };
        buf.copy_from_slice(blob.and_then(|bytes| bytes.get(..buf.len())).ok_or_else(missing)?);
        Ok(())
    }
}

fn transform(numbers: &mut Numbers) -> Transform {
    let float = [Float::F32, Float::F16, Float::BF16][usize::from(numbers.byte() % 3)];
    let block = [BlockSize::B32, BlockSize::B128][usize::from(numbers.byte() % 2)];
    match numbers.byte() % 7 {
        0 => Transform::F16(float),
        1 => Transform::Int8(float),
        2 => Transform::Block(float, Bits::Four, block),
        3 => Transform::Block(float, Bits::Five, block),
        4 => Transform::Adaptive(float),
        5 => Transform::Fp8(float, numbers.short(), Fp8::Codes),
        _ => Transform::Fp8(float, numbers.short(), Fp8::Scales),
    }
}

/// Puts a file together by the input's instructions, then reads ranges of it.
pub fn extents(input: &[u8]) {
    let (mut numbers, blobs) = (Numbers(input), &*BLOBS);
    let (mut map, mut naive) = (ExtentMap::new(), Vec::new());
    for _ in 0..numbers.byte() % 32 {
        if naive.len() > MOST {
            break;
        }
        match numbers.byte() % 6 {
            0 => {
                let len = numbers.byte();
                let bytes = numbers.take(len.into());
                map.push_inline(bytes);
                naive.extend(bytes);
            }
            1 => {
                let zeros = numbers.short();
                map.push_zeros(zeros);
                naive.resize(naive.len() + zeros as usize, 0);
            }
            2 => {
                let (digest, bytes) = &blobs.0[usize::from(numbers.byte() % 4)];
                let (offset, len) = (numbers.short(), numbers.short());
                let pushed = map.push_blob(*digest, bytes.len() as u64, offset, len);
                let range = bytes.get(offset as usize..(offset + len) as usize);
                assert_eq!(pushed.is_some(), range.is_some());
                naive.extend(range.unwrap_or_default());
            }
            3 => {
                let alignment = 1 << (numbers.byte() % 8);
                map.align(alignment);
                naive.resize(naive.len().next_multiple_of(alignment as usize), 0);
            }
            4 => {
                let (from, to) = (numbers.short(), numbers.short());
                let whole = map.clone();
                map.push_range(&whole, from..to);
                let to = naive.len().min(to as usize);
                naive.extend_from_within((from as usize).min(to)..to);
            }
            _ => {
                let transform = transform(&mut numbers);
                let (digest, bytes) = &blobs.0[usize::from(numbers.byte() % 4)];
                let (offset, input_len) = (numbers.short(), numbers.short());
                let computed = Computed { transform, digest: *digest, offset, input_len };
                let mut alone = ExtentMap::new();
                let pushed = alone.push_computed(computed, bytes.len() as u64);
                assert!(pushed.is_none() || offset + input_len <= bytes.len() as u64);
                map.append(&alone);
                naive.extend(alone.read_all(blobs).unwrap());
            }
        }
    }
    check(&map, &naive);
    assert!(map.read_all(blobs).unwrap() == naive);
    let mut again = ExtentMap::new();
    again.append(&map);
    assert!(again == map || again.read_all(blobs).unwrap() == naive);
    for _ in 0..32 {
        if numbers.is_empty() {
            break;
        }
        let (offset, len) = (numbers.short() as usize, numbers.short() as usize);
        let mut buf = vec![0xAA; len];
        let read = map.read(blobs, offset as u64, &mut buf).unwrap();
        assert!(buf[..read] == *naive.get(offset..naive.len().min(offset + len)).unwrap_or_default());
        assert!(buf[read..].iter().all(|&byte| byte == 0xAA));
        let mut part = ExtentMap::new();
        part.push_range(&map, offset as u64..(offset + len) as u64);
        assert!(part.read_all(blobs).unwrap() == buf[..read]);
    }
}

/// Extents follow each other without gap, none is empty, and they end where the file does.
fn check(map: &ExtentMap, naive: &[u8]) {
    let mut end = 0;
    for extent in map.extents() {
        assert!(extent.start == end && extent.len > 0);
        end += extent.len;
    }
    assert_eq!((end, map.size()), (naive.len() as u64, naive.len() as u64));
}
