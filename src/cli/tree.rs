//! The tree of a store without a mount.

use std::sync::Arc;

use super::StoreArgs;
use crate::error::{Error, Result};
use crate::slips::slips;
use crate::vfs::{Attr, ROOT, Vfs};

/// The most entries of a directory that an error names.
const NAMED: usize = 12;

/// Which tree a command looks at.
#[derive(Debug, Clone, clap::Args)]
pub struct TreeArgs {
    /// Have fp16 variants also of models that have values beyond its range; these become infinite
    #[arg(long)]
    allow_overflow: bool,
    #[command(flatten)]
    store: StoreArgs,
}

impl TreeArgs {
    /// The tree, and what is at a path of it.
    pub fn at(&self, path: &str) -> Result<(Vfs, Attr)> {
        let vfs = Vfs::new(Arc::new(self.store.open()?.allowing_overflow(self.allow_overflow)))?;
        let attr = resolve(&vfs, path)?;
        Ok((vfs, attr))
    }
}

/// What is at a path of a tree; where nothing is, the error says what may be meant.
pub fn resolve(vfs: &Vfs, path: &str) -> Result<Attr> {
    vfs.resolve(path).map_err(|error| match error {
        Error::NotFound(path) => {
            let late: Vec<String> = vfs.tree().late().map(|entry| entry.found.name.to_string()).collect();
            let why = match late.is_empty() {
                true => near(vfs, &path),
                false => format!(", which does not answer for {}", late.join(", ")),
            };
            Error::NotFound(format!("{path} in the store {}{why}", vfs.store().root().display()))
        }
        other => other,
    })
}

/// How far a path leads, and which names are there: those that the next one may be mistyped of, or all if they are few.
fn near(vfs: &Vfs, path: &str) -> String {
    let (mut dir, mut way) = (ROOT, String::new());
    for part in path.split('/').filter(|part| !part.is_empty()) {
        if let Ok(attr) = vfs.lookup(dir, part) {
            dir = attr.ino;
            way = format!("{way}{part}/");
            continue;
        }
        let Ok(listing) = vfs.entries(dir) else { break };
        let mut names: Vec<String> = listing.children.iter().map(|child| child.name.into()).collect();
        if names.iter().any(|name| slips(part, name).is_some()) {
            names.retain(|name| slips(part, name).is_some());
        }
        let place = if way.is_empty() { "whose tree" } else { &format!("where {way}") };
        return match names.len() {
            0 => format!(", {place} has nothing"),
            1..=NAMED => format!(", {place} has {}", names.join(", ")),
            _ => String::new(),
        };
    }
    String::new()
}
