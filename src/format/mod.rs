//! Containers: each file parses one (bytes to named tensors with ranges) and plans it (tensors to an extent map).
//!
//! No I/O, no store and no kernel here. A parser sees a container through [`Bytes`], does its arithmetic checked,
//! allocates nothing from a count it has not held against the length, and never panics.

pub mod amb;
mod form;
#[doc = include_str!("fuzzing.md")]
pub mod fuzzing {}
pub mod gds;
pub mod gguf;
pub(crate) mod json;
pub mod milblob;
pub mod milprogram;
pub mod mlpackage;
pub mod mlprogram;
pub mod ollama;
pub mod recipe;
pub mod safetensors;

use std::borrow::Cow;

use crate::digest::Digest;
use crate::error::{Error, Fault};
use crate::extent::Blobs;

pub use form::Form;

/// The most tensors that a container may have: what is kept of each takes a few hundred bytes.
pub(crate) const MAX_TENSORS: usize = 1 << 20;

/// The fault of a container with more than [`MAX_TENSORS`].
pub(crate) fn too_many_tensors(at: u64) -> Fault {
    Fault::new(at, format!("it has more than {MAX_TENSORS} tensors"))
}

/// Random access to the bytes of a container.
pub trait Bytes {
    /// Length in bytes.
    fn len(&self) -> u64;

    /// The range `offset..offset + len`, or a fault at `offset` if it is not within the container or cannot be read.
    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault>;

    /// Whether a range is within the container: what [`Bytes::get`] looks at first.
    fn check_range(&self, offset: u64, len: usize) -> Result<(), Fault> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(Fault::new(offset, format!("{len} bytes are needed but the file has {} in all", self.len()))),
        }
    }

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Bytes for [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        self.check_range(offset, len)?;
        Ok(Cow::Borrowed(&self[offset as usize..][..len]))
    }
}

/// A blob as a parser sees it.
pub struct BlobBytes<'a> {
    /// Where it is read.
    pub blobs: &'a dyn Blobs,
    /// Which it is.
    pub digest: Digest,
    /// Its length by whoever names it.
    pub len: u64,
}

impl Bytes for BlobBytes<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        self.check_range(offset, len)?;
        let fault = |error: Error| match error {
            Error::Damaged { fault, .. } => Fault::new(offset, fault),
            other => Fault::new(offset, other.to_string()),
        };
        // The length is a claim: nothing is allocated before its last byte was read.
        if let Some(last) = (offset + len as u64).checked_sub(1) {
            self.blobs.read_exact(&self.digest, last, &mut [0]).map_err(fault)?;
        }
        let mut bytes = vec![0; len];
        self.blobs.read_exact(&self.digest, offset, &mut bytes).map_err(fault)?;
        Ok(Cow::Owned(bytes))
    }
}

/// The little-endian u32 at `at` of a slice that is known to hold it.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(raw)
}

/// The little-endian u64 at `at` of a slice that is known to hold it.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}
