//! `all.mlpackage`: the shapes of a model as the functions of one package, over the weight file that they share.
//!
//! It is put together from the packages' own messages, as coremltools' `save_multifunction` would, but with each function
//! as it was imported.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use super::super::{Branch, VirtualFile};
use super::package::{Changes, Package};
use crate::extent::ExtentMap;
use crate::format::mlpackage::{MODEL_PATH, Manifest, WEIGHTS_PATH};
use crate::format::mlprogram::multifunction;

/// What the package is called.
pub(super) const NAME: &str = "all.mlpackage";

/// The package of all functions; `None` if there are not two of them, or not over the same weight files.
pub(super) fn branch(parts: &[(&Package<'_>, String, Changes)]) -> Option<Branch> {
    let mut taken = HashMap::new();
    let mut functions = Vec::new();
    let mut groups = HashSet::new();
    let mut weights: BTreeMap<&str, (Arc<ExtentMap>, SystemTime)> = BTreeMap::new();
    for (package, shown, changes) in parts {
        let Some(function) = &changes.function else { continue };
        groups.extend(changes.group);
        functions.push((identifier(shown, &mut taken), function));
        for (name, file) in &package.weights {
            weights.entry(name).or_insert_with(|| (file.content.clone(), file.mtime));
        }
    }
    if functions.len() < 2 || groups.len() > 1 {
        return None;
    }
    for (_, _, changes) in parts.iter().filter(|(_, _, changes)| changes.function.is_some()) {
        for (name, file) in &changes.weights {
            match file {
                Some(file) => _ = weights.insert(name, file.clone()),
                None => _ = weights.remove(name.as_str()),
            }
        }
    }
    let parts_of = functions.iter().map(|(name, function)| (name.as_str(), &function.description, &function.body));
    let version = functions.iter().map(|(_, function)| function.specification_version).max()?;
    let model = multifunction(version, parts_of);
    let mtime = parts.iter().map(|(package, ..)| package.program.mtime).max()?;
    let manifest = Manifest::new(&model.fingerprint(), !weights.is_empty()).render();
    let mut branch = Branch::dir();
    branch.put("Manifest.json", VirtualFile::new(ExtentMap::from_bytes(manifest), mtime));
    branch.put(&format!("Data/{MODEL_PATH}"), VirtualFile::new(model, mtime));
    for (name, (content, mtime)) in weights {
        branch.put(&format!("Data/{WEIGHTS_PATH}/{name}"), VirtualFile { content, mtime, link: None, fallback: false });
    }
    Some(branch)
}

/// A function's name from that of a package.
///
/// `taken` has the names that were given, each with the number that was last put behind it.
fn identifier(shown: &str, taken: &mut HashMap<String, usize>) -> String {
    let stem = shown.strip_suffix(".mlpackage").unwrap_or(shown);
    let mut name: String = stem.chars().map(|char| if char.is_ascii_alphanumeric() { char } else { '_' }).collect();
    if !name.starts_with(|char: char| char.is_ascii_alphabetic()) {
        name.insert_str(0, "f_");
    }
    let Some(last) = taken.get(&name) else {
        taken.insert(name.clone(), 1);
        return name;
    };
    let free = |number: &usize| !taken.contains_key(&format!("{name}_{number}"));
    let number = (last + 1..).find(free).expect("there are more numbers than names");
    let unique = format!("{name}_{number}");
    taken.insert(unique.clone(), 1);
    taken.insert(name, number);
    unique
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_has_a_function_of_its_own() {
        let mut taken = HashMap::new();
        let names = ["s.1.mlpackage", "s-1", "s_1_2", "s 1", "8", "s_1_2", "s_1"].map(|it| identifier(it, &mut taken));
        assert_eq!(names, ["s_1", "s_1_2", "s_1_2_2", "s_1_3", "f_8", "s_1_2_3", "s_1_4"]);
    }
}
