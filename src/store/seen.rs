//! A file as it was when it was looked at, to notice that it is another one by now.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::Store;
use crate::error::Error;

/// A file as it was; missing is one way to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    path: PathBuf,
    version: Version,
}

/// Inode, length and time of a file; `None` if it is missing.
type Version = Option<(u64, u64, i64, i64)>;

impl Seen {
    /// The file at `path` as it is now.
    pub fn now(path: PathBuf) -> Seen {
        let found = fs::metadata(&path).ok();
        let version = found.map(|found| (found.ino(), found.len(), found.mtime(), found.mtime_nsec()));
        Seen { path, version }
    }

    /// Whether it is another one now, or there again.
    pub fn is_another(&self) -> bool {
        Seen::now(self.path.clone()).version != self.version
    }
}

impl Store {
    /// The file at fault, as it is now.
    pub fn culprit(&self, error: &Error) -> Option<Seen> {
        match error {
            Error::Damaged { digest, .. } => Some(Seen::now(self.blob_path(digest))),
            Error::Io { path, .. } | Error::Format { path, .. } => Some(Seen::now(path.clone())),
            _ => None,
        }
    }
}
