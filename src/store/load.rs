//! From a manifest to a [`Model`]: everything that layouts rely on is checked here, once.

use std::cell::Cell;
use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use super::beneath::{self, Dir};
use super::{Found, Store};
use crate::budget::{Budget, Counted, Limits};
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Fault, Result};
use crate::extent::ExtentMap;
use crate::format::ollama::{self, Layer, Manifest};
use crate::format::recipe::{self, Documents};
use crate::format::{BlobBytes, gguf, safetensors};
use crate::model::{
    Defect, Foreign, MAX_DIRS, Model, ModelName, Role, SmallFile, Source, Tensor, WeightFile, check_path, directories,
};

/// The sum of all blobs of a model, in bytes, up to which no sum of sizes can overflow.
const MAX_MODEL: u64 = 1 << 60;

impl Store {
    /// The bytes of a manifest.
    pub fn manifest_bytes(&self, found: &Found) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let metadata = self.read_manifest(found, &mut bytes)?;
        self.admit(found, &metadata, &bytes)?;
        Ok(bytes)
    }

    /// The bytes of a manifest in the place of what is in `bytes`, and what its file is.
    fn read_manifest(&self, found: &Found, bytes: &mut Vec<u8>) -> Result<Metadata> {
        let path = self.manifest_path(&found.name);
        let gone = || Error::NotFound(format!("the manifest of {} as it was", found.name));
        let file = beneath::file(&self.manifests_dir(), &found.name.manifest_path());
        let file = file.map_err(|error| if self.is_removed(&path) { gone() } else { Error::io(&path, error) })?;
        let metadata = file.metadata().at(&path)?;
        if (metadata.ino(), metadata.len()) != found.version {
            return Err(gone());
        }
        // It is replaced, never written to, so the length stays what it is.
        if metadata.len() > ollama::MAX_MANIFEST {
            let what =
                format!("{} bytes are too many for a manifest: more than {}", metadata.len(), ollama::MAX_MANIFEST);
            return Err(Error::format(&path, Fault::new(0, what)));
        }
        bytes.clear();
        // Reading to the end takes one byte more to see it.
        bytes.reserve(metadata.len() as usize + 1);
        file.take(ollama::MAX_MANIFEST).read_to_end(bytes).at(&path)?;
        Ok(metadata)
    }

    /// Whether a manifest is not there, while the store is.
    fn is_removed(&self, path: &Path) -> bool {
        let is_missing = fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        is_missing && beneath::Dir::open(&self.manifests_dir()).is_ok()
    }

    /// Reads a manifest.
    pub fn manifest(&self, found: &Found) -> Result<Manifest> {
        Manifest::parse(&self.manifest_bytes(found)?).at(self.manifest_path(&found.name))
    }

    /// Reads a model: its manifest and recipes, and the headers of blobs whose layers do not describe their tensors.
    ///
    /// # Errors
    /// A manifest or recipe that cannot be read. Everything less is one of [`Model::defects`] and hurts only what
    /// touches it.
    pub fn load(&self, found: &Found) -> Result<Model> {
        let bytes = self.manifest_bytes(found)?;
        let mut model = self.model_of(&found.name, found.written, &bytes, Limits::default())?;
        self.fill_forms(found, &bytes, &mut model);
        Ok(model)
    }

    /// The model of a manifest, which need not be in the store yet.
    pub(super) fn model_of(
        &self,
        name: &ModelName,
        written: SystemTime,
        bytes: &[u8],
        limits: Limits,
    ) -> Result<Model> {
        let path = self.manifest_path(name);
        let manifest = Manifest::parse(bytes).at(&path)?;
        check_sizes(&manifest).at(path)?;
        // Who may read a model, and what gc leaves of it, the manifest says: no recipe leads beyond it.
        let layers: HashSet<Digest> = manifest.blobs().map(|layer| layer.digest).collect();
        let strange = |digest: &Digest| {
            let what = format!("a recipe names blob {digest}, and no layer does: import the model again");
            Error::format(self.manifest_path(name), Fault::new(0, what))
        };
        let map = |digest: &Digest, len| match layers.contains(digest) {
            true => self.small_blob(digest, len, recipe::MAX_RECIPE),
            false => Err(strange(digest)),
        };
        let model = self.model(name, written, &manifest, bytes, Some(&map), Budget::of(limits))?;
        for file in model.sources.iter().flat_map(|source| &source.files) {
            if let Some(outside) = file.content.digests().find(|digest| !layers.contains(digest)) {
                return Err(strange(&outside));
            }
        }
        Ok(model)
    }

    /// A model that every layout shows, or does not show, as it does that of [`Store::load`]: with a few of the tensors, and
    /// with files of which only the names are known. `None` if only [`Store::load`] can tell.
    ///
    /// Who reads many lends the same `room` for all their manifests.
    ///
    /// # Errors
    /// A manifest or recipe that cannot be read.
    pub fn load_brief(&self, found: &Found, room: &mut Vec<u8>) -> Result<Option<Model>> {
        // What was computed for a form is there for all tensors.
        if found.forms != [0; 2] {
            return Ok(None);
        }
        self.read_manifest(found, room)?;
        let Some(manifest) = Manifest::brief(room) else { return Ok(None) };
        self.model(&found.name, found.written, &manifest, room, None, Budget::default()).map(Some)
    }

    /// The model of a manifest, whose text is `bytes`; without maps, the model in brief: its imported files have no content.
    fn model(
        &self,
        name: &ModelName,
        written: SystemTime,
        manifest: &Manifest,
        bytes: &[u8],
        map: Option<&ReadMap<'_>>,
        budget: Budget,
    ) -> Result<Model> {
        let mut model = Model {
            name: name.clone(),
            tensors: Vec::new(),
            other_tensors: Vec::new(),
            files: Vec::new(),
            weights: Vec::new(),
            sources: Vec::new(),
            written,
            foreign: self.foreign(manifest, bytes),
            defects: Vec::new(),
        };
        let (mut read, mut documents) = (HashSet::new(), Documents::of(budget));
        let too_large = |fault| Error::format(self.manifest_path(name), fault);
        for layer in &manifest.layers {
            match layer.media_type.as_str() {
                // ollama reads a blob once, whatever the number of layers that name it.
                _ if layer.is_tensor() && layer.shape.is_none() && !read.insert(layer.digest) => {}
                ollama::TENSOR => {
                    self.tensors_of(layer, &mut model.tensors, &mut model.defects, &documents.budget);
                }
                ollama::OWN_TENSOR => {
                    self.tensors_of(layer, &mut model.other_tensors, &mut model.defects, &documents.budget);
                }
                ollama::JSON | ollama::JSON_OLD | ollama::OWN_FILE => match check_path(&layer.name) {
                    Ok(()) => {
                        model.files.push(SmallFile { path: layer.name.clone(), blob: layer.digest, len: layer.size });
                    }
                    Err(what) => {
                        let what = format!("the layer of blob {}: {what}", layer.digest);
                        model.defects.push(Defect { what, unread: None });
                    }
                },
                ollama::MODEL => self.weight_file(layer, Role::Model, &mut model),
                ollama::PROJECTOR => self.weight_file(layer, Role::Projector, &mut model),
                ollama::ADAPTER => self.weight_file(layer, Role::Adapter, &mut model),
                ollama::DRAFT => self.weight_file(layer, Role::Draft, &mut model),
                ollama::OWN_RECIPE => {
                    let source = self.source(layer, map, &mut documents);
                    model.sources.push(source.map_err(|error| documents.budget.over().map_or(error, too_large))?);
                }
                _ => {}
            }
            documents.budget.over().map_or(Ok(()), |fault| Err(too_large(fault)))?;
        }
        model.sort();
        let of_files = directories(model.files.iter().map(|file| &*file.path));
        let of_source = |source: &Source| {
            let of_files = directories(source.files.iter().map(|file| &*file.path));
            of_files.max(source.dirs.len()).max(directories(source.dirs.iter().map(|dir| &*dir.path)))
        };
        if of_files + model.sources.iter().map(of_source).sum::<usize>() > MAX_DIRS {
            let fault = Fault::new(0, format!("it has more than {MAX_DIRS} directories"));
            return Err(Error::format(self.manifest_path(name), fault));
        }
        Ok(model)
    }

    /// What was imported, by the recipe that a layer names.
    fn source(&self, layer: &Layer, map: Option<&ReadMap<'_>>, documents: &mut Documents) -> Result<Source> {
        let part = |error| match error {
            Error::Damaged { digest, fault } => {
                Error::Damaged { digest, fault: format!("{fault}; it is part of the recipe of {:?}", layer.name) }
            }
            other => other,
        };
        documents.budget.text(layer.size).map_err(|fault| damaged(layer, fault))?;
        let bytes = self.small_blob(&layer.digest, layer.size, recipe::MAX_RECIPE).map_err(part)?;
        // It is the map that is damaged, and not the recipe that names it.
        let lost = Cell::new(None);
        let get = |digest: &Digest, len| match map {
            None => Ok(recipe::NO_MAP.into()),
            Some(map) => map(digest, len).map_err(|error| {
                let fault = Fault::new(0, error.to_string());
                lost.set(Some(error));
                fault
            }),
        };
        let mut source = recipe::parse(&layer.name, &bytes, &get, documents)
            .map_err(|fault| lost.take().map_or_else(|| damaged(layer, fault), part))?;
        if map.is_none() {
            source.files.iter_mut().for_each(|file| file.content = Arc::default());
        }
        Ok(source)
    }

    /// The whole content of a blob that is small enough to be held in memory.
    pub fn small_blob(&self, digest: &Digest, len: u64, max: u64) -> Result<Vec<u8>> {
        let fault = |fault: String| Error::Damaged { digest: *digest, fault };
        if len > max {
            return Err(fault(format!("{len} bytes are too many for what it is")));
        }
        let actual = self.blobs.open(digest)?.metadata().map_err(|error| fault(error.to_string()))?.len();
        if actual != len {
            return Err(fault(format!("it has {actual} bytes, not {len}")));
        }
        ExtentMap::from_blob(*digest, len).read_all(self.blobs())
    }

    /// What `ollama/` shows of a model whose weights another program stored: the manifest as it is, or without the
    /// layers that wmount added.
    fn foreign(&self, manifest: &Manifest, bytes: &[u8]) -> Option<Foreign> {
        if !manifest.is_foreign() {
            return None;
        }
        let theirs = |layer: &&Layer| !layer.is_ours();
        let stored = Dir::open(&self.root.join("blobs"));
        // A manifest that lies about a size must not hurt the others that name the same blob.
        let len = |layer: &Layer| {
            let found = stored.as_ref().ok().and_then(|dir| dir.regular(&layer.digest.file_name()).ok());
            let found = found.map_or(layer.size, |found| found.len());
            if found != layer.size {
                self.blobs.set_used(&layer.digest);
            }
            found
        };
        let blobs = manifest.blobs().filter(theirs).map(|layer| (layer.digest, len(layer))).collect();
        let manifest = match manifest.has_ours() {
            false => bytes.to_vec(),
            true => {
                let layers = manifest.layers.iter().filter(theirs).cloned().collect();
                Manifest::new(manifest.config.clone(), layers).to_bytes()
            }
        };
        Some(Foreign { manifest, blobs })
    }

    pub(super) fn tensors_of(
        &self,
        layer: &Layer,
        tensors: &mut Vec<Tensor>,
        defects: &mut Vec<Defect>,
        budget: &Budget,
    ) {
        let read = match &layer.shape {
            Some(shape) => described(layer, shape).map(|tensor| vec![tensor]),
            None => self.header_of(layer, budget),
        };
        match read {
            Ok(read) => tensors.extend(read),
            Err(fault) => {
                defects.push(Defect { what: fault.to_string(), unread: Some((layer.digest, layer.size)) });
            }
        }
    }

    /// Adds a file of weights. One that cannot be read is taken for what its layer says: whoever opens it is told.
    fn weight_file(&self, layer: &Layer, role: Role, model: &mut Model) {
        let fault = match gguf::check_magic(&BlobBytes { blobs: self.blobs(), digest: layer.digest, len: layer.size }) {
            Ok(fault) => fault,
            Err(fault) => {
                model.defects.push(Defect { what: format!("blob {}: {}", layer.digest, fault.what), unread: None });
                None
            }
        };
        model.weights.push(WeightFile { role, blob: layer.digest, len: layer.size, fault });
    }

    /// The tensors of a blob by its own header, as today's ollama writes them.
    fn header_of(&self, layer: &Layer, budget: &Budget) -> Result<Vec<Tensor>, Fault> {
        let blob = BlobBytes { blobs: self.blobs(), digest: layer.digest, len: layer.size };
        let header = safetensors::parse(&Counted(blob, budget))?;
        budget.tensors(header.tensors.len())?;
        let tensor = |range: safetensors::TensorRange| {
            let is_plain = range.name == "data" && !layer.name.is_empty();
            Tensor {
                name: if is_plain { layer.name.clone() } else { range.name },
                dtype: range.dtype,
                shape: range.shape,
                blob: layer.digest,
                blob_len: layer.size,
                offset: range.offset,
                len: range.len,
                named: (!is_plain).then_some(layer.digest),
                plain: is_plain.then_some(layer.digest),
            }
        };
        Ok(header.tensors.into_iter().map(tensor).collect())
    }
}

/// Reads a map of a recipe, of the given length.
type ReadMap<'a> = dyn Fn(&Digest, u64) -> Result<Vec<u8>> + 'a;

/// Refuses a manifest whose sizes would overflow.
pub(super) fn check_sizes(manifest: &Manifest) -> Result<(), Fault> {
    let sum = manifest.blobs().try_fold(0, |sum: u64, layer| sum.checked_add(layer.size));
    match sum {
        Some(sum) if sum <= MAX_MODEL => Ok(()),
        _ => Err(Fault::new(0, "the sizes of its layers cannot be true")),
    }
}

/// A tensor whose layer says what it is: its bytes are the last of the blob.
fn described(layer: &Layer, shape: &[u64]) -> Result<Tensor, Fault> {
    let fault = |what: String| Fault::new(0, format!("tensor {:?}: {what}", layer.name));
    let dtype: Dtype = layer.dtype.parse().map_err(fault)?;
    let len = dtype.bytes(shape).filter(|&len| len <= layer.size);
    let len = len.ok_or_else(|| fault(format!("{dtype} {shape:?} does not fit into {} bytes", layer.size)))?;
    Ok(Tensor {
        name: layer.name.clone(),
        dtype,
        shape: shape.to_vec(),
        blob: layer.digest,
        blob_len: layer.size,
        offset: layer.size - len,
        len,
        named: layer.named,
        plain: Some(layer.digest),
    })
}

fn damaged(layer: &Layer, fault: Fault) -> Error {
    Error::Damaged { digest: layer.digest, fault: fault.to_string() }
}
