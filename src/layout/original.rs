//! `original/<model>/<source>/...`: what was imported, byte for byte.

use super::{Anchor, Branch, Files, Layout, model_dir, source_branch};
use crate::error::Result;
use crate::model::{Model, ModelName};

pub(super) struct Original;

impl Layout for Original {
    fn name(&self) -> &'static str {
        "original"
    }

    fn expresses(&self, model: &Model) -> Result<(), String> {
        if model.sources.is_empty() { Err("it was not imported by wmount".into()) } else { Ok(()) }
    }

    fn anchors(&self, _name: &ModelName, path: &str) -> Vec<Anchor> {
        model_dir(path)
    }

    fn plan(&self, model: &Model, _files: Files<'_>) -> Result<Vec<Branch>> {
        let mut branch = Branch::dir();
        for source in &model.sources {
            let mut content = source_branch(source);
            // A source that is a file is not put into a directory of its own name.
            if source.is_file()
                && let Branch::Dir(children, _) = &mut content
                && let Some(file) = children.remove(&source.name)
            {
                content = file;
            }
            if let Some(place) = branch.place(&source.name) {
                *place = content;
            }
        }
        Ok(vec![branch])
    }
}
