//! Copying models from another store: their blobs are linked, cloned or, where the file system can do neither, copied.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use super::{Counts, ImportReport, Progress, told};
use crate::cores::cores;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::format::ollama::{self, Manifest};
use crate::model::ModelName;
use crate::store::stage::Stage;
use crate::store::{Found, Store, Survey};

/// How models are copied.
#[derive(Debug, Clone, Default)]
pub struct CopyOptions {
    /// Which models; all, if it is empty.
    pub models: Vec<ModelName>,
    /// The new name, if it is one model.
    pub name: Option<ModelName>,
    /// Whether models of the same names give way.
    pub replace: bool,
}

/// What a copy did.
#[derive(Debug, Default, serde::Serialize)]
pub struct CopyReport {
    /// The models that are now in the store.
    pub models: Vec<ImportReport>,
    /// Why others are not.
    pub failed: Vec<String>,
}

/// Whether a path is a store and no model.
pub fn is_store(path: &Path) -> bool {
    path.join("blobs").is_dir() && path.join("manifests").is_dir()
}

/// Copies models from the store at `from` into the one at `root`, which is made if there is none. It may be the same
/// store, in which a model then has another name, too.
///
/// A blob that is there already is not read, unless another program wrote it; all others are hashed.
///
/// # Errors
/// Faults of the stores themselves. A model that cannot be copied is in the report and leaves the others alone.
pub fn copy(root: &Path, from: &Path, options: &CopyOptions, progress: &dyn Progress) -> Result<CopyReport> {
    let from = Store::open(from)?;
    let Survey { models: chosen, hidden, .. } = from.survey_of(&options.models)?;
    if options.name.is_some() && chosen.len() != 1 {
        let what = format!("a new name is for one model, and these are {}: choose with --model", chosen.len());
        return Err(Error::Invalid(what));
    }
    let store = Store::create(root)?;
    if store.root() == from.root() && options.name.is_none() {
        let what = format!("{}: is the store itself; wmount cp gives a model another name", root.display());
        return Err(Error::Invalid(what));
    }
    let lock = store.lock()?;
    progress.begin(from.total_bytes(&chosen));
    let hidden = hidden.iter().map(|error| format!("{error}; it may be a model, and was not copied"));
    let mut report = CopyReport { models: Vec::new(), failed: hidden.collect() };
    for found in chosen {
        let name = options.name.clone().unwrap_or_else(|| found.name.clone());
        let copied = copy_one(&from, &found, &store, &name, &lock, options.replace, progress);
        match copied {
            Ok(model) => report.models.push(model),
            Err(error) => report.failed.push(format!("{}: {error}", found.name)),
        }
    }
    Ok(report)
}

fn copy_one(
    from: &Store,
    found: &Found,
    store: &Store,
    name: &ModelName,
    lock: &crate::store::Lock,
    replace: bool,
    progress: &dyn Progress,
) -> Result<ImportReport> {
    let bytes = from.manifest_bytes(found)?;
    let manifest = Manifest::parse(&bytes).map_err(|fault| Error::format(from.manifest_path(&found.name), fault))?;
    // What cannot be read is no model, whatever its blobs are; what is wrong with a part of it comes along.
    from.load(found)?;
    let path = store.manifest_path(name);
    let mut dropped = Vec::new();
    if let Some(old) = store.find_any(name)? {
        let old = match store.manifest_bytes(&old) {
            // What cannot be read may be replaced, too.
            Err(_) if replace => Vec::new(),
            old => old?,
        };
        let new = manifest.layers.iter().filter(|layer| layer.media_type == ollama::OWN_RECIPE);
        let new = new.map(|layer| &*layer.name).collect();
        dropped = Manifest::parse(&old).map_or_else(|_| Vec::new(), |old| told::dropped(&old, &new));
        if old == bytes {
            dropped.clear();
        } else if !replace {
            let what = told::replace_it(&dropped);
            return Err(Error::Invalid(format!("the store has another model {name}: give a new name, or {what}")));
        }
    }
    // One that goes by two lengths is looked at for each of them.
    let blobs: HashMap<(Digest, u64), bool> =
        manifest.blobs().map(|layer| ((layer.digest, layer.size), layer.is_tensor())).collect();
    let blobs: Vec<((Digest, u64), bool)> = blobs.into_iter().collect();
    let stage = Stage::new(store, lock)?;
    let (added, present) = take_all(&stage, from, &blobs, progress)?;
    stage.flush()?;
    stage.publish(name, &bytes, replace)?;
    keep_time(&path, found.written);
    Ok(ImportReport {
        model: name.to_string(),
        sources: vec![from.root().display().to_string()],
        dropped,
        added,
        present,
        ..ImportReport::default()
    })
}

/// Takes the blobs on all cores: those that are new, and those that were there.
fn take_all(
    stage: &Stage,
    from: &Store,
    blobs: &[((Digest, u64), bool)],
    progress: &dyn Progress,
) -> Result<(Counts, Counts)> {
    let next = AtomicUsize::new(0);
    let outcome = Mutex::new(Ok((Counts::default(), Counts::default())));
    let worker = || {
        while let Some(((digest, len), is_tensor)) = blobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let taken = from.blob_file(digest).and_then(|file| stage.take(&file, digest, *len));
            progress.advance(*len);
            let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
            match (&mut *outcome, taken) {
                (Ok((added, present)), Ok(is_new)) => {
                    let counts = if is_new { added } else { present };
                    let number = if *is_tensor { &mut counts.tensors } else { &mut counts.files };
                    *number += 1;
                    counts.bytes += len;
                }
                (outcome @ Ok(_), Err(error)) => {
                    next.store(blobs.len(), Ordering::Relaxed);
                    *outcome = Err(error);
                }
                (Err(_), _) => {}
            }
        }
    };
    std::thread::scope(|scope| (0..cores()).for_each(|_| _ = scope.spawn(worker)));
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// ollama shows the time of the manifest as that of the model.
fn keep_time(manifest: &Path, written: SystemTime) {
    let set = std::fs::File::options().write(true).open(manifest).and_then(|file| file.set_modified(written));
    if let Err(error) = set {
        tracing::warn!("{}: {error}", manifest.display());
    }
}
