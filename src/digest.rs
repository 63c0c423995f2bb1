//! [`Digest`], the sha256 that names a blob, and [`Hasher`], which computes one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::Digest as _;
use sha2::block_api::compress256;

use crate::chunks::for_each_to_the_end;

/// The value of each character that is a hex digit, and 255 for all others.
const HEX: [u8; 256] = {
    let mut values = [255; 256];
    let mut value = 0;
    while value < 16 {
        values[b"0123456789abcdef"[value] as usize] = value as u8;
        values[b"0123456789ABCDEF"[value] as usize] = value as u8;
        value += 1;
    }
    values
};

/// A sha256.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        let mut hasher = Hasher::new();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The digest of all that `read` gives from an offset on, which says how many bytes it has read, 0 at the end.
    pub fn of_all<E>(read: impl FnMut(u64, &mut [u8]) -> Result<usize, E>) -> Result<Digest, E> {
        let mut hasher = Hasher::new();
        for_each_to_the_end(0, read, |chunk| {
            hasher.update(chunk);
            Ok(())
        })?;
        Ok(hasher.finish())
    }

    /// That content with the digest `actual` is not what this one names, in words.
    pub fn check(&self, actual: Digest) -> Result<(), String> {
        if actual == *self { Ok(()) } else { Err(format!("its content has the digest {actual}")) }
    }

    /// A digest that is known.
    pub fn from_bytes(bytes: [u8; 32]) -> Digest {
        Digest(bytes)
    }

    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The file name of the blob: `sha256-<64 hex>`.
    pub fn file_name(&self) -> String {
        format!("sha256-{}", self.hex())
    }

    /// Reads a blob's file name; `None` for anything but `sha256-` and 64 lower-case hex digits.
    pub fn from_file_name(name: &str) -> Option<Digest> {
        let text = name.strip_prefix("sha256-")?;
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return None;
        }
        Self::from_hex(text)
    }

    /// The 64 hex digits.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// Reads 64 hex digits of either case.
    pub fn from_hex(text: &str) -> Option<Digest> {
        // A store of a million tensors has two million digests in its manifests.
        let digits: &[u8; 64] = text.as_bytes().try_into().ok()?;
        let (mut bytes, mut wrong) = ([0; 32], 0);
        for (byte, [high, low]) in bytes.iter_mut().zip(digits.as_chunks().0) {
            let (high, low) = (HEX[*high as usize], HEX[*low as usize]);
            wrong |= high | low;
            *byte = (high << 4) | (low & 15);
        }
        (wrong < 16).then_some(Digest(bytes))
    }

    /// The first eight bytes as a number: the seed of an inode number.
    pub fn prefix(&self) -> u64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(first)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = String;

    /// Accepts what ollama accepts: `sha256:` or `sha256-` and 64 hex digits of either case.
    fn from_str(text: &str) -> Result<Digest, String> {
        text.strip_prefix("sha256:")
            .or_else(|| text.strip_prefix("sha256-"))
            .and_then(Self::from_hex)
            .ok_or_else(|| format!("{:?} is no sha256 digest", text.chars().take(80).collect::<String>()))
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Computes a [`Digest`] piece by piece.
#[derive(Clone, Default)]
pub struct Hasher(sha2::Sha256);

impl Hasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes taken in.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// Computes the digests of two files that differ in their beginnings: what is common is taken in once for both.
///
/// A processor's sha256 instructions wait for each other within one digest. Two digests that are computed block by block
/// in turn fill each other's waits, and take 0.7 of the time that they take one after the other.
#[derive(Clone, Default)]
pub struct PairHasher([Blocks; 2]);

impl PairHasher {
    /// The two beginnings.
    pub fn new(first: &[u8], second: &[u8]) -> Self {
        let mut pair = PairHasher::default();
        pair.0[0].update(first);
        pair.0[1].update(second);
        pair
    }

    /// Takes in the next bytes of the first file alone.
    pub fn update_first(&mut self, bytes: &[u8]) {
        self.0[0].update(bytes);
    }

    /// Takes in the next bytes of both files.
    pub fn update(&mut self, bytes: &[u8]) {
        let [first, second] = &mut self.0;
        let ([blocks, tail], [other_blocks, other_tail]) = (first.begin(bytes), second.begin(bytes));
        let (blocks, other_blocks) = (blocks.as_chunks().0, other_blocks.as_chunks().0);
        let common = blocks.len().min(other_blocks.len());
        for (block, other) in blocks.iter().zip(other_blocks) {
            compress256(&mut first.state, std::slice::from_ref(block));
            compress256(&mut second.state, std::slice::from_ref(other));
        }
        compress256(&mut first.state, &blocks[common..]);
        compress256(&mut second.state, &other_blocks[common..]);
        first.hold(tail);
        second.hold(other_tail);
    }

    /// The digests of both files.
    pub fn finish(self) -> [Digest; 2] {
        self.0.map(Blocks::finish)
    }
}

/// Bytes of a block.
const BLOCK: usize = 64;

/// A digest in the making.
#[derive(Clone)]
struct Blocks {
    state: [u32; 8],
    /// The beginning of the next block.
    held: [u8; BLOCK],
    len: u64,
}

impl Default for Blocks {
    fn default() -> Self {
        /// FIPS 180-4, section 5.3.3.
        const INITIAL: [u32; 8] =
            [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];
        Blocks { state: INITIAL, held: [0; BLOCK], len: 0 }
    }
}

impl Blocks {
    /// How many bytes are held.
    fn held(&self) -> usize {
        (self.len % BLOCK as u64) as usize
    }

    /// Counts these bytes and completes the block that was begun; the whole blocks of the rest, and what is left.
    fn begin<'a>(&mut self, bytes: &'a [u8]) -> [&'a [u8]; 2] {
        let (held, mut rest) = (self.held(), bytes);
        self.len += bytes.len() as u64;
        if held > 0 {
            let (first, other) = bytes.split_at(bytes.len().min(BLOCK - held));
            self.held[held..held + first.len()].copy_from_slice(first);
            if held + first.len() == BLOCK {
                compress256(&mut self.state, &[self.held]);
            }
            rest = other;
        }
        let (blocks, tail) = rest.split_at(rest.len() - rest.len() % BLOCK);
        [blocks, tail]
    }

    /// Keeps what is less than a block; nothing is kept already, or nothing is given.
    fn hold(&mut self, tail: &[u8]) {
        self.held[..tail.len()].copy_from_slice(tail);
    }

    fn update(&mut self, bytes: &[u8]) {
        let [blocks, tail] = self.begin(bytes);
        compress256(&mut self.state, blocks.as_chunks().0);
        self.hold(tail);
    }

    fn finish(mut self) -> Digest {
        let bits = self.len.wrapping_mul(8).to_be_bytes();
        // A one bit, zeros, and the length at the end of a block.
        let mut padding = [0; 2 * BLOCK];
        padding[0] = 0x80;
        let zeros = (2 * BLOCK - 8 - self.held()) % BLOCK;
        let zeros = if zeros == 0 { BLOCK } else { zeros };
        padding[zeros..zeros + 8].copy_from_slice(&bits);
        self.update(&padding[..zeros + 8]);
        let mut bytes = [0; 32];
        let words = bytes.as_chunks_mut::<4>().0.iter_mut().zip(self.state);
        words.for_each(|(bytes, word)| *bytes = word.to_be_bytes());
        Digest(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_has_the_digests_of_both_files() {
        let bytes: Vec<u8> = (0..1000_u32).map(|it| ((it * 7) >> 2) as u8).collect();
        let lens = [0, 1, 8, 55, 56, 63, 64, 65, 119, 120, 128, 200];
        for (first, second) in lens.iter().flat_map(|first| lens.map(|second| (*first, second))) {
            for len in lens.into_iter().chain([700]) {
                for piece in [1, 13, 64, 100, 1000] {
                    let data = &bytes[200..200 + len];
                    let mut pair = PairHasher::new(&bytes[..first / 2], &bytes[..second]);
                    pair.update_first(&bytes[first / 2..first]);
                    data.chunks(piece).for_each(|chunk| pair.update(chunk));
                    let whole = [first, second].map(|prefix| Digest::of(&[&bytes[..prefix], data].concat()));
                    assert_eq!(pair.finish(), whole, "{first} {second} {len} {piece}");
                }
            }
        }
    }

    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn text_forms() {
        let digest = Digest::of(b"");
        assert_eq!(digest.to_string(), format!("sha256:{EMPTY}"));
        assert_eq!(digest.file_name(), format!("sha256-{EMPTY}"));
        assert_eq!(Digest::from_file_name(&digest.file_name()), Some(digest));
        assert_eq!(format!("sha256-{}", EMPTY.to_uppercase()).parse(), Ok(digest));
        let odd = |place: usize, digit: &str| format!("sha256:{}{digit}{}", &EMPTY[..place], &EMPTY[place + 1..]);
        let odd = [odd(0, "g"), odd(63, "G"), odd(30, "/"), odd(31, ":"), odd(1, "@"), odd(2, "`"), odd(62, "\u{e9}")];
        assert!(odd.iter().all(|text| text.parse::<Digest>().is_err()));
        for bad in ["", "sha256:", "sha256-../../etc", "sha512:00", &EMPTY[..63]] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
        assert_eq!(Digest::from_file_name(&format!("sha256-{}", EMPTY.to_uppercase())), None);
    }
}
