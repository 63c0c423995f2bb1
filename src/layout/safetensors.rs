//! `safetensors/<model>/...`: the imported directory, or a synthesised `model.safetensors`.

use super::{Anchor, Branch, Files, Layout, VirtualFile, model_dir, source_branch};
use crate::error::Result;
use crate::extent::ExtentMap;
use crate::format::safetensors::{file_header, sort_key};
use crate::model::{Model, ModelName, SourceKind, Tensor};

pub(super) struct Safetensors;

impl Layout for Safetensors {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        if model.sources(SourceKind::Safetensors).next().is_some() {
            return Ok(());
        }
        if model.tensors().is_empty() {
            return Err("it has no tensors".into());
        }
        let reserved = |tensor: &&Tensor| !tensor.dtype.in_safetensors() || tensor.name == "__metadata__";
        match model.tensors().iter().find(reserved) {
            Some(tensor) => Err(format!("tensor {:?} is {}, which safetensors cannot name", tensor.name, tensor.dtype)),
            None => Ok(()),
        }
    }

    fn anchors(&self, _name: &ModelName, path: &str) -> Vec<Anchor> {
        model_dir(path)
    }

    fn plan(&self, model: &Model, _files: Files<'_>) -> Result<Vec<Branch>> {
        let mut imported = model.sources(SourceKind::Safetensors).peekable();
        if imported.peek().is_some() {
            let mut branch = Branch::dir();
            for source in imported {
                branch = source_branch(source);
            }
            return Ok(vec![branch]);
        }
        let mut branch = Branch::dir();
        branch.put("model.safetensors", VirtualFile::new(file_of(model.tensors()), model.modified()));
        for file in model.files.iter().filter(|file| !file.path.contains(".mlpackage/")) {
            branch.put(&file.path, VirtualFile::new(ExtentMap::from_blob(file.blob, file.len), model.modified()));
        }
        Ok(vec![branch])
    }
}

/// One file of these tensors, as the Rust crate would write it.
fn file_of(tensors: &[Tensor]) -> ExtentMap {
    let mut sorted: Vec<&Tensor> = tensors.iter().collect();
    sorted.sort_by(|a, b| sort_key(a.dtype, &a.name).cmp(&sort_key(b.dtype, &b.name)));
    let entries = sorted.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice(), tensor.len));
    let mut map = ExtentMap::from_bytes(file_header(&[("format", "pt")], entries));
    sorted.iter().for_each(|tensor| tensor.push_to(&mut map));
    map
}
