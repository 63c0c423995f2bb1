//! Writing blobs: to temporary files in the store, hashed while written, made durable together, then renamed.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tempfile::{NamedTempFile, TempPath};

use super::{Lock, Store, beneath, remove_with_files};
use crate::chunks::for_each_to_the_end;
use crate::digest::{Digest, Hasher};
use crate::error::{AtPath, Error, Result};
use crate::format::ollama::{self, Layer, Manifest};
use crate::model::ModelName;

/// The directory of files that are not finished, below `.wmount/`.
const TMP: &str = "tmp";
/// Staged bytes after which the finished blobs are made durable and renamed.
const BATCH: u64 = 4 << 30;
/// Bytes of a long blob after which the kernel is asked to begin writing them out, while the next ones are hashed.
const STRIDE: u64 = 8 << 20;

/// The blobs that one command adds. Unless [`Stage::keep`] is called, dropping it takes all of them away again.
///
/// Holding the writers' lock makes that safe: no other process can have come to rely on them. If the lock's file is
/// gone, or another is in its place, nothing is named or removed any more.
pub(super) struct Stage<'a> {
    store: &'a Store,
    lock: &'a Lock,
    dir: PathBuf,
    /// If it is there, only these blobs are taken, with their lengths, whatever the store has in their places.
    waited: Option<HashMap<Digest, u64>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    staged: HashMap<Digest, TempPath>,
    staged_bytes: u64,
    /// Those that were there.
    present: HashSet<Digest>,
    renamed: HashSet<Digest>,
    /// Those of them that took the place of a file.
    replaced: HashSet<Digest>,
    keep: bool,
}

/// A blob being written.
pub(super) struct Draft {
    file: NamedTempFile,
    hasher: Hasher,
    len: u64,
    /// How many of its bytes the kernel was asked to write out.
    begun: u64,
}

impl Draft {
    /// The digest of the bytes so far.
    pub fn digest(&self) -> Digest {
        self.hasher.clone().finish()
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.write_unhashed(bytes)
    }

    /// Appends bytes of a blob whose digest is computed elsewhere.
    pub fn write_unhashed(&mut self, bytes: &[u8]) -> Result<()> {
        self.len += bytes.len() as u64;
        self.file.as_file_mut().write_all(bytes).at(self.file.path())?;
        // In whole strides, so that no page is written twice.
        let whole = self.len - self.len % STRIDE;
        if whole > self.begun {
            start_writeback(self.file.as_file(), self.begun, whole - self.begun);
            self.begun = whole;
        }
        Ok(())
    }
}

impl Store {
    /// Removes what a command left behind when it was killed, for who has the lock; names and lengths of the files.
    pub(super) fn clean_staged(&self) -> Result<Vec<(String, u64)>> {
        let dir = self.own_path(TMP)?;
        if dir.exists() { remove_with_files(&dir) } else { Ok(Vec::new()) }
    }
}

impl<'a> Stage<'a> {
    /// Begins; what an earlier command left behind in `.wmount/tmp` when it was killed is removed.
    pub fn new(store: &'a Store, lock: &'a Lock) -> Result<Stage<'a>> {
        store.check_place()?;
        store.clean_staged()?;
        let dir = store.own_path(TMP)?;
        fs::create_dir(&dir).at(&dir)?;
        Ok(Stage { store, lock, dir, waited: None, state: Mutex::default() })
    }

    /// Begins, to take these blobs alone, each in the place of a damaged one. They stay once they have their names.
    pub fn replacing(store: &'a Store, lock: &'a Lock, waited: HashMap<Digest, u64>) -> Result<Stage<'a>> {
        let mut stage = Stage::new(store, lock)?;
        stage.waited = Some(waited);
        stage.keep();
        Ok(stage)
    }

    /// Whether most of what it is given is not taken.
    pub fn is_choosy(&self) -> bool {
        self.waited.is_some()
    }

    /// Whether one of the blobs that it is to take has this length.
    pub fn waits_for(&self, len: u64) -> bool {
        self.waited.iter().flat_map(HashMap::values).any(|&waited| waited == len)
    }

    /// The blobs that are written and have no names yet.
    pub fn staged(&self) -> HashSet<Digest> {
        self.state().staged.keys().copied().collect()
    }

    /// Whether the store has the blob, with this length, or will have it.
    ///
    /// What is not read only was written by another program, which may not have made it durable: it is hashed, once, and
    /// made so.
    pub fn has(&self, digest: &Digest, len: u64) -> bool {
        self.has_where(digest, len, |_| false)
    }

    /// The same, its content left to whoever wrote it.
    pub fn has_unread(&self, digest: &Digest, len: u64) -> bool {
        self.has_where(digest, len, |_| true)
    }

    /// Whether the store has the blob or will have it; what `is_trusted` says is not hashed.
    fn has_where(&self, digest: &Digest, len: u64, is_trusted: impl FnOnce(&Metadata) -> bool) -> bool {
        let state = self.state();
        if state.staged.contains_key(digest) || state.renamed.contains(digest) {
            return true;
        }
        drop(state);
        if let Some(waited) = &self.waited {
            return !waited.contains_key(digest);
        }
        if let Err(fault) = self.check_there(digest, len, is_trusted) {
            tracing::debug!("blob {digest}: {fault}");
            return false;
        }
        self.state().present.insert(*digest);
        true
    }

    /// Looks at what has the blob's name as a reader would.
    fn check_there(&self, digest: &Digest, len: u64, is_trusted: impl FnOnce(&Metadata) -> bool) -> io::Result<()> {
        let file = beneath::file(&self.store.root.join("blobs"), &digest.file_name())?;
        let found = file.metadata()?;
        if found.len() != len {
            return Err(io::Error::other(format!("it has {} bytes, not {len}", found.len())));
        }
        if found.mode() & 0o222 != 0 && !is_trusted(&found) {
            self.store.others.check(digest, &file)?.map_err(io::Error::other)?;
            file.sync_all()?;
        }
        Ok(())
    }

    /// A new blob to write to.
    pub fn draft(&self) -> Result<Draft> {
        let file = NamedTempFile::new_in(&self.dir).at(&self.dir)?;
        Ok(Draft { file, hasher: Hasher::new(), len: 0, begun: 0 })
    }

    /// Takes a finished blob; `false` if the store had it already.
    pub fn add(&self, draft: Draft) -> Result<(Digest, bool)> {
        let digest = draft.hasher.finish();
        Ok((digest, self.add_file(draft.file, digest, draft.len)?))
    }

    /// Takes a finished blob whose digest was computed elsewhere; `false` if the store had it already.
    pub fn add_as(&self, draft: Draft, digest: Digest) -> Result<bool> {
        self.add_file(draft.file, digest, draft.len)
    }

    /// Stores these parts, whose digest is known, as one blob; `false` if the store had it already.
    pub fn add_parts(&self, digest: Digest, parts: &[&[u8]]) -> Result<bool> {
        let len = parts.iter().map(|part| part.len() as u64).sum();
        if self.has(&digest, len) {
            return Ok(false);
        }
        let mut file = NamedTempFile::new_in(&self.dir).at(&self.dir)?;
        parts.iter().try_for_each(|part| file.as_file_mut().write_all(part)).at(file.path())?;
        self.add_file(file, digest, len)
    }

    /// Takes a blob of another store, as a clone or another name of the file if the file system can, else as a copy;
    /// `false` if the store had it already.
    ///
    /// It is hashed in any case: a later import of the same bytes trusts its name.
    pub fn take(&self, from: &File, digest: &Digest, len: u64) -> Result<bool> {
        self.take_if(from, digest, len, |file| Digest::of_all(|at, buf| file.read_at(buf, at)))
    }

    /// The same of a blob whose content was hashed.
    pub fn take_hashed(&self, from: &File, digest: &Digest, len: u64) -> Result<bool> {
        self.take_if(from, digest, len, |_| Ok(*digest))
    }

    fn take_if(
        &self,
        from: &File,
        digest: &Digest,
        len: u64,
        hash: impl FnOnce(&File) -> io::Result<Digest>,
    ) -> Result<bool> {
        let damaged = |fault: String| Error::Damaged { digest: *digest, fault };
        let found = from.metadata().map_err(|error| damaged(error.to_string()))?;
        if found.len() != len {
            return Err(damaged(format!("it has {} bytes, its manifest says {len}", found.len())));
        }
        // Content that was hashed in the other store's name is not read again for being here by a link.
        let is_it = |there: &Metadata| (there.dev(), there.ino()) == (found.dev(), found.ino());
        if self.has_where(digest, len, is_it) {
            return Ok(false);
        }
        let temporary = NamedTempFile::new_in(&self.dir).at(&self.dir)?;
        let shared = if clone_file(from, temporary.as_file()) {
            temporary.as_file().set_permissions(Permissions::from_mode(0o444)).at(temporary.path())?;
            temporary.into_temp_path()
        } else if let Some(link) = self.link(from, &found, digest) {
            link
        } else {
            let mut draft = Draft { file: temporary, hasher: Hasher::new(), len: 0, begun: 0 };
            let read = |at, buf: &mut [u8]| from.read_at(buf, at).map_err(|error| damaged(error.to_string()));
            for_each_to_the_end(0, read, |chunk| draft.write(chunk))?;
            digest.check(draft.digest()).map_err(damaged)?;
            return Ok(self.add(draft)?.1);
        };
        // What was cloned or linked, and not what it came from: that may be changed.
        let file = File::open(&shared).at(&shared)?;
        let actual = hash(&file).map_err(|error| damaged(error.to_string()))?;
        digest.check(actual).map_err(damaged)?;
        self.state().staged.insert(*digest, shared);
        Ok(true)
    }

    /// Another name of a blob, if the file system has such and it is this user's: another could still change it.
    fn link(&self, from: &File, found: &Metadata, digest: &Digest) -> Option<TempPath> {
        if found.uid() != rustix::process::geteuid().as_raw() {
            return None;
        }
        let link = self.dir.join(digest.file_name());
        link_file(from, &link).ok()?;
        TempPath::try_from_path(link).ok()
    }

    /// Stores bytes that are in memory; `false` if the store had them already.
    pub fn add_bytes(&self, bytes: &[u8]) -> Result<(Digest, bool)> {
        let digest = Digest::of(bytes);
        Ok((digest, self.add_parts(digest, &[bytes])?))
    }

    fn add_file(&self, file: NamedTempFile, digest: Digest, len: u64) -> Result<bool> {
        if self.has(&digest, len) {
            return Ok(false);
        }
        file.as_file().set_permissions(Permissions::from_mode(0o444)).at(file.path())?;
        start_writeback(file.as_file(), 0, len);
        let mut state = self.state();
        // Two threads may have written the same bytes at once.
        if state.staged.contains_key(&digest) {
            return Ok(false);
        }
        state.staged.insert(digest, file.into_temp_path());
        state.staged_bytes += len;
        if state.staged_bytes >= BATCH {
            self.rename(&mut state)?;
        }
        Ok(true)
    }

    /// Makes all blobs durable and gives them their names.
    pub fn flush(&self) -> Result<()> {
        self.rename(&mut self.state())
    }

    /// The blobs stay: a manifest names them.
    pub fn keep(&self) {
        self.state().keep = true;
    }

    /// Makes the blobs, which are flushed, a model, in the place of one if `replace` says so.
    pub fn publish(&self, name: &ModelName, manifest: &[u8], replace: bool) -> Result<()> {
        let path = self.store.manifest_path(name);
        if manifest.len() as u64 > ollama::MAX_MANIFEST {
            // It could not be read back.
            let (len, most) = (manifest.len(), ollama::MAX_MANIFEST);
            return Err(Error::Invalid(format!(
                "model {name} has too many tensors: its manifest of {len} bytes is over {most}"
            )));
        }
        self.lock.check()?;
        let old = self.store.find_any(name)?;
        let old_bytes = fs::read(&path).ok();
        if old_bytes.as_deref() == Some(manifest) {
            self.keep();
            return self.check_all_there(&path, manifest);
        }
        if replace && let Some(old) = &old {
            self.store.keep_removed(old)?;
        }
        let temporary = self.store.own_path(TMP)?;
        write_durably(&temporary, &path, manifest, || self.keep())?;
        self.check_all_there(&path, manifest).map_err(|gone| {
            let taken_back = match (&old, old_bytes) {
                (Some(old), Some(bytes)) => write_durably(&temporary, &path, &bytes, || ()).map(|()| {
                    let _ = File::open(&path).and_then(|file| file.set_modified(old.written));
                }),
                _ => self.store.remove_locked(name, self.lock),
            };
            match taken_back {
                Ok(()) => gone,
                Err(error) => Error::Invalid(format!("{gone}; model {name} is damaged until then: {error}")),
            }
        })
    }

    /// Looks for the blobs that a manifest names, now that it has its own name, as far as this command saw to them: a program
    /// that looks at the manifests removes none from here on, but one that has looked before may have.
    fn check_all_there(&self, path: &Path, manifest: &[u8]) -> Result<()> {
        let state = self.state();
        let is_gone = |digest: &Digest| {
            (state.present.contains(digest) || state.renamed.contains(digest))
                && !fs::metadata(self.store.blob_path(digest)).is_ok_and(|found| found.is_file())
        };
        match Manifest::parse(manifest).at(path)?.blobs().find(|layer| is_gone(&layer.digest)) {
            None => Ok(()),
            Some(Layer { digest, .. }) => Err(Error::Invalid(format!(
                "blob {digest}: another program removed it meanwhile: run the import again"
            ))),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn rename(&self, state: &mut State) -> Result<()> {
        if state.staged.is_empty() {
            return Ok(());
        }
        let paths: Vec<&Path> = state.staged.values().map(AsRef::as_ref).collect();
        sync_files(&self.dir, &paths)?;
        self.lock.check()?;
        let mut mended: Vec<(Digest, u64)> = Vec::new();
        for (digest, temporary) in std::mem::take(&mut state.staged) {
            let path = self.store.blob_path(&digest);
            if self.waited.is_some() && fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
                self.put_aside(&path)?;
            }
            let old = fs::metadata(&path).or_else(|_| fs::symlink_metadata(&path));
            temporary.persist(&path).map_err(|error| Error::io(&path, error.error))?;
            state.renamed.insert(digest);
            if self.waited.is_none()
                && let Ok(old) = old
            {
                tracing::warn!("blob {digest} could not be read or was not what its name says: it is replaced");
                self.store.reopen(&digest);
                state.replaced.insert(digest);
                mended.push((digest, old.ino()));
            }
        }
        state.staged_bytes = 0;
        sync_dir(&self.store.root.join("blobs"))?;
        if !mended.is_empty() {
            self.store.announce(mended);
        }
        Ok(())
    }
}

impl Stage<'_> {
    /// Takes a directory away that stands where a blob belongs; a file is replaced as it is.
    fn put_aside(&self, path: &Path) -> Result<()> {
        let aside = self.store.own_path("aside")?;
        fs::create_dir_all(&aside).at(&aside)?;
        let now = crate::model::to_unix(std::time::SystemTime::now()).0;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        fs::rename(path, aside.join(format!("{name}.{now}"))).at(path)
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.lock.check().is_err() {
            // What has these names may be another writer's by now, or be needed by it.
            std::mem::take(&mut state.staged).into_values().for_each(|temporary| _ = temporary.keep());
            return;
        }
        if !state.keep {
            // In the place of another file, other models may need it.
            for digest in state.renamed.iter().filter(|digest| !state.replaced.contains(*digest)) {
                let _ = fs::remove_file(self.store.blob_path(digest));
            }
        }
        state.staged.clear();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Writes a file by way of a temporary one: it is there whole or not at all, and durable.
///
/// `named` is called when it has its name: from then on others rely on it, even if making that durable fails.
fn write_durably(temporary_dir: &Path, path: &Path, bytes: &[u8], named: impl FnOnce()) -> Result<()> {
    let parent = path.parent().expect("the files of a store have a parent");
    fs::create_dir_all(parent).at(parent)?;
    let mut file = NamedTempFile::new_in(temporary_dir).at(temporary_dir)?;
    file.write_all(bytes).at(file.path())?;
    file.as_file().set_permissions(Permissions::from_mode(0o644)).at(file.path())?;
    file.as_file().sync_all().at(file.path())?;
    file.persist(path).map_err(|error| Error::io(path, error.error))?;
    named();
    let mut dir = Some(parent);
    // The directories may be new, each an entry of the one above it.
    while let Some(above) = dir.filter(|dir| dir.file_name().is_some_and(|name| name != "manifests")) {
        sync_dir(above)?;
        dir = above.parent();
    }
    dir.map_or(Ok(()), sync_dir)
}

/// Makes the entries of a directory durable.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).at(dir)
}

/// Makes the content of many files durable: one `syncfs` is far cheaper than an `fsync` for each.
fn sync_files(dir: &Path, paths: &[&Path]) -> Result<()> {
    /// Below this many the rest of the file system is not made to wait for us.
    const FEW: usize = 4;
    if cfg!(target_os = "linux") && paths.len() > FEW {
        return sync_file_system(dir);
    }
    paths.iter().try_for_each(|path| File::open(path).and_then(|file| file.sync_all()).at(path))
}

#[cfg(target_os = "linux")]
fn sync_file_system(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| Ok(rustix::fs::syncfs(&dir)?)).at(dir)
}

#[cfg(not(target_os = "linux"))]
fn sync_file_system(dir: &Path) -> Result<()> {
    sync_dir(dir)
}

/// Makes `to` share the content of `from`, if the file system can.
fn clone_file(from: &File, to: &File) -> bool {
    #[cfg(target_os = "linux")]
    return rustix::fs::ioctl_ficlone(to, from).is_ok();
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (from, to);
        false
    }
}

/// Gives an open file another name.
#[cfg(target_os = "linux")]
fn link_file(from: &File, to: &Path) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    use rustix::fs::{AtFlags, CWD, linkat};

    // By its path, another file could have come into its place.
    Ok(linkat(CWD, format!("/proc/self/fd/{}", from.as_raw_fd()), CWD, to, AtFlags::SYMLINK_FOLLOW)?)
}

/// An open file gets no other name on this system.
#[cfg(not(target_os = "linux"))]
fn link_file(_from: &File, _to: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Asks the kernel to begin writing this part of the file out, so that the sync at the end finds little to do.
fn start_writeback(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open; the call touches no memory of ours. It is advice: its failure changes nothing.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), offset as i64, len as i64, libc::SYNC_FILE_RANGE_WRITE);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, len);
}

#[cfg(test)]
mod tests;
