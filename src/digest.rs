//! [`Digest`], the sha256 that names a blob, and [`Hasher`], which computes one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::Digest as _;

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
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).ok()?;
        Some(Digest(bytes))
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

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn text_forms() {
        let digest = Digest::of(b"");
        assert_eq!(digest.to_string(), format!("sha256:{EMPTY}"));
        assert_eq!(digest.file_name(), format!("sha256-{EMPTY}"));
        assert_eq!(Digest::from_file_name(&digest.file_name()), Some(digest));
        assert_eq!(format!("sha256-{}", EMPTY.to_uppercase()).parse(), Ok(digest));
        for bad in ["", "sha256:", "sha256-../../etc", "sha512:00", &EMPTY[..63]] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
        assert_eq!(Digest::from_file_name(&format!("sha256-{}", EMPTY.to_uppercase())), None);
    }
}
