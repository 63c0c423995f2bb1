//! What another program writes into the store through a mount: unfinished files and finished blobs that no manifest
//! names yet, in `.wmount/ingest/`, and what makes a model of them.
//!
//! A blob gets its name there when its content was hashed and is durable, so what has a blob's name is one. It moves
//! to `blobs/` under the writers' lock, together with the manifest that names it: `gc` never meets it in between.

use std::collections::HashSet;
use std::fs::{self, File, Metadata, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::access::Access;
use super::beneath::Dir;
use super::blobs::damaged;
use super::load::check_sizes;
use super::stage::Stage;
use super::{Found, Store, children, remove_with_files};
use crate::chunks::for_each_to_the_end;
use crate::digest::{Digest, Hasher};
use crate::error::{AtPath, Error, Result};
use crate::format::ollama::Manifest;
use crate::model::ModelName;

const DIR: &str = "ingest";
/// Held by the one process that uses the directory.
const LOCK: &str = "ingest.lock";

/// The files that one mount takes in.
#[derive(Debug)]
pub struct IngestDir {
    store: Arc<Store>,
    /// Where it was when it was opened.
    path: PathBuf,
    /// Held open: what comes to be at its path is not written to.
    dir: Dir,
    reached: Mutex<Reached>,
    _lock: File,
}

/// Where a file is that lies over the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In the directory of what is taken in, by its name there.
    Here(String),
    /// A blob of the store.
    Stored(Digest),
}

/// What manifests reach, as long as they stay as they are.
type Reached = (Vec<Found>, HashSet<Digest>);

/// The hash of the beginning of a file.
#[derive(Default)]
pub struct Progress {
    hasher: Hasher,
    len: u64,
}

impl Progress {
    /// Writes bytes to the file; goes on if they come next, and begins again if they change what was hashed, be it that
    /// only some of them are written.
    pub fn write(&mut self, file: &File, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.cut(offset);
        file.write_all_at(bytes, offset)?;
        if offset == self.len {
            self.hasher.update(bytes);
            self.len += bytes.len() as u64;
        }
        Ok(())
    }

    /// Forgets everything if the file was changed from `len` on.
    pub fn cut(&mut self, len: u64) {
        if len < self.len {
            *self = Progress::default();
        }
    }

    fn finish(&self, file: &File) -> std::io::Result<Digest> {
        let mut hasher = self.hasher.clone();
        let read = |at, buf: &mut [u8]| file.read_at(buf, at);
        for_each_to_the_end(self.len, read, |chunk| {
            hasher.update(chunk);
            Ok(())
        })?;
        Ok(hasher.finish())
    }
}

impl IngestDir {
    /// Takes the directory for this process; what another one left there goes, but for finished blobs and downloads
    /// that ollama resumes.
    ///
    /// # Errors
    /// A store that cannot be written to; another mount that takes in files for it.
    pub fn open(store: Arc<Store>) -> Result<IngestDir> {
        let shown = store.root().display();
        let cannot = |error: Error| Error::Invalid(format!("--ingest writes into the store {shown}: {error}"));
        let lock = store.try_ingest().map_err(cannot)?.ok_or_else(|| {
            Error::Invalid(format!("{shown}: another mount with --ingest takes in files for this store"))
        })?;
        let dir = store.own_path(DIR)?;
        match fs::create_dir(&dir) {
            // A link would lead out of the store.
            Err(error) if fs::symlink_metadata(&dir).map_or(true, |found| !found.is_dir()) => {
                return Err(cannot(Error::io(&dir, error)));
            }
            _ => {}
        }
        let opened = Dir::plain(&dir).at(&dir).map_err(cannot)?;
        let found = IngestDir { store: store.clone(), path: dir, dir: opened, reached: Mutex::default(), _lock: lock };
        for name in found.names()? {
            if found.dir.plain_metadata(&name).is_err() || !is_resumable(&name) {
                found.remove(&Place::Here(name));
            }
        }
        Ok(found)
    }

    /// The names of the files that are there.
    pub fn names(&self) -> Result<Vec<String>> {
        children(&self.path)
    }

    /// A blob of the store, if it is there.
    pub fn stored(&self, digest: &Digest) -> Option<Place> {
        self.store.blob_metadata(digest).is_ok().then_some(Place::Stored(*digest))
    }

    /// What a file is: a regular one, and no link to what is elsewhere.
    pub fn metadata(&self, place: &Place) -> std::io::Result<Metadata> {
        match place {
            Place::Here(name) => self.dir.plain_metadata(name),
            Place::Stored(digest) => self.store.blob_metadata(digest),
        }
    }

    /// Opens a file, with `write` to write to it, too; a blob of the store is only read.
    pub fn file(&self, place: &Place, write: bool) -> std::io::Result<File> {
        match place {
            Place::Here(name) => self.dir.plain_file(name, write),
            Place::Stored(_) if write => Err(std::io::ErrorKind::PermissionDenied.into()),
            Place::Stored(digest) => {
                self.store.blob_file(digest).map_err(std::io::Error::other).and_then(|file| file.try_clone())
            }
        }
    }

    /// Who may read a file, which was found to be this.
    pub fn access(&self, place: Option<&Place>, found: &Metadata) -> Access {
        match place {
            Some(Place::Stored(digest)) => self.store.stored_access(digest),
            _ => self.store.own_access(found, &self.dir, &self.path),
        }
    }

    /// Makes a file.
    pub fn create(&self, name: &str) -> Result<File> {
        self.dir.new_file(name).at(self.path.join(name))
    }

    /// Gives a file another name. A blob of the store is where it belongs.
    pub fn rename(&self, place: &Place, to: &str) -> Result<Place> {
        let Place::Here(name) = place else { return Ok(place.clone()) };
        self.dir.rename(name, to).at(self.path.join(name)).map(|()| Place::Here(to.into()))
    }

    /// Removes a file; one of the store itself stays.
    pub fn remove(&self, place: &Place) {
        if let Place::Here(name) = place
            && let Err(error) = self.dir.remove(name)
        {
            tracing::debug!("{}: {error}", self.path.join(name).display());
        }
    }

    /// Checks a file whose hash has come as far as `progress`, and makes it durable: it may have the blob's name then.
    ///
    /// # Errors
    /// [`Error::Damaged`] if its content has another digest; it is then as it was.
    pub fn finish(&self, place: &Place, progress: &Progress, digest: &Digest) -> Result<()> {
        let path = match place {
            Place::Here(name) => self.path.join(name),
            Place::Stored(digest) => self.store.blob_path(digest),
        };
        let file = self.file(place, false).at(&path)?;
        let actual = progress.finish(&file).at(&path)?;
        if actual != *digest {
            return Err(Error::Damaged { digest: *digest, fault: format!("its content has the digest {actual}") });
        }
        file.set_permissions(Permissions::from_mode(0o444)).at(&path)?;
        file.sync_all().at(path)
    }

    /// Whether this is a finished blob here or one of the store's.
    pub fn has(&self, digest: &Digest, len: u64) -> bool {
        let places = [Place::Here(digest.file_name()), Place::Stored(*digest)];
        places.iter().any(|place| self.metadata(place).is_ok_and(|found| found.len() == len))
    }

    /// Makes a model, or puts it in the place of one; its blobs are the store's then. Waits for other writers.
    ///
    /// # Errors
    /// A manifest that is none, or that names what is neither a blob of the store nor a finished one here.
    pub fn publish(&self, name: &ModelName, bytes: &[u8]) -> Result<Manifest> {
        let path = self.store.manifest_path(name);
        let manifest = Manifest::parse(bytes).at(&path)?;
        check_sizes(&manifest).at(&path)?;
        let lock = self.store.wait_for_lock()?;
        let stage = Stage::new(&self.store, &lock)?;
        for layer in manifest.blobs().filter(|layer| !stage.has_unread(&layer.digest, layer.size)) {
            let file = self
                .dir
                .plain_file(&layer.digest.file_name(), false)
                .map_err(|error| damaged(&layer.digest, &error))?;
            stage.take_hashed(&file, &layer.digest, layer.size)?;
        }
        stage.flush()?;
        stage.publish(name, bytes, true)?;
        Ok(manifest)
    }

    /// Removes a model as `rm` does. Waits for other writers.
    pub fn remove_model(&self, name: &ModelName) -> Result<()> {
        let lock = self.store.wait_for_lock()?;
        self.store.remove_locked(name, &lock)
    }

    /// Removes a blob of the store that no manifest reaches, as `gc` would; `false` if it stays.
    pub fn remove_blob(&self, digest: &Digest) -> Result<bool> {
        let path = self.store.blob_path(digest);
        if fs::symlink_metadata(&path).is_err() {
            return Ok(false);
        }
        // Who writes just now may be about to name it, and leaves it to the next gc.
        let Some(_lock) = self.store.try_lock()? else { return Ok(false) };
        let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        let survey = self.store.survey_all()?;
        self.store.check_place()?;
        self.store.check_manifests(false)?;
        if !survey.nameless.is_empty() || reached.0 != survey.models {
            let digests = self.store.reached(&survey)?;
            *reached = (survey.models, digests);
        }
        let mut open = HashSet::new();
        self.store.reach_removed(&mut open)?;
        if reached.1.contains(digest) || open.contains(digest) {
            return Ok(false);
        }
        fs::remove_file(&path).at(path).map(|()| true)
    }
}

impl Store {
    /// The lock of the directory; `None` if another process has it.
    fn try_ingest(&self) -> Result<Option<File>> {
        Ok(self.try_lock_file(LOCK)?.map(|(_, file)| file))
    }

    /// Removes what a mount with `--ingest` left behind, if none is there; names and lengths of the files.
    pub(super) fn clean_ingest(&self) -> Result<Vec<(String, u64)>> {
        let dir = self.own_path(DIR)?;
        match dir.exists().then(|| self.try_ingest()).transpose()?.flatten() {
            Some(_lock) => remove_with_files(&dir),
            None => Ok(Vec::new()),
        }
    }
}

/// Whether ollama goes on with what has this name when it pulls again, or finds it finished.
pub fn is_resumable(name: &str) -> bool {
    let Some((digest, rest)) = name.split_at_checked("sha256-".len() + 64) else { return false };
    let part = rest.strip_prefix("-partial-").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    Digest::from_file_name(digest).is_some() && (part || ["", "-partial", ".tmp"].contains(&rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ollama_resumes_is_known_by_its_name() {
        let digest = Digest::of(b"x").file_name();
        for end in ["", "-partial", "-partial-0", "-partial-15", ".tmp"] {
            assert!(is_resumable(&format!("{digest}{end}")), "{end}");
        }
        for name in
            ["", "sha256-1234", "new-00", &digest[1..], &format!("{digest}-partial-"), &format!("{digest}-partial-x")]
        {
            assert!(!is_resumable(name), "{name}");
        }
        assert!(!is_resumable(&digest.to_uppercase()) && !is_resumable(&format!("{digest}x")));
    }

    #[test]
    fn a_hash_follows_writes_in_order_and_begins_again_after_others() {
        let file = tempfile::tempfile().expect("a file");
        let writes: [(u64, &[u8]); 5] = [(0, b"abc"), (3, b"def"), (9, b"jkl"), (6, b"ghi"), (1, b"B")];
        let mut progress = Progress::default();
        for (offset, bytes) in writes {
            progress.write(&file, offset, bytes).expect("written");
        }
        assert_eq!(progress.finish(&file).expect("read"), Digest::of(b"aBcdefghijkl"));
        progress.write(&file, 0, b"aBcdefghijkl").expect("written");
        progress.cut(5);
        file.set_len(5).expect("cut");
        assert_eq!(progress.finish(&file).expect("read"), Digest::of(b"aBcde"));
    }

    #[test]
    fn what_a_write_that_failed_has_left_is_hashed() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut progress = Progress::default();
        progress.write(file.as_file(), 0, b"abc").expect("written");
        let refused = File::open(file.path()).expect("readable");
        assert!(progress.write(&refused, 1, b"XY").is_err());
        file.as_file().write_all_at(b"X", 1).expect("written");
        assert_eq!(progress.finish(file.as_file()).expect("read"), Digest::of(b"aXc"));
    }

    #[test]
    fn half_written_files_go_and_what_can_be_resumed_stays() {
        let place = tempfile::tempdir().expect("a directory");
        let store = Arc::new(Store::create(place.path()).expect("a store"));
        let blob = Digest::of(b"finished");
        let kept = [format!("{}-partial", blob.file_name()), blob.file_name()];
        let dir = IngestDir::open(store.clone()).expect("opened");
        for name in kept.iter().map(String::as_str).chain(["new-1", "sha256-77"]) {
            dir.create(name).expect("made").write_all_at(b"finished", 0).expect("written");
        }
        assert!(IngestDir::open(store.clone()).is_err(), "one at a time");
        store.clean_ingest().expect("nothing to do");
        assert_eq!(dir.names().expect("listed").len(), 4);
        drop(dir);
        let dir = IngestDir::open(store.clone()).expect("opened");
        let mut names = dir.names().expect("listed");
        names.sort_by_key(|name| std::cmp::Reverse(name.len()));
        assert_eq!(names, kept);
        let part = Place::Here(kept[0].clone());
        assert!(dir.finish(&part, &Progress::default(), &Digest::of(b"x")).is_err());
        dir.finish(&part, &Progress::default(), &blob).expect("it has this content");
        assert_eq!(dir.metadata(&part).expect("there").permissions().mode() & 0o777, 0o444);
        drop(dir);
        let report = store.gc().expect("gc");
        assert_eq!((report.removed, report.unfinished, report.bytes), (1, 1, 16));
        assert!(!place.path().join(".wmount/ingest").exists());
    }
}
