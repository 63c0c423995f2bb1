//! What an import says of itself beside its numbers: what became one model that could have been several.

use std::collections::{BTreeSet, HashSet};

use super::source::SourcePlan;
use crate::format::ollama::{self, Manifest};
use crate::model::{Model, SourceKind};

/// What could be imported by itself, by the ends of names.
const FORMATS: [&str; 5] = [".mlpackage", ".mlmodelc", ".mlmodel", ".amb", ".gguf"];

/// A source by name, with its format where the name does not end with it.
pub(super) fn named(name: &str, kind: SourceKind) -> String {
    if kind.stem(name) == name { format!("{name} ({})", kind.name()) } else { name.into() }
}

/// What the model had before and keeps.
pub(super) fn joined(model: &Model, plans: &[SourcePlan]) -> Vec<String> {
    let is_new = |name: &String| plans.iter().any(|plan| plan.name == *name);
    model.sources.iter().filter(|old| !is_new(&old.name)).map(|old| named(&old.name, old.kind)).collect()
}

/// What a model has beside these sources, and has no more when they take its place.
pub(super) fn dropped(old: &Manifest, new: &HashSet<&str>) -> Vec<String> {
    let recipes = old.layers.iter().filter(|layer| layer.media_type == ollama::OWN_RECIPE).map(|layer| &layer.name);
    let (kept, dropped): (Vec<&String>, Vec<&String>) = recipes.partition(|name| new.contains(name.as_str()));
    if kept.is_empty() && dropped.is_empty() {
        return vec!["what another program wrote".into()];
    }
    dropped.into_iter().cloned().collect()
}

/// The advice to replace a model, with what of it would be lost.
pub(super) fn replace_it(dropped: &[String]) -> String {
    /// So many names say what a model is.
    const NAMES: usize = 4;
    let more = match dropped.len().saturating_sub(NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    match &dropped[..dropped.len().min(NAMES)] {
        [] => "--replace it".into(),
        names => format!("--replace it, which takes {}{more} away from it", names.join(", ")),
    }
}

/// The directories whose tensors are those of components.
pub(super) fn components(plan: &SourcePlan) -> BTreeSet<String> {
    let weights = plan.scan.files.iter().filter(|file| file.path.ends_with(".safetensors"));
    let dirs = weights.filter_map(|file| Some(file.path.rsplit_once('/')?.0.to_owned()));
    if plan.kind == SourceKind::Safetensors { dirs.collect() } else { BTreeSet::new() }
}

/// Files and directories of other formats, which are kept as files.
pub(super) fn kept(plan: &SourcePlan) -> Vec<String> {
    if !matches!(plan.kind, SourceKind::Safetensors | SourceKind::GdsExport) {
        return Vec::new();
    }
    let dirs = plan.scan.dirs.iter().map(|dir| &dir.path);
    let found = dirs.chain(plan.scan.files.iter().map(|file| &file.path));
    let is_one = |path: &str| FORMATS.iter().any(|end| path.ends_with(end));
    let is_within = |path: &str| path.match_indices('/').any(|(at, _)| is_one(&path[..at]));
    found.filter(|path| is_one(path) && !is_within(path)).cloned().collect()
}
