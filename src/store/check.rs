//! Hashing blobs when they are first used: what `wmount --verify-on-read` does, an import with what others wrote, and without
//! either who keeps what was computed from a blob.
//!
//! The result is remembered for the version of the blob's file that was hashed: its inode number, length and times.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use dashmap::DashMap;

use super::seen::Version;
use crate::digest::Digest;
use crate::waits::Reading;

/// A file that changes while it is read is read so often.
pub(super) const TRIES: usize = 3;

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
    /// The version of a blob's file that has the content that its name says, or what is wrong with it. Who asks while it is
    /// hashed waits for the result.
    pub fn check(&self, digest: &Digest, file: &File) -> io::Result<Result<Version, String>> {
        let version = Version::of(&file.metadata()?);
        let known = match self.known.get(digest) {
            Some(known) => Arc::clone(&known),
            None => Arc::clone(&self.known.entry(*digest).or_default()),
        };
        let of_version = |known: &Option<(Version, Result<(), String>)>| match known {
            Some((of, result)) if *of == version => Some(result.clone().map(|()| version)),
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
            let before = Version::of(&file.metadata()?);
            let actual = self.digest_of(digest, file)?;
            if Version::of(&file.metadata()?) == before {
                let result = digest.check(actual);
                *known = Some((before, result.clone()));
                self.blobs.fetch_add(1, Ordering::Relaxed);
                return Ok(result.map(|()| before));
            }
        }
        Err(io::Error::other("it is being written to"))
    }

    fn digest_of(&self, digest: &Digest, file: &File) -> io::Result<Digest> {
        Digest::of_all(|at, buf| {
            // For each chunk: hashing a long blob is no sign that it does not answer.
            let _reading = Reading::begin(digest);
            loop {
                match file.read_at(buf, at) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    outcome => {
                        let len = outcome?;
                        self.bytes.fetch_add(len as u64, Ordering::Relaxed);
                        return Ok(len);
                    }
                }
            }
        })
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
            (0..8).for_each(|_| _ = scope.spawn(|| assert!(checks.check(&digest, &file).expect("read").is_ok())));
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
