//! Views: each layout turns a model into a [`Branch`] of virtual files.
//!
//! A layout knows formats and models, but neither the store nor the tree's inodes. It is a pure function of the model
//! and its small files, so the same model gives the same bytes for ever.

mod amb;
mod components;
mod coreml;
mod gds_export;
mod gguf;
mod ollama;
mod original;
mod overflow;
mod safetensors;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use crate::error::{Error, Fault, Result};
use crate::extent::{Blobs, ExtentMap};
use crate::format::{Bytes, Form, json};
use crate::model::{Model, ModelName, SmallFile, Source};

pub use coreml::{Shape, Unshared, shapes};

/// Bytes of a small file or a part of one, at the most: more than any config or tokenizer has.
const MAX_SMALL: u64 = 128 << 20;

/// A view of models.
pub trait Layout: Send + Sync {
    /// Its directory below the mountpoint.
    fn name(&self) -> &'static str;

    /// Whether it can show the model, or why not.
    fn expresses(&self, model: &Model) -> Result<(), String>;

    /// Where below its directory a model stands, known before the model is read.
    ///
    /// `path` is the model's path in the tree, which differs from that of its name where two models would take one.
    fn anchors(&self, name: &ModelName, path: &str) -> Vec<Anchor>;

    /// What stands at each anchor, in their order.
    fn plan(&self, model: &Model, files: Files<'_>) -> Result<Vec<Branch>>;

    /// Whether it shows what can be read of a model that [`Model::check_whole`] refuses.
    fn shows_damaged(&self) -> bool {
        false
    }

    /// Directories that are there even without a model.
    fn fixed_dirs(&self) -> &'static [&'static str] {
        &[]
    }

    /// The values that would become infinite if it showed the model, in words; finding out may read all tensors.
    fn overflow(&self, _model: &Model, _files: Files<'_>) -> Result<Option<String>> {
        Ok(None)
    }

    /// Its variants by name: each a layout whose models stand at `path@name`.
    fn variants(&self) -> &'static [(&'static str, &'static dyn Layout)] {
        &[]
    }
}

/// A place below a layout's directory where a model stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anchor {
    /// Path below the layout's directory.
    pub path: String,
    /// What is there.
    pub kind: AnchorKind,
}

/// What stands at an [`Anchor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorKind {
    /// A file of the model's own.
    File,
    /// A directory of the model's own.
    Dir,
    /// A directory that all models of the layout share, and in which every name is that of a blob.
    Shared,
    /// A directory in which the model's files stand beside those of others; their names are known when it is planned.
    Beside,
}

/// Part of a tree.
#[derive(Debug, Clone)]
pub enum Branch {
    /// A directory; without a time it gets that of the newest entry.
    Dir(BTreeMap<String, Branch>, Option<SystemTime>),
    /// A file.
    File(VirtualFile),
}

/// A file before it has an inode number.
#[derive(Debug, Clone)]
pub struct VirtualFile {
    /// Its bytes.
    pub content: Arc<ExtentMap>,
    /// Its time.
    pub mtime: SystemTime,
    /// Files of one model and layout with the same link and content are one inode, with the time of the first.
    pub link: Option<&'static str>,
    /// Whether it is as stored because the variant does not compute it.
    pub fallback: bool,
}

impl VirtualFile {
    /// A file with an inode of its own.
    pub fn new(content: impl Into<Arc<ExtentMap>>, mtime: SystemTime) -> VirtualFile {
        VirtualFile { content: content.into(), mtime, link: None, fallback: false }
    }
}

impl Branch {
    /// An empty directory.
    pub fn dir() -> Branch {
        Branch::Dir(BTreeMap::new(), None)
    }

    /// The entry at a plain path below this directory, its directories made as needed.
    ///
    /// `None` if a file stands where a directory is needed.
    pub fn place(&mut self, path: &str) -> Option<&mut Branch> {
        path.split('/').try_fold(self, |branch, part| match branch {
            Branch::Dir(children, _) => Some(children.entry(part.to_owned()).or_insert_with(Branch::dir)),
            Branch::File(_) => None,
        })
    }

    /// Puts another directory's entries into the one at a plain path, or here if that is empty; what stands there stays.
    pub fn graft(&mut self, path: &str, other: Branch) {
        let place = if path.is_empty() { Some(self) } else { self.place(path) };
        if let (Some(Branch::Dir(children, _)), Branch::Dir(others, _)) = (place, other) {
            for (name, branch) in others {
                children.entry(name).or_insert(branch);
            }
        }
    }

    /// Puts a file at a plain path; what stands there already stays.
    pub fn put(&mut self, path: &str, file: VirtualFile) {
        if let Some(place) = self.place(path)
            && matches!(place, Branch::Dir(children, None) if children.is_empty())
        {
            *place = Branch::File(file);
        }
    }
}

/// The small files of a model, as a layout reads them.
#[derive(Clone, Copy)]
pub struct Files<'a>(pub &'a dyn Blobs);

impl Files<'_> {
    /// The content of a small file.
    pub fn read(&self, file: &SmallFile) -> Result<Vec<u8>> {
        if file.len > MAX_SMALL {
            return Err(Error::Invalid(format!("{:?} has {} bytes, more than {MAX_SMALL}", file.path, file.len)));
        }
        // The length is a claim: nothing is allocated before its last byte was read.
        if let Some(last) = file.len.checked_sub(1) {
            self.0.read_exact(&file.blob, last, &mut [0])?;
        }
        ExtentMap::from_blob(file.blob, file.len).read_all(self.0)
    }

    /// A virtual file as a parser sees it.
    pub fn bytes<'b>(&'b self, content: &'b ExtentMap) -> impl Bytes + 'b {
        MapBytes { map: content, blobs: self.0 }
    }

    /// A part of a virtual file, if it is small enough to be held in memory.
    pub fn part(&self, content: &ExtentMap, range: Range<u64>) -> Result<Vec<u8>> {
        let len = range.end.saturating_sub(range.start);
        if len > MAX_SMALL {
            return Err(Error::Invalid(format!("{len} bytes at {} are more than {MAX_SMALL}", range.start)));
        }
        let bytes = self.bytes(content).get(range.start, len as usize).map(Cow::into_owned);
        bytes.map_err(|fault| Error::Invalid(fault.to_string()))
    }

    /// A small file of the model parsed as a JSON object; `None` if the model has none. One that is no object, or has
    /// more values than any config or tokenizer, is passed over with a log line.
    pub fn json(&self, model: &Model, path: &str) -> Result<Option<serde_json::Map<String, serde_json::Value>>> {
        let Some(file) = model.file(path) else { return Ok(None) };
        let object = json::config(&self.read(file)?);
        let told = object.inspect_err(|fault| tracing::warn!("model {}: {path} is passed over: {fault}", model.name));
        Ok(told.ok())
    }

    /// Why layouts pass over each of a model's small files, if they do, in the order of the files.
    pub fn faults(&self, model: &Model) -> Vec<Option<String>> {
        /// What they read, be it of the model proper or of a component.
        const READ: [&str; 4] = ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
        /// Bytes of all that is looked at, each blob once.
        const MOST: u64 = 4 * MAX_SMALL;
        let (mut known, mut looked) = (HashMap::new(), 0u64);
        let mut fault = |file: &SmallFile| {
            looked = looked.saturating_add(file.len.min(MAX_SMALL));
            if looked > MOST {
                return Some(format!("it and what comes before it have more than {MOST} bytes"));
            }
            match self.read(file) {
                Ok(text) => json::config(&text).err().map(|fault| fault.to_string()),
                Err(error) => Some(error.to_string()),
            }
        };
        let mut of_file = |file: &SmallFile| {
            let is_read = file.path.rsplit('/').next().is_some_and(|name| READ.contains(&name));
            is_read.then(|| known.entry((file.blob, file.len)).or_insert_with(|| fault(file)).clone()).flatten()
        };
        model.files.iter().map(&mut of_file).collect()
    }
}

/// A virtual file as a parser sees it.
struct MapBytes<'a> {
    map: &'a ExtentMap,
    blobs: &'a dyn Blobs,
}

impl Bytes for MapBytes<'_> {
    fn len(&self) -> u64 {
        self.map.size()
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        self.check_range(offset, len)?;
        let mut bytes = vec![0; len];
        let read = self.map.read(self.blobs, offset, &mut bytes);
        read.map(|_| Cow::Owned(bytes)).map_err(|error| Fault::new(offset, error.to_string()))
    }
}

/// How many layouts there are.
pub const COUNT: usize = 10;

/// Every layout, in order of name.
pub fn all() -> [&'static dyn Layout; COUNT] {
    [
        &amb::AMB,
        &coreml::CoreMl,
        &gds_export::GDS_EXPORT,
        &gguf::Gguf::Plain,
        &gguf::Gguf::LmStudio,
        &ollama::Ollama::Plain,
        &ollama::Ollama::In(Form::Seed),
        &ollama::Ollama::In(Form::Today),
        &original::Original,
        &safetensors::Safetensors,
    ]
}

/// The layout that has every model in this form, stored so or not.
pub fn of_form(form: Form) -> &'static dyn Layout {
    match form {
        Form::Today => &ollama::Ollama::In(Form::Today),
        Form::Seed => &ollama::Ollama::In(Form::Seed),
    }
}

/// The anchor of layouts that give each model a directory.
fn model_dir(path: &str) -> Vec<Anchor> {
    vec![Anchor { path: path.into(), kind: AnchorKind::Dir }]
}

/// A source's files and directories, byte for byte.
fn source_branch(source: &Source) -> Branch {
    let mut branch = Branch::dir();
    for file in &source.files {
        branch.put(&file.path, VirtualFile::new(file.content.clone(), file.mtime));
    }
    for dir in &source.dirs {
        if let Some(Branch::Dir(_, mtime)) = branch.place(&dir.path) {
            *mtime = Some(dir.mtime);
        }
    }
    branch
}
