//! Blobs that were repaired while they were shown.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
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
            repairs.iter().filter(|file| !known.contains(file)).map(|file| file.digest).collect();
        known.extend(repairs);
        drop(known);
        if new.is_empty() {
            return Ok(Vec::new());
        }
        new.iter().for_each(|digest| self.store.reopen(digest));
        let _one = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        // What was planned from damaged headers and configs is planned anew.
        let tree = Arc::new(Tree::new(&self.store, self.store.survey()?, None, self.listed.clone()));
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

    /// Whether this, the inode number of a file that is open, is the damaged file of a blob that was replaced.
    pub fn is_replaced(&self, ino: u64, blob: u64) -> bool {
        let known = self.repaired.read().unwrap_or_else(PoisonError::into_inner);
        let is_known = |digest| known.iter().any(|file| (file.digest, file.inode) == (digest, blob));
        let Some(digest) = self.file(ino, |file| file.content.whole_blob()).filter(|digest| is_known(*digest)) else {
            return false;
        };
        drop(known);
        // The whole blob may have come to have the inode number that a damaged one had.
        fs::metadata(self.store.blob_path(&digest)).is_ok_and(|now| now.ino() != blob)
    }
}
