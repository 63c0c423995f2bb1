//! How much of a model is read to plan it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::extent::Blobs;

/// Bytes that are read of a model's programs. A graph of a hundred thousand operations has a tenth of a gigabyte; but a
/// recipe of a few lines can make a program of exabytes, and a million of them.
const MOST: u64 = 4 << 30;

/// What a read costs besides its bytes.
const READ: u64 = 256;

/// Blobs of which no more than so much is read.
pub(super) struct Bounded<'a> {
    blobs: &'a dyn Blobs,
    left: AtomicU64,
}

impl<'a> Bounded<'a> {
    pub fn new(blobs: &'a dyn Blobs) -> Self {
        Bounded { blobs, left: AtomicU64::new(MOST) }
    }
}

impl Blobs for Bounded<'_> {
    fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
        let cost = READ + buf.len() as u64;
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(cost)).map_err(|_| {
            let most = MOST >> 30;
            Error::Invalid(format!("the programs of the model are more than the {most} GiB that are read of them"))
        })?;
        self.blobs.read_exact(digest, offset, buf)
    }
}
