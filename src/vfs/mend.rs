//! Blobs that were mended while they were shown: repaired, or written to or replaced by hand.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, PoisonError};

use super::{Inode, Vfs, What};
use crate::digest::Digest;
use crate::error::Result;
use crate::memo::Memo;
use crate::tree::{Body, Node, Tree};

/// Blobs whose files were written to or replaced.
#[derive(Debug, PartialEq, Eq)]
pub enum Written {
    /// These.
    These(HashSet<Digest>),
    /// Any, for all that is known.
    Any,
}

impl Default for Written {
    fn default() -> Written {
        Written::These(HashSet::new())
    }
}

impl Written {
    /// Adds others.
    pub fn add(&mut self, others: Written) {
        match (&mut *self, others) {
            (Written::These(these), Written::These(others)) => these.extend(others),
            _ => *self = Written::Any,
        }
    }
}

impl Vfs {
    /// Notices blobs that were repaired since the last look, and these; returns the files whose bytes the front may have
    /// kept.
    pub fn mend(&self, mut written: Written) -> Result<Vec<u64>> {
        let repairs = self.store.repairs();
        let mut known = self.repaired.write().unwrap_or_else(PoisonError::into_inner);
        written
            .add(Written::These(repairs.iter().filter(|file| !known.contains(file)).map(|file| file.digest).collect()));
        known.extend(repairs);
        drop(known);
        match &written {
            Written::These(digests) if digests.is_empty() => return Ok(Vec::new()),
            Written::These(digests) => {
                digests.iter().for_each(|digest| self.store.reopen(digest));
                self.mended.write().unwrap_or_else(PoisonError::into_inner).extend(digests);
            }
            Written::Any => self.store.reopen_all(),
        }
        let _one = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        // What was planned from damaged headers and configs is planned anew, and which layouts show it found out anew.
        Memo::of(std::iter::empty()).write(&self.store);
        let tree = Arc::new(Tree::new(&self.store, self.store.survey()?, None, self.listed.clone()));
        *self.tree.write().unwrap_or_else(PoisonError::into_inner) = tree;
        let is_hurt = |node: &Node| match &node.body {
            Body::Dir(_) => false,
            Body::File(file) => file.content.digests().any(|digest| match &written {
                Written::These(digests) => digests.contains(&digest),
                Written::Any => true,
            }),
        };
        // What is no longer in memory is not planned for this: it counts as hurt.
        let hurt = |inode: &Inode| match &inode.what {
            What::Node(handle) => handle.node.upgrade().is_none_or(|node| is_hurt(&node)),
            _ => false,
        };
        Ok(self.inodes.iter().filter(|inode| hurt(inode)).map(|inode| *inode.key()).collect())
    }

    /// Whether this, the inode number of a file that is open, is that of a blob's file which another has replaced since.
    pub fn is_replaced(&self, ino: u64, blob: u64) -> bool {
        let Some(digest) = self.file(ino, |file| file.content.whole_blob()) else { return false };
        let is_mended = self.mended.read().unwrap_or_else(PoisonError::into_inner).contains(&digest);
        is_mended && fs::metadata(self.store.blob_path(&digest)).is_ok_and(|now| now.ino() != blob)
    }
}
