//! Writing through ollama: the names that a mount with `--ingest` adds to `ollama/`.
//!
//! Over what the [`Vfs`] shows lie the files that ollama has not finished, the directories that it made, and finished
//! blobs that no manifest names yet. A manifest that is complete becomes a model of the store, and what it names a
//! blob; from then on the tree shows both, and their names here go. Nothing else of the tree can be changed.

mod files;
mod names;
mod publish;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::model::ModelName;
use crate::store::ingest::{IngestDir, Place, Progress, is_resumable};
use crate::tree::number;
use crate::vfs::{Access, Attr, Children, Kind, Vfs};

pub use names::Names;

/// The directory that can be written to.
const ROOT: &str = "ollama";
/// Its directory of blobs.
const BLOBS: &str = "ollama/blobs";
/// Its directory of manifests.
const MANIFESTS: &str = "ollama/manifests";

/// What an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A directory.
    Dir,
    /// A regular file.
    File,
    /// A symbolic link.
    Link,
}

impl From<Kind> for Form {
    fn from(kind: Kind) -> Form {
        match kind {
            Kind::Dir => Form::Dir,
            Kind::File => Form::File,
        }
    }
}

/// Attributes of something in `ollama/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Inode number.
    pub ino: u64,
    /// What it is.
    pub form: Form,
    /// Size in bytes, 0 for directories.
    pub size: u64,
    /// Number of names.
    pub nlink: u32,
    /// When the content last changed.
    pub mtime: SystemTime,
    /// Who may read it.
    pub access: Access,
    /// Whether its owner may write to it.
    pub writable: bool,
    /// Whether it stays as it is as long as the mount.
    pub lasting: bool,
}

/// The writable part of a tree.
pub struct Ingest {
    vfs: Arc<Vfs>,
    dir: IngestDir,
    /// Held while a model is made or removed.
    publishing: Mutex<()>,
    state: Mutex<State>,
    /// What tells the inode numbers of this mount from those of others.
    salt: [u8; 20],
    next: AtomicU64,
}

#[derive(Default)]
struct State {
    /// What lies over the tree, by path from the root of the mount.
    names: BTreeMap<String, Name>,
    /// Unfinished files and finished blobs, by inode number.
    files: HashMap<u64, Arc<Pending>>,
    /// Open files, by handle.
    handles: HashMap<u64, Handle>,
    /// The paths of directories that were handed out.
    dirs: HashMap<u64, String>,
    /// The paths of the tree's manifests that were handed out.
    manifests: HashMap<u64, String>,
}

impl State {
    fn pending_at(&self, path: &str) -> Option<Arc<Pending>> {
        let Some(Name::File(ino)) = self.names.get(path) else { return None };
        self.files.get(ino).cloned()
    }
}

#[derive(Debug, Clone)]
enum Name {
    Dir(SystemTime),
    File(u64),
    Link(u64, OsString),
    /// Another name of a file of the tree, by its path there.
    Alias(String),
}

/// A file that was written here.
struct Pending {
    ino: u64,
    progress: Mutex<Progress>,
    state: Mutex<PendingState>,
}

struct PendingState {
    /// Where it is, as long as it has a name. It is held open only while it is open here: there may be thousands.
    place: Option<Place>,
    /// The last name that it had.
    path: String,
    names: u32,
    opens: u32,
    /// Whether it is a finished blob, or about to be one.
    sealed: bool,
    /// Whether it was written to since a model was last made of it.
    dirty: bool,
    /// Whether it is the manifest of a model, whose name is no longer here.
    published: bool,
}

impl Pending {
    fn state(&self) -> MutexGuard<'_, PendingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone)]
struct Handle {
    pending: Arc<Pending>,
    file: Arc<File>,
    write: bool,
    /// The inode that the kernel opened: that of the tree's manifest, if this is the one that replaces it.
    shown: u64,
}

impl Ingest {
    /// The writable part of a tree; what can be resumed of an earlier mount is there again.
    pub fn new(vfs: Arc<Vfs>) -> Result<Ingest> {
        let dir = IngestDir::open(vfs.store().clone())?;
        let mut salt = [0; 20];
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        salt[..16].copy_from_slice(&since.as_nanos().to_le_bytes());
        salt[16..].copy_from_slice(&std::process::id().to_le_bytes());
        let (publishing, state, next) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        let ingest = Ingest { vfs, dir, publishing, state, salt, next };
        for name in ingest.dir.names()? {
            let sealed = Digest::from_file_name(&name).is_some();
            ingest.add(&mut ingest.state(), format!("{BLOBS}/{name}"), Place::Here(name), sealed);
        }
        tracing::info!("what ollama writes into {ROOT}/ goes into the store {}", ingest.vfs.store().root().display());
        ingest.vfs.describe("ingest", true.into());
        Ok(ingest)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, when what the tree shows at a path was found out: that can take long if the store does not answer, and
    /// then nobody else waits for it.
    fn state_at(&self, path: &str) -> Result<MutexGuard<'_, State>> {
        if !matches!(self.state().names.get(path), Some(Name::File(_))) {
            Ingest::plan(self.vfs.resolve(path))?;
        }
        Ok(self.state())
    }

    /// Passes over what came of a look at the tree, unless another look would wait again.
    fn plan<T>(looked: Result<T>) -> Result<()> {
        looked.map(drop).or_else(|error| if error.is_unanswered() { Err(error) } else { Ok(()) })
    }

    /// A number that was never handed out.
    fn new_ino(&self) -> u64 {
        number(&["ingest"], &[&self.salt, &self.next.fetch_add(1, Ordering::Relaxed).to_le_bytes()])
    }

    fn add(&self, state: &mut State, path: String, place: Place, sealed: bool) -> Arc<Pending> {
        let place = Some(place);
        let (ino, progress) = (self.new_ino(), Mutex::default());
        let inner =
            PendingState { place, path: path.clone(), names: 1, opens: 0, sealed, dirty: false, published: false };
        let pending = Arc::new(Pending { ino, progress, state: Mutex::new(inner) });
        state.files.insert(ino, pending.clone());
        state.names.insert(path, Name::File(ino));
        pending
    }

    /// The path of a directory in `ollama/`; `None` for what is elsewhere, where nothing can be written.
    pub fn path_of(&self, dir: u64) -> Option<String> {
        if let Some(path) = self.state().dirs.get(&dir) {
            return Some(path.clone());
        }
        let path = self.vfs.path_of(dir)?;
        is_inside(&path).then(|| path.to_string())
    }

    /// Whether this is the name in the root of the directory that can be written to.
    pub fn is_top(&self, name: &OsStr) -> bool {
        name == ROOT
    }

    /// Whether an inode is in `ollama/`.
    pub fn has(&self, ino: u64) -> bool {
        let known = |state: &State| {
            state.files.contains_key(&ino)
                || state.names.values().any(|name| matches!(name, Name::Link(n, _) if *n == ino))
        };
        known(&self.state()) || self.path_of(ino).is_some() || self.vfs.layout_of(ino) == Some(ROOT)
    }

    /// What has this name in a directory.
    pub fn lookup(&self, dir: &str, name: &str) -> Result<Stat> {
        let path = if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") };
        self.stat(&mut *self.state_at(&path)?, &path)
    }

    fn stat(&self, state: &mut State, path: &str) -> Result<Stat> {
        match state.names.get(path) {
            Some(Name::File(ino)) => {
                let pending = state.files.get(ino).cloned().ok_or(Error::Stale(*ino))?;
                match self.stat_of(state, &pending) {
                    // A blob that no model needs any more goes with the next gc.
                    Err(Error::NotFound(_)) => {
                        self.drop_name(state, path);
                        self.vfs.resolve(path).map(|attr| self.seen(state, path, attr))
                    }
                    stat => stat,
                }
            }
            Some(Name::Link(ino, target)) => {
                let (form, size) = (Form::Link, target.len() as u64);
                Ok(Stat {
                    ino: *ino,
                    form,
                    size,
                    nlink: 1,
                    mtime: SystemTime::UNIX_EPOCH,
                    access: Access::ALL,
                    writable: true,
                    lasting: false,
                })
            }
            Some(Name::Alias(of)) => {
                let of = of.clone();
                let attr = self.vfs.resolve(&of)?;
                Ok(self.seen(state, &of, attr))
            }
            Some(Name::Dir(mtime)) => {
                let mtime = *mtime;
                match self.vfs.resolve(path) {
                    Ok(attr) => Ok(self.seen(state, path, attr)),
                    Err(_) => {
                        let ino = number(&["skeleton", path], &[]);
                        state.dirs.insert(ino, path.to_owned());
                        Ok(Stat {
                            ino,
                            form: Form::Dir,
                            size: 0,
                            nlink: 2,
                            mtime,
                            access: Access::ALL,
                            writable: true,
                            lasting: false,
                        })
                    }
                }
            }
            None => self.vfs.resolve(path).map(|attr| self.seen(state, path, attr)),
        }
    }

    /// The attributes of what the tree shows, which is remembered.
    fn seen(&self, state: &mut State, path: &str, attr: Attr) -> Stat {
        let form = attr.kind.into();
        let manifest = form == Form::File && path.starts_with(MANIFESTS);
        if manifest {
            state.manifests.insert(attr.ino, path.to_owned());
        }
        let access = attr.access;
        // What belongs to somebody else is not written to from here.
        let (writable, lasting) =
            (form == Form::Dir || manifest && access.uid.is_none(), form == Form::File && !manifest);
        Stat { ino: attr.ino, form, size: attr.size, nlink: attr.nlink, mtime: attr.mtime, access, writable, lasting }
    }

    /// The attributes of an inode, if it is in `ollama/` and not one of the tree that nobody can write to.
    pub fn attr(&self, ino: u64) -> Result<Option<Stat>> {
        let mut state = self.state();
        if let Some(pending) = state.files.get(&ino) {
            return self.stat_of(&state, pending).map(Some);
        }
        // The manifest that takes the place of this one is written through its inode.
        if let Some(handle) = state.handles.values().find(|handle| handle.shown == ino) {
            return self.stat_of(&state, &handle.pending).map(|stat| Some(Stat { ino, ..stat }));
        }
        let link = |(path, name): (&String, &Name)| matches!(name, Name::Link(n, _) if *n == ino).then(|| path.clone());
        if let Some(path) = state.names.iter().find_map(link) {
            return self.stat(&mut state, &path).map(Some);
        }
        let known = state.dirs.get(&ino).or_else(|| state.manifests.get(&ino)).cloned();
        if let Some(path) = known.filter(|path| state.names.contains_key(path)) {
            return self.stat(&mut state, &path).map(Some);
        }
        drop(state);
        let path = match self.vfs.path_of(ino) {
            Some(path) if is_inside(&path) => path.to_string(),
            _ if self.vfs.layout_of(ino) == Some(ROOT) => match self.state().manifests.get(&ino) {
                Some(path) => path.clone(),
                None => return Ok(None),
            },
            _ => return Ok(None),
        };
        let attr = self.vfs.attr(ino)?;
        Ok(Some(self.seen(&mut self.state(), &path, attr)))
    }

    /// The target of a symbolic link.
    pub fn read_link(&self, ino: u64) -> Result<OsString> {
        let state = self.state();
        let target = state.names.values().find_map(|name| match name {
            Name::Link(link, target) if *link == ino => Some(target.clone()),
            _ => None,
        });
        target.ok_or(Error::Stale(ino))
    }

    /// The names in a directory, as they are now.
    pub fn entries(&self, ino: u64, dir: &str) -> Result<Names> {
        let state = self.state();
        let mut own = Vec::new();
        for (name, found) in below(&state, dir) {
            let path = format!("{dir}/{name}");
            own.push(match found {
                Name::Dir(_) => (name.into(), number(&["skeleton", &path], &[]), Form::Dir),
                Name::File(ino) => (name.into(), *ino, Form::File),
                Name::Link(ino, _) => (name.into(), *ino, Form::Link),
                Name::Alias(of) => (name.into(), self.vfs.resolve(of).map_or(0, |attr| attr.ino), Form::File),
            });
        }
        drop(state);
        let listing = self.vfs.resolve(dir).and_then(|attr| self.vfs.entries(attr.ino));
        match listing {
            Ok(listing) => Ok(Names::new(ino, listing.parent, own, listing.children)),
            Err(Error::NotFound(_)) => Ok(Names::new(ino, ino, own, Children::Few([].into()))),
            Err(error) => Err(error),
        }
    }

    fn has_children(&self, state: &State, dir: &str) -> bool {
        let shown = || self.vfs.resolve(dir).and_then(|attr| self.vfs.entries(attr.ino));
        below(state, dir).next().is_some() || shown().is_ok_and(|listing| !listing.children.is_empty())
    }

    /// Makes a directory.
    pub fn make_dir(&self, dir: &str, name: &str) -> Result<Stat> {
        let path = format!("{dir}/{name}");
        let mut state = self.state_at(&path)?;
        if self.stat(&mut state, &path).is_ok() {
            return Err(refused(&path, io::ErrorKind::AlreadyExists));
        }
        state.names.insert(path.clone(), Name::Dir(SystemTime::now()));
        self.stat(&mut state, &path)
    }

    /// Makes a symbolic link, which ollama does in directories of its own beside `blobs/`.
    pub fn make_link(&self, dir: &str, name: &str, target: OsString) -> Result<Stat> {
        let path = format!("{dir}/{name}");
        let mut state = self.state_at(&path)?;
        if path.starts_with(MANIFESTS) || dir == BLOBS {
            return Err(refused(&path, io::ErrorKind::PermissionDenied));
        }
        if self.stat(&mut state, &path).is_ok() {
            return Err(refused(&path, io::ErrorKind::AlreadyExists));
        }
        state.names.insert(path.clone(), Name::Link(self.new_ino(), target));
        self.stat(&mut state, &path)
    }

    /// Gives a file another name, as ollama does with the parts of a model that it merges.
    pub fn link(&self, ino: u64, dir: &str, name: &str) -> Result<Stat> {
        let path = format!("{dir}/{name}");
        let mut state = self.state_at(&path)?;
        if path.starts_with(MANIFESTS) || dir == BLOBS {
            return Err(refused(&path, io::ErrorKind::PermissionDenied));
        }
        if self.stat(&mut state, &path).is_ok() {
            return Err(refused(&path, io::ErrorKind::AlreadyExists));
        }
        if let Some(pending) = state.files.get(&ino).cloned() {
            pending.state().names += 1;
            state.names.insert(path.clone(), Name::File(ino));
        } else {
            let of = self.vfs.blob_of(ino).map(|digest| format!("{BLOBS}/{}", digest.file_name()));
            let of = of.ok_or_else(|| refused(&path, io::ErrorKind::PermissionDenied))?;
            state.names.insert(path.clone(), Name::Alias(of));
        }
        self.stat(&mut state, &path)
    }

    /// Removes an empty directory. The two that ollama needs come back at once.
    pub fn remove_dir(&self, dir: &str, name: &str) -> Result<()> {
        let path = format!("{dir}/{name}");
        Ingest::plan(self.vfs.resolve(&path).and_then(|attr| self.vfs.entries(attr.ino)))?;
        let mut state = self.state();
        if self.stat(&mut state, &path)?.form != Form::Dir {
            return Err(Error::NotDir);
        }
        if self.has_children(&state, &path) {
            return Err(refused(&path, io::ErrorKind::DirectoryNotEmpty));
        }
        state.names.remove(&path);
        Ok(())
    }

    fn stat_of(&self, state: &State, pending: &Pending) -> Result<Stat> {
        let inner = pending.state();
        let opened = || state.handles.values().find(|handle| handle.pending.ino == pending.ino);
        let found = match &inner.place {
            Some(place) => self.dir.metadata(place),
            None => opened().ok_or(Error::Stale(pending.ino))?.file.metadata(),
        };
        let found = found.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NotFound(inner.path.clone()),
            _ => Error::io(&inner.path, error),
        })?;
        let mtime = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        let (size, nlink, writable) = (found.len(), inner.names, !inner.sealed);
        let access = self.dir.access(inner.place.as_ref(), &found);
        Ok(Stat { ino: pending.ino, form: Form::File, size, nlink, mtime, access, writable, lasting: false })
    }
}

/// The names that were added to a directory.
fn below<'a>(state: &'a State, dir: &str) -> impl Iterator<Item = (&'a str, &'a Name)> {
    let prefix = format!("{dir}/");
    let range = state.names.range(prefix.clone()..);
    let inside = range.map_while(move |(path, name)| Some((path.strip_prefix(&prefix)?, name)));
    inside.filter(|(name, _)| !name.contains('/'))
}

fn is_inside(path: &str) -> bool {
    path == ROOT || path.starts_with("ollama/")
}

/// The model whose manifest stands at this path.
fn model_at(path: &str) -> Option<ModelName> {
    let parts: Vec<&str> = path.strip_prefix(MANIFESTS)?.strip_prefix('/')?.split('/').collect();
    let [host, namespace, name, tag] = parts[..] else { return None };
    ModelName::new(host, namespace, name, tag).ok()
}

/// The blob whose name this path is.
fn blob_at(path: &str) -> Option<Digest> {
    Digest::from_file_name(path.strip_prefix(BLOBS)?.strip_prefix('/')?)
}

fn refused(path: &str, kind: io::ErrorKind) -> Error {
    Error::io(path, kind.into())
}
