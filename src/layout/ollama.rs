//! `ollama/`, `ollama@seed/` and `ollama@today/`, each with `manifests/...` and `blobs/...`: directories for OLLAMA_MODELS.
//!
//! A model that wmount imported is in `ollama/` as today's ollama writes it: the blob of a tensor is a header with the
//! tensor's full name and the bytes of the stored blob, and its digest was computed at import. Order and form follow
//! ollama's own importer: tensors in order of name, then the top-level JSON files. `ollama@seed/` has the form of the
//! first ollama that stored single tensors: every tensor is called `data` in its blob, and the layer says what it is.
//! These are the stored blobs themselves, so equal tensors are one file whatever their names.
//!
//! A model that another program stored is in `ollama/` as that program left it, whatever its form. Its other form is in
//! `ollama@seed/` or `ollama@today/` when `wmount prepare` has computed its digests: the same layers in the same order,
//! those of tensors in the form of the directory.

use std::collections::HashMap;

use super::{Anchor, AnchorKind, Branch, Files, Layout, VirtualFile};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::extent::ExtentMap;
use crate::format::Form;
use crate::format::ollama::{self as format, Layer, Manifest};
use crate::model::{Foreign, Model, ModelName, SmallFile, Tensor};

/// The three directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ollama {
    /// What others stored as they left it, and what wmount imported as today's ollama reads it.
    Plain,
    /// What is in this form, stored so or not: of [`Form::Today`] only what `ollama/` has in another.
    In(Form),
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

    /// Puts the blob of another program's layer into `blobs/`, with its true length where that is known.
    fn keep(&mut self, layer: Layer, lens: &HashMap<Digest, u64>) -> Layer {
        let len = lens.get(&layer.digest).copied().unwrap_or(layer.size);
        let content = ExtentMap::from_blob(layer.digest, len);
        self.blobs.put(&layer.digest.file_name(), VirtualFile::new(content, self.model.modified()));
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
            Ollama::Plain => "ollama",
            Ollama::In(Form::Seed) => "ollama@seed",
            Ollama::In(Form::Today) => "ollama@today",
        }
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        if model.foreign.is_some() && *self == Ollama::Plain {
            return Ok(());
        }
        if model.tensors.is_empty() {
            return Err("it has no safetensors weights".into());
        }
        let (form, is_today_only) = (self.form(), *self == Ollama::In(Form::Today));
        let is_today = model.foreign.is_none() || model.tensors.iter().all(|tensor| Form::Today.is_stored(tensor));
        // What another program stored is in ollama/ as it is, config or not.
        if is_today_only && is_today && model.foreign.is_some() {
            return Err("ollama/ shows it in this form".into());
        }
        if form != Form::Seed && model.file("config.json").is_none() {
            return Err("it has no config.json, which ollama needs".into());
        }
        if is_today_only && is_today {
            return Err("ollama/ shows it in this form".into());
        }
        let unknown = model.tensors.iter().find(|tensor| form.digest(tensor).is_none());
        match (unknown, model.tensors.iter().find(|tensor| !form.is_stored(tensor) && !is_alone(tensor))) {
            (_, Some(tensor)) if model.foreign.is_some() => {
                Err(format!("tensor {:?} shares its blob, which this form has no words for", tensor.name))
            }
            (None, _) => Ok(()),
            (Some(tensor), _) if model.foreign.is_none() => {
                Err(format!("the digest of tensor {:?} with its name was not computed", tensor.name))
            }
            (Some(_), _) => {
                let (name, form) = (&model.name, form.name());
                Err(format!("its digests in this form are not known; `wmount prepare {name}@{form}` computes them"))
            }
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
        *self == Ollama::Plain
    }

    fn plan(&self, model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
        match (self, &model.foreign) {
            (Ollama::Plain, Some(foreign)) => Ok(verbatim(foreign, model)),
            (Ollama::In(Form::Seed), Some(foreign)) if model.tensors.iter().all(|it| Form::Seed.is_stored(it)) => {
                Ok(verbatim(foreign, model))
            }
            (Ollama::In(form), Some(foreign)) => convert(*form, foreign, model),
            (Ollama::In(Form::Seed), None) => seed(model, files),
            (_, None) => today(model, files),
        }
    }
}

impl Ollama {
    /// The form of the tensors that wmount imported.
    fn form(self) -> Form {
        match self {
            Ollama::Plain => Form::Today,
            Ollama::In(form) => form,
        }
    }
}

/// What another program stored, with the tensors in this form and everything else as it is.
fn convert(form: Form, foreign: &Foreign, model: &Model) -> Result<Vec<Branch>> {
    let manifest = Manifest::parse(&foreign.manifest).map_err(|fault| Error::Invalid(fault.to_string()))?;
    let lens: HashMap<Digest, u64> = foreign.blobs.iter().copied().collect();
    let by_name: HashMap<&str, &Tensor> = model.tensors.iter().map(|tensor| (&*tensor.name, tensor)).collect();
    let by_blob: HashMap<Digest, &Tensor> = model.tensors.iter().map(|tensor| (tensor.blob, tensor)).collect();
    let mut shelf = Shelf { model, blobs: Branch::dir() };
    let config = shelf.keep(manifest.config, &lens);
    let mut layers = Vec::new();
    for mut layer in manifest.layers {
        if layer.media_type != format::TENSOR {
            if form == Form::Today && layer.media_type == format::JSON_OLD {
                layer.media_type = format::JSON.into();
            }
            layers.push(shelf.keep(layer, &lens));
            continue;
        }
        // A blob that several layers name has one tensor under several names, unless the names are in the blob.
        let of_layer = by_name.get(&*layer.name).filter(|tensor| tensor.blob == layer.digest);
        let Some(tensor) = of_layer.or_else(|| by_blob.get(&layer.digest)) else { continue };
        // It was known when the model was last looked at.
        let gone =
            || Error::Invalid(format!("{}: its digests in the form {} are gone: prepare it", model.name, form.name()));
        let digest = form.digest(tensor).ok_or_else(gone)?;
        if digest == layer.digest {
            layers.push(shelf.keep(layer, &lens));
            continue;
        }
        let mut content = ExtentMap::from_bytes(form.header_of(tensor));
        tensor.push_to(&mut content);
        let mut new = shelf.add(format::TENSOR, &tensor.name, digest, content);
        if form == Form::Seed {
            new.dtype = tensor.dtype.name().into();
            new.shape = Some(tensor.shape.clone());
        }
        layers.push(new);
    }
    let manifest = Manifest::new(config, layers);
    Ok(shelf.finish(if form == Form::Seed { manifest.to_bytes() } else { manifest.to_go_bytes() }))
}

/// Whether the blob ends with the tensor, and holds one only.
fn is_alone(tensor: &Tensor) -> bool {
    tensor.offset + tensor.len == tensor.blob_len
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
        let mut content = ExtentMap::from_bytes(Form::Today.header_of(tensor));
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
