//! Open files: each keeps its node, and the blobs of its model from `gc`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use super::{Handle, Inode, Vfs, What};
use crate::error::{Error, Result};
use crate::store::Lease;
use crate::tree::{Body, FileBody, Node};

/// The open files of a model.
#[derive(Debug)]
pub(super) struct OpenFiles {
    count: u64,
    /// Each open file's node is kept, with the number of times that it is open.
    nodes: HashMap<u64, (u64, Arc<Node>)>,
    #[expect(dead_code, reason = "the lock ends when the file closes")]
    lease: Option<Lease>,
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
                self.add_open(ino, file, &node);
                if let Some(mut inode) = self.inodes.get_mut(&ino) {
                    inode.what = Handle::with(&node, handle.place.clone(), handle.names.load(Relaxed));
                }
                Ok(())
            }
        }
    }

    /// The store may not answer for this model while others are opened and closed: it is asked without the lock.
    fn add_open(&self, ino: u64, file: &FileBody, node: &Arc<Node>) {
        let mut lease = None;
        loop {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            if lease.is_some() || open.contains_key(&file.model) {
                let first = || OpenFiles { count: 0, nodes: HashMap::new(), lease: lease.take().flatten() };
                let files = open.entry(file.model.clone()).or_insert_with(first);
                files.count += 1;
                files.nodes.entry(ino).or_insert_with(|| (0, node.clone())).0 += 1;
                return;
            }
            drop(open);
            lease = Some(self.store.lease(&file.model));
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
                let files = open.remove(&file.model);
                drop(open);
                // Closing its manifest can take as long as opening it.
                drop(files);
            }
        }
    }
}
