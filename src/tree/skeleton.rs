//! The directories above the models, made of names alone.

use std::collections::{BTreeMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use super::look::{Stand, planned};
use super::union::{Claim, Row, Unsettled};
use super::view::View;
use super::{Body, Entry, Kind, Node, Place, ROOT, Union, number};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::layout::{self, Anchor, AnchorKind};
use crate::store::{Found, Times};

/// A directory of the skeleton.
#[derive(Debug, Default)]
pub struct SkeletonDir {
    /// Path from the root of the mount, `""` for the root itself.
    pub path: String,
    /// When a model below it last came, went or changed; `None` if that is the time of the whole tree.
    pub mtime: Option<SystemTime>,
    children: BTreeMap<String, SkeletonChild>,
    /// The models that share this directory.
    shared: Vec<Stand>,
    union: Mutex<Option<Blobs>>,
    /// The models that have files beside the children.
    beside: Vec<Stand>,
}

/// The blobs of a shared directory, and which of the models that share it could not be planned, or not in time.
#[derive(Debug, Clone)]
struct Blobs(Arc<Union>, Arc<[usize]>);

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
    pub(super) fn new(path: String) -> SkeletonDir {
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
                let asked = name.to_owned();
                let found = planned(&self.beside, move |_, node| node.map(|node| node.child(&asked).is_ok()));
                let mut damage = Ok(());
                for ((entry, view, anchor), found) in self.beside.iter().zip(found) {
                    match found.unwrap_or(Err(Error::Unanswered)) {
                        Ok(true) => return Place::of(entry, *view, *anchor, name).step(),
                        Ok(false) => {}
                        // The name may be one of this model's, unless another model has it.
                        Err(error) => damage = damage.and(Err(error)),
                    }
                }
                damage?;
                let digest = Digest::from_file_name(name).filter(|_| self.is_shared()).ok_or_else(absent)?;
                let shown = self.blobs()?.model(&digest, |claims| self.believed(claims)).ok_or_else(absent)?;
                let unsettled = |Unsettled| Error::Damaged {
                    digest,
                    fault: "models have unlike content of this digest, too long to find out whose is right; \
                            look at them with wmount verify"
                        .into(),
                };
                let (entry, view, anchor) = &self.shared[shown.map_err(unsettled)?];
                Place::of(entry, *view, *anchor, name).step()
            }
        }
    }

    /// The model that has this name, or whose variant has it.
    pub fn model(&self, name: &str) -> Option<&Arc<Found>> {
        match self.children.get(name) {
            Some(SkeletonChild::Anchor { entry, .. }) => Some(&entry.found),
            Some(SkeletonChild::Dir(_)) => None,
            None => self.unlisted(name).map(|(entry, ..)| &entry.found),
        }
    }

    /// The directory of the skeleton that has this name.
    pub(super) fn dir(&self, name: &str) -> Option<&SkeletonDir> {
        match self.children.get(name)? {
            SkeletonChild::Dir(dir) => Some(dir),
            SkeletonChild::Anchor { .. } => None,
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
    /// A model that cannot be read, or for which the store does not answer in time, keeps its name here, with a number of
    /// its path: that is an error, or waited for, when it is touched, and no absence.
    pub fn entries(&self) -> Result<Vec<(Box<str>, u64, Kind)>> {
        let (mut entries, mut names, mut stands) = (Vec::new(), Vec::new(), Vec::new());
        for (name, child) in &self.children {
            match child {
                SkeletonChild::Dir(dir) => entries.push((name.as_str().into(), dir.ino(), Kind::Dir)),
                SkeletonChild::Anchor { entry, view, anchor, kind } => {
                    names.push((name, *kind));
                    stands.push((entry.clone(), *view, *anchor));
                }
            }
        }
        if self.is_shared() {
            let union = self.blobs()?;
            entries.extend((0..union.len()).filter_map(|at| union.get(at)).map(|(n, ino)| (n.into(), ino, Kind::File)));
        }
        stands.extend(self.beside.iter().cloned());
        let first_beside = names.len();
        let mut found = planned(&stands, move |index, node| {
            let node = node?;
            let row = |(name, node): &(Box<str>, Arc<Node>)| (name.clone(), node.ino, node.kind());
            let files = match &node.body {
                Body::Dir(children) if index >= first_beside => children.iter().map(row).collect(),
                _ => Vec::new(),
            };
            Ok((node.ino, files))
        });
        // A model that cannot be planned has the name of its own file above.
        let files = found.split_off(first_beside).into_iter().flatten().flatten().flat_map(|(_, files)| files);
        entries.extend(files.filter(|(name, ..)| !self.children.contains_key(&**name)));
        for ((name, kind), found) in names.into_iter().zip(found) {
            let ino = match found {
                Some(Ok((ino, _))) => ino,
                Some(Err(Error::Refused(_))) => continue,
                _ => number(&["damaged", &self.path, name], &[]),
            };
            entries.push((name.as_str().into(), ino, kind));
        }
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        // Of two that have one name the first is found.
        entries.dedup_by(|next, first| next.0 == first.0);
        Ok(entries)
    }

    /// Whether what has this name needs an answer of the store that is already late.
    pub fn is_awaited(&self, name: &str) -> bool {
        match self.children.get(name) {
            Some(SkeletonChild::Anchor { entry, view, .. }) => entry.is_awaited(*view),
            _ => false,
        }
    }

    /// Whether it holds the blobs of several models, and nothing else.
    pub fn is_shared(&self) -> bool {
        !self.shared.is_empty() && self.children.is_empty()
    }

    /// The blobs of a shared directory.
    pub fn blobs(&self) -> Result<Arc<Union>> {
        let known = self.union.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // What a damaged model lacks is looked for again, in that model alone.
        let is_lacking = |&index: &usize| {
            let (entry, view, _) = &self.shared[index];
            entry.is_awaited(*view) || entry.planned(*view).is_err()
        };
        if let Some(Blobs(union, _)) = known.filter(|Blobs(_, lacking)| lacking.iter().all(is_lacking)) {
            return Ok(union);
        }
        // One growing list: a list for each model would leave a million small holes in memory.
        let (claims, prints) = (Arc::new(Mutex::new(Vec::new())), RandomState::new());
        let all = claims.clone();
        let added = planned(&self.shared, move |index, node| {
            let Body::Dir(children) = &node?.body else { return Ok::<(), Error>(()) };
            let claim = |(name, node): &(Box<str>, Arc<Node>)| {
                let (digest, content) = (Digest::from_file_name(name)?, node.content()?);
                let row = Row { digest, ino: node.ino, model: index as u32 };
                let (print, is_stored) = (prints.hash_one(content), content.whole_blob() == Some(digest));
                Some(Claim { row, print, len: content.size(), is_stored })
            };
            all.lock().unwrap_or_else(PoisonError::into_inner).extend(children.iter().filter_map(claim));
            Ok(())
        });
        let mut lacking = Vec::new();
        for (index, added) in added.into_iter().enumerate() {
            let why = match added {
                Some(Ok(())) => continue,
                Some(Err(error)) => error.to_string(),
                None => format!("{}; until it does, the model's blobs are not shown", Error::Unanswered),
            };
            tracing::warn!("model {}: {why}", self.shared[index].0.found.name);
            lacking.push(index);
        }
        let claims = std::mem::take(&mut *claims.lock().unwrap_or_else(PoisonError::into_inner));
        let union = Arc::new(Union::of(claims));
        *self.union.lock().unwrap_or_else(PoisonError::into_inner) = Some(Blobs(union.clone(), lacking.into()));
        Ok(union)
    }

    /// Which of these claims for one digest is right: that of the stored blob, else that of content which has the digest. If
    /// none is, it is one whose content cannot be read just now, or the first. `None` if finding out would take too long:
    /// whoever looks waits for it, and a claim of any length takes no room in a store.
    fn believed(&self, claims: &[Claim]) -> Option<usize> {
        /// Bytes of all claims together, above any tensor.
        const MOST: u64 = 16 << 30;
        let digest = claims[0].row.digest;
        let model = |claim: &Claim| &self.shared[claim.row.model as usize];
        if let Some(stored) = claims.iter().position(|it| it.is_stored && model(it).0.has_blob(&digest, it.len)) {
            return Some(stored);
        }
        // The shortest first: who lies can make others wait for no longer than their own blob takes.
        let mut order: Vec<usize> = (0..claims.len()).collect();
        order.sort_by_key(|index| claims[*index].len);
        let (mut hashed, mut unread, mut left) = (HashSet::new(), None, MOST);
        for index in order {
            if !hashed.insert(claims[index].print) {
                continue;
            }
            let Some(rest) = left.checked_sub(claims[index].len) else {
                tracing::warn!("blob {digest}: what models claim it to be is too long to be hashed");
                return None;
            };
            left = rest;
            let (entry, view, anchor) = model(&claims[index]);
            match entry.digest_of(*view, *anchor, &digest.file_name()) {
                Ok(actual) if actual == digest => return Some(index),
                Ok(actual) => tracing::warn!("model {}: its blob {digest} has the digest {actual}", entry.found.name),
                Err(_) => unread = unread.or(Some(index)),
            }
        }
        unread.or(Some(0))
    }

    /// The directory at a path below this one, made as needed.
    pub(super) fn make(&mut self, path: &str) -> Option<&mut SkeletonDir> {
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
    pub(super) fn put(
        &mut self,
        path: &str,
        entry: &Arc<Entry>,
        view: View,
        anchor: usize,
        kind: AnchorKind,
    ) -> Option<()> {
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

    /// Has the directories above an anchor be no older than its model, and than those of the store in which models of these
    /// directories come and go. Those above any host, namespace and name are as old as the whole tree.
    pub(super) fn date(&mut self, anchor: &Anchor, entry: &Entry, times: &Times) {
        let model = &entry.found.name;
        let [host, namespace, name] = times.above(model);
        let newest = Some(entry.found.written).max(name);
        let at = |part: &str| match part {
            _ if part == model.name => Some(newest),
            _ if part == model.namespace => Some(newest.max(namespace)),
            _ if part == model.host => Some(newest.max(namespace).max(host)),
            _ => None,
        };
        let path = match anchor.kind {
            AnchorKind::Shared | AnchorKind::Beside => &anchor.path,
            _ => anchor.path.rsplit_once('/').map_or("", |(dir, _)| dir),
        };
        let (mut dir, mut is_model) = (self, false);
        for part in path.split('/') {
            let Some(SkeletonChild::Dir(below)) = dir.children.get_mut(part) else { return };
            dir = below;
            if let Some(time) = at(part).or(is_model.then_some(newest)) {
                (dir.mtime, is_model) = (dir.mtime.max(time), true);
            }
        }
    }
}
