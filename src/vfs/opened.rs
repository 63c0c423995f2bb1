//! Open files: each keeps its node, and the blobs of its model from `gc`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use super::{Handle, Inode, Vfs, What};
use crate::error::{Error, Result};
use crate::store::Lease;
use crate::tree::{Body, Node};

/// The open files of a model.
#[derive(Debug)]
pub(super) struct OpenFiles {
    count: u64,
    /// Each open file's node is kept, with the number of times that it is open.
    nodes: HashMap<u64, (u64, Arc<Node>)>,
    _lease: Option<Lease>,
}

impl Vfs {
    /// Keeps the blobs of a file's model from `gc` until [`Vfs::release`].
    pub fn open(&self, ino: u64) -> Result<()> {
        match self.inode(ino)?.what {
            What::Skeleton(_) => Err(Error::IsDir),
            What::Status(_) => Ok(()),
            What::Node(handle) => {
                let node = handle.node()?;
                let Body::File(file) = &node.body else { return Err(Error::IsDir) };
                self.begin_variant(file);
                let none = || OpenFiles { count: 0, nodes: HashMap::new(), _lease: self.store.lease(&file.model) };
                let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
                let files = open.entry(file.model.clone()).or_insert_with(none);
                files.count += 1;
                files.nodes.entry(ino).or_insert_with(|| (0, node.clone())).0 += 1;
                drop(open);
                if let Some(mut inode) = self.inodes.get_mut(&ino) {
                    inode.what = Handle::with(&node, handle.place.clone(), handle.names.load(Relaxed));
                }
                Ok(())
            }
        }
    }

    /// The reverse of [`Vfs::open`].
    pub fn release(&self, ino: u64) {
        let Ok(Inode { what: What::Node(handle), .. }) = self.inode(ino) else { return };
        let Ok(node) = handle.node() else { return };
        let Body::File(file) = &node.body else { return };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(files) = open.get_mut(&file.model) {
            files.count -= 1;
            if let Entry::Occupied(mut entry) = files.nodes.entry(ino) {
                entry.get_mut().0 -= 1;
                if entry.get().0 == 0 {
                    entry.remove();
                }
            }
            if files.count == 0 {
                open.remove(&file.model);
            }
        }
    }
}
