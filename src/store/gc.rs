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
use super::{Found, Lock, Store, Survey, beneath, children};
use crate::digest::Digest;
use crate::error::{AtPath, Error, Result};
use crate::format::ollama::{MAX_MANIFEST, Manifest};
use crate::model::ModelName;

/// What `gc` did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct GcReport {
    /// Blobs removed.
    pub removed: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files that an import, or a mount with `--ingest`, left unfinished.
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
    // A clock that was put back, or another machine's, makes it a time to come.
    let age = blob.modified().map(|time| time.elapsed().unwrap_or_else(|ahead| ahead.duration()));
    blob.is_file() && blob.mode() & 0o222 != 0 && age.is_ok_and(|age| age < YOUNG)
}

/// How far below `manifests/` something is looked for that nobody's program puts there.
const MAX_DEPTH: u32 = 8;

/// Adds what a file reaches that is a manifest, or the files of a directory.
fn reach_nameless(path: &Path, depth: u32, reached: &mut HashSet<Digest>) -> Result<()> {
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        found => found.at(path)?,
    };
    // Links to directories can go in circles.
    let may_enter = depth == MAX_DEPTH || depth > 0 && !path.is_symlink();
    if found.is_dir() && may_enter {
        for entry in fs::read_dir(path).at(path)? {
            reach_nameless(&entry.at(path)?.path(), depth - 1, reached)?;
        }
    } else if found.is_file() && found.len() <= MAX_MANIFEST {
        let bytes = fs::read(path).at(path)?;
        reached.extend(Manifest::parse(&bytes).iter().flat_map(Manifest::blobs).map(|layer| layer.digest));
    }
    Ok(())
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
        self.check_place()?;
        let manifest = self.manifest_path(name);
        let removed = self.own_path("removed")?;
        fs::create_dir_all(&removed).at(&removed)?;
        let (inode, _) = found.version;
        if fs::symlink_metadata(&manifest).at(&manifest)?.is_symlink() {
            // What it leads to is another model's, and stays.
            fs::remove_file(&manifest).at(&manifest)?;
        } else {
            // The inode number keeps two removed models apart: both files live on one file system.
            fs::rename(&manifest, removed.join(inode.to_string())).at(&manifest)?;
        }
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
    /// reaches. So does a store that shares its blobs with another one.
    pub fn gc(&self) -> Result<GcReport> {
        let lock = self.lock()?;
        self.check_place()?;
        let survey = self.survey_all()?;
        let mut reached = self.reached(&survey)?;
        self.check_manifests(reached.is_empty() && self.removed_manifests()?.is_empty())?;
        self.clean_forms(&survey.models)?;
        let mut report = GcReport { in_use: self.reach_removed(&mut reached)?, ..GcReport::default() };
        lock.check()?;
        let mut unfinished = self.clean_ingest()?;
        unfinished.extend(self.clean_staged()?);
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
        for (name, len) in unfinished {
            let number =
                if Digest::from_file_name(&name).is_some() { &mut report.removed } else { &mut report.unfinished };
            *number += 1;
            report.bytes += len;
        }
        Ok(report)
    }

    /// What the manifests below `manifests/` reach, those without a model's name included: a user may have put them aside.
    pub(super) fn reached(&self, survey: &Survey) -> Result<HashSet<Digest>> {
        let mut reached = HashSet::new();
        for found in &survey.models {
            let manifest = self.manifest(found).map_err(|error| {
                let name = &found.name;
                Error::Invalid(format!(
                    "{error}; nobody knows what it needs, so nothing is removed: mend it, or wmount rm {name}"
                ))
            })?;
            reached.extend(manifest.blobs().map(|layer| layer.digest));
        }
        for path in &survey.nameless {
            reach_nameless(path, MAX_DEPTH, &mut reached)?;
        }
        Ok(reached)
    }

    /// Adds what removed models reach that a mount has open, and forgets the others; how many are open.
    pub(super) fn reach_removed(&self, reached: &mut HashSet<Digest>) -> Result<u64> {
        let mut in_use = 0;
        for path in self.removed_manifests()? {
            if fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
                fs::remove_file(&path).at(&path)?;
                continue;
            }
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
