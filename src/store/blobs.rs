//! Reading blobs: positioned reads from a bounded set of open files.
//!
//! Blobs are not mapped: who touches a mapping of a blob that is cut off is killed with SIGBUS, and mapped pages count as
//! the daemon's memory. A positioned read of a damaged blob is an error, and nothing else.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use dashmap::DashSet;
use quick_cache::sync::Cache;

use super::access::{Access, Guard};
use super::beneath::{self, Dir};
use super::check::{Checks, TRIES};
use super::memo::Memos;
use super::seen::Version;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::extent::{Blobs, Sink};
use crate::waits::Reading;

/// Files kept open. Each reader thread needs one; more save an open and a close for each read.
const OPEN_FILES: usize = 512;

/// The blobs of one store.
#[derive(Debug)]
pub struct BlobFiles {
    dir: PathBuf,
    open: Cache<Digest, Opened>,
    /// Where the store is shown to all users.
    guard: OnceLock<Guard>,
    memos: Memos,
    checks: Checks,
    /// The first bytes of the digests of blobs that were ever opened, or told by their length: there may be a million.
    used: DashSet<u64>,
    /// Whether blobs are checked when they are used, and not only before something is kept that was computed from them.
    is_checking: bool,
}

/// An open blob.
#[derive(Debug, Clone)]
struct Opened {
    file: Arc<File>,
    /// Who may read it, if that matters.
    access: Option<Access>,
}

impl BlobFiles {
    /// The blobs in `dir`, and what is known of them in the store's directory `own`.
    pub fn new(dir: PathBuf, own: PathBuf) -> Self {
        BlobFiles {
            dir,
            open: Cache::new(OPEN_FILES),
            guard: OnceLock::new(),
            memos: Memos::new(own),
            checks: Checks::default(),
            used: DashSet::new(),
            is_checking: false,
        }
    }

    /// Whether the content of each blob is checked when it is first used.
    pub fn checking(self, check: bool) -> Self {
        BlobFiles { is_checking: check, ..self }
    }

    /// Blobs that were checked, and their bytes; `None` if they are not when they are used.
    pub fn checked(&self) -> Option<(u64, u64)> {
        self.is_checking.then(|| self.checks.counts())
    }

    /// Opens a blob, and checks it if that is asked for.
    pub fn open(&self, digest: &Digest) -> Result<Arc<File>> {
        let file = self.opened(digest)?;
        if self.is_checking {
            self.check(digest, &file)?;
        }
        Ok(file)
    }

    /// The version of a blob's file, whose content is what its name says.
    fn check(&self, digest: &Digest, file: &File) -> Result<Version> {
        let checked = self.checks.check(digest, file).map_err(|error| damaged(digest, &error))?;
        checked.map_err(|fault| Error::Damaged { digest: *digest, fault })
    }

    /// What `make` computes from a blob, if its file was sound and the same all the time.
    fn of_sound(&self, digest: &Digest, make: &dyn Fn() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        for _ in 0..TRIES {
            let before = self.open(digest).ok().and_then(|file| Some(Version::of(&file.metadata().ok()?)));
            let result = make()?;
            // Hashed after it was read, and so from memory.
            let file = self.open(digest)?;
            // What is open may be the damaged file that a whole one has replaced since.
            let sound = self.check(digest, &file).inspect_err(|_| _ = self.open.remove(digest))?;
            if before == Some(sound) {
                return Ok(result);
            }
        }
        Err(Error::Damaged { digest: *digest, fault: "it is being written to".into() })
    }

    /// A blob's file: a regular file, or a link to one in the same directory.
    fn opened(&self, digest: &Digest) -> Result<Arc<File>> {
        let open = || {
            let _reading = Reading::begin(digest);
            self.open_now(digest)
        };
        let opened = || self.open.get_or_insert_with(digest, open).map_err(|error| damaged(digest, &error));
        let mut blob = opened()?;
        if !self.may_show(digest, &blob) {
            self.open.remove(digest);
            blob = opened()?;
        }
        if self.may_show(digest, &blob) {
            return Ok(blob.file);
        }
        let fault = "fewer users may read it than could when it was first looked at: mount the store anew";
        Err(Error::Damaged { digest: *digest, fault: fault.into() })
    }

    fn open_now(&self, digest: &Digest) -> io::Result<Opened> {
        self.set_used(digest);
        let name = digest.file_name();
        if self.guard.get().is_none_or(Guard::is_sole) {
            return Ok(Opened { file: Arc::new(beneath::file(&self.dir, &name)?), access: None });
        }
        let dir = Dir::open(&self.dir)?;
        let file = dir.file(&name)?;
        let access = Some(Access::of(&file.metadata()?, &dir.above()));
        Ok(Opened { file: Arc::new(file), access })
    }

    fn may_show(&self, digest: &Digest, blob: &Opened) -> bool {
        let allows = |guard: &Guard| blob.access.is_some_and(|access| guard.allows(digest, &access));
        self.guard.get().is_none_or(|guard| guard.is_sole() || allows(guard))
    }

    /// From now on no blob is shown to more users than it was first.
    pub(super) fn guard(&self, guard: Guard) {
        let _ = self.guard.set(guard);
    }

    /// What was found out of who may read what, if the store is shown to all users.
    pub(super) fn guarded(&self) -> Option<&Guard> {
        self.guard.get()
    }

    /// From now on a memo that cannot be kept is an error.
    pub(super) fn keep_memos(&self) {
        self.memos.must_keep();
    }

    /// Closes a blob, and drops what was computed from any: what is there now is opened when it is read next.
    pub fn forget(&self, digest: &Digest) {
        self.open.remove(digest);
        self.memos.forget();
    }

    /// The same of all.
    pub fn forget_all(&self) {
        self.open.clear();
        self.memos.forget();
    }

    /// Takes note that something is known of a blob that another file of its name would change.
    pub(super) fn set_used(&self, digest: &Digest) {
        self.used.insert(digest.prefix());
    }

    /// Whether something is known of a blob.
    pub(super) fn has_used(&self, digest: &Digest) -> bool {
        self.used.contains(&digest.prefix())
    }
}

pub(super) fn damaged(digest: &Digest, error: &io::Error) -> Error {
    let fault = match error.kind() {
        io::ErrorKind::NotFound => "it is missing".into(),
        io::ErrorKind::UnexpectedEof => "it is shorter than its manifest says".into(),
        _ => error.to_string(),
    };
    Error::Damaged { digest: *digest, fault }
}

impl Blobs for BlobFiles {
    fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
        let read = |file: &File, buf: &mut [u8]| {
            let _reading = Reading::begin(digest);
            file.read_exact_at(buf, offset)
        };
        match self.open(digest) {
            Ok(file) if read(&file, buf).is_ok() => return Ok(()),
            // One that is not there to be opened will not be the next moment either.
            Err(error) if !self.is_checking => return Err(error),
            _ => {}
        }
        // What was opened may be the damaged file that a whole one has replaced since.
        self.open.remove(digest);
        read(&*self.open(digest)?, buf).map_err(|error| damaged(digest, &error))
    }

    fn send(&self, digest: &Digest, offset: u64, len: usize, sink: &mut dyn Sink) -> Option<()> {
        let file = self.open(digest).ok()?;
        let _reading = Reading::begin(digest);
        sink.file(&file, offset, len)
    }

    fn memo(&self, key: &str, digest: &Digest, make: &dyn Fn() -> Result<Vec<u8>>) -> Result<Arc<[u8]>> {
        self.memos.get(key, &|| self.of_sound(digest, make))
    }
}
