//! The snapshot of all layouts: which paths there are, and the inode number of each.
//!
//! The upper part, down to the models, is the skeleton: it is made of names alone when a layout is first touched.
//! Below a model's anchor stand [`Node`]s, which are made when the model is first touched and never change.
//!
//! An inode number means one content for ever. That of a node is a hash of its path, content and time, so it is the
//! same after a remount and another one when the content changes; that of a skeleton directory is a hash of its path.

mod entry;
mod look;
mod numbering;
mod skeleton;
mod union;
mod view;

use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::extent::ExtentMap;
use crate::keep::Keep;
use crate::layout;
use crate::memo::Memo;
use crate::store::{Found, Store, Survey, Times};

pub use entry::{Entry, Place};
pub(crate) use numbering::number;
pub use skeleton::{SkeletonDir, Step};
pub use union::Union;
use view::View;

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

    /// The bytes of a file.
    fn content(&self) -> Option<&ExtentMap> {
        match &self.body {
            Body::Dir(_) => None,
            Body::File(file) => Some(&file.content),
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

/// The snapshot.
#[derive(Debug)]
pub struct Tree {
    store: Arc<Store>,
    keep: Arc<Keep>,
    entries: Vec<Arc<Entry>>,
    /// Set when every entry knows which layouts show it, but for these, for which the store has not answered in time.
    sorted: OnceLock<Vec<Arc<Entry>>>,
    layouts: [OnceLock<SkeletonDir>; layout::COUNT],
    listed: Arc<[String]>,
    times: Times,
}

impl Tree {
    /// The snapshot of these models; those that `old` has too, for certain, keep what was planned. Of the variants only the `listed`
    /// are entries of directories; the others are there for who asks for them.
    pub fn new(store: &Arc<Store>, survey: Survey, old: Option<&Tree>, listed: Arc<[String]>) -> Tree {
        let Survey { models: found, times, .. } = survey;
        let paths = tree_paths(&found);
        let keep = old.map_or_else(Arc::default, |old| old.keep.clone());
        let entries = found.into_iter().zip(paths).map(|(found, path)| {
            let is_as_it_was = |entry: &Entry| entry.found.settled && !entry.may_be_mended();
            let same = |entry: &&Arc<Entry>| *entry.found == found && entry.path == path && is_as_it_was(entry);
            let index = old.map(|old| old.entries.binary_search_by(|entry| entry.found.name.cmp(&found.name)));
            let kept = old.zip(index.and_then(Result::ok)).map(|(old, index)| &old.entries[index]).filter(same);
            kept.cloned().unwrap_or_else(|| Arc::new(Entry::new(store.clone(), keep.clone(), found, path)))
        });
        let entries = entries.collect();
        Tree {
            store: store.clone(),
            keep,
            entries,
            sorted: OnceLock::new(),
            layouts: Default::default(),
            listed,
            times,
        }
    }

    /// Has every model say which layouts show it, unless that is done or under way: what every look at a layout waits for.
    pub fn look(&self) {
        self.sorted.get_or_init(|| self.sort());
    }

    /// Whether another snapshot can show a model that this one cannot: it has said so after it was no longer waited for,
    /// or what was wrong with it is mended.
    pub fn is_behind(&self) -> bool {
        let Some(late) = self.sorted.get() else { return false };
        late.iter().any(|entry| !entry.is_late()) || self.entries.iter().any(|entry| entry.may_be_mended())
    }

    /// From the memo, or by reading the models.
    fn sort(&self) -> Vec<Arc<Entry>> {
        let memo = Memo::read(&self.store);
        for entry in &self.entries {
            if let Some(shown) = memo.get(&entry.found) {
                let _ = entry.shown.set(shown);
            }
        }
        let unknown = self.entries.iter().filter(|entry| entry.shown.get().is_none()).cloned();
        // Those that are late are waited for by threads of an earlier snapshot's.
        let (mut late, unknown): (Vec<_>, Vec<_>) = unknown.partition(|entry| entry.is_late());
        if !unknown.is_empty() {
            late.extend(look::look(unknown));
            let known = self.entries.iter().filter_map(|entry| Some((&*entry.found, *entry.shown.get()?)));
            Memo::of(known).write(&self.store);
        }
        for entry in &late {
            tracing::warn!(
                "model {}: the store does not answer; until it does, the model is only in original/",
                entry.found.name
            );
        }
        late
    }

    /// The models in order of name.
    pub fn entries(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    /// The models for which the store has not answered yet, and is not waited for.
    pub fn late(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.entries.iter().filter(|entry| entry.is_late())
    }

    /// When a model last came, went or changed.
    pub fn newest(&self) -> Option<SystemTime> {
        self.entries.iter().map(|entry| entry.found.written).max().max(self.times.newest())
    }

    /// The times of the store's directories.
    pub fn times(&self) -> &Times {
        &self.times
    }

    /// The skeleton directory at a path whose first component is a layout's name.
    pub fn dir(&self, path: &str) -> Option<&SkeletonDir> {
        let mut parts = path.split('/');
        let first = parts.next()?;
        let layout = layout::all().iter().position(|layout| layout.name() == first)?;
        let root = self.layouts[layout].get_or_init(|| self.skeleton(layout));
        parts.try_fold(root, SkeletonDir::dir)
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
                    if root.put(&anchor.path, entry, *view, index, anchor.kind).is_some() {
                        root.date(&anchor, entry, &self.times);
                    } else {
                        let (name, dir) = (&entry.found.name, base.name());
                        tracing::warn!("model {name} is not in {dir}/: {:?} is taken", anchor.path);
                    }
                }
            }
        }
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
