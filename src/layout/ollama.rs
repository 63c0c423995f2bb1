//! `ollama/manifests/...` and `ollama/blobs/...`: what today's ollama reads.
//!
//! A tensor's blob is a header with the tensor's full name and the bytes of the stored blob. Its digest was computed
//! when the model was imported. Order and form follow ollama's own importer: tensors in order of name, then the
//! top-level JSON files.

use super::{Anchor, AnchorKind, Branch, Files, Layout, VirtualFile};
use crate::digest::Digest;
use crate::error::Result;
use crate::extent::ExtentMap;
use crate::format::ollama::{self as format, Layer, Manifest};
use crate::format::safetensors::named_header;
use crate::model::{Model, ModelName};

pub(super) struct Ollama;

impl Layout for Ollama {
    fn name(&self) -> &'static str {
        "ollama"
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        if model.tensors.is_empty() {
            return Err("it has no safetensors weights".into());
        }
        if model.file("config.json").is_none() {
            return Err("it has no config.json, which ollama needs".into());
        }
        match model.tensors.iter().find(|tensor| tensor.named.is_none()) {
            Some(tensor) => Err(format!("the digest of tensor {:?} with its name was not computed", tensor.name)),
            None => Ok(()),
        }
    }

    fn anchors(&self, name: &ModelName, _path: &str) -> Vec<Anchor> {
        let manifest = Anchor { path: format!("manifests/{}", name.manifest_path()), kind: AnchorKind::File };
        vec![manifest, Anchor { path: "blobs".into(), kind: AnchorKind::Shared }]
    }

    fn fixed_dirs(&self) -> &'static [&'static str] {
        // ollama makes them at start if they are missing, which fails on a read-only mount.
        &["blobs", "manifests"]
    }

    fn plan(&self, model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
        let (mut layers, mut blobs) = (Vec::new(), Branch::dir());
        let mut add = |media_type: &str, name: &str, digest: Digest, content: ExtentMap| {
            let layer = Layer::new(media_type, digest, content.size(), name);
            blobs.put(&digest.file_name(), VirtualFile::new(content, model.modified()));
            layer
        };
        for tensor in &model.tensors {
            let digest = tensor.named.expect("checked by expresses");
            let mut content =
                ExtentMap::from_bytes(named_header(&tensor.name, tensor.dtype, &tensor.shape, tensor.len));
            tensor.push_to(&mut content);
            layers.push(add(format::TENSOR, &tensor.name, digest, content));
        }
        let is_config = |path: &str| !path.contains('/') && path.ends_with(".json");
        let is_index = |path: &str| path == "model.safetensors.index.json";
        for file in model.files.iter().filter(|file| is_config(&file.path) && !is_index(&file.path)) {
            layers.push(add(format::JSON, &file.path, file.blob, ExtentMap::from_blob(file.blob, file.len)));
        }
        let config = format::safetensors_config(&senses(model, files)?);
        let config = add(format::CONFIG, "", Digest::of(&config), ExtentMap::from_bytes(config));
        let manifest = ExtentMap::from_bytes(Manifest::new(config, layers).to_go_bytes());
        Ok(vec![Branch::File(VirtualFile::new(manifest, model.modified())), blobs])
    }
}

/// Capabilities beside completion, as ollama's importer infers them from config.json.
fn senses(model: &Model, files: Files<'_>) -> Result<Vec<&'static str>> {
    let config = files.json(model, "config.json")?.unwrap_or_default();
    let has = |key: &str| config.get(key).is_some_and(|value| value.is_object());
    let senses = [("vision_config", "vision"), ("audio_config", "audio")];
    Ok(senses.into_iter().filter(|(key, _)| has(key)).map(|(_, sense)| sense).collect())
}
