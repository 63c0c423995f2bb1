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
mod memo;
mod near;
mod place;
mod repair;
mod seen;
mod stage;
mod verify;

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::digest::Digest;
use crate::error::{AtPath, Error, Result, quoted};
use crate::extent::Blobs;
use crate::model::{ModelName, to_unix};

pub use access::Access;
pub(crate) use access::is_sole;
use beneath::Dir;
pub use blobs::BlobFiles;
use check::Checks;
pub use gc::{GcReport, Lease};
pub use repair::{Repaired, RepairedFile};
pub use seen::Seen;
pub use verify::{Damage, VerifyReport};

/// wmount's own directory in a store.
const OWN: &str = ".wmount";
/// The writers' lock in it.
const LOCK: &str = "lock";
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

/// A manifest found in the store, not yet read.
#[derive(Debug, Clone)]
pub struct Found {
    /// The model's name, from the manifest's path.
    pub name: ModelName,
    /// When the manifest was written.
    pub written: SystemTime,
    /// The manifest's inode and length: with the times they tell one version of it from the next.
    pub version: (u64, u64),
    /// When the manifest's inode last changed, in seconds and nanoseconds: unlike [`Found::written`] nobody can set it.
    pub changed: (i64, i64),
    /// Whether it was found so long after that time that a later change has another. This is no part of what it is.
    pub settled: bool,
    /// Which versions there are of what was computed for its other [`Form`](crate::format::Form)s, 0 where nothing was.
    pub forms: [u64; 2],
}

/// What is below `manifests/`.
#[derive(Debug, Default)]
pub struct Survey {
    /// The models, in order of name.
    pub models: Vec<Found>,
    /// Why something could not be looked at that may be a model, too.
    pub hidden: Vec<Error>,
    /// Files and directories that no model's manifest can be.
    nameless: Vec<PathBuf>,
    /// When names in the directories last came or went.
    pub times: Times,
}

/// Times of `manifests/` and of the directories below it, by their paths in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Times(BTreeMap<String, SystemTime>);

impl Times {
    fn look(&mut self, manifests: &Path, inside: &str) {
        if let Ok(time) = fs::metadata(manifests.join(inside)).and_then(|found| found.modified()) {
            self.0.insert(inside.into(), time);
        }
    }

    /// The newest of all.
    pub fn newest(&self) -> Option<SystemTime> {
        self.0.values().max().copied()
    }

    /// That of a model's host, of the namespace in it, and of the name in that.
    pub fn above(&self, model: &ModelName) -> [Option<SystemTime>; 3] {
        let ModelName { host, namespace, name, .. } = model;
        let inside = [host.clone(), format!("{host}/{namespace}"), format!("{host}/{namespace}/{name}")];
        inside.map(|inside| self.0.get(&inside).copied())
    }
}

impl Found {
    fn identity(&self) -> impl Eq + std::hash::Hash + '_ {
        (&self.name, self.written, self.version, self.changed, self.forms)
    }
}

impl PartialEq for Found {
    fn eq(&self, other: &Found) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Found {}

impl std::hash::Hash for Found {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
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

/// Held while the store is written to. It ends when the file closes.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Refuses to go on where the file that is locked is not the store's lock any more: another process may have that.
    fn check(&self) -> Result<()> {
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
    fn try_lock(&self) -> Result<Option<Lock>> {
        Ok(self.try_lock_file(LOCK)?.map(|(path, file)| Lock { path, file }))
    }

    /// A file below `.wmount/`, locked; `None` if another process has it.
    fn try_lock_file(&self, name: &str) -> Result<Option<(PathBuf, File)>> {
        let (path, file) = self.lock_file(name)?;
        match file.try_lock() {
            Ok(()) => Ok(Some((path, file))),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => Err(Error::io(&path, error)),
        }
    }

    /// Takes the writers' lock when whoever has it is done.
    fn wait_for_lock(&self) -> Result<Lock> {
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

    /// Every manifest of the store, in order of name; what is none is passed over with a log line.
    pub fn find(&self) -> Result<Vec<Found>> {
        Ok(self.survey()?.models)
    }

    /// The same for who takes away what no manifest reaches.
    ///
    /// # Errors
    /// Something below `manifests/` cannot be looked at: nobody knows what it reaches.
    fn survey_all(&self) -> Result<Survey> {
        let survey = self.survey()?;
        match survey.hidden.first() {
            None => Ok(survey),
            Some(error) => Err(Error::Invalid(format!(
                "{error}; it may be a model, so nothing is removed: mend it, or take it away"
            ))),
        }
    }

    /// Looks through `manifests/`.
    pub fn survey(&self) -> Result<Survey> {
        let (mut found, mut hidden, mut nameless) = (Vec::new(), Vec::new(), Vec::new());
        let mut pass_over = |path: PathBuf, error: Error| {
            self.ignore(path.clone(), &error);
            match may_hide_a_model(&error) {
                true => hidden.push(error),
                false => nameless.push(path),
            }
        };
        let root = self.manifests_dir();
        let manifests = Dir::open(&root).at(&root)?;
        let forms = self.form_files();
        // Each before what is in it: a name that comes meanwhile is then newer than the time.
        let mut times = Times::default();
        times.look(&root, "");
        for host in children(&root)? {
            times.look(&root, &host);
            for namespace in below(&root.join(&host), &mut pass_over) {
                times.look(&root, &format!("{host}/{namespace}"));
                for name in below(&root.join(&host).join(&namespace), &mut pass_over) {
                    times.look(&root, &format!("{host}/{namespace}/{name}"));
                    let dir = root.join(&host).join(&namespace).join(&name);
                    for tag in below(&dir, &mut pass_over) {
                        match found_in(&manifests, &dir.join(&tag), [&host, &namespace, &name, &tag]) {
                            Ok(model) => found.push(Found { forms: forms.of(&model.name), ..model }),
                            Err(error) => pass_over(dir.join(&tag), error),
                        }
                    }
                }
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Survey { models: found, hidden, nameless, times })
    }

    /// These models, or what a survey finds if none is named.
    pub fn survey_of(&self, names: &[ModelName]) -> Result<Survey> {
        if names.is_empty() {
            return self.survey();
        }
        let models = names.iter().map(|name| self.find_asked(name)).collect::<Result<_>>()?;
        Ok(Survey { models, ..Survey::default() })
    }

    /// Says once that something below `manifests/` is no manifest.
    fn ignore(&self, path: PathBuf, why: &Error) {
        let path_text = path.display().to_string();
        if self.ignored.lock().unwrap_or_else(PoisonError::into_inner).insert(path) {
            let why = why.to_string();
            let why = why.strip_prefix(&format!("{path_text}: ")).unwrap_or(&why);
            tracing::warn!("{path_text} is ignored: {why}");
        }
    }

    /// The manifest of one model.
    ///
    /// # Errors
    /// [`Error::NotFound`] if the store does not have it; others if nobody can tell.
    pub fn find_one(&self, name: &ModelName) -> Result<Found> {
        let path = self.manifest_path(name);
        let found = Dir::open(&self.manifests_dir())
            .at(&path)
            .and_then(|manifests| found_in(&manifests, &path, [&name.host, &name.namespace, &name.name, &name.tag]));
        match found {
            Ok(model) if self.respelled(name).is_none() => {
                Ok(Found { forms: self.form_files_of(&model.name), ..model })
            }
            Err(error) if may_hide_a_model(&error) => Err(error),
            _ => Err(Error::NotFound(format!("model {name} in the store {}", self.root.display()))),
        }
    }

    /// The same where there need not be one, but could be.
    fn find_any(&self, name: &ModelName) -> Result<Option<Found>> {
        if let Some(respelled) = self.respelled(name) {
            return Err(respelled.refusal(name));
        }
        match self.find_one(name) {
            Err(Error::NotFound(_)) => Ok(None),
            found => found.map(Some),
        }
    }
}

/// Makes a directory unless there is one.
fn make_dir(dir: &Path) -> std::io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        outcome => outcome,
    }
}

/// The names in a directory below `manifests/`; none in what is no directory or cannot be read.
fn below(dir: &Path, pass_over: &mut impl FnMut(PathBuf, Error)) -> Vec<String> {
    children(dir).unwrap_or_else(|error| {
        pass_over(dir.to_owned(), error);
        Vec::new()
    })
}

/// Whether what cannot be looked at is, or holds, a manifest for all that is known.
fn may_hide_a_model(error: &Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    let Error::Io { path, source } = error else { return false };
    match source.kind() {
        NotADirectory => false,
        // It is gone by now, or a link to what is not there just now, such as a disk.
        NotFound => fs::symlink_metadata(path).is_ok(),
        _ => true,
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

/// No file system counts time in longer steps, in seconds.
const COARSEST: i64 = 2;

fn found_in(manifests: &Dir, path: &Path, [host, namespace, name, tag]: [&str; 4]) -> Result<Found> {
    use std::os::unix::fs::MetadataExt;
    let name = ModelName::new(host, namespace, name, tag)?;
    let metadata = manifests.metadata(&name.manifest_path()).at(path)?;
    if !metadata.is_file() {
        return Err(Error::Invalid("is no regular file".into()));
    }
    let written = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    let settled = to_unix(SystemTime::now()).0 - changed.0 > COARSEST;
    Ok(Found { name, written, version: (metadata.ino(), metadata.len()), changed, settled, forms: [0; 2] })
}
