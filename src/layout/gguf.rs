//! `gguf/<model>.gguf` and `lmstudio/<publisher>/<model>/<model>.gguf`: GGUF files, each one whole blob of the store.
//!
//! In `gguf/` a model's other files stand beside it: `mmproj-<tag>.gguf` (the name that llama.cpp's `--mmproj` and LM
//! Studio look for), `adapter-<tag>.gguf`, `draft-<tag>.gguf`; of several, the second is `adapter-<tag>-2.gguf`.
//!
//! LM Studio finds files exactly two directories below its models directory, `publisher/model/file.gguf`, and takes every
//! projector of a directory for all models in it, so each tag has a directory of its own there. The publisher is the
//! namespace whatever the host, and for models without one `library`, which is ollama's own. llama.cpp's
//! `--models-dir` takes a directory of such directories, which is that of any publisher. Neither knows what an adapter is
//! from its place, and would offer it as a model: these are in `gguf/` alone.

use super::{Anchor, AnchorKind, Branch, Files, Layout, VirtualFile};
use crate::error::{Error, Result};
use crate::extent::ExtentMap;
use crate::model::{Model, ModelName, Role, WeightFile};

/// The two forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gguf {
    /// A file by the model's path.
    Plain,
    /// A directory for each model, two levels down.
    LmStudio,
}

impl Layout for Gguf {
    fn name(&self) -> &'static str {
        match self {
            Gguf::Plain => "gguf",
            Gguf::LmStudio => "lmstudio",
        }
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        let mut own = model.weights.iter().filter(|file| file.role == Role::Model).peekable();
        if own.peek().is_none() {
            return Err("it has no GGUF file of weights".into());
        }
        let faults: Option<Vec<&str>> = own.map(|file| file.fault.as_deref()).collect();
        faults.map_or(Ok(()), |faults| Err(format!("its weights are no GGUF file: {}", faults[0])))
    }

    fn anchors(&self, name: &ModelName, path: &str) -> Vec<Anchor> {
        match self {
            Gguf::Plain => {
                let (dir, _) = path.rsplit_once('/').unwrap_or(("", path));
                let own = Anchor { path: format!("{path}.gguf"), kind: AnchorKind::File };
                vec![own, Anchor { path: dir.into(), kind: AnchorKind::Beside }]
            }
            Gguf::LmStudio => {
                let path = format!("{}/{}-{}", name.namespace, name.name, name.tag);
                vec![Anchor { path, kind: AnchorKind::Dir }]
            }
        }
    }

    fn shows_damaged(&self) -> bool {
        true
    }

    fn plan(&self, model: &Model, _files: Files<'_>) -> Result<Vec<Branch>> {
        let stem = match self {
            Gguf::Plain => model.name.tag.clone(),
            Gguf::LmStudio => format!("{}-{}", model.name.name, model.name.tag),
        };
        let mut own = None;
        let mut others = Branch::dir();
        let mut counts = [0; 4];
        for file in model.weights.iter().filter(|file| file.fault.is_none()) {
            if *self == Gguf::LmStudio && matches!(file.role, Role::Adapter | Role::Draft) {
                continue;
            }
            let count = &mut counts[file.role as usize];
            *count += 1;
            match (file.role, *count) {
                (Role::Model, 1) => own = Some(shown(file, model)),
                (role, 1) => others.put(&format!("{}{stem}.gguf", prefix(role)), shown(file, model)),
                (role, count) => others.put(&format!("{}{stem}-{count}.gguf", prefix(role)), shown(file, model)),
            }
        }
        // The file was GGUF when the model was last looked at.
        let own = own.ok_or_else(|| {
            let first = model.weights.iter().find(|file| file.role == Role::Model);
            let fault = first.and_then(|file| Some((file.blob, file.fault.clone()?)));
            let damaged = |(digest, fault)| Error::Damaged { digest, fault };
            fault.map_or_else(|| Error::NotFound(format!("the weights of {}", model.name)), damaged)
        })?;
        Ok(match self {
            Gguf::Plain => vec![Branch::File(own), others],
            Gguf::LmStudio => {
                others.put(&format!("{stem}.gguf"), own);
                vec![others]
            }
        })
    }
}

fn shown(file: &WeightFile, model: &Model) -> VirtualFile {
    VirtualFile::new(ExtentMap::from_blob(file.blob, file.len), model.modified())
}

fn prefix(role: Role) -> &'static str {
    match role {
        Role::Model => "",
        Role::Projector => "mmproj-",
        Role::Adapter => "adapter-",
        Role::Draft => "draft-",
    }
}
