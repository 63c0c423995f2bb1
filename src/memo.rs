//! Which layouts show each model, remembered in the store: without it every manifest is read at the first look at a
//! layout, 300 MB for a million tensors.
//!
//! It is written only into a store that has a directory `.wmount`, and can be deleted at any time.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::layout;
use crate::store::{Found, Store};

/// To be raised when a layout comes to show other models than before.
const RULES: u32 = 4;
/// Its file in `.wmount/`.
const FILE: &str = "memo.json";

/// A manifest's inode, length and time of change, and what was computed for its other forms.
type Version = (u64, u64, i64, i64, [u64; 2]);

/// The memo of a store.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memo {
    version: String,
    rules: u32,
    layouts: Vec<String>,
    /// By path of the manifest: which version was read, and a bit for each layout that shows it.
    models: HashMap<String, (Version, u64)>,
}

impl Memo {
    /// The memo of a store; empty if there is none of this version.
    pub fn read(store: &Store) -> Memo {
        let empty = Memo::of(std::iter::empty());
        let read = store.own_file(FILE).and_then(|bytes| serde_json::from_slice::<Memo>(&bytes).ok());
        let is_ours =
            |memo: &Memo| (&memo.version, memo.rules, &memo.layouts) == (&empty.version, RULES, &empty.layouts);
        read.filter(is_ours).unwrap_or(empty)
    }

    /// A memo of these models and the bits of their layouts. Those are left out whose manifests were written so lately
    /// that the next version could have the same time.
    pub fn of<'a>(models: impl Iterator<Item = (&'a Found, u64)>) -> Memo {
        let row = |(found, shown): (&Found, u64)| (found.name.manifest_path(), (version(found), shown));
        Memo {
            version: env!("CARGO_PKG_VERSION").into(),
            rules: RULES,
            layouts: layout::all().iter().map(|layout| layout.name().to_owned()).collect(),
            models: models.filter(|(found, _)| found.settled).map(row).collect(),
        }
    }

    /// The bits of a model, if its manifest is the one that was read.
    pub fn get(&self, found: &Found) -> Option<u64> {
        let (read, shown) = self.models.get(&found.name.manifest_path())?;
        (*read == version(found)).then_some(*shown)
    }

    /// Writes it, if the store may be written to.
    pub fn write(&self, store: &Store) {
        if let Ok(bytes) = serde_json::to_vec(self) {
            store.set_own_file(FILE, &bytes);
        }
    }
}

fn version(found: &Found) -> Version {
    (found.version.0, found.version.1, found.changed.0, found.changed.1, found.forms)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_may_be_written_over_unnoticed_is_not_remembered() {
        let name = "a".parse().expect("a name");
        let (written, version, changed) = (SystemTime::UNIX_EPOCH, (1, 2), (3, 4));
        let mut found = Found { name, written, version, changed, settled: true, forms: [0; 2] };
        let memo = Memo::of([(&found, 5)].into_iter());
        assert_eq!(memo.get(&found), Some(5));
        found.changed = (3, 5);
        assert_eq!(memo.get(&found), None);
        found.settled = false;
        assert_eq!(Memo::of([(&found, 5)].into_iter()).get(&found), None);
    }
}
