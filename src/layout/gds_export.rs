//! `gds_export/<model>/manifest.json` and a raw file for each tensor: what oLLM streams layer by layer.

use std::collections::HashMap;

use super::{Anchor, Branch, Files, Layout, VirtualFile, model_dir};
use crate::error::Result;
use crate::extent::ExtentMap;
use crate::format::gds::{self, Entry};
use crate::model::{Model, ModelName, Tensor, check_path};

pub(super) struct GdsExport;

pub(super) const GDS_EXPORT: GdsExport = GdsExport;

/// The longest extension of any file, with its dot.
const LONGEST_EXTENSION: usize = ".scale".len();

impl Layout for GdsExport {
    fn name(&self) -> &'static str {
        "gds_export"
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        if model.tensors().is_empty() {
            return Err("it has no tensors".into());
        }
        let mut stems: HashMap<String, &str> = HashMap::with_capacity(model.tensors().len());
        for tensor in model.tensors() {
            let stem = gds::file_stem(&tensor.name);
            if gds::torch_name(tensor.dtype).is_none() {
                return Err(format!("tensor {:?} is {}, which torch cannot name", tensor.name, tensor.dtype));
            }
            if stem.contains('/') || stem.len() + LONGEST_EXTENSION > 255 || check_path(&stem).is_err() {
                return Err(format!("the name of tensor {:?} makes no file name", tensor.name));
            }
            if let Some(other) = stems.insert(stem, &tensor.name) {
                return Err(format!("tensors {other:?} and {:?} would have the same file", tensor.name));
            }
        }
        Ok(())
    }

    fn anchors(&self, _name: &ModelName, path: &str) -> Vec<Anchor> {
        model_dir(path)
    }

    fn plan(&self, model: &Model, _files: Files<'_>) -> Result<Vec<Branch>> {
        Ok(vec![export(model, ".bin")])
    }
}

/// The tensors as they are stored, in files with this extension.
fn export(model: &Model, extension: &str) -> Branch {
    let mut export = Export::new(model);
    model.tensors().iter().for_each(|tensor| export.stored(tensor, extension));
    export.finish()
}

/// A directory that is being planned.
struct Export<'a> {
    model: &'a Model,
    branch: Branch,
    entries: Vec<Entry>,
}

impl<'a> Export<'a> {
    fn new(model: &'a Model) -> Self {
        Export { model, branch: Branch::dir(), entries: Vec::with_capacity(model.tensors().len()) }
    }

    fn file(&mut self, path: &str, content: ExtentMap) {
        self.branch.put(path, VirtualFile::new(content, self.model.modified()));
    }

    /// Adds a tensor as it is stored.
    fn stored(&mut self, tensor: &Tensor, extension: &str) {
        let mut content = ExtentMap::new();
        tensor.push_to(&mut content);
        let path = gds::file_stem(&tensor.name) + extension;
        self.file(&path, content);
        let (name, dtype, shape) = (tensor.name.clone(), tensor.dtype, tensor.shape.clone());
        self.entries.push(Entry { name, path, dtype, shape, transport: None });
    }

    fn finish(mut self) -> Branch {
        let manifest = ExtentMap::from_bytes(gds::render(&self.entries));
        self.file(gds::MANIFEST, manifest);
        self.branch
    }
}
