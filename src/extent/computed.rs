//! A tensor that is transformed when it is read, and how the transform gets at it.

use std::sync::Arc;

use super::Blobs;
use crate::digest::Digest;
use crate::error::Result;
use crate::transform::{Input, Transform};

/// A tensor that is transformed when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Computed {
    /// What is done to it.
    pub transform: Transform,
    /// The blob that holds it.
    pub digest: Digest,
    /// Its first byte in the blob.
    pub offset: u64,
    /// Its length in bytes.
    pub input_len: u64,
}

impl Computed {
    /// Fills `buf` with the output from byte `skip` on.
    pub(super) fn read(&self, blobs: &dyn Blobs, skip: u64, buf: &mut [u8]) -> Result<()> {
        self.transform.read(&BlobInput { blobs, computed: self }, skip, buf)
    }

    /// What must be known of the tensor: found out now unless it is kept.
    pub fn survey(&self, blobs: &dyn Blobs) -> Result<Arc<[u8]>> {
        BlobInput { blobs, computed: self }.survey()
    }

    /// All that its bytes depend on, in words; inode numbers are made of it, so it never changes.
    pub(super) fn key(&self) -> String {
        self.of_tensor(self.transform.name())
    }

    /// The same for what must be known of the tensor, which computations can have in common.
    pub fn survey_key(&self) -> String {
        self.of_tensor(self.transform.survey_name())
    }

    fn of_tensor(&self, what: String) -> String {
        format!("{what} at {} of {}, {} bytes", self.offset, self.digest.hex(), self.input_len)
    }
}

/// The tensor of a computation, in its blob.
struct BlobInput<'a> {
    blobs: &'a dyn Blobs,
    computed: &'a Computed,
}

impl Input for BlobInput<'_> {
    fn len(&self) -> u64 {
        self.computed.input_len
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.blobs.read_exact(&self.computed.digest, self.computed.offset + offset, buf)
    }

    fn survey(&self) -> Result<Arc<[u8]>> {
        self.blobs.memo(&self.computed.survey_key(), &self.computed.digest, &|| {
            // The length is a claim: nothing is allocated before its last byte was read.
            if let Some(last) = self.len().checked_sub(1) {
                self.read(last, &mut [0])?;
            }
            self.computed.transform.survey(self)
        })
    }
}
