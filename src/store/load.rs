//! From a manifest to a [`Model`]: everything that layouts rely on is checked here, once.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;

use super::{Found, Store};
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Fault, Result};
use crate::extent::ExtentMap;
use crate::format::ollama::{self, Layer, Manifest};
use crate::format::{Bytes, past_the_end, recipe, safetensors};
use crate::model::{Model, SmallFile, Tensor, check_path};

impl Store {
    /// Reads a manifest.
    pub fn manifest(&self, found: &Found) -> Result<Manifest> {
        let path = self.manifest_path(&found.name);
        let mut bytes = Vec::new();
        File::open(&path).at(&path)?.take(ollama::MAX_MANIFEST + 1).read_to_end(&mut bytes).at(&path)?;
        if bytes.len() as u64 > ollama::MAX_MANIFEST {
            return Err(Error::format(&path, Fault::new(0, "is too long for a manifest")));
        }
        Manifest::parse(&bytes).at(&path)
    }

    /// Reads a model: its manifest and recipes, and the headers of blobs whose layers do not describe their tensors.
    pub fn load(&self, found: &Found) -> Result<Model> {
        let manifest = self.manifest(found)?;
        let path = self.manifest_path(&found.name);
        let mut model = Model {
            name: found.name.clone(),
            tensors: Vec::new(),
            other_tensors: Vec::new(),
            files: Vec::new(),
            sources: Vec::new(),
            written: found.written,
        };
        for layer in &manifest.layers {
            match layer.media_type.as_str() {
                ollama::TENSOR => self.tensors_of(layer, &mut model.tensors).at(&path)?,
                ollama::OWN_TENSOR => self.tensors_of(layer, &mut model.other_tensors).at(&path)?,
                ollama::JSON | ollama::JSON_OLD | ollama::OWN_FILE => {
                    check_path(&layer.name).map_err(|what| Error::format(&path, Fault::new(0, what)))?;
                    model.files.push(SmallFile { path: layer.name.clone(), blob: layer.digest, len: layer.size });
                }
                ollama::OWN_RECIPE => {
                    let bytes = self.small_blob(&layer.digest, layer.size, recipe::MAX_RECIPE)?;
                    let map = |digest: &Digest, len| {
                        let bytes = self.small_blob(digest, len, recipe::MAX_RECIPE);
                        bytes.map_err(|error| Fault::new(0, error.to_string()))
                    };
                    let source = recipe::parse(&layer.name, &bytes, &map).map_err(|fault| damaged(layer, fault))?;
                    model.sources.push(source);
                }
                _ => {}
            }
        }
        model.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        model.other_tensors.sort_by(|a, b| a.name.cmp(&b.name));
        model.files.sort_by(|a, b| a.path.cmp(&b.path));
        for names in [&model.tensors, &model.other_tensors] {
            if let Some(pair) = names.windows(2).find(|pair| pair[0].name == pair[1].name) {
                return Err(Error::format(&path, Fault::new(0, format!("tensor {:?} occurs twice", pair[0].name))));
            }
        }
        Ok(model)
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

    fn tensors_of(&self, layer: &Layer, tensors: &mut Vec<Tensor>) -> Result<(), Fault> {
        match &layer.shape {
            Some(shape) => tensors.push(described(layer, shape)?),
            None => tensors.extend(self.header_of(layer)?),
        }
        Ok(())
    }

    /// The tensors of a blob by its own header, as today's ollama writes them.
    fn header_of(&self, layer: &Layer) -> Result<Vec<Tensor>, Fault> {
        let blob = BlobBytes { store: self, layer };
        let header = safetensors::parse(&blob)
            .map_err(|fault| Fault::new(fault.at, format!("blob {}: {}", layer.digest, fault.what)))?;
        let tensor = |range: safetensors::TensorRange| Tensor {
            name: if range.name == "data" && !layer.name.is_empty() { layer.name.clone() } else { range.name },
            dtype: range.dtype,
            shape: range.shape,
            blob: layer.digest,
            blob_len: layer.size,
            offset: range.offset,
            len: range.len,
            named: None,
        };
        Ok(header.tensors.into_iter().map(tensor).collect())
    }
}

/// A tensor whose layer says what it is: its bytes are the last of the blob.
fn described(layer: &Layer, shape: &[u64]) -> Result<Tensor, Fault> {
    let fault = |what: String| Fault::new(0, format!("tensor {:?}: {what}", layer.name));
    let dtype: Dtype = layer.dtype.parse().map_err(&fault)?;
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
    })
}

fn damaged(layer: &Layer, fault: Fault) -> Error {
    Error::Damaged { digest: layer.digest, fault: fault.to_string() }
}

/// A blob as a parser sees it.
struct BlobBytes<'a> {
    store: &'a Store,
    layer: &'a Layer,
}

impl Bytes for BlobBytes<'_> {
    fn len(&self) -> u64 {
        self.layer.size
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.layer.size) {
            return Err(past_the_end(self, offset, len));
        }
        let mut bytes = vec![0; len];
        let read = self.store.blobs().read_exact(&self.layer.digest, offset, &mut bytes);
        read.map_err(|error| Fault::new(offset, error.to_string()))?;
        Ok(Cow::Owned(bytes))
    }
}
