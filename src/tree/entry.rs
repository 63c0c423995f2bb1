//! The models of the snapshot, and where their nodes stand.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::numbering::Numbering;
use super::view::View;
use super::{Node, Step};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::keep::{Cell, Keep};
use crate::layout::{self, Files, Layout};
use crate::model::Model;
use crate::store::{Found, Seen, Store};

/// The layout that shows what cannot be read.
const UNREAD: &str = "original";

/// After this time without an answer of the store no more is waited for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// The nodes at the anchors of one layout.
pub(super) type Anchored = Vec<Arc<Node>>;

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
    pub(super) shown: OnceLock<u64>,
    /// The file that kept it from being read, or from being read whole, when that was last tried.
    unread: Mutex<Option<Seen>>,
    /// Whether the store has not answered in time to find that out.
    late: AtomicBool,
    /// A bit for each layout for whose plan the store has not answered in time.
    awaited: AtomicU64,
}

impl Entry {
    pub(super) fn new(store: Arc<Store>, keep: Arc<Keep>, found: Found, path: String) -> Entry {
        let (model, plans) = (Cell::default(), std::array::from_fn(|_| Cell::default()));
        let variants = Mutex::default();
        Entry {
            found: Arc::new(found),
            path,
            store,
            keep,
            model,
            plans,
            variants,
            shown: OnceLock::new(),
            unread: Mutex::default(),
            late: AtomicBool::new(false),
            awaited: AtomicU64::new(0),
        }
    }

    /// For how long this model is waited for while another thread reads or plans it.
    fn patience(&self) -> Duration {
        // Hashing its blobs first can take any time.
        if self.store.checked().is_some() { Duration::MAX } else { PATIENCE }
    }

    /// The model.
    pub fn model(&self) -> Result<Arc<Model>> {
        self.model.get(&self.keep, self.patience(), || {
            let model = self.store.load(&self.found)?;
            self.set_unread(model.check_whole().err().as_ref());
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
    pub(super) fn planned(&self, view: View) -> Result<Arc<Anchored>> {
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
                let reason = format!("{}/{shown}: {reason}", layout.name());
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
            return self.plans[view.layout].get(&self.keep, self.patience(), make);
        }
        let plan = self.variants.lock().unwrap_or_else(PoisonError::into_inner).entry(view).or_default().clone();
        // What is computed for it can take any time.
        plan.get(&self.keep, Duration::MAX, make)
    }

    /// The same, however long the store takes to answer.
    pub(super) fn planned_at_last(&self, view: View) -> Result<Arc<Anchored>> {
        at_last(|| self.planned(view))
    }

    /// The same if that needs no look at the store.
    pub(super) fn at_hand(&self, view: View) -> Option<Arc<Anchored>> {
        if view.variant.is_none() {
            return self.plans[view.layout].at_hand();
        }
        self.variants.lock().unwrap_or_else(PoisonError::into_inner).get(&view)?.at_hand()
    }

    /// Says whether planning a layout takes longer than anybody waits who does not ask for this model.
    pub(super) fn set_awaited(&self, view: View, awaited: bool) {
        let bit = 1 << view.layout;
        match awaited {
            true => self.awaited.fetch_or(bit, Ordering::Release),
            false => self.awaited.fetch_and(!bit, Ordering::Release),
        };
    }

    /// Whether it does.
    pub(super) fn is_awaited(&self, view: View) -> bool {
        self.awaited.load(Ordering::Acquire) & 1 << view.layout != 0 && self.at_hand(view).is_none()
    }

    /// Whether the store has a blob, with this length.
    pub(super) fn has_blob(&self, digest: &Digest, len: u64) -> bool {
        self.store.blob_metadata(digest).is_ok_and(|found| found.len() == len)
    }

    /// Hashes the file of this name in the directory at an anchor.
    pub(super) fn digest_of(&self, view: View, anchor: usize, name: &str) -> Result<Digest> {
        let planned = self.planned(view)?;
        let content = planned[anchor].child(name)?.content().ok_or(Error::IsDir)?;
        Digest::of_all(|at, part| content.read(self.store.blobs(), at, part))
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
    pub(super) fn shows(&self, view: View) -> bool {
        let expressed = || self.model().is_ok_and(|model| view.layout().expresses(&model).is_ok());
        let shown = match self.shown.get() {
            Some(shown) => *shown,
            None if self.is_late() => mask(|view| view.name() == UNREAD),
            None => self.look(&mut Vec::new()),
        };
        shown & 1 << view.layout != 0 && (view.variant.is_none() || expressed())
    }

    /// A bit for each layout that shows it. What cannot be read is shown in `original/`, where touching it tells why.
    pub(super) fn look(&self, room: &mut Vec<u8>) -> u64 {
        let brief = self.store.load_brief(&self.found, room);
        let whole = || at_last(|| self.model());
        let model = brief.and_then(|brief| brief.map_or_else(whole, |brief| Ok(Arc::new(brief))));
        match &model {
            Ok(model) => self.set_unread(model.check_whole().err().as_ref()),
            Err(error) => self.set_unread(Some(error)),
        }
        match model {
            // What damage hides is not remembered.
            Ok(model) if !model.is_settled() => mask(|view| view.expresses(&model).is_ok()),
            Ok(model) => *self.shown.get_or_init(|| mask(|view| view.expresses(&model).is_ok())),
            Err(error) => {
                tracing::warn!("model {}: {error}", self.found.name);
                mask(|view| view.name() == UNREAD)
            }
        }
    }

    fn set_unread(&self, error: Option<&Error>) {
        let unread = error.and_then(|error| self.store.culprit(error));
        *self.unread.lock().unwrap_or_else(PoisonError::into_inner) = unread;
    }

    /// Whether what kept it from being read, or from being read whole, is another file by now, or there again, as when a
    /// disk is back.
    pub(super) fn may_be_mended(&self) -> bool {
        let unread = self.unread.lock().unwrap_or_else(PoisonError::into_inner).clone();
        unread.is_some_and(|file| file.is_another())
    }

    /// Says whether the look takes longer than anybody waits.
    pub(super) fn set_late(&self, late: bool) {
        self.late.store(late, Ordering::Release);
    }

    /// Whether it does. Until it is done, the model is shown as one that cannot be read.
    pub(super) fn is_late(&self) -> bool {
        self.late.load(Ordering::Acquire)
    }
}

/// Asks again as long as the store does not answer in time.
fn at_last<T>(ask: impl Fn() -> Result<T>) -> Result<T> {
    loop {
        match ask() {
            Err(error) if error.is_unanswered() => {}
            outcome => return outcome,
        }
    }
}

/// A bit for each layout that is meant.
fn mask(is_meant: impl Fn(&dyn Layout) -> bool) -> u64 {
    let layouts = layout::all().into_iter().enumerate();
    layouts.filter(|(_, view)| is_meant(*view)).fold(0, |mask, (index, _)| mask | 1 << index)
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
    pub(super) fn of(entry: &Arc<Entry>, view: View, anchor: usize, path: &str) -> Place {
        Place { entry: entry.clone(), view, anchor, path: path.into() }
    }

    pub(super) fn step(self) -> Result<Step<'static>> {
        Ok(Step::Node(self.node()?, self))
    }

    /// The model whose it is.
    pub fn model(&self) -> &Arc<Found> {
        &self.entry.found
    }

    /// Whether it was planned with a file that was damaged and is not any more: the next snapshot has another one here.
    pub fn is_outdated(&self) -> bool {
        self.entry.may_be_mended()
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
