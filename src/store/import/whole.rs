//! Whether what is imported is one model and all of it: not several, and not a part.

use std::collections::{BTreeMap, BTreeSet};

use super::hub;
use super::plan::{SourcePlan, indexed};
use super::scan::Scan;
use crate::error::{Error, Result};
use crate::model::SourceKind;

/// Refuses what holds several models, or shards of which others are missing.
pub(super) fn check(plans: &[SourcePlan]) -> Result<()> {
    for plan in plans.iter().filter(|plan| plan.kind == SourceKind::Safetensors) {
        let place = plan.place.display();
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

/// One file of several, by its name: model-00002-of-00003.safetensors.
struct Shard<'a> {
    /// What stands before the number, and after the total: both are the same for all shards of a set.
    ends: (&'a str, &'a str),
    number: &'a str,
    total: &'a str,
}

impl<'a> Shard<'a> {
    fn of(path: &'a str) -> Option<Shard<'a>> {
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let (before, after) = path.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (stem, number) = before.rsplit_once('-')?;
        // A word may follow, as in .fp16.safetensors.
        let total = after.split('.').next()?;
        let rest = &path[before.len() + "-of-".len() + total.len()..];
        (is_number(number) && is_number(total)).then_some(Shard { ends: (stem, rest), number, total })
    }

    fn path(&self, number: usize) -> String {
        let (stem, rest) = self.ends;
        format!("{stem}-{number:0width$}-of-{}{rest}", self.total, width = self.number.len())
    }
}

/// Whether a file is, by its name, one of several.
pub(super) fn is_shard(path: &str) -> bool {
    Shard::of(path).is_some()
}

/// The name that all shards of a set have in common: theirs without the numbers. It is that of a file that is no shard.
pub(super) fn set_of(path: &str) -> String {
    Shard::of(path).map_or_else(|| path.to_owned(), |Shard { ends: (stem, rest), .. }| format!("{stem}{rest}"))
}

/// Refuses sets of shards that are not whole, but for the one whose index has been checked: it says what belongs to it.
fn check_shards(plan: &SourcePlan) -> Result<()> {
    let has_index = !indexed(&plan.scan)?.is_empty();
    let is_indexed = |path: &str| !path.contains('/') && has_index;
    let paths = plan.scan.files.iter().map(|file| &*file.path).filter(|path| !is_indexed(path));
    let mut sets: BTreeMap<_, Vec<Shard>> = BTreeMap::new();
    for shard in paths.filter_map(Shard::of) {
        sets.entry((shard.ends, shard.total)).or_default().push(shard);
    }
    for ((_, total), shards) in sets {
        let numbers: BTreeSet<usize> = shards.iter().filter_map(|shard| shard.number.parse().ok()).collect();
        if total.parse().is_ok_and(|total: usize| numbers.len() >= total) {
            continue;
        }
        let place = plan.place.display();
        if !plan.place.is_dir() {
            let total = total.trim_start_matches('0');
            return Err(Error::Invalid(format!(
                "{place}: is one of {total} shards of a model: import the directory that has them all"
            )));
        }
        let missing = (1..).find(|number| !numbers.contains(number)).unwrap_or_default();
        return Err(Error::Invalid(format!(
            "{place}: has no {}, which is a part of its model: a model with holes is not imported",
            shards[0].path(missing)
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_known_by_their_names() {
        for (path, other) in [
            ("model-00001-of-00003.safetensors", Some("model-00002-of-00003.safetensors")),
            ("unet/a-b-00001-of-000163.fp16.safetensors", Some("unet/a-b-00002-of-000163.fp16.safetensors")),
            ("model.safetensors", None),
            ("best-of-10.safetensors", None),
            ("one-1-of-many.safetensors", None),
            ("model-00001-of-00003.bin", None),
        ] {
            assert_eq!(Shard::of(path).map(|shard| shard.path(2)).as_deref(), other, "{path}");
        }
    }
}
