//! Blobs that were repaired while they were shown.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use super::{Inode, Vfs, What};
use crate::digest::Digest;
use crate::error::Result;
use crate::tree::{Body, Node, Tree};

impl Vfs {
    /// Notices blobs that were repaired since the last look; returns the files whose bytes the front may have kept.
    pub fn mend(&self) -> Result<Vec<u64>> {
        let repairs = self.store.repairs();
        let mut known = self.repaired.write().unwrap_or_else(PoisonError::into_inner);
        let new: HashSet<Digest> =
            repairs.iter().filter(|file| !known.contains(file)).map(|(digest, _)| *digest).collect();
        known.extend(repairs);
        drop(known);
        if new.is_empty() {
            return Ok(Vec::new());
        }
        new.iter().for_each(|digest| self.store.reopen(digest));
        let _one = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        // What was planned from damaged headers and configs is planned anew.
        let tree = Arc::new(Tree::new(&self.store, self.store.find()?, None, self.listed.clone()));
        *self.tree.write().unwrap_or_else(PoisonError::into_inner) = tree;
        let is_hurt = |node: &Node| match &node.body {
            Body::Dir(_) => false,
            Body::File(file) => file.content.digests().any(|digest| new.contains(&digest)),
        };
        // What is no longer in memory is not planned for this: it counts as hurt.
        let hurt = |inode: &Inode| match &inode.what {
            What::Node(handle) => handle.node.upgrade().is_none_or(|node| is_hurt(&node)),
            _ => false,
        };
        Ok(self.inodes.iter().filter(|inode| hurt(inode)).map(|inode| *inode.key()).collect())
    }

    /// Whether this is the damaged file of a blob that was replaced.
    pub fn is_replaced(&self, ino: u64, blob: u64) -> bool {
        let known = self.repaired.read().unwrap_or_else(PoisonError::into_inner);
        if known.is_empty() {
            return false;
        }
        self.file(ino, |file| file.content.whole_blob()).is_some_and(|digest| known.contains(&(digest, blob)))
    }
}
