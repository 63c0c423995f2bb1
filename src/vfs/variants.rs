//! Variants that prepare themselves: what must be known of whole tensors is found out when the first file is opened.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dashmap::DashMap;

use super::Vfs;
use crate::extent::Computed;
use crate::layout;
use crate::meter::Metered;
use crate::prepare::{prepare, surveyed};
use crate::store::Found;
use crate::tree::FileBody;

/// The variants of which files were opened.
#[derive(Debug, Default)]
pub(super) struct Variants {
    /// Whether there are any.
    any: AtomicBool,
    /// How far each is.
    prepared: Arc<DashMap<VariantKey, Prepared>>,
}

/// A variant of a model: the model, the index of the layout and that of the variant.
type VariantKey = (Arc<Found>, usize, usize);

/// How far a variant has prepared itself.
#[derive(Debug)]
enum Prepared {
    /// These surveys are made.
    Partly(HashSet<String>),
    All,
}

impl Prepared {
    fn has(&self, computed: &Computed) -> bool {
        match self {
            Prepared::Partly(surveys) => surveys.contains(&computed.survey_key()),
            Prepared::All => true,
        }
    }

    fn add(&mut self, computed: &Computed) {
        if let Prepared::Partly(surveys) = self {
            surveys.insert(computed.survey_key());
        }
    }
}

impl Vfs {
    /// Lets a variant prepare itself, in a thread of its own, when the first of its files is opened.
    pub(super) fn begin_variant(&self, file: &FileBody) {
        let Some(variant) = file.variant else { return };
        self.variants.any.store(true, Ordering::Relaxed);
        if file.fallback {
            self.meters.of(file.layout, file.variant).fallback();
        }
        let key = (file.model.clone(), file.layout, variant);
        match self.variants.prepared.entry(key.clone()) {
            dashmap::Entry::Occupied(_) => return,
            dashmap::Entry::Vacant(entry) => _ = entry.insert(Prepared::Partly(HashSet::new())),
        }
        let tree = self.tree();
        let Some(entry) = tree.entries().iter().find(|entry| entry.found == file.model).cloned() else { return };
        let (store, meters, prepared) = (self.store.clone(), self.meters.clone(), self.variants.prepared.clone());
        let work = move || {
            let name = layout::all()[key.1].variants()[variant].0;
            let counters = meters.of(key.1, Some(variant));
            let blobs = Metered::new(store.blobs(), counters, true);
            let nodes = entry.variant_of(key.1, variant);
            let made = |survey: &Computed| {
                if let Some(mut prepared) = prepared.get_mut(&key) {
                    prepared.add(survey);
                }
            };
            let done = nodes.and_then(|nodes| prepare(&surveyed(nodes.iter().map(|node| &**node)), &blobs, &made));
            if let Err(error) = done {
                // Who reads what is damaged is told so.
                tracing::warn!("model {}@{name}: {error}", entry.found.name);
            }
            prepared.insert(key, Prepared::All);
        };
        if let Err(error) = std::thread::Builder::new().name("prepare".into()).spawn(work) {
            tracing::warn!("no thread to prepare a variant with: {error}");
        }
    }

    /// Whether a read may have to wait until something of a whole tensor is known, since its variant is not prepared yet.
    pub fn is_slow(&self, ino: u64, offset: u64, len: u64) -> bool {
        // Most mounts have none open, and every read asks.
        if !self.variants.any.load(Ordering::Relaxed) {
            return false;
        }
        let slow = |file: &FileBody| {
            let key = (file.model.clone(), file.layout, file.variant?);
            let prepared = self.variants.prepared.get(&key);
            let is_known = |computed: &Computed| prepared.as_ref().is_some_and(|prepared| prepared.has(computed));
            let mut computed = file.content.computed_in(offset..offset.saturating_add(len));
            Some(computed.any(|computed| computed.transform.is_surveyed() && !is_known(computed)))
        };
        self.file(ino, slow).unwrap_or(false)
    }
}
