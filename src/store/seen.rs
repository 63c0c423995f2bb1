//! A file as it was when it was looked at, to notice that it is another one by now.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::Store;
use crate::error::Error;

/// A file as it was; missing is one way to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    path: PathBuf,
    version: Option<Version>,
}

/// One version of a file. The time of its inode's last change is part of it, since anybody can set the other; a new name
/// for the file changes that time, too, so that what is the same can count as another version, never the reverse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version {
    inode: u64,
    len: u64,
    mtime: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    /// The version that was found.
    pub fn of(found: &Metadata) -> Version {
        let mtime = (found.mtime(), found.mtime_nsec());
        let changed = (found.ctime(), found.ctime_nsec());
        Version { inode: found.ino(), len: found.len(), mtime, changed }
    }
}

impl Seen {
    /// The file at `path` as it is now.
    pub fn now(path: PathBuf) -> Seen {
        let version = fs::metadata(&path).ok().map(|found| Version::of(&found));
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
