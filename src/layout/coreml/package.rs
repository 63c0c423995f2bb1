//! One package: which of its files is what, and how it is shown.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use super::super::{Branch, Files, VirtualFile, source_branch};
use super::function::Function;
use crate::budget::Budget;
use crate::extent::ExtentMap;
use crate::format::mlpackage::{self, MODEL_PATH, Manifest, WEIGHTS_PATH};
use crate::model::{Source, SourceFile, SourceKind};

const MANIFEST: &str = "Manifest.json";

/// A package, or a bare model that is shown as one.
pub(super) struct Package<'a> {
    pub source: &'a Source,
    /// The program.
    pub program: &'a SourceFile,
    /// The weight files by name.
    pub weights: BTreeMap<&'a str, &'a SourceFile>,
    /// Path of the directory of the weight files.
    weights_dir: String,
    /// `None` for a bare model.
    manifest: Option<Manifest>,
}

/// What of a package is not as it was imported.
#[derive(Default)]
pub(super) struct Changes {
    /// The program.
    pub program: Option<ExtentMap>,
    /// Weight files by name: other or new ones, or `None` for one that nothing refers to any more.
    pub weights: BTreeMap<String, Option<(Arc<ExtentMap>, SystemTime)>>,
    /// Which packages it shares its weight files with; `None` if it has none.
    pub group: Option<usize>,
    /// Its function, if it has only one.
    pub function: Option<Function>,
}

impl<'a> Package<'a> {
    /// The package that a source is; `None` if it is compiled, or damaged so far that its program cannot be found, or more
    /// than the budget is for.
    pub fn find(source: &'a Source, files: Files<'_>, budget: &Budget) -> Option<Package<'a>> {
        /// Bytes of memory that a byte of a manifest can take: it is held as it was read, and shown as it is written anew.
        const MANIFEST_BYTES: u64 = 8;
        if budget.over().is_some() {
            return None;
        }
        let file = |path: &str| source.files.iter().find(|file| file.path == path);
        let (program, manifest) = match source.kind {
            SourceKind::Mlmodel => (source.files.first()?, None),
            SourceKind::Mlpackage => {
                let content = &file(MANIFEST)?.content;
                let read = match content.size() {
                    size if size > mlpackage::MAX_MANIFEST => Err(format!("has {size} bytes, too many for what it is")),
                    size => budget
                        .memory(MANIFEST_BYTES * size)
                        .map_err(|fault| fault.to_string())
                        .and_then(|()| files.part(content, 0..size).map_err(|error| error.to_string())),
                };
                let manifest = read.and_then(|json| mlpackage::parse(&json).map_err(|fault| fault.to_string()));
                let manifest = manifest.inspect_err(|why| tracing::warn!("{}: {MANIFEST}: {why}", source.name)).ok()?;
                (file(&format!("Data/{}", manifest.model_path()?))?, Some(manifest))
            }
            _ => return None,
        };
        let weights_dir = match &manifest {
            Some(_) => program.path.rsplit_once('/').map_or("weights".into(), |(dir, _)| format!("{dir}/weights")),
            None => format!("Data/{WEIGHTS_PATH}"),
        };
        let name = |file: &'a SourceFile| file.path.strip_prefix(&weights_dir)?.strip_prefix('/');
        let weights = source.files.iter().filter_map(|file| Some((name(file)?, file)));
        let weights = weights.filter(|(name, _)| name.ends_with(".bin") && !name.contains('/')).collect();
        Some(Package { source, program, weights, weights_dir, manifest })
    }

    /// The package as it is shown.
    pub fn branch(&self, changes: &Changes) -> Branch {
        let bare = self.manifest.is_none();
        let mut branch = if bare { Branch::dir() } else { source_branch(self.source) };
        let program = changes.program.clone().map_or_else(|| self.program.content.clone(), Arc::new);
        let identity = program.fingerprint();
        let path = if bare { format!("Data/{MODEL_PATH}") } else { self.program.path.clone() };
        replace(&mut branch, &path, Some(VirtualFile::new(program, self.program.mtime)));
        let mut names: Vec<&str> = self.weights.keys().copied().collect();
        for (name, file) in &changes.weights {
            names.retain(|other| other != name);
            names.extend(file.is_some().then_some(name.as_str()));
            let file = file.as_ref().map(|(content, mtime)| VirtualFile {
                content: content.clone(),
                mtime: *mtime,
                link: None,
                fallback: false,
            });
            replace(&mut branch, &format!("{}/{name}", self.weights_dir), file);
        }
        // coremltools finds the weights by an item for their directory alone.
        let manifest = match &self.manifest {
            None => Some(Manifest::new(&identity, !names.is_empty())),
            Some(manifest) => {
                let dir = self.weights_dir.strip_prefix("Data/").filter(|_| !names.is_empty());
                dir.and_then(|dir| manifest.with_weights(&identity, dir))
            }
        };
        if let Some(manifest) = manifest {
            let imported = self.source.files.iter().find(|file| file.path == MANIFEST);
            let mtime = imported.map_or(self.program.mtime, |file| file.mtime);
            let json = ExtentMap::from_bytes(manifest.render());
            replace(&mut branch, MANIFEST, Some(VirtualFile::new(json, mtime)));
        }
        branch
    }
}

/// Puts a file where another may stand, or takes that away.
fn replace(branch: &mut Branch, path: &str, file: Option<VirtualFile>) {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    let dir = if dir.is_empty() { Some(branch) } else { branch.place(dir) };
    if let Some(Branch::Dir(children, _)) = dir {
        match file {
            Some(file) => _ = children.insert(name.to_owned(), Branch::File(file)),
            None => _ = children.remove(name),
        }
    }
}
