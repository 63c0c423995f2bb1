//! `wmount ls`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};

use super::StoreArgs;
use super::output::{print, print_json, size, table};
use crate::digest::Digest;
use crate::error::{AtPath, Result};
use crate::model::Model;
use crate::store::{Found, Store};

/// List the models of the store
#[derive(Debug, clap::Args)]
pub struct LsArgs {
    /// What several models have in common instead: which models, and how many bytes are stored once for them
    #[arg(long)]
    shared: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) fn run(args: &LsArgs) -> Result<()> {
    let store = args.store.open()?;
    if args.shared {
        return shared(&store, args.json);
    }
    let models: Vec<Value> = store.find()?.iter().map(|found| describe(&store, found)).collect();
    if args.json {
        return print_json(&models);
    }
    let mut rows = vec![["MODEL", "TENSORS", "SHAPES", "SIZE", ""].map(String::from).to_vec()];
    rows.extend(models.iter().map(|model| {
        let number = |key: &str| model[key].as_u64().unwrap_or(0);
        let fault = model["damaged"].as_str().map(|fault| format!("damaged: {fault}")).unwrap_or_default();
        let name = model["model"].as_str().unwrap_or_default().to_owned();
        vec![name, number("tensors").to_string(), number("programs").to_string(), size(number("bytes")), fault]
    }));
    print(&table(&rows, &[1, 2, 3]))
}

/// Blobs by the models that name them. Small files such as equal configs count, too.
fn shared(store: &Store, as_json: bool) -> Result<()> {
    let mut users: BTreeMap<Digest, (u64, BTreeSet<String>)> = BTreeMap::new();
    for found in store.find()? {
        // What cannot be read is told by `ls`.
        let Ok(manifest) = store.manifest(&found) else { continue };
        for layer in manifest.blobs() {
            let (bytes, models) = users.entry(layer.digest).or_default();
            *bytes = layer.size;
            models.insert(found.name.to_string());
        }
    }
    let mut groups: BTreeMap<BTreeSet<String>, (u64, u64)> = BTreeMap::new();
    for (bytes, models) in users.into_values().filter(|(_, models)| models.len() > 1) {
        let group = groups.entry(models).or_default();
        *group = (group.0 + 1, group.1.saturating_add(bytes));
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    if as_json {
        let group = |(models, (blobs, bytes))| json!({"models": models, "blobs": blobs, "bytes": bytes});
        return print_json(&groups.into_iter().map(group).collect::<Vec<Value>>());
    }
    let mut rows = vec![["SIZE", "BLOBS", "MODELS"].map(String::from).to_vec()];
    rows.extend(groups.into_iter().map(|(models, (blobs, bytes))| {
        vec![size(bytes), blobs.to_string(), models.into_iter().collect::<Vec<_>>().join(", ")]
    }));
    print(&table(&rows, &[0, 1]))
}

fn describe(store: &Store, found: &Found) -> Value {
    let path = found.name.tree_path();
    match store.load(found) {
        Ok(model) => json!({
            "model": found.name.to_string(),
            "path": path,
            "tensors": model.tensors.len() + model.other_tensors.len(),
            "programs": model.programs().count(),
            "files": model.files.len(),
            "bytes": blobs(&model).values().sum::<u64>(),
            "damaged": damage(store, &model),
        }),
        Err(error) => json!({
            "model": found.name.to_string(),
            "path": path,
            "tensors": null,
            "programs": null,
            "files": null,
            "bytes": null,
            "damaged": error.to_string(),
        }),
    }
}

/// The blobs of a model with their lengths.
fn blobs(model: &Model) -> HashMap<Digest, u64> {
    let all = model.tensors.iter().chain(&model.other_tensors).map(|tensor| (tensor.blob, tensor.blob_len));
    let mut blobs: HashMap<_, _> = all.chain(model.files.iter().map(|file| (file.blob, file.len))).collect();
    for (digest, len) in model.foreign.iter().flat_map(|foreign| &foreign.blobs) {
        blobs.entry(*digest).or_insert(*len);
    }
    blobs
}

/// What can be seen to be wrong with a model without reading its blobs.
pub(super) fn damage(store: &Store, model: &Model) -> Option<String> {
    // What nobody could read is no part of the sum, but the reason may be that it is short or missing.
    let unread = model.defects.iter().filter_map(|defect| defect.unread);
    let damage = blobs(model).into_iter().chain(unread).find_map(|(digest, len)| fault(store, &digest, len));
    damage.or_else(|| model.defects.first().map(ToString::to_string))
}

/// What is wrong with a blob, which is opened as a mount does unless it is plainly what it should be.
fn fault(store: &Store, digest: &Digest, len: u64) -> Option<String> {
    let is_plain = |found: fs::Metadata| found.is_file() && found.mode() & 0o004 != 0 && found.len() == len;
    if fs::symlink_metadata(store.blob_path(digest)).is_ok_and(is_plain) {
        return None;
    }
    match store.blob_file(digest).and_then(|blob| blob.metadata().at(store.blob_path(digest))) {
        Ok(found) if found.len() == len => None,
        Ok(found) => Some(format!("blob {digest} has {} bytes, its manifest says {len}", found.len())),
        Err(error) => Some(error.to_string()),
    }
}
