//! The writers' lock: one process at a time writes to a store.

use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::Store;
use crate::error::{AtPath, Error, Result};

/// The file that is locked, in `.wmount/`.
const LOCK: &str = "lock";

/// Held while the store is written to. It ends when the file closes.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Refuses to go on where the file that is locked is not the store's lock any more: another process may have that.
    pub(super) fn check(&self) -> Result<()> {
        use std::os::unix::fs::MetadataExt;

        let of = |found: fs::Metadata| (found.dev(), found.ino());
        let is_held = of(self.file.metadata().at(&self.path)?);
        if fs::symlink_metadata(&self.path).is_ok_and(|there| of(there) == is_held) {
            return Ok(());
        }
        let (path, own) = (self.path.display(), self.path.with_file_name(""));
        Err(Error::Invalid(format!(
            "{path}: was removed, or the store was moved, while it was written to: run this again, and leave {} alone meanwhile",
            own.display()
        )))
    }
}

impl Store {
    /// Takes the writers' lock, or says that another process has it.
    pub fn lock(&self) -> Result<Lock> {
        /// A mount with `--ingest` holds it for moments, which are worth waiting for; an import is not.
        const PATIENCE: Duration = Duration::from_secs(1);
        let began = Instant::now();
        loop {
            match self.try_lock()? {
                Some(lock) => return Ok(lock),
                None if began.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(5)),
                None => return Err(Error::Locked(self.root.clone())),
            }
        }
    }

    /// Takes the writers' lock if nobody has it.
    pub(super) fn try_lock(&self) -> Result<Option<Lock>> {
        Ok(self.try_lock_file(LOCK)?.map(|(path, file)| Lock { path, file }))
    }

    /// A file below `.wmount/`, locked; `None` if another process has it.
    pub(super) fn try_lock_file(&self, name: &str) -> Result<Option<(PathBuf, File)>> {
        let (path, file) = self.lock_file(name)?;
        match file.try_lock() {
            Ok(()) => Ok(Some((path, file))),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => Err(Error::io(&path, error)),
        }
    }

    /// Takes the writers' lock when whoever has it is done.
    pub(super) fn wait_for_lock(&self) -> Result<Lock> {
        let (path, file) = self.lock_file(LOCK)?;
        file.lock().at(&path)?;
        Ok(Lock { file, path })
    }

    fn lock_file(&self, name: &str) -> Result<(PathBuf, File)> {
        use std::os::unix::fs::OpenOptionsExt;

        let path = self.own_path(name)?;
        // Who may read a file may lock it, too: another user could keep this one from ever writing.
        let mut options = File::options();
        options.create(true).truncate(false).write(true).mode(0o660).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&path);
        let file = file.map_err(|error| self.unwritable(&path, error))?;
        Ok((path, file))
    }
}
