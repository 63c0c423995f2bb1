//! File systems that take names for one that differ only in case, as those of Macs and of Windows mostly do: what is found
//! by a model's name may be another's there.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::{Store, children};
use crate::error::Error;
use crate::model::ModelName;

/// A part of a model's name, and what the file system finds by it.
#[derive(Debug)]
pub(super) struct Respelled {
    dir: PathBuf,
    asked: String,
    there: String,
}

impl Respelled {
    /// That no model can have the name.
    pub fn refusal(&self, name: &ModelName) -> Error {
        let Respelled { dir, asked, there } = self;
        Error::Invalid(format!(
            "{}: {asked:?} is {there:?} on this file system, which cannot hold both: spell it so, or give {name} another name",
            dir.display()
        ))
    }
}

impl Store {
    /// The first part of a model's name that is spelled otherwise in the store, where that is the same to the file system.
    pub(super) fn respelled(&self, name: &ModelName) -> Option<Respelled> {
        let mut dir = self.manifests_dir();
        for asked in [&name.host, &name.namespace, &name.name, &name.tag] {
            let path = dir.join(asked);
            let inode = |part: &str| fs::symlink_metadata(dir.join(part)).ok().map(|found| (found.dev(), found.ino()));
            let found = inode(asked)?;
            // Nothing, or something else, by this name: case counts here, and no directory need be listed.
            let turned: String = asked.chars().map(other_case).collect();
            if turned != *asked && inode(&turned) == Some(found) {
                let names = children(&dir).ok()?;
                let there = names.iter().find(|there| there.eq_ignore_ascii_case(asked));
                if let Some(there) = there.filter(|_| !names.contains(asked)) {
                    return Some(Respelled { there: there.clone(), asked: asked.clone(), dir });
                }
            }
            dir = path;
        }
        None
    }
}

fn other_case(char: char) -> char {
    if char.is_ascii_uppercase() { char.to_ascii_lowercase() } else { char.to_ascii_uppercase() }
}
