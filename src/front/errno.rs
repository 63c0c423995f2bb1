//! The errno of every [`Error`], and the log line of those that mean damage.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fuser::Errno;

use crate::error::{Error, Result};

/// A reader that retries a damaged file would fill the log, so one inode complains once in this time.
const QUIET: Duration = Duration::from_secs(60);
/// More complaining inodes than this at a time are forgotten, and may complain again sooner.
const REMEMBERED: usize = 4096;

/// What the kernel is told about `error`.
///
/// Damage is EIO, never ENOENT: a reader must not take a broken file for an absent one.
pub fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound(_) | Error::Refused(_) => Errno::ENOENT,
        Error::Stale(_) => Errno::ESTALE,
        Error::NotDir => Errno::ENOTDIR,
        Error::IsDir => Errno::EISDIR,
        Error::Io { .. } | Error::Format { .. } | Error::Invalid(_) | Error::Locked(_) => Errno::EIO,
        Error::Damaged { .. } | Error::Hurts { .. } | Error::Unanswered => Errno::EIO,
    }
}

/// Does a piece of work. A panic is damage: it would otherwise end the thread, and with the last the mount.
pub(super) fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    outcome.unwrap_or_else(|_| Err(Error::Invalid("a fault of wmount itself; please report".into())))
}

/// What the kernel is told about an error of writing, where more than damage can be meant.
pub fn write_errno(error: &Error) -> Errno {
    match error {
        Error::Io { source, .. } => match (source.raw_os_error(), source.kind()) {
            (Some(code @ (libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EROFS)), _) => Errno::from_i32(code),
            (Some(_), _) => Errno::EIO,
            (None, io::ErrorKind::AlreadyExists) => Errno::EEXIST,
            (None, io::ErrorKind::DirectoryNotEmpty) => Errno::ENOTEMPTY,
            (None, io::ErrorKind::PermissionDenied) => Errno::EACCES,
            (None, io::ErrorKind::FileTooLarge) => Errno::EFBIG,
            _ => Errno::EIO,
        },
        Error::Invalid(_) | Error::Format { .. } => Errno::EINVAL,
        other => errno(other),
    }
}

/// Logs failed requests: what is normal traffic at debug, damage as an error that repeats only after a while.
#[derive(Debug, Default)]
pub struct Complaints {
    last: Mutex<HashMap<u64, Instant>>,
}

impl Complaints {
    /// Logs that `request` on inode `ino` failed.
    pub fn log(&self, request: &str, ino: u64, error: &Error) {
        match error {
            Error::NotFound(_) | Error::Refused(_) | Error::Stale(_) | Error::NotDir | Error::IsDir => {
                tracing::debug!(request, ino, "{error}");
            }
            _ if self.is_new(ino) => tracing::error!(request, ino, "{error}"),
            _ => tracing::debug!(request, ino, "{error}"),
        }
    }

    fn is_new(&self, ino: u64) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.get(&ino).is_some_and(|at| at.elapsed() < QUIET) {
            return false;
        }
        if last.len() >= REMEMBERED {
            last.clear();
        }
        last.insert(ino, Instant::now());
        true
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::digest::Digest;
    use crate::error::Fault;

    #[test]
    fn only_absence_is_enoent() {
        let table = [
            (Error::NotFound("x".into()), libc::ENOENT),
            (Error::Stale(7), libc::ESTALE),
            (Error::NotDir, libc::ENOTDIR),
            (Error::IsDir, libc::EISDIR),
            (Error::io("x", io::ErrorKind::NotFound.into()), libc::EIO),
            (Error::format("x", Fault::new(0, "short")), libc::EIO),
            (Error::Invalid("x".into()), libc::EIO),
            (Error::Damaged { digest: Digest::of(b""), fault: "missing".into() }, libc::EIO),
            (Error::Locked(PathBuf::from("x")), libc::EIO),
        ];
        for (error, expected) in table {
            assert_eq!(errno(&error).code(), expected, "{error}");
        }
    }

    #[test]
    fn who_writes_is_told_what_is_in_the_way() {
        let table = [
            (Error::io("x", io::Error::from_raw_os_error(libc::ENOSPC)), libc::ENOSPC),
            (Error::io("x", io::Error::from_raw_os_error(libc::ENOENT)), libc::EIO),
            (Error::io("x", io::ErrorKind::AlreadyExists.into()), libc::EEXIST),
            (Error::io("x", io::ErrorKind::DirectoryNotEmpty.into()), libc::ENOTEMPTY),
            (Error::io("x", io::ErrorKind::PermissionDenied.into()), libc::EACCES),
            (Error::Invalid("x".into()), libc::EINVAL),
            (Error::Damaged { digest: Digest::of(b""), fault: "other content".into() }, libc::EIO),
            (Error::NotFound("x".into()), libc::ENOENT),
        ];
        for (error, expected) in table {
            assert_eq!(write_errno(&error).code(), expected, "{error}");
        }
    }

    #[test]
    fn an_inode_complains_once() {
        let complaints = Complaints::default();
        assert!(complaints.is_new(3));
        assert!(!complaints.is_new(3));
        assert!(complaints.is_new(4));
    }
}
