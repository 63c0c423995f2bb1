//! Whether what is imported is one model and all of it: not several, and not a part.

use std::collections::{BTreeMap, BTreeSet};

use super::hub;
use super::plan::{ENDING, indexed};
use super::scan::Scan;
use super::shard::{Shard, has_no, missing};
use super::source::SourcePlan;
use crate::error::{Error, Result};
use crate::model::SourceKind;

/// Refuses what holds several models, or shards of which others are missing.
pub(super) fn check(plans: &[SourcePlan]) -> Result<()> {
    for plan in plans.iter().filter(|plan| plan.kind == SourceKind::Safetensors) {
        let place = plan.places[0].display();
        if let Some(first) = repositories(&plan.scan).first() {
            return Err(Error::Invalid(format!(
                "{place} has a hub cache in it and is no model: import a repository of it, such as {place}/{first}"
            )));
        }
        let models = models(&plan.scan);
        if let [first, _, ..] = &models[..] {
            return Err(Error::Invalid(format!(
                "{place} holds {} models and is none itself: import each by itself, such as {place}/{first}",
                models.len()
            )));
        }
        check_shards(plan)?;
    }
    Ok(())
}

/// The repositories of a hub cache: models--<owner>--<name>, with snapshots in them.
fn repositories(scan: &Scan) -> BTreeSet<String> {
    let repository = |path: &str| {
        let (above, _) = path.split_once("/snapshots/")?;
        above.rsplit('/').next().is_some_and(hub::is_repository).then(|| above.to_owned())
    };
    scan.files.iter().filter_map(|file| repository(&file.path)).collect()
}

/// The outermost directories with JSON or weights of their own, where several of them have both a config and weights.
fn models(scan: &Scan) -> Vec<String> {
    let dir_of = |path: &str| path.rsplit_once('/').map_or("", |(dir, _)| dir).to_owned();
    let is_part = |path: &str| path.ends_with(".json") || path.ends_with(".safetensors");
    let parts: BTreeSet<String> =
        scan.files.iter().filter(|file| is_part(&file.path)).map(|file| dir_of(&file.path)).collect();
    let outermost =
        |dir: &String| !parts.contains("") && !dir.match_indices('/').any(|(at, _)| parts.contains(&dir[..at]));
    let has = |dir: &str, name: &str| scan.file(&format!("{dir}/{name}")).is_some();
    let is_model = |dir: &String| {
        let below = format!("{dir}/");
        let first = scan.files.partition_point(|file| file.path < below);
        let mut files = scan.files[first..].iter().take_while(|file| file.path.starts_with(&below));
        (has(dir, "config.json") || has(dir, "model_index.json"))
            && files.any(|file| file.path.ends_with(".safetensors"))
    };
    parts.iter().filter(|dir| outermost(dir) && is_model(dir)).cloned().collect()
}

/// Refuses sets of shards that are not whole, but for the one whose index has been checked: it says what belongs to it.
fn check_shards(plan: &SourcePlan) -> Result<()> {
    let has_index = !indexed(&plan.scan)?.is_empty();
    let is_indexed = |path: &str| !path.contains('/') && has_index;
    let paths = plan.scan.files.iter().map(|file| &*file.path).filter(|path| !is_indexed(path));
    let mut sets: BTreeMap<_, Vec<Shard>> = BTreeMap::new();
    for shard in paths.filter_map(|path| Shard::of(path, ENDING)) {
        sets.entry(shard.set()).or_default().push(shard);
    }
    for shards in sets.into_values() {
        let Some(missing) = missing(&shards) else { continue };
        let place = plan.places[0].display();
        if !plan.places[0].is_dir() {
            let total = shards[0].total().unwrap_or_default();
            return Err(Error::Invalid(format!(
                "{place}: is one of {total} shards of a model: import the directory that has them all"
            )));
        }
        return Err(has_no(&plan.places[0], &missing));
    }
    Ok(())
}
