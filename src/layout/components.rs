//! Components: directories of a model with tensors of their own, as `text_encoder/` and `vae/` of an image model.
//!
//! A component is a directory in which the model has a JSON file; `text_encoder/x` is the tensor `x` of `text_encoder`, and
//! `draft.x` that of `draft`. Of directories within each other the innermost has the tensor.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Model, Tensor};

/// A tensor under the name that it has in its component.
pub(super) struct Named<'a> {
    pub name: String,
    pub tensor: &'a Tensor,
}

/// The tensors by component; the model proper is the component without a name.
pub(super) fn components(model: &Model) -> BTreeMap<&str, Vec<Named<'_>>> {
    let json = model.files.iter().map(|file| file.path.as_str()).filter(|path| path.ends_with(".json"));
    let dirs: BTreeSet<&str> = json.filter_map(|path| Some(path.rsplit_once('/')?.0)).collect();
    let mut components: BTreeMap<&str, Vec<Named<'_>>> = BTreeMap::new();
    for tensor in model.tensors() {
        let draft = tensor.name.strip_prefix("draft.").and_then(|name| Some((*dirs.get("draft")?, name)));
        let slashes = tensor.name.match_indices('/').rev();
        let component = slashes.filter_map(|(at, _)| Some((*dirs.get(&tensor.name[..at])?, &tensor.name[at + 1..])));
        let (component, name) = draft.or(component.into_iter().next()).unwrap_or(("", &tensor.name));
        components.entry(component).or_default().push(Named { name: name.into(), tensor });
    }
    components
}

/// The components as models of their own, with what the model says of them; `None` if the model has none.
pub(super) fn split(model: &Model) -> Option<Vec<(String, Model)>> {
    let components = components(model);
    if components.keys().all(|component| component.is_empty()) {
        return None;
    }
    let part = |(component, tensors): (&str, Vec<Named<'_>>)| {
        let mut tensors: Vec<Tensor> =
            tensors.into_iter().map(|named| Tensor { name: named.name, ..named.tensor.clone() }).collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let inside = |path: &str| match component {
            "" => Some(path.to_owned()),
            _ => Some(path.strip_prefix(component)?.strip_prefix('/')?.to_owned()),
        };
        let files = model.files.iter();
        let files =
            files.filter_map(|file| Some(crate::model::SmallFile { path: inside(&file.path)?, ..file.clone() }));
        let files = files.collect();
        let model = Model {
            name: model.name.clone(),
            tensors,
            other_tensors: Vec::new(),
            files,
            weights: Vec::new(),
            sources: Vec::new(),
            written: model.modified(),
            foreign: None,
            defects: model.defects.clone(),
        };
        (component.to_owned(), model)
    };
    Some(components.into_iter().map(part).collect())
}
