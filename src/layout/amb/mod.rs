//! `amb/<model>.amb`: one file with the model's tensors in order of name, its config and its tokenizer.
//!
//! A model that was imported as an AMB file shows that file. `amb/<model>@<variant>.amb` is cast or quantised when it is
//! read.

mod config;
mod metadata;
mod tokenizer;

use std::sync::Arc;

use super::overflow::overflow;
use super::{Anchor, AnchorKind, Branch, Files, Layout, VirtualFile};
use crate::error::{AtPath, Error, Result};
use crate::extent::ExtentMap;
use crate::format::amb::{self, Sections, Variant};
use crate::model::{Model, ModelName, Source, SourceKind};

/// The file, or one variant of it.
pub(super) struct Amb(Option<Variant>);

/// The layout.
pub(super) const AMB: Amb = Amb(None);

macro_rules! variants {
    ($($index:literal)*) => { [$((Variant::ALL[$index].0, &Amb(Some(Variant::ALL[$index].1)))),*] };
}

static VARIANTS: [(&str, &dyn Layout); Variant::ALL.len()] = variants!(0 1 2 3 4 5 6);

impl Layout for Amb {
    fn name(&self) -> &'static str {
        "amb"
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        if self.0.is_none() && imported(model).is_some() {
            return Ok(());
        }
        if model.tensors().is_empty() {
            return Err(match imported(model) {
                Some(_) => "some of its tensors are quantised already".into(),
                None => "it has no tensors".into(),
            });
        }
        model.tensors().iter().find_map(amb::refusal).map_or(Ok(()), Err)
    }

    fn anchors(&self, _name: &ModelName, path: &str) -> Vec<Anchor> {
        vec![Anchor { path: format!("{path}.amb"), kind: AnchorKind::File }]
    }

    fn plan(&self, model: &Model, files: Files<'_>) -> Result<Vec<Branch>> {
        let content = match (self.0, imported(model)) {
            (None, Some(source)) => source.files[0].content.clone(),
            (variant, Some(source)) => {
                let sections = sections_of(&source.files[0].content, files)?;
                Arc::new(amb::plan(&with_quant(sections, variant)?, model.tensors(), variant).map_err(Error::Invalid)?)
            }
            (variant, None) => {
                let source = files.json(model, "config.json")?;
                let sections = Sections {
                    metadata: metadata::section(model, files, source.as_ref())?,
                    config: source.as_ref().map_or_else(Vec::new, config::section),
                    tokenizer: tokenizer::section(model, files, source.as_ref())?,
                };
                Arc::new(amb::plan(&with_quant(sections, variant)?, model.tensors(), variant).map_err(Error::Invalid)?)
            }
        };
        Ok(vec![Branch::File(VirtualFile::new(content, model.modified()))])
    }

    fn variants(&self) -> &'static [(&'static str, &'static dyn Layout)] {
        if self.0.is_none() { &VARIANTS } else { &[] }
    }

    fn overflow(&self, model: &Model, files: Files<'_>) -> Result<Option<String>> {
        let Some(variant) = self.0 else { return Ok(None) };
        let casts = model.tensors().iter().filter_map(|tensor| Some((&*tensor.name, variant.computed(tensor)?)));
        overflow(casts, files)
    }
}

/// The AMB file that the model came from.
fn imported(model: &Model) -> Option<&Source> {
    model.sources(SourceKind::Amb).find(|source| source.is_file())
}

/// The sections of an imported file.
fn sections_of(content: &ExtentMap, files: Files<'_>) -> Result<Sections> {
    let bytes = files.bytes(content);
    let file = amb::parse(&bytes).at("the imported file")?;
    let section = |range: &std::ops::Range<u64>| files.part(content, range.clone());
    let tokenizer = ExtentMap::from_bytes(section(&file.tokenizer)?);
    Ok(Sections { metadata: section(&file.metadata)?, config: section(&file.config)?, tokenizer })
}

/// The sections of a variant: its config says how it is quantised.
fn with_quant(mut sections: Sections, variant: Option<Variant>) -> Result<Sections> {
    let Some(variant) = variant else { return Ok(sections) };
    let config = amb::json_section(sections.config.as_slice(), "config", &(0..sections.config.len() as u64));
    let mut config = config.at("the config section")?.unwrap_or_default();
    config.insert("quant".into(), variant.quant());
    sections.config = serde_json::Value::Object(config).to_string().into_bytes();
    Ok(sections)
}
