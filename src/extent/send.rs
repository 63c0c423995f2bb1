//! Ranges of a file passed on as they are: bytes of blobs need not come to this process for that.
//!
//! Whatever goes wrong, the range is not sent, and whoever reads it instead is told why.

use std::fs::File;

use super::{Blobs, ExtentBytes, ExtentMap, Source};

/// Zeros are taken from here.
const ZEROS: [u8; 4096] = [0; 4096];

/// Takes the pieces of a range in their order. After a `None` the range is given up.
pub trait Sink {
    /// Whether `len` bytes in so many pieces are wanted. It is asked first.
    fn begin(&mut self, len: usize, pieces: usize) -> Option<()>;

    /// Takes these bytes, all of them.
    fn bytes(&mut self, bytes: &[u8]) -> Option<()>;

    /// Takes `len` bytes of a file from `offset` on, all of them.
    fn file(&mut self, file: &File, offset: u64, len: usize) -> Option<()>;

    /// Sends what was taken, which is all that was promised.
    fn end(&mut self) -> Option<()>;
}

impl ExtentMap {
    /// Sends up to `len` bytes from `offset` on, fewer only at the end of the file, and returns how many they were.
    ///
    /// What must be computed is not sent, nor what is empty.
    pub fn send(&self, blobs: &dyn Blobs, offset: u64, len: usize, sink: &mut dyn Sink) -> Option<usize> {
        let len = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(len);
        let range = offset..offset.checked_add(len as u64)?;
        let sources = self.sources_in(range.clone());
        if len == 0 || sources.iter().any(|source| matches!(source, Source::Computed(..))) {
            return None;
        }
        sink.begin(len, sources.len())?;
        for extent in self.extents_in(range) {
            // No more than the whole range.
            let len = extent.len as usize;
            match extent.bytes {
                ExtentBytes::Inline(bytes) => sink.bytes(bytes)?,
                ExtentBytes::Blob { digest, offset } => blobs.send(&digest, offset, len, sink)?,
                ExtentBytes::Zeros => {
                    (0..len).step_by(ZEROS.len()).try_for_each(|at| sink.bytes(&ZEROS[..ZEROS.len().min(len - at)]))?;
                }
                ExtentBytes::Computed { .. } => return None,
            }
        }
        sink.end()?;
        Some(len)
    }
}
