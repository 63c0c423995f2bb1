//! `gds_export/<model>/manifest.json` and a raw file for each tensor: what oLLM streams layer by layer.
//!
//! | variant | files |
//! |---|---|
//! | none | the tensors as they are stored, `.bin` as exporters write them |
//! | `@raw` | the same, `.raw`: one validator refuses `.bin`, which torch uses for pickles too |
//! | `@f16` | bf16 and f32 as fp16: oLLM's readers take the bits of bfloat16 for those of float16 |
//! | `@fp8` | weights encoded for transport, each with a file of scales; see [`gds::Transport`] |
//!
//! A model of several components has such a directory for each of them.

use std::collections::HashMap;
use std::time::SystemTime;

use super::components::split;
use super::overflow::overflow;
use super::{Anchor, Branch, Files, Layout, VirtualFile, model_dir};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::extent::{Computed, ExtentMap};
use crate::format::gds::{self, Entry, Transport};
use crate::model::{Model, ModelName, Tensor, check_path};
use crate::transform::{Float, Fp8, Transform};

/// The export, or one variant of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GdsExport {
    Stored,
    Raw,
    F16,
    Fp8,
}

/// The layout, and behind it its variants.
pub(super) const GDS_EXPORT: GdsExport = GdsExport::Stored;
static VARIANTS: [(&str, &dyn Layout); 3] =
    [("raw", &GdsExport::Raw), ("f16", &GdsExport::F16), ("fp8", &GdsExport::Fp8)];

/// Rows of a tensor that is encoded, at the most: a hundred times those of the largest vocabularies.
const MAX_ROWS: u64 = 1 << 24;

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
        match split(model) {
            Some(parts) => parts.iter().try_for_each(|(_, tensors)| check_names(tensors)),
            None => check_names(model.tensors()),
        }
    }

    fn anchors(&self, _name: &ModelName, path: &str) -> Vec<Anchor> {
        model_dir(path)
    }

    fn plan(&self, model: &Model, _files: Files<'_>) -> Result<Vec<Branch>> {
        let time = model.modified();
        let Some(parts) = split(model) else { return Ok(vec![self.export(model.tensors(), time)?]) };
        let mut branch = Branch::dir();
        for (component, tensors) in parts {
            branch.graft(component, self.export(&tensors, time)?);
        }
        Ok(vec![branch])
    }

    fn variants(&self) -> &'static [(&'static str, &'static dyn Layout)] {
        if *self == GDS_EXPORT { &VARIANTS } else { &[] }
    }

    fn overflow(&self, model: &Model, files: Files<'_>) -> Result<Option<String>> {
        if *self != GdsExport::F16 {
            return Ok(None);
        }
        let casts = model.tensors().iter().filter(|tensor| tensor.len > 0);
        overflow(casts.filter_map(|tensor| Some((&*tensor.name, tensor.computed(cast_of(tensor)?)))), files)
    }
}

impl GdsExport {
    /// The directory of these tensors.
    fn export(self, tensors: &[Tensor], time: SystemTime) -> Result<Branch> {
        let mut export = Export::new(tensors.len(), time, if self == GdsExport::Raw { ".raw" } else { ".bin" });
        for tensor in tensors {
            match (self, cast_of(tensor), rows_of(tensor)) {
                (GdsExport::F16, Some(cast), _) => export.cast(tensor, cast)?,
                (GdsExport::Fp8, _, Some((float, row))) => export.encoded(tensor, float, row)?,
                (GdsExport::Fp8, ..) => export.stored(tensor, true),
                _ => export.stored(tensor, false),
            }
        }
        Ok(export.finish())
    }
}

/// Whether every tensor has a type and makes a file name of its own.
fn check_names(tensors: &[Tensor]) -> Result<(), String> {
    let mut stems: HashMap<String, &str> = HashMap::with_capacity(tensors.len());
    for tensor in tensors {
        let stem = gds::file_stem(&tensor.name);
        if gds::torch_name(tensor.dtype).is_none() {
            return Err(format!("tensor {:?} is {}, which torch cannot name", tensor.name, tensor.dtype));
        }
        if stem.len() + LONGEST_EXTENSION > 255 || check_path(&stem).is_err() {
            return Err(format!("the name of tensor {:?} makes no file name", tensor.name));
        }
        if let Some(other) = stems.insert(stem, &tensor.name) {
            return Err(format!("tensors {other:?} and {:?} would have the same file", tensor.name));
        }
    }
    Ok(())
}

/// How a tensor becomes fp16, if it is of a type that oLLM does not read as what it is.
fn cast_of(tensor: &Tensor) -> Option<Transform> {
    Float::of(tensor.dtype).filter(|float| *float != Float::F16).map(Transform::F16)
}

/// The rows of a tensor that is encoded for transport. Those of one dimension are small, and norms are not rows; of very
/// many rows the scales are too many to be in memory at once.
fn rows_of(tensor: &Tensor) -> Option<(Float, u64)> {
    let float = Float::of(tensor.dtype)?;
    let row = Dtype::elements(tensor.shape.get(1..)?)?;
    (tensor.shape.len() > 1 && tensor.len > 0 && tensor.shape[0] <= MAX_ROWS).then_some((float, row))
}

/// A directory that is being planned.
struct Export {
    /// That of its files.
    time: SystemTime,
    /// Extension of files that hold plain elements.
    extension: &'static str,
    branch: Branch,
    entries: Vec<Entry>,
    /// The digests of encoded files, in the order of their entries.
    digests: Vec<Computed>,
}

/// Stands in the text of a manifest for a digest that is computed when it is read, and is as long as one.
const DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";

impl Export {
    fn new(tensors: usize, time: SystemTime, extension: &'static str) -> Self {
        let entries = Vec::with_capacity(tensors);
        Export { time, extension, branch: Branch::dir(), entries, digests: Vec::new() }
    }

    fn file(&mut self, path: &str, content: ExtentMap) {
        self.branch.put(path, VirtualFile::new(content, self.time));
    }

    fn computed(&mut self, path: &str, tensor: &Tensor, transform: Transform) -> Result<()> {
        let mut content = ExtentMap::new();
        let pushed = content.push_computed(tensor.computed(transform), tensor.blob_len);
        pushed.ok_or_else(|| Error::Invalid(format!("{} cannot be made of {:?}", transform.name(), tensor.name)))?;
        self.file(path, content);
        Ok(())
    }

    /// Adds a tensor as it is stored, be it what was wanted or what is left where it is not encoded.
    fn stored(&mut self, tensor: &Tensor, fallback: bool) {
        let mut content = ExtentMap::new();
        tensor.push_to(&mut content);
        let path = gds::file_stem(&tensor.name) + self.extension;
        let file = VirtualFile { fallback, ..VirtualFile::new(content, self.time) };
        self.branch.put(&path, file);
        self.entries.push(entry(tensor, path, tensor.dtype, None));
    }

    /// Adds a tensor as fp16.
    fn cast(&mut self, tensor: &Tensor, cast: Transform) -> Result<()> {
        let path = gds::file_stem(&tensor.name) + self.extension;
        if tensor.len > 0 {
            self.computed(&path, tensor, cast)?;
        } else {
            self.file(&path, ExtentMap::new());
        }
        self.entries.push(entry(tensor, path, Dtype::F16, None));
        Ok(())
    }

    /// Adds a tensor as e4m3fn with its scales.
    fn encoded(&mut self, tensor: &Tensor, float: Float, row: u64) -> Result<()> {
        let stem = gds::file_stem(&tensor.name);
        let (path, scale_path) = (format!("{stem}.fp8"), format!("{stem}.scale"));
        self.computed(&path, tensor, Transform::Fp8(float, row, Fp8::Codes))?;
        self.computed(&scale_path, tensor, Transform::Fp8(float, row, Fp8::Scales))?;
        self.digests.push(tensor.computed(Transform::Fp8(float, row, Fp8::Digest)));
        let name = |dtype| gds::torch_name(dtype).unwrap_or_default().to_owned();
        let transport = Transport {
            encoding: gds::FP8_ROWS.into(),
            encoded_dtype: name(Dtype::F8E4M3),
            encoded_nbytes: tensor.len / float.bytes() as u64,
            decoded_dtype: name(tensor.dtype),
            decoded_shape: tensor.shape.clone(),
            decoded_nbytes: tensor.len,
            scale_encoding: gds::ROW_SCALES.into(),
            scale_path,
            checksum: format!("sha256:{DIGEST}"),
            decode_location: gds::CUDA_UPCAST.into(),
        };
        self.entries.push(entry(tensor, path, Dtype::F8E4M3, Some(transport)));
        Ok(())
    }

    /// Adds the manifest, whose digests are computed when it is read: its size does not depend on them.
    fn finish(mut self) -> Branch {
        let text = String::from_utf8(gds::render(&self.entries)).expect("JSON is UTF-8");
        // No text of the model's can hold this: its quotation marks are escaped.
        let marker = format!("\"checksum\": \"sha256:{DIGEST}\"");
        let mut parts = text.split(&marker);
        let mut content = ExtentMap::from_bytes(parts.next().unwrap_or_default().into());
        for (part, digest) in parts.zip(std::mem::take(&mut self.digests)) {
            content.push_inline(b"\"checksum\": \"sha256:");
            // That the tensor is within its blob was checked when the model was loaded.
            content.push_computed(digest, u64::MAX).expect("the codes of the same tensor were appended");
            content.push_inline(b"\"");
            content.push_inline(part.as_bytes());
        }
        self.file(gds::MANIFEST, content);
        self.branch
    }
}

fn entry(tensor: &Tensor, path: String, dtype: Dtype, transport: Option<Transport>) -> Entry {
    Entry { name: tensor.name.clone(), path, dtype, shape: tensor.shape.clone(), transport }
}
