//! `safetensors/<model>/...`: the imported directory, or one made of the model's tensors and files.
//!
//! A made directory has a weight file for the model and one for each of its [components](super::components).

mod mlx;

use super::components::{Named, components};
use super::{Anchor, Branch, Files, Layout, MAX_SMALL, VirtualFile, model_dir, source_branch};
use crate::error::{Error, Result};
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
        if model.tensors().is_empty() && model.check_whole().is_ok() {
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

    fn shows_damaged(&self) -> bool {
        true
    }

    fn plan(&self, model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
        let mut imported = model.sources(SourceKind::Safetensors).peekable();
        if imported.peek().is_some() {
            let mut branch = Branch::dir();
            for source in imported {
                branch = source_branch(source);
            }
            return Ok(vec![branch]);
        }
        let mut branch = Branch::dir();
        let mut put = |path: &str, content| branch.put(path, VirtualFile::new(content, model.modified()));
        if let Some(blob) = model.defects.iter().find_map(|defect| defect.unread) {
            put("model.safetensors", unreadable(blob.0));
        } else {
            let mut configs = 0;
            for (component, mut tensors) in components(model) {
                let path = |name: &str| if component.is_empty() { name.into() } else { format!("{component}/{name}") };
                let config_path = path("config.json");
                configs += model.file(&config_path).map_or(0, |file| file.len.min(MAX_SMALL));
                if configs > MAX_SMALL {
                    let what = format!("the config.json of its components have more than {MAX_SMALL} bytes in all");
                    return Err(Error::Invalid(what));
                }
                let mut config = files.json(model, &config_path)?.unwrap_or_default();
                if mlx::adapt(&mut tensors, &mut config, files) {
                    let config = serde_json::to_vec_pretty(&config).expect("a config is plain data");
                    put(&config_path, ExtentMap::from_bytes(config));
                }
                put(&path(weights_name(&config)), file_of(tensors));
            }
        }
        for file in model.files.iter().filter(|file| !file.path.contains(".mlpackage/")) {
            put(&file.path, ExtentMap::from_blob(file.blob, file.len));
        }
        Ok(vec![branch])
    }
}

/// What loaders call the one weight file of a directory: diffusers has its own word.
fn weights_name(config: &serde_json::Map<String, serde_json::Value>) -> &'static str {
    if config.contains_key("_class_name") { "diffusion_pytorch_model.safetensors" } else { "model.safetensors" }
}

/// One file of these tensors, as the Rust crate would write it.
fn file_of(mut tensors: Vec<Named<'_>>) -> ExtentMap {
    tensors.sort_by(|a, b| sort_key(a.tensor.dtype, &a.name).cmp(&sort_key(b.tensor.dtype, &b.name)));
    let entry = |named: &Named<'_>| (named.tensor.dtype, named.tensor.shape.clone(), named.tensor.len);
    let entries: Vec<_> = tensors.iter().map(entry).collect();
    let entries =
        tensors.iter().zip(&entries).map(|(named, (dtype, shape, len))| (&*named.name, *dtype, &**shape, *len));
    let mut map = ExtentMap::from_bytes(file_header(&[("format", "pt")], entries));
    tensors.iter().for_each(|named| named.tensor.push_to(&mut map));
    map
}

/// A file that nobody can read, as a blob cannot that it is made of.
fn unreadable(blob: crate::digest::Digest) -> ExtentMap {
    /// Past the end of any blob.
    const NOWHERE: u64 = 1 << 61;
    let mut map = ExtentMap::new();
    map.push_blob(blob, NOWHERE + 1, NOWHERE, 1).expect("the last byte is within");
    map
}
