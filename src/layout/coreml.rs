//! `coreml/<model>/<shape>.mlpackage`: the packages of all shapes; equal weight files are one inode.

use std::collections::HashMap;
use std::time::SystemTime;

use super::{Anchor, Branch, Files, Layout, model_dir, source_branch};
use crate::digest::Digest;
use crate::error::Result;
use crate::model::{Model, ModelName, SourceKind};

pub(super) struct CoreMl;

impl Layout for CoreMl {
    fn name(&self) -> &'static str {
        "coreml"
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        match model.sources(SourceKind::Mlpackage).next() {
            Some(_) => Ok(()),
            None => Err("no .mlpackage was imported into it".into()),
        }
    }

    fn anchors(&self, _name: &ModelName, path: &str) -> Vec<Anchor> {
        model_dir(path)
    }

    fn plan(&self, model: &Model, _files: Files<'_>) -> Result<Vec<Branch>> {
        let mut branch = Branch::dir();
        let mut times = HashMap::new();
        for source in model.sources(SourceKind::Mlpackage) {
            let mut package = source_branch(source);
            link_weights(&mut package, false, &mut times);
            if let Some(place) = branch.place(&source.name) {
                *place = package;
            }
        }
        Ok(vec![branch])
    }
}

/// Lets the files of every `weights` directory be shared among the packages: equal content has the time of the package
/// that was imported first, which a package that joins the model later does not change.
fn link_weights(branch: &mut Branch, in_weights: bool, times: &mut HashMap<Digest, SystemTime>) {
    match branch {
        Branch::File(file) if in_weights => {
            file.link = Some("weights");
            file.mtime = *times.entry(file.content.fingerprint()).or_insert(file.mtime);
        }
        Branch::File(_) => {}
        Branch::Dir(children, _) => {
            children.iter_mut().for_each(|(name, child)| link_weights(child, in_weights || name == "weights", times));
        }
    }
}
