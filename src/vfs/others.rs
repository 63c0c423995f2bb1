//! What a mount shows to users other than the one who mounts.

use std::sync::Arc;

use super::Vfs;
use crate::store::{Access, Found};

impl Vfs {
    /// Says that the user `mine` shows this to all others: what belongs to somebody else is then shown to those alone who
    /// may read it in the store.
    pub fn guard(&self, mine: u32) {
        let _ = self.shown_by.set(mine);
    }

    /// The user who shows the tree to all others, if one does.
    pub fn shown_by(&self) -> Option<u32> {
        self.shown_by.get().copied()
    }

    /// Who may read the files of a model, as it was when it was first asked.
    pub(super) fn access(&self, found: &Arc<Found>) -> Access {
        let Some(mine) = self.shown_by.get() else { return Access::ALL };
        if let Some(access) = self.access.get(found) {
            return *access;
        }
        let access = self.store.access(found, *mine);
        if access != Access::ALL {
            tracing::info!(
                "model {} is shown to those who may read it in the store, mode {:03o}",
                found.name,
                access.mode
            );
        }
        self.access.insert(found.clone(), access);
        access
    }
}
