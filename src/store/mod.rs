//! The store on disk: an ollama model directory whose blobs hold every tensor once.
//!
//! ```text
//! <store>/blobs/sha256-<64 hex>
//! <store>/manifests/<host>/<namespace>/<name>/<tag>
//! <store>/.wmount/                 lock, files being written, memos, manifests of removed models
//! ```
//!
//! Readers need no lock: a blob appears complete or not at all, and a manifest after its blobs. Writers hold
//! `.wmount/lock`, one at a time.

mod blobs;
mod gc;
pub mod import;
mod load;
mod memo;
mod stage;
mod verify;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::digest::Digest;
use crate::error::{AtPath, Error, Result};
use crate::extent::Blobs;
use crate::model::ModelName;

pub use blobs::BlobFiles;
pub use gc::{GcReport, Lease};
pub use verify::{Damage, VerifyReport};

/// A store.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    blobs: BlobFiles,
    allow_overflow: bool,
}

/// A manifest found in the store, not yet read.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Found {
    /// The model's name, from the manifest's path.
    pub name: ModelName,
    /// When the manifest was written.
    pub written: SystemTime,
    /// The manifest's inode and length: with the time they tell one version of it from the next.
    pub version: (u64, u64),
}

/// Held while the store is written to.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "the lock ends when the file closes")] File);

impl Store {
    /// Opens a store that exists.
    pub fn open(root: impl AsRef<Path>) -> Result<Store> {
        let root = root.as_ref();
        if !root.exists() {
            return Err(Error::Invalid(format!("{}: there is no store (wmount import makes one)", root.display())));
        }
        if !root.is_dir() || !root.join("blobs").is_dir() || !root.join("manifests").is_dir() {
            return Err(Error::Invalid(format!(
                "{}: no store: it has no blobs/ and manifests/ (wmount import makes a store)",
                root.display()
            )));
        }
        let root = root.canonicalize().at(root)?;
        Ok(Store { blobs: BlobFiles::new(root.join("blobs"), root.join(".wmount/memo")), root, allow_overflow: false })
    }

    /// Opens a store, made first if there is none: the directory must then be missing or empty.
    pub fn create(root: impl AsRef<Path>) -> Result<Store> {
        let root = root.as_ref();
        match fs::read_dir(root).map(|mut entries| entries.next().is_none()) {
            Ok(false) => return Store::open(root),
            Ok(true) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => fs::create_dir_all(root).at(root)?,
            Err(error) => return Err(Error::io(root, error)),
        }
        for dir in ["manifests", "blobs"] {
            fs::create_dir(root.join(dir)).at(root.join(dir))?;
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

    /// The store's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of the manifests.
    pub fn manifests_dir(&self) -> PathBuf {
        self.root.join("manifests")
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

    /// A file or directory below `.wmount/`, whose directory is made.
    fn own_path(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join(".wmount");
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(Error::io(&dir, error)),
            _ => Ok(dir.join(name)),
        }
    }

    /// Takes the writers' lock, or says that another process has it.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.own_path("lock")?;
        let file = File::options().create(true).truncate(false).write(true).open(&path).at(&path)?;
        match file.try_lock() {
            Ok(()) => Ok(Lock(file)),
            Err(fs::TryLockError::WouldBlock) => Err(Error::Locked(self.root.clone())),
            Err(fs::TryLockError::Error(error)) => Err(Error::io(&path, error)),
        }
    }

    /// Block size in bytes, blocks and free blocks of the file system.
    pub fn space(&self) -> std::io::Result<(u64, u64, u64)> {
        let space = rustix::fs::statvfs(&self.root)?;
        Ok((space.f_frsize, space.f_blocks, space.f_bavail))
    }

    /// Every manifest of the store, in order of name; what is ill-named is passed over with a log line.
    pub fn find(&self) -> Result<Vec<Found>> {
        let mut found = Vec::new();
        let root = self.manifests_dir();
        for host in children(&root)? {
            for namespace in subdirectory(&root.join(&host))? {
                for name in subdirectory(&root.join(&host).join(&namespace))? {
                    let dir = root.join(&host).join(&namespace).join(&name);
                    for tag in subdirectory(&dir)? {
                        found.extend(found_at(&dir.join(&tag), &host, &namespace, &name, &tag));
                    }
                }
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// The manifest of one model, if the store has it.
    pub fn find_one(&self, name: &ModelName) -> Result<Found> {
        let path = self.manifest_path(name);
        found_at(&path, &name.host, &name.namespace, &name.name, &name.tag)
            .ok_or_else(|| Error::NotFound(format!("model {name} in the store {}", self.root.display())))
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

/// Like [`children`], but empty for what is no directory.
fn subdirectory(dir: &Path) -> Result<Vec<String>> {
    match children(dir) {
        Err(Error::Io { source, .. })
            if matches!(source.kind(), std::io::ErrorKind::NotADirectory | std::io::ErrorKind::NotFound) =>
        {
            Ok(Vec::new())
        }
        other => other,
    }
}

fn found_at(path: &Path, host: &str, namespace: &str, name: &str, tag: &str) -> Option<Found> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(path).ok().filter(|metadata| metadata.is_file())?;
    match ModelName::new(host, namespace, name, tag) {
        Ok(name) => Some(Found {
            name,
            written: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            version: (metadata.ino(), metadata.len()),
        }),
        Err(error) => {
            tracing::warn!("{} is ignored: {error}", path.display());
            None
        }
    }
}
