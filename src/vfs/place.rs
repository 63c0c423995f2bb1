//! Where an inode stands, and the next snapshot.

use std::sync::{Arc, PoisonError};

use super::{Vfs, What};
use crate::digest::Digest;
use crate::error::Result;
use crate::layout;
use crate::tree::{Body, Tree};

impl Vfs {
    /// Looks at the store's manifests again; `true` if models came, went or changed.
    pub fn refresh(&self) -> Result<bool> {
        let _one = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        let survey = self.store.survey()?;
        let old = self.tree();
        let known = || old.entries().iter().map(|entry| &*entry.found);
        let same = known().eq(survey.models.iter());
        if same && *old.times() == survey.times && known().all(|found| found.settled) && !old.is_behind() {
            return Ok(false);
        }
        let new = Arc::new(Tree::new(&self.store, survey, Some(&old), self.listed.clone()));
        *self.tree.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(!same)
    }

    /// The path of a directory above the models, from the root of the mount.
    pub fn path_of(&self, dir: u64) -> Option<Arc<str>> {
        match self.inode(dir).ok()?.what {
            What::Skeleton(path) => Some(path),
            _ => None,
        }
    }

    /// The name of the layout that a file is in.
    pub fn layout_of(&self, file: u64) -> Option<&'static str> {
        let What::Node(handle) = self.inode(file).ok()?.what else { return None };
        let node = handle.node().ok()?;
        let Body::File(body) = &node.body else { return None };
        Some(layout::all()[body.layout].name())
    }

    /// The blob of `ollama/` that a file is there.
    pub fn blob_of(&self, file: u64) -> Option<Digest> {
        let What::Node(handle) = self.inode(file).ok()?.what else { return None };
        Digest::from_file_name(handle.place.path()).filter(|_| self.layout_of(file) == Some("ollama"))
    }
}
