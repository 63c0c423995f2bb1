//! Hashing blobs when they are first used: what `wmount --verify-on-read` does.
//!
//! The result is remembered for the version of the blob's file that was hashed: its inode number, length and time.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use dashmap::DashMap;

use crate::chunks::for_each_to_the_end;
use crate::digest::{Digest, Hasher};
use crate::waits::Reading;

/// A file that changes while it is hashed is hashed so often.
const TRIES: usize = 3;

/// One version of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    inode: u64,
    len: u64,
    mtime: (i64, i64),
}

impl Version {
    fn of(file: &File) -> io::Result<Version> {
        let found = file.metadata()?;
        Ok(Version { inode: found.ino(), len: found.len(), mtime: (found.mtime(), found.mtime_nsec()) })
    }
}

/// What is known of a blob: the version that was hashed and what is wrong with it.
type Known = RwLock<Option<(Version, Result<(), String>)>>;

/// The blobs that were hashed.
#[derive(Debug, Default)]
pub(super) struct Checks {
    known: DashMap<Digest, Arc<Known>>,
    blobs: AtomicU64,
    bytes: AtomicU64,
}

impl Checks {
    /// Whether a blob's file has the content that its name says. Who asks while it is hashed waits for the result.
    pub fn check(&self, digest: &Digest, file: &File) -> io::Result<Result<(), String>> {
        let version = Version::of(file)?;
        let known = match self.known.get(digest) {
            Some(known) => Arc::clone(&known),
            None => Arc::clone(&self.known.entry(*digest).or_default()),
        };
        let of_version = |known: &Option<(Version, Result<(), String>)>| match known {
            Some((of, result)) if *of == version => Some(result.clone()),
            _ => None,
        };
        if let Some(result) = of_version(&known.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(result);
        }
        let mut known = known.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(result) = of_version(&known) {
            return Ok(result);
        }
        for _ in 0..TRIES {
            let before = Version::of(file)?;
            let actual = self.digest_of(digest, file)?;
            if Version::of(file)? == before {
                let result =
                    if actual == *digest { Ok(()) } else { Err(format!("its content has the digest {actual}")) };
                *known = Some((before, result.clone()));
                self.blobs.fetch_add(1, Ordering::Relaxed);
                return Ok(result);
            }
        }
        Err(io::Error::other("it is being written to"))
    }

    fn digest_of(&self, digest: &Digest, file: &File) -> io::Result<Digest> {
        let mut hasher = Hasher::new();
        let read = |at, buf: &mut [u8]| {
            // For each chunk: hashing a long blob is no sign that it does not answer.
            let _reading = Reading::begin(digest);
            loop {
                match file.read_at(buf, at) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    outcome => return outcome,
                }
            }
        };
        for_each_to_the_end(0, read, |chunk| {
            hasher.update(chunk);
            self.bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(hasher.finish())
    }

    /// Blobs that were hashed, each as often as it was, and their bytes.
    pub fn counts(&self) -> (u64, u64) {
        (self.blobs.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_hashed_once_however_many_ask() {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(b"content", 0).expect("written");
        let (checks, digest) = (Checks::default(), Digest::of(b"content"));
        std::thread::scope(|scope| {
            (0..8).for_each(|_| _ = scope.spawn(|| assert_eq!(checks.check(&digest, &file).expect("read"), Ok(()))));
        });
        assert_eq!(checks.counts(), (1, 7));
        // Another content is another version, and a bad one is remembered, too.
        file.write_all_at(b"contents", 0).expect("written");
        for _ in 0..2 {
            assert!(checks.check(&digest, &file).expect("read").is_err_and(|why| why.contains("has the digest")));
        }
        assert_eq!(checks.counts(), (2, 15));
    }
}
