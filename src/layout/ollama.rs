//! `ollama/` and `ollama@seed/`, each with `manifests/...` and `blobs/...`: directories for OLLAMA_MODELS.
//!
//! A model that wmount imported is in `ollama/` as today's ollama writes it: the blob of a tensor is a header with the
//! tensor's full name and the bytes of the stored blob, and its digest was computed at import. Order and form follow
//! ollama's own importer: tensors in order of name, then the top-level JSON files. `ollama@seed/` has the form of the
//! first ollama that stored single tensors: every tensor is called `data` in its blob, and the layer says what it is.
//! These are the stored blobs themselves, so equal tensors are one file whatever their names.
//!
//! A model that another program stored is in `ollama/` as that program left it.

use super::{Anchor, AnchorKind, Branch, Files, Layout, VirtualFile};
use crate::digest::Digest;
use crate::error::Result;
use crate::extent::ExtentMap;
use crate::format::ollama::{self as format, Layer, Manifest};
use crate::format::safetensors::named_header;
use crate::model::{Foreign, Model, ModelName, SmallFile};

/// The two forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ollama {
    /// What today's ollama reads.
    Today,
    /// What ollama read when it first stored single tensors.
    Seed,
}

/// The files of one model in the making.
struct Shelf<'a> {
    model: &'a Model,
    blobs: Branch,
}

impl Shelf<'_> {
    /// Puts a blob into `blobs/` and names it in a layer.
    fn add(&mut self, media_type: &str, name: &str, digest: Digest, content: ExtentMap) -> Layer {
        let layer = Layer::new(media_type, digest, content.size(), name);
        self.blobs.put(&digest.file_name(), VirtualFile::new(content, self.model.modified()));
        layer
    }

    fn add_file(&mut self, media_type: &str, file: &SmallFile) -> Layer {
        self.add(media_type, &file.path, file.blob, ExtentMap::from_blob(file.blob, file.len))
    }

    fn add_config(&mut self, files: Files<'_>) -> Result<Layer> {
        let config = format::safetensors_config(&senses(self.model, files)?);
        Ok(self.add(format::CONFIG, "", Digest::of(&config), ExtentMap::from_bytes(config)))
    }

    fn finish(self, manifest: Vec<u8>) -> Vec<Branch> {
        let manifest = VirtualFile::new(ExtentMap::from_bytes(manifest), self.model.modified());
        vec![Branch::File(manifest), self.blobs]
    }
}

impl Layout for Ollama {
    fn name(&self) -> &'static str {
        match self {
            Ollama::Today => "ollama",
            Ollama::Seed => "ollama@seed",
        }
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        if model.foreign.is_some() && *self == Ollama::Today {
            return Ok(());
        }
        if model.tensors.is_empty() {
            return Err("it has no safetensors weights".into());
        }
        if *self == Ollama::Seed {
            return match model.nameless {
                true => Ok(()),
                false => Err("its tensors have their names in their blobs".into()),
            };
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

    fn shows_damaged(&self) -> bool {
        *self == Ollama::Today
    }

    fn plan(&self, model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
        match (self, &model.foreign) {
            (Ollama::Today, Some(foreign)) => Ok(verbatim(foreign, model)),
            (Ollama::Today, None) => today(model, files),
            (Ollama::Seed, _) => seed(model, files),
        }
    }
}

fn verbatim(foreign: &Foreign, model: &Model) -> Vec<Branch> {
    let mut blobs = Branch::dir();
    for (digest, len) in &foreign.blobs {
        let content = ExtentMap::from_blob(*digest, *len);
        blobs.put(&digest.file_name(), VirtualFile::new(content, model.written));
    }
    let manifest = ExtentMap::from_bytes(foreign.manifest.clone());
    vec![Branch::File(VirtualFile::new(manifest, model.written)), blobs]
}

fn today(model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
    let (mut shelf, mut layers) = (Shelf { model, blobs: Branch::dir() }, Vec::new());
    for tensor in &model.tensors {
        let digest = tensor.named.expect("checked by expresses");
        let mut content = ExtentMap::from_bytes(named_header(&tensor.name, tensor.dtype, &tensor.shape, tensor.len));
        tensor.push_to(&mut content);
        layers.push(shelf.add(format::TENSOR, &tensor.name, digest, content));
    }
    let is_config = |path: &str| !path.contains('/') && path.ends_with(".json");
    let is_index = |path: &str| path == "model.safetensors.index.json";
    for file in model.files.iter().filter(|file| is_config(&file.path) && !is_index(&file.path)) {
        layers.push(shelf.add_file(format::JSON, file));
    }
    let config = shelf.add_config(files)?;
    Ok(shelf.finish(Manifest::new(config, layers).to_go_bytes()))
}

fn seed(model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
    let (mut shelf, mut layers) = (Shelf { model, blobs: Branch::dir() }, Vec::new());
    for tensor in &model.tensors {
        let content = ExtentMap::from_blob(tensor.blob, tensor.blob_len);
        let mut layer = shelf.add(format::TENSOR, &tensor.name, tensor.blob, content);
        layer.dtype = tensor.dtype.name().into();
        layer.shape = Some(tensor.shape.clone());
        layers.push(layer);
    }
    for file in model.files.iter().filter(|file| file.path.ends_with(".json") && !file.path.contains(".mlpackage/")) {
        layers.push(shelf.add_file(format::JSON, file));
    }
    let config = shelf.add_config(files)?;
    Ok(shelf.finish(Manifest::new(config, layers).to_bytes()))
}

/// Capabilities beside completion, as ollama's importer infers them from config.json.
fn senses(model: &Model, files: Files<'_>) -> Result<Vec<&'static str>> {
    let config = files.json(model, "config.json")?.unwrap_or_default();
    let has = |key: &str| config.get(key).is_some_and(|value| value.is_object());
    let senses = [("vision_config", "vision"), ("audio_config", "audio")];
    Ok(senses.into_iter().filter(|(key, _)| has(key)).map(|(_, sense)| sense).collect())
}
