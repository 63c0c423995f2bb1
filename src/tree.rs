//! The snapshot of all layouts: which paths there are, and the inode number of each.
//!
//! The upper part, down to the models, is the skeleton: it is made of names alone when a layout is first touched.
//! Below a model's anchor stand [`Node`]s, which are made when the model is first touched and never change.
//!
//! An inode number means one content for ever. That of a node is a hash of its path, content and time, so it is the
//! same after a remount and another one when the content changes; that of a skeleton directory is a hash of its path.

mod numbering;
mod union;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use crate::cores::on_all_cores;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::extent::ExtentMap;
use crate::keep::{Cell, Keep};
use crate::layout::{self, Anchor, AnchorKind, Files, Layout};
use crate::memo::Memo;
use crate::model::{Model, ModelName};
use crate::store::{Found, Store};

use numbering::Numbering;
pub(crate) use numbering::number;
use union::Row;
pub use union::Union;

/// For fewer models, starting a thread costs more than it saves.
const WORTH: usize = 4;

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
    /// Index of its variant among those of the layout.
    pub variant: Option<usize>,
    /// Whether it is as stored because the variant does not compute it.
    pub fallback: bool,
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

    /// About how many bytes of memory it takes with all that is below it.
    fn memory(&self) -> u64 {
        128 + match &self.body {
            Body::Dir(children) => children.iter().map(|(name, child)| 40 + name.len() as u64 + child.memory()).sum(),
            Body::File(file) => file.content.memory(),
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
type Anchored = Vec<Arc<Node>>;

/// A model in the snapshot, read and planned when touched.
#[derive(Debug)]
pub struct Entry {
    /// Its manifest.
    pub found: Arc<Found>,
    /// Its path in the layouts.
    pub path: String,
    store: Arc<Store>,
    keep: Arc<Keep>,
    model: Cell<Model>,
    plans: [Cell<Anchored>; layout::COUNT],
    /// The nodes of variants that were touched.
    variants: Mutex<HashMap<View, Arc<Cell<Anchored>>>>,
    /// A bit for each layout that shows it.
    shown: OnceLock<u64>,
}

/// A layout, or one of its variants, by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct View {
    layout: usize,
    variant: Option<usize>,
}

impl View {
    fn layout(self) -> &'static dyn Layout {
        let layout = layout::all()[self.layout];
        self.variant.map_or(layout, |variant| layout.variants()[variant].1)
    }

    /// Where a model at `path` stands.
    fn anchors(self, name: &ModelName, path: &str) -> Vec<Anchor> {
        match self.variant {
            None => self.layout().anchors(name, path),
            Some(variant) => {
                let (suffix, view) = layout::all()[self.layout].variants()[variant];
                view.anchors(name, &format!("{path}@{suffix}"))
            }
        }
    }
}

impl Entry {
    fn new(store: Arc<Store>, keep: Arc<Keep>, found: Found, path: String) -> Entry {
        let (model, plans) = (Cell::default(), std::array::from_fn(|_| Cell::default()));
        let variants = Mutex::default();
        Entry { found: Arc::new(found), path, store, keep, model, plans, variants, shown: OnceLock::new() }
    }

    /// The model.
    pub fn model(&self) -> Result<Arc<Model>> {
        self.model.get(&self.keep, || {
            let model = self.store.load(&self.found)?;
            /// A model can have as many as layers.
            const SHOWN: usize = 20;
            for defect in model.defects.iter().take(SHOWN) {
                tracing::warn!("model {}: {}", model.name, defect);
            }
            if let more @ 1.. = model.defects.len().saturating_sub(SHOWN) {
                tracing::warn!("model {}: {more} more of the kind; wmount show lists them", model.name);
            }
            let memory = model.memory();
            Ok((model, memory))
        })
    }

    /// The nodes at the anchors of a layout or variant.
    fn planned(&self, view: View) -> Result<Arc<Anchored>> {
        let make = || {
            let layout = view.layout();
            let (model, files) = (self.model()?, Files(self.store.blobs()));
            if !layout.shows_damaged() {
                model.check_whole()?;
            }
            if view.variant.is_some()
                && !self.store.allows_overflow()
                && let Some(reason) = layout.overflow(&model, files)?
            {
                let shown = view.anchors(&self.found.name, &self.path).swap_remove(0).path;
                let reason = format!("{}/{shown}: {reason}; --allow-overflow shows it", layout.name());
                tracing::info!("{reason}");
                return Err(Error::Refused(reason));
            }
            let branches = layout.plan(&model, files)?;
            let anchors = view.anchors(&self.found.name, &self.path);
            let nodes = anchors.into_iter().zip(branches).map(|(anchor, branch)| {
                let path = format!("{}/{}", layout.name(), anchor.path);
                Numbering::new(&branch, &self.found, view).node(&path, &path, branch)
            });
            let nodes: Anchored = nodes.collect();
            let memory = nodes.iter().map(|node| node.memory()).sum();
            Ok((nodes, memory))
        };
        if view.variant.is_none() {
            return self.plans[view.layout].get(&self.keep, make);
        }
        let plan = self.variants.lock().unwrap_or_else(PoisonError::into_inner).entry(view).or_default().clone();
        plan.get(&self.keep, make)
    }

    /// What stands at the anchors of one variant of a layout, by index.
    pub fn variant_of(&self, layout: usize, variant: usize) -> Result<Arc<Vec<Arc<Node>>>> {
        self.planned(View { layout, variant: Some(variant) })
    }

    /// What stands at the anchors of a variant, in every layout that has it and shows it; if none does, the first says why.
    pub fn variant(&self, name: &str) -> Result<Vec<Arc<Node>>> {
        let (mut nodes, mut refusal) = (Vec::new(), None);
        for (layout, base) in layout::all().into_iter().enumerate() {
            let variants = base.variants().iter().enumerate().filter(|(_, (other, _))| *other == name);
            for (variant, (_, shown)) in variants {
                let refused =
                    |why| Error::Invalid(format!("{}/ does not show {}: {why}", base.name(), self.found.name));
                match shown.expresses(&*self.model()?) {
                    Ok(()) => nodes.extend(self.planned(View { layout, variant: Some(variant) })?.iter().cloned()),
                    Err(why) => refusal = refusal.or(Some(refused(why))),
                }
            }
        }
        match refusal {
            Some(refusal) if nodes.is_empty() => Err(refusal),
            _ => Ok(nodes),
        }
    }

    /// Whether a layout or variant shows it.
    fn shows(&self, view: View) -> bool {
        let expressed = || self.model().is_ok_and(|model| view.layout().expresses(&model).is_ok());
        let shown = self.shown.get().copied().unwrap_or_else(|| self.look(&mut Vec::new()));
        shown & 1 << view.layout != 0 && (view.variant.is_none() || expressed())
    }

    /// A bit for each layout that shows it. What cannot be read is shown in `original/`, where touching it tells why.
    fn look(&self, room: &mut Vec<u8>) -> u64 {
        let layouts = layout::all().into_iter().enumerate();
        let mask = |test: &dyn Fn(&dyn Layout) -> bool| {
            layouts.filter(|(_, view)| test(*view)).fold(0, |mask, (index, _)| mask | 1 << index)
        };
        let brief = self.store.load_brief(&self.found, room);
        match brief.and_then(|brief| brief.map_or_else(|| self.model(), |brief| Ok(Arc::new(brief)))) {
            // What damage hides is not remembered.
            Ok(model) if !model.is_settled() => mask(&|view| view.expresses(&model).is_ok()),
            Ok(model) => *self.shown.get_or_init(|| mask(&|view| view.expresses(&model).is_ok())),
            Err(error) => {
                tracing::warn!("model {}: {error}", self.found.name);
                mask(&|view| view.name() == "original")
            }
        }
    }
}

/// Where a node stands, to find it when it is no longer kept.
#[derive(Debug, Clone)]
pub struct Place {
    entry: Arc<Entry>,
    view: View,
    anchor: usize,
    /// The path below the anchor.
    path: Box<str>,
}

impl Place {
    fn of(entry: &Arc<Entry>, view: View, anchor: usize, path: &str) -> Place {
        Place { entry: entry.clone(), view, anchor, path: path.into() }
    }

    fn step(self) -> Result<Step<'static>> {
        Ok(Step::Node(self.node()?, self))
    }

    /// The model whose it is.
    pub fn model(&self) -> &Arc<Found> {
        &self.entry.found
    }

    /// The place of an entry of this directory.
    pub fn below(&self, name: &str) -> Place {
        let path = if self.path.is_empty() { name.into() } else { format!("{}/{name}", self.path).into() };
        Place { path, ..self.clone() }
    }

    /// The path below the anchor.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The node that stands here.
    pub fn node(&self) -> Result<Arc<Node>> {
        let root = self.entry.planned(self.view)?[self.anchor].clone();
        let parts = self.path.split('/').filter(|part| !part.is_empty());
        parts.into_iter().try_fold(root, |node, part| node.child(part).cloned())
    }
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
    shared: Vec<(Arc<Entry>, View, usize)>,
    union: OnceLock<Arc<Union>>,
    /// The models that have files beside the children, and which of their anchors this directory is.
    beside: Vec<(Arc<Entry>, View, usize)>,
}

#[derive(Debug)]
enum SkeletonChild {
    Dir(SkeletonDir),
    Anchor { entry: Arc<Entry>, view: View, anchor: usize, kind: Kind },
}

/// What a name in a skeleton directory leads to.
#[derive(Debug)]
pub enum Step<'a> {
    /// Another directory of the skeleton.
    Dir(&'a SkeletonDir),
    /// A model's own directory or file, and where it stands.
    Node(Arc<Node>, Place),
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
            Some(SkeletonChild::Anchor { entry, view, anchor, .. }) => Place::of(entry, *view, *anchor, "").step(),
            None => {
                if let Some((entry, view, anchor)) = self.unlisted(name) {
                    return Place::of(entry, view, anchor, "").step();
                }
                let absent = || Error::NotFound(format!("{}/{name}", self.path));
                for (entry, view, anchor) in &self.beside {
                    if entry.planned(*view)?[*anchor].child(name).is_ok() {
                        return Place::of(entry, *view, *anchor, name).step();
                    }
                }
                let digest = Digest::from_file_name(name).filter(|_| self.is_shared()).ok_or_else(absent)?;
                let (entry, view, anchor) = &self.shared[self.blobs()?.model(&digest).ok_or_else(absent)?];
                Place::of(entry, *view, *anchor, name).step()
            }
        }
    }

    /// The variant of a model of this directory that has this name. No model's own name has an `@`.
    fn unlisted(&self, name: &str) -> Option<(&Arc<Entry>, View, usize)> {
        let (stem, rest) = name.split_once('@')?;
        let base = |suffix: &str| Some(format!("{stem}{}", rest.strip_prefix(suffix)?));
        for layout in 0..layout::all().len() {
            for (variant, (suffix, _)) in layout::all()[layout].variants().iter().enumerate() {
                let view = View { layout, variant: Some(variant) };
                if let Some(base) = base(suffix)
                    && let Some(SkeletonChild::Anchor { entry, view: of, anchor, .. }) = self.children.get(&base)
                    && *of == (View { layout, variant: None })
                    && entry.shows(view)
                {
                    return Some((entry, view, *anchor));
                }
            }
        }
        None
    }

    /// Its entries in order of name: name, inode number and kind.
    ///
    /// A model that cannot be read keeps its name here, with a number of its path: damage is an error when it is
    /// touched, and no absence.
    pub fn entries(&self) -> Result<Vec<(Box<str>, u64, Kind)>> {
        let entry = |(name, child): (&String, &SkeletonChild)| {
            let (ino, kind) = match child {
                SkeletonChild::Dir(dir) => (dir.ino(), Kind::Dir),
                SkeletonChild::Anchor { entry, view, anchor, kind } => match entry.planned(*view) {
                    Ok(nodes) => (nodes[*anchor].ino, *kind),
                    Err(Error::Refused(_)) => return None,
                    Err(_) => (number(&["damaged", &self.path, name], &[]), *kind),
                },
            };
            Some((name.as_str().into(), ino, kind))
        };
        let mut entries: Vec<(Box<str>, u64, Kind)> = self.children.iter().filter_map(entry).collect();
        if self.is_shared() {
            let union = self.blobs()?;
            entries.extend((0..union.len()).filter_map(|at| union.get(at)).map(|(n, ino)| (n.into(), ino, Kind::File)));
        }
        for (entry, view, anchor) in &self.beside {
            // A model that cannot be planned has the name of its own file above.
            let Ok(nodes) = entry.planned(*view) else { continue };
            let Body::Dir(children) = &nodes[*anchor].body else { continue };
            let others = children.iter().filter(|(name, _)| !self.children.contains_key(&**name));
            entries.extend(others.map(|(name, node)| (name.clone(), node.ino, node.kind())));
        }
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        // Of two that have one name the first is found.
        entries.dedup_by(|next, first| next.0 == first.0);
        Ok(entries)
    }

    /// Whether it holds the blobs of several models, and nothing else.
    pub fn is_shared(&self) -> bool {
        !self.shared.is_empty() && self.children.is_empty()
    }

    /// The blobs of a shared directory.
    pub fn blobs(&self) -> Result<Arc<Union>> {
        if let Some(union) = self.union.get() {
            return Ok(union.clone());
        }
        // One growing list: a list for each model would leave a million small holes in memory.
        let rows = Mutex::new(Vec::new());
        let add = |index: usize, (): &mut ()| {
            let (entry, view, anchor) = &self.shared[index];
            let planned = match entry.planned(*view) {
                Ok(planned) => planned,
                Err(error) => {
                    tracing::warn!("model {}: {error}", entry.found.name);
                    return false;
                }
            };
            let Body::Dir(children) = &planned[*anchor].body else { return true };
            let row = |(name, node): &(Box<str>, Arc<Node>)| {
                Some(Row { digest: Digest::from_file_name(name)?, ino: node.ino, model: index as u32 })
            };
            rows.lock().unwrap_or_else(PoisonError::into_inner).extend(children.iter().filter_map(row));
            true
        };
        let whole = on_all_cores(self.shared.len(), WORTH, &add).into_iter().all(|added| added);
        let rows = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
        let union = Arc::new(Union::of(rows));
        // What a damaged model lacks is looked for again.
        match whole {
            true => Ok(self.union.get_or_init(|| union).clone()),
            false => Ok(union),
        }
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
    fn put(&mut self, path: &str, entry: &Arc<Entry>, view: View, anchor: usize, kind: AnchorKind) -> Option<()> {
        if kind == AnchorKind::Shared {
            self.make(path)?.shared.push((entry.clone(), view, anchor));
            return Some(());
        }
        if kind == AnchorKind::Beside {
            self.make(path)?.beside.push((entry.clone(), view, anchor));
            return Some(());
        }
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let kind = if kind == AnchorKind::Dir { Kind::Dir } else { Kind::File };
        let children = &mut self.make(dir)?.children;
        if children.contains_key(name) {
            return None;
        }
        let child = SkeletonChild::Anchor { entry: entry.clone(), view, anchor, kind };
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
    store: Arc<Store>,
    keep: Arc<Keep>,
    entries: Vec<Arc<Entry>>,
    /// Set when every entry knows which layouts show it.
    sorted: OnceLock<()>,
    layouts: [OnceLock<SkeletonDir>; layout::COUNT],
    listed: Arc<[String]>,
}

impl Tree {
    /// The snapshot of these models; those that `old` has too, for certain, keep what was planned. Of the variants only the `listed`
    /// are entries of directories; the others are there for who asks for them.
    pub fn new(store: &Arc<Store>, found: Vec<Found>, old: Option<&Tree>, listed: Arc<[String]>) -> Tree {
        let paths = tree_paths(&found);
        let keep = old.map_or_else(Arc::default, |old| old.keep.clone());
        let entries = found.into_iter().zip(paths).map(|(found, path)| {
            let same = |entry: &&Arc<Entry>| *entry.found == found && entry.found.settled && entry.path == path;
            let index = old.map(|old| old.entries.binary_search_by(|entry| entry.found.name.cmp(&found.name)));
            let kept = old.zip(index.and_then(Result::ok)).map(|(old, index)| &old.entries[index]).filter(same);
            kept.cloned().unwrap_or_else(|| Arc::new(Entry::new(store.clone(), keep.clone(), found, path)))
        });
        let entries = entries.collect();
        Tree { store: store.clone(), keep, entries, sorted: OnceLock::new(), layouts: Default::default(), listed }
    }

    /// Has every model say which layouts show it, unless that is done or under way: what every look at a layout waits for.
    pub fn look(&self) {
        self.sorted.get_or_init(|| self.sort());
    }

    /// From the memo, or by reading the models.
    fn sort(&self) {
        let memo = Memo::read(&self.store);
        for entry in &self.entries {
            if let Some(shown) = memo.get(&entry.found) {
                let _ = entry.shown.set(shown);
            }
        }
        let unknown: Vec<&Arc<Entry>> = self.entries.iter().filter(|entry| entry.shown.get().is_none()).collect();
        on_all_cores(unknown.len(), WORTH, &|index, room| unknown[index].look(room));
        if !unknown.is_empty() {
            let known = self.entries.iter().filter_map(|entry| Some((&*entry.found, *entry.shown.get()?)));
            Memo::of(known).write(&self.store);
        }
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
        self.look();
        let base = layout::all()[layout];
        let mut root = SkeletonDir::new(base.name().into());
        for path in base.fixed_dirs() {
            root.make(path);
        }
        let is_listed = |name: &str| self.listed.iter().any(|listed| listed == name);
        let variants = base.variants().iter().enumerate().filter(|(_, (name, _))| is_listed(name));
        let views: Vec<View> = std::iter::once(None)
            .chain(variants.map(|(index, _)| Some(index)))
            .map(|variant| View { layout, variant })
            .collect();
        for entry in &self.entries {
            for view in views.iter().filter(|view| entry.shows(**view)) {
                for (index, anchor) in view.anchors(&entry.found.name, &entry.path).into_iter().enumerate() {
                    if root.put(&anchor.path, entry, *view, index, anchor.kind).is_none() {
                        let (name, dir) = (&entry.found.name, base.name());
                        tracing::warn!("model {name} is not in {dir}/: {:?} is taken", anchor.path);
                    }
                }
            }
        }
        root.set_times();
        root
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
            Found {
                name,
                written: SystemTime::UNIX_EPOCH,
                version: (0, 0),
                changed: (0, 0),
                settled: true,
                forms: [0; 2],
            }
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
