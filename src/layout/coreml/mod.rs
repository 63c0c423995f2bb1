//! `coreml/<model>/<shape>.mlpackage`: the packages of all shapes, with one weight file for all of them.
//!
//! Where the imported weight files are the same, everything is as imported. Otherwise [`shared`] plans one file that holds
//! each blob once, and the programs are pointed at it; inline tensors that the store holds as blobs are in it too. What is
//! shown for a package depends on it and on the packages imported before, and no blob moves when another one joins.

mod describe;
mod function;
mod functions;
mod package;
mod shared;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use super::{Anchor, Branch, Files, Layout, model_dir, source_branch};
use crate::budget::{Budget, Limits, MAX_EXTENTS};
use crate::error::Result;
use crate::extent::ExtentMap;
use crate::model::{Model, ModelName, Source, SourceKind};
pub use describe::{Shape, Unshared, shapes};
use package::Package;

/// What is looked at of all packages of a model: a graph of a hundred thousand operations has a tenth of a gigabyte; but a
/// recipe of a few lines can make a program of exabytes, and a million of them. The extents are those of what is made.
const LIMITS: Limits = Limits { text: 4 << 30, extents: 2 * MAX_EXTENTS, tensors: 2 << 20 };

pub(super) struct CoreMl;

impl Layout for CoreMl {
    fn name(&self) -> &'static str {
        "coreml"
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        match model.programs().next() {
            Some(_) => Ok(()),
            None => Err("no .mlpackage, .mlmodel or .mlmodelc was imported into it".into()),
        }
    }

    fn anchors(&self, _name: &ModelName, path: &str) -> Vec<Anchor> {
        model_dir(path)
    }

    fn plan(&self, model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
        let names = shown_names(model);
        let budget = Budget::of(LIMITS);
        let find = |source| Package::find(source, files, &budget);
        let packages: Vec<Package<'_>> = model.programs().filter_map(find).collect();
        let mut planned = shared::plan(&packages, files, &budget);
        if let Some(fault) = budget.over() {
            tracing::warn!("model {}: some packages are in coreml/ as they were imported: {}", model.name, fault.what);
        }
        let mut branch = Branch::dir();
        let mut times = Times::default();
        let mut put = |name: &str, mut shown: Branch| {
            link_weights(&mut shown, false, &mut times);
            if let Some(place) = branch.place(name) {
                *place = shown;
            }
        };
        let (mut parts, mut packages) = (Vec::new(), packages.iter().peekable());
        for source in model.programs() {
            let package = packages.next_if(|package| std::ptr::eq(package.source, source));
            let Some(name) = names.get(source.name.as_str()) else { continue };
            match package {
                None => put(name, source_branch(source)),
                Some(package) => {
                    let changes = planned.remove(source.name.as_str()).unwrap_or_default();
                    put(name, package.branch(&changes));
                    parts.push((package, name.clone(), changes));
                }
            }
        }
        let all = functions::branch(&parts).filter(|_| names.values().all(|name| name != functions::NAME));
        if let Some(all) = all {
            put(functions::NAME, all);
        }
        Ok(vec![branch])
    }
}

/// What each source is called in the layout: a bare model stands in a package of its name, unless another has it.
fn shown_names(model: &Model) -> BTreeMap<&str, String> {
    let bare = |source: &&Source| source.kind == SourceKind::Mlmodel;
    let mut names: BTreeMap<&str, String> =
        model.programs().filter(|source| !bare(source)).map(|source| (&*source.name, source.name.clone())).collect();
    for source in model.programs().filter(bare) {
        let name = format!("{}.mlpackage", source.kind.stem(&source.name));
        let name = if names.contains_key(name.as_str()) { format!("{}.mlpackage", source.name) } else { name };
        names.insert(&source.name, name);
    }
    names
}

/// Weight files with the time of the package that was imported first.
#[derive(Default)]
struct Times {
    times: HashMap<Arc<ExtentMap>, SystemTime>,
    /// Those in `times` by address: a map that many packages have is looked at once.
    held: HashMap<*const ExtentMap, SystemTime>,
}

impl Times {
    fn first(&mut self, content: &Arc<ExtentMap>, mtime: SystemTime) -> (Arc<ExtentMap>, SystemTime) {
        if let Some(mtime) = self.held.get(&Arc::as_ptr(content)) {
            return (content.clone(), *mtime);
        }
        if let Some((content, mtime)) = self.times.get_key_value(content) {
            return (content.clone(), *mtime);
        }
        self.held.insert(Arc::as_ptr(content), mtime);
        self.times.insert(content.clone(), mtime);
        (content.clone(), mtime)
    }
}

/// Lets the files of every `weights` directory be shared among the packages: equal content is one map and has the time of
/// the package that was imported first, which a package that joins the model later does not change.
fn link_weights(branch: &mut Branch, in_weights: bool, seen: &mut Times) {
    match branch {
        Branch::File(file) if in_weights => {
            file.link = Some("weights");
            (file.content, file.mtime) = seen.first(&file.content, file.mtime);
        }
        Branch::File(_) => {}
        Branch::Dir(children, _) => {
            children.iter_mut().for_each(|(name, child)| link_weights(child, in_weights || name == "weights", seen));
        }
    }
}

#[cfg(test)]
mod tests;
