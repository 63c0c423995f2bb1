//! Removing models, and the blobs that no manifest reaches.
//!
//! `rm` moves the manifest to `.wmount/removed/`; the blobs stay until `gc`. A mount that has files of the model open
//! holds a shared lock on the manifest, which the move does not end: `gc` keeps what such a manifest reaches.
//!
//! ollama, which may write to the same store without our lock, names each layer of a model when it is there, and the model
//! when all are. So what it wrote lately is kept as well: for an hour, after which ollama itself removes what is unused.

use std::collections::HashSet;
use std::fs::{self, File, Metadata};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::stage::sync_dir;
use super::{Found, Lock, Store, beneath, children};
use crate::digest::Digest;
use crate::error::{AtPath, Error, Result};
use crate::format::ollama::Manifest;
use crate::model::ModelName;

/// What `gc` did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct GcReport {
    /// Blobs removed.
    pub removed: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files that a mount with `--ingest` left unfinished.
    pub unfinished: u64,
    /// Removed models whose files a mount still has open; their blobs go at a later `gc`.
    pub in_use: u64,
    /// Blobs that another program wrote within the last hour, and may yet need.
    pub young: u64,
}

/// Keeps the blobs of a model from `gc` for as long as it lives.
#[derive(Debug)]
pub struct Lease(#[expect(dead_code, reason = "the lock ends when the file closes")] File);

/// Whether another program may have written a blob for a model that is yet to come. Ours can be written by nobody.
fn is_of_a_pull(blob: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;

    const YOUNG: Duration = Duration::from_secs(3600);
    // A time to come is that of another machine's clock, and says nothing.
    let age = blob.modified().ok().and_then(|time| time.elapsed().ok());
    blob.is_file() && blob.mode() & 0o222 != 0 && age.is_some_and(|age| age < YOUNG)
}

impl Store {
    /// A lease on a model, `None` if its manifest is gone or another one by now.
    pub fn lease(&self, found: &Found) -> Option<Lease> {
        use std::os::unix::fs::MetadataExt;
        let file = beneath::file(&self.manifests_dir(), &found.name.manifest_path()).ok()?;
        file.try_lock_shared().ok()?;
        let metadata = file.metadata().ok()?;
        ((metadata.ino(), metadata.len()) == found.version).then_some(Lease(file))
    }

    /// Removes a model; its blobs stay until [`Store::gc`].
    pub fn remove(&self, name: &ModelName) -> Result<()> {
        self.remove_locked(name, &self.lock()?)
    }

    pub(super) fn remove_locked(&self, name: &ModelName, _lock: &Lock) -> Result<()> {
        let found = self.find_one(name)?;
        self.check_one_file_system()?;
        let removed = self.own_path("removed")?;
        fs::create_dir_all(&removed).at(&removed)?;
        let manifest = self.manifest_path(name);
        let (inode, _) = found.version;
        // The inode number keeps two removed models apart: both files live on one file system.
        fs::rename(&manifest, removed.join(inode.to_string())).at(&manifest)?;
        // ollama fails on empty directories below manifests/ when it cannot remove them itself.
        let mut above = manifest.ancestors().skip(1).take_while(|dir| *dir != self.manifests_dir());
        let left = above.find(|dir| fs::remove_dir(dir).is_err());
        sync_dir(&removed)?;
        sync_dir(left.unwrap_or(&self.manifests_dir()))
    }

    /// Removes the empty directories below `manifests/` that a removal which was cut short has left.
    fn remove_empty_dirs(&self) -> Result<()> {
        fn remove(dir: &Path, depth: u32) -> Result<()> {
            for name in children(dir)? {
                let path = dir.join(name);
                if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
                    if depth > 1 {
                        remove(&path, depth - 1)?;
                    }
                    // It fails on one that is not empty, which is what is wanted.
                    let _ = fs::remove_dir(&path);
                }
            }
            Ok(())
        }
        remove(&self.manifests_dir(), 3)
    }

    /// Puts the manifest of a model that is about to be replaced where that of a removed model would be.
    pub(super) fn keep_removed(&self, found: &Found) -> Result<()> {
        let removed = self.own_path("removed")?;
        fs::create_dir_all(&removed).at(&removed)?;
        let manifest = self.manifest_path(&found.name);
        // Without hard links the files that are open on a mount lose their protection from gc, and nothing else.
        if let Err(error) = fs::hard_link(&manifest, removed.join(found.version.0.to_string())) {
            tracing::warn!("{}: {error}", manifest.display());
        }
        Ok(())
    }

    /// Removes every blob that no manifest reaches.
    ///
    /// # Errors
    /// A manifest, or a directory of them, that cannot be read stops it before anything is removed: nobody knows what it
    /// reaches.
    pub fn gc(&self) -> Result<GcReport> {
        let lock = self.lock()?;
        let mut reached: HashSet<Digest> = HashSet::new();
        let models = self.find_all()?;
        self.clean_forms(&models)?;
        for found in models {
            reached.extend(self.manifest(&found)?.blobs().map(|layer| layer.digest));
        }
        let mut report = GcReport { in_use: self.reach_removed(&mut reached)?, ..GcReport::default() };
        let taken = self.clean_ingest()?;
        let dir = self.root.join("blobs");
        for name in children(&dir)? {
            // What has no blob's name is not ours to remove: ollama keeps partial downloads here.
            let Some(digest) = Digest::from_file_name(&name) else { continue };
            if !reached.contains(&digest) {
                let path = dir.join(name);
                let found = fs::symlink_metadata(&path).at(&path)?;
                if is_of_a_pull(&found) {
                    report.young += 1;
                    continue;
                }
                lock.check()?;
                report.bytes += found.len();
                fs::remove_file(&path).at(&path)?;
                report.removed += 1;
            }
        }
        self.remove_empty_dirs()?;
        sync_dir(&dir)?;
        // What stood where a blob belongs, put there by a repair.
        let _ = fs::remove_dir_all(self.own_path("aside")?);
        if report.removed > 0 {
            // Which blob a memo speaks of is not in its name; those still needed are made again.
            let _ = fs::remove_dir_all(self.own_path("memo")?);
        }
        for (name, len) in taken {
            let number =
                if Digest::from_file_name(&name).is_some() { &mut report.removed } else { &mut report.unfinished };
            *number += 1;
            report.bytes += len;
        }
        Ok(report)
    }

    /// Adds what removed models reach that a mount has open, and forgets the others; how many are open.
    pub(super) fn reach_removed(&self, reached: &mut HashSet<Digest>) -> Result<u64> {
        let mut in_use = 0;
        for path in self.removed_manifests()? {
            let file = File::open(&path).at(&path)?;
            match file.try_lock() {
                Ok(()) => fs::remove_file(&path).at(&path)?,
                Err(fs::TryLockError::WouldBlock) => {
                    let bytes = fs::read(&path).at(&path)?;
                    reached.extend(Manifest::parse(&bytes).at(&path)?.blobs().map(|layer| layer.digest));
                    in_use += 1;
                }
                Err(fs::TryLockError::Error(error)) => return Err(Error::io(&path, error)),
            }
        }
        Ok(in_use)
    }

    fn removed_manifests(&self) -> Result<Vec<PathBuf>> {
        let dir = self.own_path("removed")?;
        if !dir.exists() {
            return Ok(Vec::new());
        }
        Ok(children(&dir)?.into_iter().map(|name| dir.join(name)).collect())
    }
}
