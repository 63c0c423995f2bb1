//! Import: plan everything, hash and write the pieces on all cores, then write recipes and the manifest.
//!
//! Nothing is written before every file has been parsed, and the manifest comes last, so bad input leaves the store
//! as it was and a crash leaves the whole model or none of it. Files are read once, in pieces of at most a mebibyte.

mod amb;
mod assemble;
mod bounds;
mod copy;
mod coreml;
mod gds;
mod gguf;
mod hub;
mod piece;
mod pieces;
mod plan;
mod salvage;
mod scan;
mod shard;
mod source;
mod split;
mod told;
mod whole;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Store;
use super::stage::Stage;
use crate::budget::{Budget, Limits};
use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Result};
use crate::model::{Model, ModelName, Source};
use bounds::Bounds;
use source::SourcePlan;
use split::Given;

pub use copy::{CopyOptions, CopyReport, copy, is_store};
pub(super) use salvage::salvage;
pub use split::name_of_split;

/// How an import is done.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The model's name; without it, the name of what is imported.
    pub name: Option<ModelName>,
    /// Whether a model of this name gives way; without it, packages join the model if `name` was given.
    pub replace: bool,
    /// Whether links are followed that lead out of the paths.
    pub follow_links: bool,
    /// Bytes from which on a tensor inside a Core ML program becomes a blob; [`BLOB_THRESHOLD`] if not given.
    pub blob_threshold: Option<u64>,
    /// What the model may take.
    pub limits: Limits,
}

/// Below this, a tensor costs more as a blob than it could save.
pub const BLOB_THRESHOLD: u64 = 1024;

/// Told how the import comes on.
pub trait Progress: Sync {
    /// So many bytes are to be read.
    fn begin(&self, total: u64);
    /// So many more were.
    fn advance(&self, bytes: u64);
}

/// Tensors and small files, and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Tensors.
    pub tensors: u64,
    /// Small files.
    pub files: u64,
    /// Bytes of both.
    pub bytes: u64,
}

/// What an import did.
#[derive(Debug, Default, serde::Serialize)]
pub struct ImportReport {
    /// The model's name.
    pub model: String,
    /// What was imported into it, by name.
    pub sources: Vec<String>,
    /// The same with their formats.
    pub formats: Vec<String>,
    /// What the model had before and keeps, with formats.
    pub joined: Vec<String>,
    /// What the model had before and has no more, since it was replaced.
    pub dropped: Vec<String>,
    /// The directories whose tensors are those of components.
    pub components: Vec<String>,
    /// What has a format of its own, and is kept as files since it lies in the directory of another.
    pub kept: Vec<String>,
    /// Written to the store.
    pub added: Counts,
    /// In the store already: bytes that were not written again.
    pub present: Counts,
    /// Passed over: `.git`, `.cache`, `.DS_Store` and AppleDouble files.
    #[serde(serialize_with = "lossy")]
    pub skipped: Vec<PathBuf>,
}

/// Paths as text, which one that is no UTF-8 has no other way to be in JSON.
fn lossy<S: serde::Serializer>(paths: &[PathBuf], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

/// Imports paths as one model into the store at `root`, which is made if there is none.
///
/// # Errors
/// Anything that is not as its format says, before a byte is written; what changes meanwhile, or could not be read back; a
/// name taken by other content; a full disk. The store is then as it was.
pub fn import(root: &Path, paths: &[PathBuf], options: &Options, progress: &dyn Progress) -> Result<ImportReport> {
    let mut given = Given::of(paths);
    let bounds = if options.follow_links { Bounds::none() } else { Bounds::of(paths).and_files(&given.split) };
    given.others = given.others.iter().map(|path| hub::snapshot(path)).collect::<Result<_>>()?;
    check_apart(root, &given.others)?;
    let threshold = options.blob_threshold.unwrap_or(BLOB_THRESHOLD);
    let plans = plan::plan_all(&given, &bounds, threshold, &Budget::of(options.limits))?;
    if plans.is_empty() {
        return Err(Error::Invalid("nothing is to be imported".into()));
    }
    whole::check(&plans)?;
    let name = match &options.name {
        Some(name) => name.clone(),
        None => name_from(&given)?,
    };
    let weights = plans.iter().filter(|plan| plan.kind.is_weights()).count();
    if weights > 1 {
        return Err(Error::Invalid(format!(
            "{weights} of the paths hold weights: a model has one set of weights, import the others by other names"
        )));
    }
    let store = Store::create(root)?;
    let lock = store.lock()?;
    let old = store.find_any(&name)?;
    let new: HashSet<&str> = plans.iter().map(|plan| &*plan.name).collect();
    // One that cannot be read may be replaced, too.
    let dropped = old.as_ref().and_then(|found| Some(told::dropped(&store.manifest(found).ok()?, &new)));
    let dropped = dropped.unwrap_or_default();
    let existing = match &old {
        Some(found) if !options.replace => Some((store.manifest(found)?, store.load(found)?)),
        _ => None,
    };
    if let Some((_, model)) = &existing {
        check_joinable(model, &plans, options.name.is_some(), &dropped)?;
    }
    let stage = Stage::new(&store, &lock)?;
    let lens = plans.iter().flat_map(|plan| &plan.scan.files).map(|file| file.len);
    progress.begin(lens.fold(0, u64::saturating_add));
    let expected = expected(&store, &name)?;
    let stored = pieces::store_all(&stage, &plans, expected, progress)?;
    for plan in &plans {
        plan.scan.check_unchanged(&plan.places, &bounds)?;
    }
    let report = ImportReport {
        model: name.to_string(),
        sources: plans.iter().map(|plan| plan.name.clone()).collect(),
        formats: plans.iter().map(|plan| told::named(&plan.name, plan.kind)).collect(),
        dropped: if options.replace { dropped.clone() } else { Vec::new() },
        joined: existing.as_ref().map_or_else(Vec::new, |(_, model)| told::joined(model, &plans)),
        components: plans.iter().flat_map(told::components).collect(),
        kept: plans.iter().flat_map(told::kept).collect(),
        added: stored.added,
        present: stored.present,
        skipped: plans.iter().flat_map(|plan| plan.scan.skipped.iter().cloned()).collect(),
    };
    let manifest = assemble::manifest(&stage, &name, plans, &stored, existing, &dropped)?;
    stage.flush()?;
    // Who imports may delete the originals then: what could not be read back is not taken.
    store.model_of(&name, SystemTime::now(), &manifest, options.limits).map_err(|error| {
        Error::Invalid(format!("model {name} is not imported, since it could not be read from the store: {error}"))
    })?;
    stage.publish(&name, &manifest, options.replace)?;
    Ok(report)
}

/// Refuses a store in one of the paths: it would have to hold itself.
fn check_apart(root: &Path, paths: &[PathBuf]) -> Result<()> {
    let store = std::path::absolute(root).at(root)?;
    // It need not be there yet.
    let above = store.ancestors().find_map(|above| above.canonicalize().ok()).unwrap_or_default();
    let around = |path: &&PathBuf| path.canonicalize().is_ok_and(|path| above.starts_with(path));
    match paths.iter().find(around) {
        Some(path) => Err(Error::Invalid(format!(
            "{}: the store {} is in what is to be imported: let one of them be elsewhere",
            path.display(),
            store.display()
        ))),
        None => Ok(()),
    }
}

/// A model's name from what is imported: the directory's, or the repository's in a hub cache.
fn name_from(given: &Given) -> Result<ModelName> {
    let (path, split) = match (&given.split[..], &given.others[..]) {
        ([], [path]) => (path, None),
        ([parts], []) => (&parts[0], split::name_of_split(parts)),
        _ => return Err(Error::Invalid("several paths make one model: say its name with -n".into())),
    };
    let whole = path.canonicalize().at(path)?;
    let name = match hub::model_of(&whole) {
        Some(name) => name.to_owned(),
        None => match (split.map_or_else(|| scan::name_of(path), Ok)?, whole.parent().map(scan::name_of)) {
            // Exporters give every export this name, in the directory of its model.
            (name, Some(Ok(parent))) if name == "gds_export" => parent,
            (name, _) => name,
        },
    };
    let ends = [".mlpackage", ".mlmodelc", ".mlmodel", ".safetensors", ".amb", ".gguf"];
    let stem = ends.iter().find_map(|end| name.strip_suffix(end));
    ModelName::from_any(stem.unwrap_or(&name))
        .map_err(|_| Error::Invalid(format!("{}: no model name can be made of it: give one with -n", path.display())))
}

/// Packages join a model that is named; a second set of weights does not.
fn check_joinable(model: &Model, plans: &[SourcePlan], is_named: bool, dropped: &[String]) -> Result<()> {
    let is_same = |old: &Source, new: &SourcePlan| (&old.name, old.kind) == (&new.name, new.kind);
    let refused = |why: String, joining: String| {
        let replace = told::replace_it(dropped);
        let what = format!("model {} {why}: {joining}give another name or tag, or {replace}", model.name);
        Err(Error::Invalid(what))
    };
    if let Some(new) = plans.iter().find(|plan| plan.kind.is_weights()) {
        match model.sources.iter().find(|source| source.kind.is_weights()) {
            Some(old) if !is_same(old, new) => {
                return refused(format!("has its weights from {:?} already", old.name), String::new());
            }
            None if model.sources.is_empty() => {
                return refused("was made by another program".into(), String::new());
            }
            _ => {}
        }
    }
    if !is_named && !plans.iter().any(|new| model.sources.iter().any(|old| is_same(old, new))) {
        let sources: Vec<String> = model.sources.iter().map(|old| told::named(&old.name, old.kind)).collect();
        let of = if sources.is_empty() { "what another program wrote".into() } else { sources.join(", ") };
        let why = format!("is there already, made of {of}");
        return refused(why, format!("say -n {} to join it, or ", model.name));
    }
    Ok(())
}

/// What the store's models of this name hold: content that is likely there already and is not worth writing blindly.
fn expected(store: &Store, name: &ModelName) -> Result<HashSet<pieces::Likeness>> {
    let mut expected = HashSet::new();
    let same =
        |other: &ModelName| (&other.host, &other.namespace, &other.name) == (&name.host, &name.namespace, &name.name);
    for found in store.find()?.iter().filter(|found| same(&found.name)) {
        // A damaged model only costs the short cut.
        let Ok(model) = store.load(found) else { continue };
        let tensors = model.tensors.into_iter().chain(model.other_tensors);
        expected.extend(tensors.map(|tensor| (tensor.name, Some(tensor.dtype), tensor.shape)));
        expected.extend(model.files.into_iter().map(|file| (file.path, None::<Dtype>, vec![file.len])));
    }
    Ok(expected)
}
