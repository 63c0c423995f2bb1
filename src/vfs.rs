//! What a front serves: lookup, attributes, entries and reads by inode number, with no kernel type in it.
//!
//! A read needs no handle. The one lock on the way is around the snapshot and held for a clone, never across I/O.
//! Nodes that were handed out stay readable when their model is gone from the snapshot: open files still name them.

mod listing;
mod mend;
mod opened;
mod others;
mod place;
mod problems;
mod status;
mod variants;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::SystemTime;

use dashmap::DashMap;
use serde_json::Value;

use crate::digest::Digest;
use crate::error::{AtPath, Error, Result};
use crate::extent::Sink;
use crate::layout;
use crate::meter::{Metered, Meters};
use crate::store::{Found, RepairedFile, Store};
use crate::tree::{Body, FileBody, Node, Place, SkeletonDir, Step, Tree, number};

pub use crate::store::Access;
pub use crate::tree::{Kind, ROOT};
pub use listing::{Child, Children, Listing};
pub use mend::Written;
use opened::OpenFiles;
use problems::Problems;
use status::Status;
use variants::Variants;

/// Our own directory in the mount.
const OWN_DIR: &str = ".wmount";
/// The one file in it.
const STATUS: &str = "status.json";

/// Attributes of a directory or file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: u64,
    /// Directory or file.
    pub kind: Kind,
    /// Size in bytes, 0 for directories.
    pub size: u64,
    /// Number of names.
    pub nlink: u32,
    /// When the content last changed.
    pub mtime: SystemTime,
    /// Who may read it.
    pub access: Access,
    /// Whether the name that led here may come to mean something else while mounted, or nothing.
    pub fleeting: bool,
}

/// Room on the file system of the store.
#[derive(Debug, Clone, Copy)]
pub struct Space {
    /// Bytes of a block.
    pub block_size: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Free blocks.
    pub free: u64,
}

/// An inode that was handed out.
#[derive(Debug, Clone)]
struct Inode {
    parent: u64,
    what: What,
}

#[derive(Debug, Clone)]
enum What {
    /// A directory of the skeleton: by path, since the next snapshot has another one there.
    Skeleton(Arc<str>),
    Node(Arc<Handle>),
    Status(Arc<Status>),
}

/// A node that was handed out. It is found again if it was not kept, and it is then the same or gone.
#[derive(Debug)]
struct Handle {
    ino: u64,
    place: Place,
    node: Weak<Node>,
    /// Its number of names, of which a later snapshot may have more.
    names: AtomicU32,
}

impl Handle {
    fn to(node: &Arc<Node>, place: Place) -> What {
        Handle::with(node, place, node.nlink)
    }

    fn with(node: &Arc<Node>, place: Place, names: u32) -> What {
        What::Node(Arc::new(Handle { ino: node.ino, place, node: Arc::downgrade(node), names: names.into() }))
    }

    fn node(&self) -> Result<Arc<Node>> {
        let again = || self.place.node().ok().filter(|node| node.ino == self.ino);
        self.node.upgrade().or_else(again).ok_or(Error::Stale(self.ino))
    }
}

/// The tree of a store.
#[derive(Debug)]
pub struct Vfs {
    store: Arc<Store>,
    tree: RwLock<Arc<Tree>>,
    /// Held while the store is looked through, so that no older snapshot takes the place of a newer one.
    refreshing: Mutex<()>,
    inodes: DashMap<u64, Inode>,
    /// Models with open files; each keeps its blobs from `gc`.
    open: Mutex<HashMap<Arc<Found>, OpenFiles>>,
    meters: Arc<Meters>,
    variants: Variants,
    started: SystemTime,
    facts: Mutex<serde_json::Map<String, Value>>,
    problems: Problems,
    statuses: Mutex<VecDeque<Arc<Status>>>,
    listed: Arc<[String]>,
    /// The damaged files of blobs that were replaced, as far as that was noticed.
    repaired: RwLock<HashSet<RepairedFile>>,
    /// The blobs that were mended since the beginning, by whatever means.
    mended: RwLock<HashSet<Digest>>,
}

impl Vfs {
    /// The tree of a store; no model is read yet.
    pub fn new(store: Arc<Store>) -> Result<Vfs> {
        Vfs::listing(store, &[])
    }

    /// The same with these variants among the entries of directories; the others can only be looked up.
    pub fn listing(store: Arc<Store>, variants: &[String]) -> Result<Vfs> {
        let listed: Arc<[String]> = variants.into();
        let repaired = RwLock::new(store.repairs().into_iter().collect());
        let tree = Tree::new(&store, store.survey()?, None, listed.clone());
        let inodes = DashMap::new();
        inodes.insert(ROOT, Inode { parent: ROOT, what: What::Skeleton("".into()) });
        Ok(Vfs {
            store,
            tree: RwLock::new(Arc::new(tree)),
            refreshing: Mutex::default(),
            inodes,
            open: Mutex::default(),
            meters: Arc::default(),
            variants: Variants::default(),
            started: SystemTime::now(),
            facts: Mutex::default(),
            problems: Problems::default(),
            statuses: Mutex::default(),
            listed,
            repaired,
            mended: RwLock::default(),
        })
    }

    /// The store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The current snapshot.
    pub fn tree(&self) -> Arc<Tree> {
        self.tree.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a fact to the status, such as the front's number of threads.
    pub fn describe(&self, key: &str, value: Value) {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).insert(key.into(), value);
    }

    fn inode(&self, ino: u64) -> Result<Inode> {
        self.inodes.get(&ino).map(|inode| inode.clone()).ok_or(Error::Stale(ino))
    }

    /// The entry `name` of a directory.
    pub fn lookup(&self, dir: u64, name: &str) -> Result<Attr> {
        let found = match self.inode(dir)?.what {
            What::Node(handle) => {
                let child = handle.node()?.child(name)?.clone();
                self.hand_out(dir, Handle::to(&child, handle.place.below(name)), false)
            }
            What::Skeleton(path) => self.step(dir, &path, name),
            What::Status(_) => Err(Error::NotDir),
        };
        found.map_err(|error| self.note(error, || self.model_of(dir, name)))
    }

    /// Whether an entry of a directory needs an answer of the store that is already late.
    pub fn is_awaited(&self, dir: u64, name: &str) -> bool {
        match self.inode(dir).map(|inode| inode.what) {
            Ok(What::Skeleton(path)) => self.tree().dir(&path).is_some_and(|dir| dir.is_awaited(name)),
            _ => false,
        }
    }

    /// The model that an entry of a directory is of.
    fn model_of(&self, dir: u64, name: &str) -> Option<Arc<Found>> {
        match self.inode(dir).ok()?.what {
            What::Node(handle) => Some(handle.place.model().clone()),
            What::Skeleton(path) => self.tree().dir(&path)?.model(name).cloned(),
            What::Status(_) => None,
        }
    }

    fn step(&self, dir: u64, path: &str, name: &str) -> Result<Attr> {
        let below = |path: &str| if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        if path.is_empty() && name != OWN_DIR && !is_layout(name) {
            return Err(Error::NotFound(name.into()));
        }
        if path == OWN_DIR {
            return match name {
                STATUS => self.hand_out(dir, What::Status(self.current_status()), true),
                _ => Err(Error::NotFound(below(path))),
            };
        }
        if path.is_empty() {
            return self.hand_out(dir, What::Skeleton(name.into()), false);
        }
        let tree = self.tree();
        let skeleton = tree.dir(path).ok_or_else(|| Error::NotFound(path.into()))?;
        match skeleton.child(name).inspect_err(|error| self.count_refusal(error, path, name))? {
            Step::Dir(_) => self.hand_out(dir, What::Skeleton(below(path).into()), true),
            Step::Node(node, place) => self.hand_out(dir, Handle::to(&node, place), true),
        }
    }

    fn count_refusal(&self, error: &Error, path: &str, name: &str) {
        let first = path.split('/').next().unwrap_or_default();
        let layout = layout::all().iter().position(|layout| layout.name() == first);
        if let (Error::Refused(_), Some(layout), Some((_, rest))) = (error, layout, name.split_once('@')) {
            let variants = layout::all()[layout].variants();
            let variant =
                variants.iter().position(|(variant, _)| rest == *variant || rest.starts_with(&format!("{variant}.")));
            self.meters.of(layout, variant).fallback();
        }
    }

    /// Remembers an inode that the front now knows.
    fn hand_out(&self, parent: u64, what: What, fleeting: bool) -> Result<Attr> {
        let attr = self.attr_of(&what)?;
        let inode = Inode { parent, what };
        match self.inodes.entry(attr.ino) {
            dashmap::Entry::Vacant(entry) => _ = entry.insert(inode),
            dashmap::Entry::Occupied(mut entry) => {
                // 63 bits of a sha256: with a million inodes one pair in ten million mounts.
                if !same(&entry.get().what, &inode.what) {
                    tracing::error!("two paths have the inode number {}", attr.ino);
                }
                // A node that an open file holds is found through this inode.
                let held = match &entry.get().what {
                    What::Node(handle) => {
                        handle.node.upgrade().filter(|node| node.kind() == Kind::File).map(|_| handle)
                    }
                    _ => None,
                };
                match held {
                    Some(handle) => handle.names.store(attr.nlink, Relaxed),
                    None => _ = entry.insert(inode),
                }
            }
        }
        Ok(Attr { fleeting, ..attr })
    }

    /// The attributes of an inode.
    pub fn attr(&self, ino: u64) -> Result<Attr> {
        self.attr_of(&self.inode(ino)?.what)
    }

    fn attr_of(&self, what: &What) -> Result<Attr> {
        let dir = |ino, nlink, mtime: Option<SystemTime>| Attr {
            ino,
            kind: Kind::Dir,
            size: 0,
            nlink,
            mtime: mtime.unwrap_or(SystemTime::UNIX_EPOCH),
            access: Access::ALL,
            fleeting: false,
        };
        match what {
            What::Node(handle) => {
                let node = handle.node()?;
                let (kind, size) = (node.kind(), node.size());
                let access = self.access(handle, &node);
                Ok(Attr {
                    ino: node.ino,
                    kind,
                    size,
                    nlink: handle.names.load(Relaxed),
                    mtime: node.mtime,
                    access,
                    fleeting: false,
                })
            }
            What::Status(status) => Ok(Attr {
                ino: status.ino,
                kind: Kind::File,
                size: status.text.len() as u64,
                nlink: 1,
                mtime: status.mtime,
                access: Access::ALL,
                fleeting: true,
            }),
            What::Skeleton(path) => {
                let tree = self.tree();
                if path.is_empty() {
                    return Ok(dir(ROOT, 3 + layout::all().len() as u32, tree.newest()));
                }
                if &**path == OWN_DIR {
                    return Ok(dir(number(&["skeleton", OWN_DIR], &[]), 2, tree.newest()));
                }
                let skeleton = tree.dir(path).ok_or_else(|| Error::NotFound(path.to_string()))?;
                Ok(dir(skeleton.ino(), skeleton.nlink(), skeleton.mtime.or_else(|| tree.newest())))
            }
        }
    }

    /// The entries of a directory.
    pub fn entries(&self, dir: u64) -> Result<Listing> {
        let inode = self.inode(dir)?;
        let child = |(name, ino, kind): (Box<str>, u64, Kind)| Child { name, ino, kind };
        let children = match &inode.what {
            What::Status(_) => return Err(Error::NotDir),
            What::Node(handle) => match &handle.node()?.body {
                Body::File(_) => return Err(Error::NotDir),
                Body::Dir(children) => {
                    children.iter().map(|(name, node)| child((name.clone(), node.ino, node.kind()))).collect()
                }
            },
            What::Skeleton(path) if path.is_empty() => {
                let mut names: Vec<&str> = layout::all().iter().map(|layout| layout.name()).collect();
                names.push(OWN_DIR);
                names.sort_unstable();
                names.iter().map(|name| child(((*name).into(), number(&["skeleton", name], &[]), Kind::Dir))).collect()
            }
            What::Skeleton(path) if &**path == OWN_DIR => {
                [child((STATUS.into(), self.current_status().ino, Kind::File))].into_iter().collect()
            }
            What::Skeleton(path) => {
                let tree = self.tree();
                let skeleton: &SkeletonDir = tree.dir(path).ok_or_else(|| Error::NotFound(path.to_string()))?;
                if skeleton.is_shared() {
                    let union = skeleton.blobs().map_err(|error| self.note(error, || None))?;
                    return Ok(Listing { parent: inode.parent, children: Children::Blobs(union) });
                }
                let entries = skeleton.entries().map_err(|error| self.note(error, || None))?;
                entries.into_iter().map(child).collect()
            }
        };
        Ok(Listing { parent: inode.parent, children })
    }

    fn file<T>(&self, ino: u64, look: impl FnOnce(&FileBody) -> Option<T>) -> Option<T> {
        let What::Node(handle) = self.inode(ino).ok()?.what else { return None };
        let node = handle.node().ok()?;
        let Body::File(file) = &node.body else { return None };
        look(file)
    }

    /// The blobs that a read would touch, each as the first bytes of its digest.
    pub fn blobs_of(&self, ino: u64, offset: u64, len: u64) -> Vec<u64> {
        let range = offset..offset.saturating_add(len);
        let blobs = |file: &FileBody| Some(file.content.digests_in(range).map(|digest| digest.prefix()).collect());
        self.file(ino, blobs).unwrap_or_default()
    }

    /// Whether a file is a blob and nothing else.
    pub fn is_whole_blob(&self, ino: u64) -> bool {
        self.file(ino, |file| file.content.whole_blob()).is_some()
    }

    /// The blob that a file is, if it is nothing else and the blob is sound: it has exactly the file's size.
    ///
    /// What is wrong with a blob is said when the file is read, so there is no error here.
    pub fn whole_blob(&self, ino: u64) -> Option<Arc<File>> {
        let (digest, size) = self.file(ino, |file| Some((file.content.whole_blob()?, file.content.size())))?;
        let blob = self.store.blob_file(&digest).ok()?;
        (blob.metadata().ok()?.len() == size).then_some(blob)
    }

    /// Tells of a fault of the blob that a file is, found by who reads it past us.
    pub fn damaged(&self, ino: u64, fault: String) -> Error {
        let blob = self.file(ino, |file| Some((file.content.whole_blob()?, file.model.clone())));
        let Some((digest, model)) = blob else { return Error::Stale(ino) };
        self.note(Error::Damaged { digest, fault }, || Some(model))
    }

    /// Reads from a file into `buf` and returns how many bytes there were: fewer than asked only at its end.
    pub fn read(&self, ino: u64, offset: u64, buf: &mut [u8]) -> Result<usize> {
        match self.inode(ino)?.what {
            What::Skeleton(_) => Err(Error::IsDir),
            What::Status(status) => {
                let rest = usize::try_from(offset).ok().and_then(|at| status.text.get(at..)).unwrap_or_default();
                let len = rest.len().min(buf.len());
                buf[..len].copy_from_slice(&rest[..len]);
                Ok(len)
            }
            What::Node(handle) => {
                let node = handle.node()?;
                let Body::File(file) = &node.body else { return Err(Error::IsDir) };
                let counters = self.meters.of(file.layout, file.variant);
                let blobs = Metered::new(self.store.blobs(), counters, file.variant.is_some());
                let read = file.content.read(&blobs, offset, buf);
                let len = read.map_err(|error| match handle.place.is_outdated() {
                    true => error,
                    false => self.note(error, || Some(file.model.clone())),
                })?;
                counters.read(len);
                Ok(len)
            }
        }
    }

    /// Sends up to `len` bytes of a file, as [`Vfs::read`] would read them, and returns how many they were.
    ///
    /// `None` if they cannot be sent; [`Vfs::read`] says why, if there is a fault.
    pub fn send(&self, ino: u64, offset: u64, len: usize, sink: &mut dyn Sink) -> Option<usize> {
        self.file(ino, |file| {
            let counters = self.meters.of(file.layout, file.variant);
            let blobs = Metered::new(self.store.blobs(), counters, false);
            let len = file.content.send(&blobs, offset, len, sink)?;
            counters.sent(len);
            Some(len)
        })
    }

    /// Room on the file system of the store.
    pub fn space(&self) -> Result<Space> {
        let (block_size, blocks, free) = self.store.space().at(self.store.root())?;
        Ok(Space { block_size, blocks, free })
    }

    /// The inode at a path from the root, `/` between the components.
    pub fn resolve(&self, path: &str) -> Result<Attr> {
        let parts = path.split('/').filter(|part| !part.is_empty());
        parts.fold(self.attr(ROOT), |attr, part| {
            self.lookup(attr?.ino, part).map_err(|error| match error {
                Error::NotFound(_) => Error::NotFound(path.into()),
                Error::NotDir => Error::Invalid(format!("{path}: {part:?} is below a file")),
                other => other,
            })
        })
    }
}

fn is_layout(name: &str) -> bool {
    layout::all().iter().any(|layout| layout.name() == name)
}

/// Whether two inodes of one number are the same thing.
fn same(a: &What, b: &What) -> bool {
    match (a, b) {
        (What::Skeleton(a), What::Skeleton(b)) => a == b,
        (What::Node(a), What::Node(b)) => match (a.node.upgrade(), b.node.upgrade()) {
            (Some(a), Some(b)) => (a.kind(), a.size(), a.mtime) == (b.kind(), b.size(), b.mtime),
            _ => true,
        },
        (What::Status(_), What::Status(_)) => true,
        _ => false,
    }
}
