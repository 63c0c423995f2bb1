//! The store on disk: an ollama model directory whose blobs hold every tensor once.
//!
//! ```text
//! <store>/blobs/sha256-<64 hex>
//! <store>/manifests/<host>/<namespace>/<name>/<tag>
//! <store>/.wmount/                 lock, files being written, memos, manifests of removed models, what `--ingest` took in
//! ```
//!
//! Readers need no lock: a blob appears complete or not at all, and a manifest after its blobs. Writers hold
//! `.wmount/lock`, one at a time.

mod access;
mod beneath;
mod blobs;
mod case;
mod check;
mod forms;
mod gc;
pub mod import;
pub mod ingest;
mod load;
mod lock;
mod memo;
mod near;
mod place;
mod repair;
mod seen;
mod stage;
mod survey;
mod verify;

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use crate::digest::Digest;
use crate::error::{AtPath, Error, Result, quoted};
use crate::extent::Blobs;
use crate::model::ModelName;

pub use access::Access;
pub(crate) use access::is_sole;
use beneath::Dir;
pub use blobs::BlobFiles;
use check::Checks;
pub use gc::{GcReport, Lease};
pub use lock::Lock;
pub use repair::{Repaired, RepairedFile};
pub use seen::Seen;
pub use survey::{Found, Survey, Times};
pub use verify::{Damage, VerifyReport};

/// wmount's own directory in a store.
const OWN: &str = ".wmount";
/// The directory of the manifests.
const MANIFESTS: &str = "manifests";
/// Bytes that a file in it can have: with a row of 200 bytes for each model, a million of them.
const OWN_FILE: u64 = 256 << 20;

/// A store.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    /// The path that was asked for, which may lead through links.
    asked: PathBuf,
    blobs: BlobFiles,
    /// The content of blobs that other programs wrote, as far as an import needed to know it.
    others: Checks,
    /// What was passed over below `manifests/`, each logged once.
    ignored: Mutex<HashSet<PathBuf>>,
    allow_overflow: bool,
}

/// What is at a path, if anything is; who may not look is not told that nothing is there.
fn found(path: &Path) -> Result<Option<fs::Metadata>> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    match fs::metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => Ok(None),
        Err(error) => Err(Error::io(path, error)),
    }
}

impl Store {
    /// Opens a store that exists.
    pub fn open(root: impl AsRef<Path>) -> Result<Store> {
        let root = root.as_ref();
        let (shown, quoted) = (root.display(), quoted(root));
        if found(root)?.is_none() {
            let what = format!("there is no store at {shown}; `wmount import --store {quoted} PATH` makes one");
            return Err(Error::Invalid(what));
        }
        let is_dir = |path: &Path| Ok(found(path)?.is_some_and(|found| found.is_dir()));
        if !is_dir(root)? || !is_dir(&root.join("blobs"))? || !is_dir(&root.join(MANIFESTS))? {
            return Err(Error::Invalid(format!(
                "{shown} is no store: it has no blobs/ and manifests/; if it is a model, put it into one: wmount import {quoted}"
            )));
        }
        let asked = std::path::absolute(root).at(root)?;
        let root = root.canonicalize().at(root)?;
        for dir in ["blobs", MANIFESTS].map(|dir| root.join(dir)) {
            Dir::open(&dir).at(&dir)?;
        }
        let blobs = BlobFiles::new(root.join("blobs"), root.join(OWN));
        Ok(Store { blobs, others: Checks::default(), root, asked, ignored: Mutex::default(), allow_overflow: false })
    }

    /// Opens a store, made first if there is none: the directory must then be missing, empty, or what a making that was
    /// cut short, or one that is under way in another process, has left.
    pub fn create(root: impl AsRef<Path>) -> Result<Store> {
        let root = root.as_ref();
        let parts = [MANIFESTS, "blobs"];
        match fs::read_dir(root) {
            Ok(mut entries) => {
                let is_part = |entry: fs::DirEntry| parts.iter().any(|part| entry.file_name() == *part);
                if !entries.all(|entry| entry.is_ok_and(is_part)) {
                    return Store::open(root);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => fs::create_dir_all(root).at(root)?,
            Err(error) => return Err(Error::io(root, error)),
        }
        for dir in parts.map(|part| root.join(part)) {
            make_dir(&dir).at(&dir)?;
        }
        Store::open(root)
    }

    /// Whether variants are shown whose casts make finite values infinite.
    pub fn allowing_overflow(self, allow: bool) -> Store {
        Store { allow_overflow: allow, ..self }
    }

    /// Whether such variants are shown.
    pub fn allows_overflow(&self) -> bool {
        self.allow_overflow
    }

    /// Whether the content of each blob is checked when it is first used.
    pub fn checking(self, check: bool) -> Store {
        Store { blobs: self.blobs.checking(check), ..self }
    }

    /// Blobs that were checked when they were used, and their bytes; `None` if none is.
    pub fn checked(&self) -> Option<(u64, u64)> {
        self.blobs.checked()
    }

    /// The store's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of the manifests.
    pub fn manifests_dir(&self) -> PathBuf {
        self.root.join(MANIFESTS)
    }

    /// The path of a blob.
    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.root.join("blobs").join(digest.file_name())
    }

    /// The path of a model's manifest.
    pub fn manifest_path(&self, name: &ModelName) -> PathBuf {
        self.manifests_dir().join(name.manifest_path())
    }

    /// Where the bytes of blobs are read.
    pub fn blobs(&self) -> &dyn Blobs {
        &self.blobs
    }

    /// A blob's own file, for a reader that needs no extent map.
    pub fn blob_file(&self, digest: &Digest) -> Result<Arc<File>> {
        self.blobs.open(digest)
    }

    /// What the file of a blob is: a regular one within the store.
    pub fn blob_metadata(&self, digest: &Digest) -> std::io::Result<fs::Metadata> {
        Dir::open(&self.root.join("blobs"))?.regular(&digest.file_name())
    }

    /// Reads a blob anew from the file that has its name now.
    pub fn reopen(&self, digest: &Digest) {
        self.blobs.forget(digest);
    }

    /// The same of all blobs.
    pub fn reopen_all(&self) {
        self.blobs.forget_all();
    }

    /// Whether anything was found out from a blob's file, or read of it.
    pub fn has_used(&self, digest: &Digest) -> bool {
        self.blobs.has_used(digest)
    }

    /// A file or directory below `.wmount/`, whose directory is made.
    fn own_path(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join(OWN);
        if fs::symlink_metadata(&dir).is_ok_and(|found| found.is_symlink()) {
            return Err(Error::Invalid(format!(
                "{}: is a link: remove it, nothing is written through it",
                dir.display()
            )));
        }
        make_dir(&dir).map_err(|error| self.unwritable(&dir, error))?;
        Ok(dir.join(name))
    }

    /// That something of the store cannot be written to, and who can do it.
    fn unwritable(&self, path: &Path, error: std::io::Error) -> Error {
        use std::os::unix::fs::MetadataExt;
        match fs::metadata(&self.root) {
            Ok(root) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                let (path, owner, store) = (path.display(), root.uid(), self.root.display());
                Error::Invalid(if owner == rustix::process::geteuid().as_raw() {
                    format!(
                        "{path}: {error}; somebody else wrote to this store: have root give it back, chown -R {owner} {store}"
                    )
                } else {
                    format!("{path}: {error}; the store belongs to the user with the id {owner}: run this as that user")
                })
            }
            _ => Error::io(path, error),
        }
    }

    /// Lets memos be kept in the store, also in one that wmount has not written to; from now on a memo that cannot be
    /// kept is an error.
    pub fn keep_memos(&self) -> Result<()> {
        let dir = self.own_path("memo")?;
        let writable = make_dir(&dir).and_then(|()| tempfile::tempfile_in(&dir));
        writable.map_err(|error| self.unwritable(&dir, error))?;
        self.blobs.keep_memos();
        Ok(())
    }

    /// The content of a file below `.wmount/`, if there is one of a length that it can have.
    pub fn own_file(&self, name: &str) -> Option<Vec<u8>> {
        Dir::plain(&self.root.join(OWN)).and_then(|own| own.read(name, OWN_FILE)).ok()
    }

    /// Writes a file that can be made again in `.wmount/`. Where that directory is not, the store is another program's, and
    /// nothing is written; nor where it is read only.
    pub fn set_own_file(&self, name: &str, bytes: &[u8]) {
        let dir = self.root.join(OWN);
        if let Err(error) = Dir::plain(&dir).and_then(|own| own.write(name, bytes)) {
            tracing::debug!("{}: {error}", dir.join(name).display());
        }
    }

    /// Has mounts look at the store again: they watch the directory of the manifests.
    fn wake_mounts(&self) {
        let dir = self.manifests_dir();
        if let Err(error) = File::open(&dir).and_then(|dir| dir.set_modified(SystemTime::now())) {
            tracing::warn!("{}: {error}; mounts notice the change when they are made anew", dir.display());
        }
    }

    /// Block size in bytes, blocks and free blocks of the file system.
    pub fn space(&self) -> std::io::Result<(u64, u64, u64)> {
        let space = rustix::fs::statvfs(&self.root)?;
        Ok((space.f_frsize, space.f_blocks, space.f_bavail))
    }
}

/// Makes a directory unless there is one.
fn make_dir(dir: &Path) -> std::io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        outcome => outcome,
    }
}

/// The names in a directory; a name that is no UTF-8 is no part of a model's name and left out.
fn children(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).at(dir)? {
        match entry.at(dir)?.file_name().into_string() {
            Ok(name) => names.push(name),
            Err(name) => tracing::warn!("{}: {name:?} is ignored: no valid name", dir.display()),
        }
    }
    Ok(names)
}

/// Removes a directory; names and lengths of its files.
fn remove_with_files(dir: &Path) -> Result<Vec<(String, u64)>> {
    let mut removed = Vec::new();
    for name in children(dir)? {
        let len = fs::symlink_metadata(dir.join(&name)).map_or(0, |found| found.len());
        removed.push((name, len));
    }
    fs::remove_dir_all(dir).at(dir)?;
    Ok(removed)
}
