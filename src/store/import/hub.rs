//! The Hugging Face hub cache: `models--OWNER--NAME/`, in it `snapshots/REVISION/`, `refs/main` and `blobs/`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{AtPath, Error, Result};

/// What the names of its repositories of models begin with.
const MODELS: &str = "models--";

/// Bytes of a revision's name at the most; it is that of a commit.
const REVISION_MAX: u64 = 256;

/// Whether a directory of this name is a repository of models.
pub(super) fn is_repository(name: &str) -> bool {
    name.starts_with(MODELS)
}

/// The name of the model whose repository a path is in, without its owner.
pub(super) fn model_of(real: &Path) -> Option<&str> {
    let repository = real.components().rev().find_map(|part| part.as_os_str().to_str()?.strip_prefix(MODELS))?;
    repository.rsplit("--").next()
}

/// The snapshot that a repository, or its `snapshots`, stands for: that of refs/main, as the hub's own library takes it,
/// or the only one. Every other path stands for itself.
pub(super) fn snapshot(path: &Path) -> Result<PathBuf> {
    // What is not there is told of where it is read.
    let Ok(real) = path.canonicalize() else { return Ok(path.to_owned()) };
    let repository = if real.ends_with("snapshots") { real.parent().unwrap_or(&real) } else { &real };
    let snapshots = repository.join("snapshots");
    let name = repository.file_name().and_then(|name| name.to_str());
    // A link in a repository that came from elsewhere must not choose what is imported.
    let is_dir = fs::symlink_metadata(&snapshots).is_ok_and(|found| found.is_dir());
    if !name.is_some_and(is_repository) || !is_dir {
        return Ok(path.to_owned());
    }
    let revisions = revisions(&snapshots)?;
    let main = main(repository).filter(|main| revisions.contains(main));
    match (main, &revisions[..]) {
        (Some(revision), _) => Ok(snapshots.join(revision)),
        (None, [only]) => Ok(snapshots.join(only)),
        (None, []) => Err(Error::Invalid(format!(
            "{}: no snapshot of it was downloaded: fetch it, such as with hf download",
            path.display()
        ))),
        (None, [first, ..]) => Err(Error::Invalid(format!(
            "{}: has {} snapshots, and refs/main names none: import one of them, such as {}",
            path.display(),
            revisions.len(),
            snapshots.join(first).display()
        ))),
    }
}

/// The revisions that were downloaded, in order of name.
fn revisions(snapshots: &Path) -> Result<Vec<String>> {
    let mut revisions = Vec::new();
    for entry in fs::read_dir(snapshots).at(snapshots)? {
        let entry = entry.at(snapshots)?;
        if entry.file_type().at(entry.path())?.is_dir() {
            revisions.extend(entry.file_name().into_string());
        }
    }
    revisions.sort_unstable();
    Ok(revisions)
}

/// The revision that refs/main names.
fn main(repository: &Path) -> Option<String> {
    let path = repository.join("refs/main");
    let found = fs::symlink_metadata(&path).ok()?;
    let text = (found.is_file() && found.len() <= REVISION_MAX).then(|| fs::read_to_string(&path).ok())??;
    Some(text.trim().to_owned())
}
