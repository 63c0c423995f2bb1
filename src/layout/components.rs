//! Components: directories of a model with tensors of their own, as `text_encoder/` and `vae/` of an image model.
//!
//! A component is a directory in which the model has a JSON file; `text_encoder/x` is the tensor `x` of `text_encoder`, and
//! `draft.x` that of `draft`, unless there is `draft/x`. Of directories within each other the innermost has the tensor.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::model::{Model, Tensor};

/// A tensor under the name that it has in its component.
pub(super) struct Named<'a> {
    pub name: String,
    pub tensor: &'a Tensor,
}

/// The directories that can be components.
fn dirs(model: &Model) -> BTreeSet<&str> {
    let json = model.files.iter().map(|file| file.path.as_str()).filter(|path| path.ends_with(".json"));
    json.filter_map(|path| Some(path.rsplit_once('/')?.0)).collect()
}

/// The tensors by component; the model proper is the component without a name.
pub(super) fn components(model: &Model) -> BTreeMap<&str, Vec<Named<'_>>> {
    let dirs = dirs(model);
    let taken: HashSet<&str> = model.tensors().iter().filter_map(|tensor| tensor.name.strip_prefix("draft/")).collect();
    let mut components: BTreeMap<&str, Vec<Named<'_>>> = BTreeMap::new();
    for tensor in model.tensors() {
        let draft = tensor.name.strip_prefix("draft.").filter(|name| !taken.contains(name));
        let draft = draft.and_then(|name| Some((*dirs.get("draft")?, name)));
        let slashes = tensor.name.match_indices('/').rev();
        let component = slashes.filter_map(|(at, _)| Some((*dirs.get(&tensor.name[..at])?, &tensor.name[at + 1..])));
        let (component, name) = draft.or(component.into_iter().next()).unwrap_or(("", &tensor.name));
        components.entry(component).or_default().push(Named { name: name.into(), tensor });
    }
    components
}

/// The tensors of each component under their names there, in order of name; `None` if the model has no components.
pub(super) fn split(model: &Model) -> Option<Vec<(&str, Vec<Tensor>)>> {
    // Most models have none, and of a million tensors no name is to be copied to find that out.
    if dirs(model).is_empty() {
        return None;
    }
    let components = components(model);
    if components.keys().all(|component| component.is_empty()) {
        return None;
    }
    let renamed = |named: Named<'_>| Tensor { name: named.name, ..named.tensor.clone() };
    let part = |(component, tensors): (_, Vec<Named<'_>>)| {
        let mut tensors: Vec<Tensor> = tensors.into_iter().map(renamed).collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        (component, tensors)
    };
    Some(components.into_iter().map(part).collect())
}
