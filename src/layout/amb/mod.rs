//! `amb/<model>.amb`: one file with the model's tensors in order of name, its config and its tokenizer.

mod config;
mod tokenizer;

use super::{Anchor, AnchorKind, Branch, Files, Layout, VirtualFile};
use crate::error::{Error, Result};
use crate::format::amb::{self, Sections};
use crate::model::{Model, ModelName};

pub(super) struct Amb;

impl Layout for Amb {
    fn name(&self) -> &'static str {
        "amb"
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        if model.tensors().is_empty() {
            return Err("it has no tensors".into());
        }
        model.tensors().iter().find_map(amb::refusal).map_or(Ok(()), Err)
    }

    fn anchors(&self, _name: &ModelName, path: &str) -> Vec<Anchor> {
        vec![Anchor { path: format!("{path}.amb"), kind: AnchorKind::File }]
    }

    fn plan(&self, model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
        let source = files.json(model, "config.json")?;
        let sections = Sections {
            metadata: config::metadata(model, source.as_ref()),
            config: source.as_ref().map_or_else(Vec::new, config::config),
            tokenizer: tokenizer::section(model, files, source.as_ref())?,
        };
        let content = amb::plan(&sections, model.tensors()).map_err(Error::Invalid)?;
        Ok(vec![Branch::File(VirtualFile::new(content, model.modified()))])
    }
}
