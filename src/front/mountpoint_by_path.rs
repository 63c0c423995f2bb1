//! The directory that is mounted on, by its path.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::mounts::{self, Mounted};
use super::sys;

/// A directory to mount on, or what is mounted on it.
#[derive(Clone, Debug)]
pub struct Mountpoint {
    path: PathBuf,
}

impl Mountpoint {
    /// Takes a canonical path.
    pub fn hold(path: PathBuf) -> io::Result<Mountpoint> {
        Ok(Mountpoint { path })
    }

    /// Its canonical path when it was looked at first.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The mount that is on it.
    pub fn mounted(&self) -> io::Result<Option<Mounted>> {
        mounts::at(&self.path)
    }

    /// Whether it is a directory with nothing in it.
    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(fs::read_dir(&self.path)?.next().is_none())
    }

    /// Nothing: it takes another to mount.
    pub fn mount(&self, _source: &str, _writable: bool, _options: &[String]) -> io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    /// Unmounts what is on it. A mount in use is [`io::ErrorKind::ResourceBusy`] unless `lazy`.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        sys::unmount(&self.path, lazy)
    }
}
