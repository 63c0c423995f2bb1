//! The snapshot of all layouts: which paths there are, and the inode number of each.
//!
//! The upper part, down to the models, is the skeleton: it is made of names alone when a layout is first touched.
//! Below a model's anchor stand [`Node`]s, which are made when the model is first touched and never change.
//!
//! An inode number means one content for ever. That of a node is a hash of its path, content and time, so it is the
//! same after a remount and another one when the content changes; that of a skeleton directory is a hash of its path.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use crate::digest::{Digest, Hasher};
use crate::error::{Error, Result};
use crate::extent::ExtentMap;
use crate::layout::{self, AnchorKind, Branch, Files, Layout};
use crate::model::{Model, to_unix};
use crate::store::{Found, Store};

/// The inode number of the root directory, as FUSE wants it.
pub const ROOT: u64 = 1;

/// Directory or file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Dir,
    /// A regular file.
    File,
}

/// A directory or file below a model's anchor.
#[derive(Debug)]
pub struct Node {
    /// Its inode number.
    pub ino: u64,
    /// Its time.
    pub mtime: SystemTime,
    /// Its number of names.
    pub nlink: u32,
    /// What it is.
    pub body: Body,
}

/// What a [`Node`] is.
#[derive(Debug)]
pub enum Body {
    /// Entries in order of name.
    Dir(Vec<(Box<str>, Arc<Node>)>),
    /// A file.
    File(FileBody),
}

/// A file's content and whose it is.
#[derive(Debug)]
pub struct FileBody {
    /// Its bytes.
    pub content: Arc<ExtentMap>,
    /// The model whose it is.
    pub model: Arc<Found>,
    /// Index of its layout in [`layout::all`].
    pub layout: usize,
}

impl Node {
    /// Directory or file.
    pub fn kind(&self) -> Kind {
        match self.body {
            Body::Dir(_) => Kind::Dir,
            Body::File(_) => Kind::File,
        }
    }

    /// Size in bytes; 0 for a directory.
    pub fn size(&self) -> u64 {
        match &self.body {
            Body::Dir(_) => 0,
            Body::File(file) => file.content.size(),
        }
    }

    /// The entry of this name.
    pub fn child(&self, name: &str) -> Result<&Arc<Node>> {
        let Body::Dir(children) = &self.body else { return Err(Error::NotDir) };
        let found = children.binary_search_by(|(child, _)| child.as_ref().cmp(name));
        found.map(|index| &children[index].1).map_err(|_| Error::NotFound(name.into()))
    }
}

/// The nodes at the anchors of one layout.
type Anchored = Arc<Vec<Arc<Node>>>;

/// A model in the snapshot, read and planned when first touched.
#[derive(Debug)]
pub struct Entry {
    /// Its manifest.
    pub found: Arc<Found>,
    /// Its path in the layouts.
    pub path: String,
    store: Arc<Store>,
    // Errors are not kept: damage that is mended is gone.
    model: Mutex<Option<Arc<Model>>>,
    plans: [Mutex<Option<Anchored>>; layout::COUNT],
}

impl Entry {
    fn new(store: Arc<Store>, found: Found, path: String) -> Entry {
        let plans = std::array::from_fn(|_| Mutex::default());
        Entry { found: Arc::new(found), path, store, model: Mutex::default(), plans }
    }

    /// The model.
    pub fn model(&self) -> Result<Arc<Model>> {
        once(&self.model, || {
            let model = self.store.load(&self.found)?;
            for defect in &model.defects {
                tracing::warn!("model {}: {}", model.name, defect.what);
            }
            Ok(Arc::new(model))
        })
    }

    /// The nodes at the anchors of a layout.
    fn planned(&self, layout: usize) -> Result<Anchored> {
        once(&self.plans[layout], || {
            let view = layout::all()[layout];
            let model = self.model()?;
            if !view.shows_damaged() {
                model.check_whole()?;
            }
            let branches = view.plan(&model, Files(self.store.blobs()))?;
            let paths = view.anchors(&self.found.name, &self.path);
            let nodes = paths.into_iter().zip(branches).map(|(anchor, branch)| {
                let path = format!("{}/{}", view.name(), anchor.path);
                Numbering::new(&branch, &self.found, layout).node(&path, &path, branch)
            });
            Ok(Arc::new(nodes.collect()))
        })
    }
}

fn once<T>(cell: &Mutex<Option<Arc<T>>>, make: impl FnOnce() -> Result<Arc<T>>) -> Result<Arc<T>> {
    let mut cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
    match &*cell {
        Some(made) => Ok(made.clone()),
        None => Ok(cell.insert(make()?).clone()),
    }
}

/// Gives the nodes of one anchor their numbers.
struct Numbering<'a> {
    model: &'a Arc<Found>,
    layout: usize,
    /// How many files share a link and a content.
    links: HashMap<(&'static str, Digest), u32>,
    /// Fingerprints of maps that several files have.
    fingerprints: HashMap<*const ExtentMap, Digest>,
}

impl<'a> Numbering<'a> {
    fn new(branch: &Branch, model: &'a Arc<Found>, layout: usize) -> Self {
        let mut numbering = Numbering { model, layout, links: HashMap::new(), fingerprints: HashMap::new() };
        numbering.count(branch);
        numbering
    }

    fn count(&mut self, branch: &Branch) {
        match branch {
            Branch::Dir(children, _) => children.values().for_each(|child| self.count(child)),
            Branch::File(file) => {
                if let Some(link) = file.link {
                    let known = self.fingerprints.entry(Arc::as_ptr(&file.content));
                    let fingerprint = *known.or_insert_with(|| file.content.fingerprint());
                    *self.links.entry((link, fingerprint)).or_default() += 1;
                }
            }
        }
    }

    /// The node of a branch at `path`, below the anchor at `anchor`.
    fn node(&self, anchor: &str, path: &str, branch: Branch) -> Arc<Node> {
        let node = match branch {
            Branch::File(file) => {
                let known = self.fingerprints.get(&Arc::as_ptr(&file.content)).copied();
                let fingerprint = known.unwrap_or_else(|| file.content.fingerprint());
                let place = file.link.map_or(path.to_owned(), |link| format!("{anchor}\0{link}"));
                let nlink = file.link.map_or(1, |link| self.links[&(link, fingerprint)]);
                let ino = number(&["file", &place], &[fingerprint.as_bytes(), &time_bytes(file.mtime)]);
                let body = FileBody { content: file.content, model: self.model.clone(), layout: self.layout };
                Node { ino, mtime: file.mtime, nlink, body: Body::File(body) }
            }
            Branch::Dir(children, mtime) => {
                let child = |(name, child): (String, Branch)| {
                    let node = self.node(anchor, &format!("{path}/{name}"), child);
                    (name.into_boxed_str(), node)
                };
                let children: Vec<(Box<str>, Arc<Node>)> = children.into_iter().map(child).collect();
                let newest = || children.iter().map(|(_, child)| child.mtime).max();
                let mtime = mtime.or_else(newest).unwrap_or(self.model.written);
                let mut content = time_bytes(mtime).to_vec();
                for (name, child) in &children {
                    content.extend(child.ino.to_le_bytes());
                    content.extend(name.as_bytes());
                    content.push(0);
                }
                let dirs = children.iter().filter(|(_, child)| child.kind() == Kind::Dir).count();
                let ino = number(&["dir", path], &[&content]);
                Node { ino, mtime, nlink: 2 + dirs as u32, body: Body::Dir(children) }
            }
        };
        Arc::new(node)
    }
}

fn time_bytes(time: SystemTime) -> [u8; 12] {
    let (seconds, nanos) = to_unix(time);
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&seconds.to_le_bytes());
    bytes[8..].copy_from_slice(&nanos.to_le_bytes());
    bytes
}

/// An inode number from words and bytes. Never 0, which is none, or 1, the root; it fits an i64 for those who ask.
pub(crate) fn number(words: &[&str], bytes: &[&[u8]]) -> u64 {
    let mut hasher = Hasher::new();
    for part in words.iter().map(|word| word.as_bytes()).chain(bytes.iter().copied()) {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    (hasher.finish().prefix() >> 1).max(2)
}

/// A directory of the skeleton.
#[derive(Debug, Default)]
pub struct SkeletonDir {
    /// Path from the root of the mount, `""` for the root itself.
    pub path: String,
    /// When the newest model below it was written.
    pub mtime: Option<SystemTime>,
    children: BTreeMap<String, SkeletonChild>,
    /// The models that share this directory, and which of their anchors it is.
    shared: Vec<(Arc<Entry>, usize, usize)>,
    union: OnceLock<Arc<Union>>,
}

/// The files of all models in a shared directory.
type Union = BTreeMap<Box<str>, Arc<Node>>;

#[derive(Debug)]
enum SkeletonChild {
    Dir(SkeletonDir),
    Anchor { entry: Arc<Entry>, layout: usize, anchor: usize, kind: Kind },
}

/// What a name in a skeleton directory leads to.
#[derive(Debug)]
pub enum Step<'a> {
    /// Another directory of the skeleton.
    Dir(&'a SkeletonDir),
    /// A model's own directory or file.
    Node(Arc<Node>),
}

impl SkeletonDir {
    fn new(path: String) -> SkeletonDir {
        SkeletonDir { path, ..SkeletonDir::default() }
    }

    /// Its inode number.
    pub fn ino(&self) -> u64 {
        if self.path.is_empty() { ROOT } else { number(&["skeleton", &self.path], &[]) }
    }

    /// Its number of names.
    pub fn nlink(&self) -> u32 {
        let is_dir = |child: &SkeletonChild| match child {
            SkeletonChild::Dir(_) => true,
            SkeletonChild::Anchor { kind, .. } => *kind == Kind::Dir,
        };
        2 + self.children.values().filter(|child| is_dir(child)).count() as u32
    }

    /// What `name` leads to.
    pub fn child(&self, name: &str) -> Result<Step<'_>> {
        match self.children.get(name) {
            Some(SkeletonChild::Dir(dir)) => Ok(Step::Dir(dir)),
            Some(SkeletonChild::Anchor { entry, layout, anchor, .. }) => {
                Ok(Step::Node(entry.planned(*layout)?[*anchor].clone()))
            }
            None => match self.union()?.get(name) {
                Some(node) => Ok(Step::Node(node.clone())),
                None => Err(Error::NotFound(format!("{}/{name}", self.path))),
            },
        }
    }

    /// Its entries in order of name: name, inode number and kind.
    ///
    /// A model that cannot be read keeps its name here, with a number of its path: damage is an error when it is
    /// touched, and no absence.
    pub fn entries(&self) -> Result<Vec<(Box<str>, u64, Kind)>> {
        let entry = |(name, child): (&String, &SkeletonChild)| {
            let (ino, kind) = match child {
                SkeletonChild::Dir(dir) => (dir.ino(), Kind::Dir),
                SkeletonChild::Anchor { entry, layout, anchor, kind } => match entry.planned(*layout) {
                    Ok(nodes) => (nodes[*anchor].ino, *kind),
                    Err(_) => (number(&["damaged", &self.path, name], &[]), *kind),
                },
            };
            (name.as_str().into(), ino, kind)
        };
        let mut entries: Vec<(Box<str>, u64, Kind)> = self.children.iter().map(entry).collect();
        if !self.shared.is_empty() {
            entries.extend(self.union()?.iter().map(|(name, node)| (name.clone(), node.ino, node.kind())));
            entries.sort_by(|a, b| a.0.cmp(&b.0));
        }
        Ok(entries)
    }

    fn union(&self) -> Result<Arc<Union>> {
        if let Some(union) = self.union.get() {
            return Ok(union.clone());
        }
        let mut union = Union::new();
        for (entry, layout, anchor) in &self.shared {
            let Body::Dir(children) = &entry.planned(*layout)?[*anchor].body else { return Err(Error::NotDir) };
            for (name, node) in children {
                union.entry(name.clone()).or_insert_with(|| node.clone());
            }
        }
        Ok(self.union.get_or_init(|| Arc::new(union)).clone())
    }

    /// The directory at a path below this one, made as needed.
    fn make(&mut self, path: &str) -> Option<&mut SkeletonDir> {
        path.split('/').filter(|part| !part.is_empty()).try_fold(self, |dir, part| {
            let below = if dir.path.is_empty() { part.to_owned() } else { format!("{}/{part}", dir.path) };
            let child = dir.children.entry(part.to_owned());
            match child.or_insert_with(|| SkeletonChild::Dir(SkeletonDir::new(below))) {
                SkeletonChild::Dir(dir) => Some(dir),
                SkeletonChild::Anchor { .. } => None,
            }
        })
    }

    /// Puts an anchor in its place; `None` if something stands there or in the way.
    fn put(&mut self, path: &str, entry: &Arc<Entry>, layout: usize, anchor: usize, kind: AnchorKind) -> Option<()> {
        if kind == AnchorKind::Shared {
            self.make(path)?.shared.push((entry.clone(), layout, anchor));
            return Some(());
        }
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let kind = if kind == AnchorKind::Dir { Kind::Dir } else { Kind::File };
        let children = &mut self.make(dir)?.children;
        if children.contains_key(name) {
            return None;
        }
        let child = SkeletonChild::Anchor { entry: entry.clone(), layout, anchor, kind };
        children.insert(name.to_owned(), child);
        Some(())
    }

    /// Sets the times from the models below; the newest of them.
    fn set_times(&mut self) -> Option<SystemTime> {
        let below = self.children.values_mut().filter_map(|child| match child {
            SkeletonChild::Dir(dir) => dir.set_times(),
            SkeletonChild::Anchor { entry, .. } => Some(entry.found.written),
        });
        let shared = self.shared.iter().map(|(entry, ..)| entry.found.written);
        self.mtime = below.max().max(shared.max());
        self.mtime
    }
}

/// The snapshot.
#[derive(Debug)]
pub struct Tree {
    entries: Vec<Arc<Entry>>,
    layouts: [OnceLock<SkeletonDir>; layout::COUNT],
}

impl Tree {
    /// The snapshot of these models; those that `old` has too keep what was planned.
    pub fn new(store: &Arc<Store>, found: Vec<Found>, old: Option<&Tree>) -> Tree {
        let paths = tree_paths(&found);
        let entries = found.into_iter().zip(paths).map(|(found, path)| {
            let same = |entry: &&Arc<Entry>| *entry.found == found && entry.path == path;
            let index = old.map(|old| old.entries.binary_search_by(|entry| entry.found.name.cmp(&found.name)));
            let kept = old.zip(index.and_then(Result::ok)).map(|(old, index)| &old.entries[index]).filter(same);
            kept.cloned().unwrap_or_else(|| Arc::new(Entry::new(store.clone(), found, path)))
        });
        Tree { entries: entries.collect(), layouts: Default::default() }
    }

    /// The models in order of name.
    pub fn entries(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    /// When the newest model was written.
    pub fn newest(&self) -> Option<SystemTime> {
        self.entries.iter().map(|entry| entry.found.written).max()
    }

    /// The skeleton directory at a path whose first component is a layout's name.
    pub fn dir(&self, path: &str) -> Option<&SkeletonDir> {
        let mut parts = path.split('/');
        let first = parts.next()?;
        let layout = layout::all().iter().position(|layout| layout.name() == first)?;
        let root = self.layouts[layout].get_or_init(|| self.skeleton(layout));
        parts.try_fold(root, |dir, part| match dir.children.get(part)? {
            SkeletonChild::Dir(dir) => Some(dir),
            SkeletonChild::Anchor { .. } => None,
        })
    }

    fn skeleton(&self, layout: usize) -> SkeletonDir {
        let view = layout::all()[layout];
        let mut root = SkeletonDir::new(view.name().into());
        for path in view.fixed_dirs() {
            root.make(path);
        }
        for entry in &self.entries {
            if !is_shown(view, entry) {
                continue;
            }
            for (index, anchor) in view.anchors(&entry.found.name, &entry.path).into_iter().enumerate() {
                if root.put(&anchor.path, entry, layout, index, anchor.kind).is_none() {
                    tracing::warn!("model {} is not in {}/: {:?} is taken", entry.found.name, view.name(), anchor.path);
                }
            }
        }
        root.set_times();
        root
    }
}

/// Whether a layout shows a model. One that cannot be read is shown in `original/`, where touching it tells why.
fn is_shown(view: &dyn Layout, entry: &Entry) -> bool {
    match entry.model() {
        Ok(model) => view.expresses(&model).is_ok(),
        Err(error) => {
            tracing::warn!("model {}: {error}", entry.found.name);
            view.name() == "original"
        }
    }
}

/// The models' paths: as short as their names allow, or the full one where a model of the default namespace has the
/// short one or a directory on the way to it.
fn tree_paths(found: &[Found]) -> Vec<String> {
    use crate::model::{DEFAULT_HOST, DEFAULT_NAMESPACE};
    let is_default = |found: &&Found| found.name.host == DEFAULT_HOST && found.name.namespace == DEFAULT_NAMESPACE;
    let taken: std::collections::HashSet<String> =
        found.iter().filter(is_default).map(|found| found.name.tree_path()).collect();
    let path = |found: &Found| {
        let path = found.name.tree_path();
        let blocked = |path: &str| path.match_indices('/').any(|(at, _)| taken.contains(&path[..at]));
        if !is_default(&found) && blocked(&path) { found.name.manifest_path() } else { path }
    };
    found.iter().map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_model_keeps_its_path() {
        let found = |text: &str| {
            let name = text.parse().expect("a name");
            Found { name, written: SystemTime::UNIX_EPOCH, version: (0, 0) }
        };
        let paths = tree_paths(&[found("me/a:x"), found("you/a"), found("me:a"), found("host.example/me/a")]);
        assert_eq!(paths, ["registry.ollama.ai/me/a/x", "you/a/latest", "me/a", "host.example/me/a/latest"]);
    }

    #[test]
    fn numbers_are_what_they_were() {
        // Page caches, CoreML's compiled models and ollama's records live by these numbers across upgrades.
        assert_eq!(number(&["file", "amb/a/latest.amb"], &[b"x"]), 4_378_353_928_388_979_780);
    }
}
