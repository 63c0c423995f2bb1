//! What a mount shows to users other than the one who mounts.

use super::{Handle, Vfs};
use crate::digest::Digest;
use crate::store::Access;
use crate::tree::{Body, Node};

impl Vfs {
    /// Says that the user `mine` shows this to all others: what belongs to somebody else is then shown to those alone who
    /// may read it in the store.
    pub fn guard(&self, mine: u32) {
        self.store.guard(mine);
    }

    /// Who may read a file: those who may read its model, as it was when it was first read. A stored blob that is shown as
    /// one has rights of its own: models share it.
    pub(super) fn access(&self, handle: &Handle, node: &Node) -> Access {
        let model = self.store.access(handle.place.model());
        let Body::File(file) = &node.body else { return model };
        let shown_as = || handle.place.path().rsplit('/').next().and_then(Digest::from_file_name);
        match file.content.whole_blob().filter(|blob| model != Access::ALL && shown_as() == Some(*blob)) {
            Some(blob) => self.store.blob_access(&blob).unwrap_or(model),
            None => model,
        }
    }
}
