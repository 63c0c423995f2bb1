//! Views: each layout turns a model into a [`Branch`] of virtual files.
//!
//! A layout knows formats and models, but neither the store nor the tree's inodes. It is a pure function of the model
//! and its small files, so the same model gives the same bytes for ever.

mod amb;
mod coreml;
mod gds_export;
mod ollama;
mod original;
mod safetensors;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use crate::error::{Error, Result};
use crate::extent::{Blobs, ExtentMap};
use crate::model::{Model, ModelName, SmallFile, Source};

pub use coreml::{Shape, Unshared, shapes};

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
    /// A directory that all models of the layout share.
    Shared,
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
}

impl VirtualFile {
    /// A file with an inode of its own.
    pub fn new(content: ExtentMap, mtime: SystemTime) -> VirtualFile {
        VirtualFile { content: Arc::new(content), mtime, link: None }
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

    /// Puts a file at a plain path; what stands there already stays.
    pub fn put(&mut self, path: &str, file: VirtualFile) {
        if let Some(place @ Branch::Dir(_, None)) = self.place(path) {
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
        /// More than any config or tokenizer has.
        const MAX: u64 = 256 << 20;
        if file.len > MAX {
            return Err(Error::Invalid(format!("{:?} has {} bytes, more than {MAX}", file.path, file.len)));
        }
        ExtentMap::from_blob(file.blob, file.len).read_all(self.0)
    }

    /// A small file of the model parsed as a JSON object; `None` if the model has none or it is no object.
    pub fn json(&self, model: &Model, path: &str) -> Result<Option<serde_json::Map<String, serde_json::Value>>> {
        let Some(file) = model.file(path) else { return Ok(None) };
        Ok(serde_json::from_slice(&self.read(file)?).ok())
    }
}

/// How many layouts there are.
pub const COUNT: usize = 7;

/// Every layout, in order of name.
pub fn all() -> [&'static dyn Layout; COUNT] {
    [
        &amb::Amb,
        &coreml::CoreMl,
        &gds_export::GdsExport,
        &ollama::Ollama::Today,
        &ollama::Ollama::Seed,
        &original::Original,
        &safetensors::Safetensors,
    ]
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
