//! How requests that write are carried out and answered.

use std::ffi::OsStr;
use std::time::Duration;

use fuser::{Errno, FileAttr, FileType, ReplyEmpty};

use super::errno::{caught, write_errno};
use super::listing::Attributes;
use super::served::LONG;
use crate::error::{Error, Result};
use crate::ingest::{Form, Stat};

/// Does one piece of work that may write.
pub(super) fn attempt<T>(request: &str, work: impl FnOnce() -> Result<T>) -> Result<T, Errno> {
    caught(work).map_err(|error| {
        let errno = write_errno(&error);
        match errno {
            Errno::EIO | Errno::EINVAL | Errno::ENOSPC => tracing::error!(request, "{error}"),
            _ => tracing::debug!(request, "{error}"),
        }
        errno
    })
}

/// Does what can take long in a thread of its own: those that serve requests must not all wait.
pub(super) fn aside(work: impl FnOnce() + Send + 'static) {
    // Without a thread the reply goes down with the work, which the caller sees as an I/O error.
    let _ = std::thread::Builder::new().name("ingest".into()).spawn(work);
}

pub(super) fn name_text(name: &OsStr) -> Result<&str> {
    name.to_str().ok_or_else(|| Error::Invalid(format!("{name:?} is no text")))
}

pub(super) fn file_type(form: Form) -> FileType {
    match form {
        Form::Dir => FileType::Directory,
        Form::File => FileType::RegularFile,
        Form::Link => FileType::Symlink,
    }
}

pub(super) fn ttl(stat: &Stat) -> Duration {
    if stat.lasting { LONG } else { Duration::ZERO }
}

pub(super) fn answer(reply: ReplyEmpty, outcome: Result<(), Errno>) {
    match outcome {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

/// Attributes as the kernel takes them; `read_only` is the mode of files that stay as they are.
pub(super) fn file_attr(stat: &Stat, owner: (u32, u32), read_only: u16) -> FileAttr {
    let read = stat.access.mode;
    let perm = match stat.form {
        Form::Dir => read | read >> 2 | 0o200,
        Form::File if stat.lasting => (read | read >> 1) & read_only,
        Form::File if stat.writable => read | 0o200,
        Form::File => read,
        Form::Link => 0o777,
    };
    let Stat { ino, size, mtime, nlink, access, .. } = *stat;
    Attributes { ino, size, mtime, kind: file_type(stat.form), perm, nlink, access }.of(owner)
}
