//! Names of files that are one of several, as model-00002-of-00003.safetensors.

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::Error;

/// One file of several, by its name.
pub(super) struct Shard<'a> {
    /// What stands before the number, and after the total: both are the same for all shards of a set.
    ends: (&'a str, &'a str),
    number: &'a str,
    total: &'a str,
}

/// What all shards of a set have in common: what stands before and behind the numbers, and the total.
pub(super) type Set = [String; 3];

impl<'a> Shard<'a> {
    /// The shard of this path, which ends with `ending`; `None` if it is none by its name.
    pub fn of(path: &'a str, ending: &str) -> Option<Shard<'a>> {
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let (before, after) = path.strip_suffix(ending)?.rsplit_once("-of-")?;
        let (stem, number) = before.rsplit_once('-')?;
        // A word may follow, as in .fp16.safetensors.
        let total = after.split('.').next()?;
        let rest = &path[before.len() + "-of-".len() + total.len()..];
        (is_number(number) && is_number(total)).then_some(Shard { ends: (stem, rest), number, total })
    }

    /// What it has in common with the others.
    pub fn set(&self) -> Set {
        [self.ends.0, self.ends.1, self.total].map(String::from)
    }

    /// Which it is, from 1 on.
    pub fn number(&self) -> Option<u64> {
        self.number.parse().ok()
    }

    /// How many there are.
    pub fn total(&self) -> Option<u64> {
        self.total.parse().ok()
    }

    /// Whether its number has as many digits as the total: the order of such names is that of the numbers.
    pub fn is_padded(&self) -> bool {
        self.number.len() == self.total.len()
    }

    /// Its path without the numbers.
    pub fn plain(&self) -> String {
        format!("{}{}", self.ends.0, self.ends.1)
    }

    fn path(&self, number: u64) -> String {
        let (stem, rest) = self.ends;
        format!("{stem}-{number:0width$}-of-{}{rest}", self.total, width = self.number.len())
    }
}

/// The path of the first shard that a set lacks.
pub(super) fn missing(shards: &[Shard<'_>]) -> Option<String> {
    let first = shards.first()?;
    let numbers: BTreeSet<u64> = shards.iter().filter_map(Shard::number).collect();
    if first.total().is_some_and(|total| numbers.len() as u64 >= total) {
        return None;
    }
    (1..).find(|number| !numbers.contains(number)).map(|number| first.path(number))
}

/// The error of a set that lacks a shard, in the directory `place`.
pub(super) fn has_no(place: &Path, missing: &str) -> Error {
    let place = place.display();
    let what = "which is a part of its model: a model with holes is not imported, so fetch it";
    Error::Invalid(format!("{place}: has no {missing}, {what}"))
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
            assert_eq!(Shard::of(path, ".safetensors").map(|shard| shard.path(2)).as_deref(), other, "{path}");
        }
    }
}
