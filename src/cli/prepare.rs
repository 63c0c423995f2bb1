//! `wmount prepare MODEL@VARIANT`.

use serde_json::json;

use super::StoreArgs;
use super::output::{Bar, count, print, print_json, size};
use crate::error::{Error, Result};
use crate::model::ModelName;
use crate::prepare::{prepare, surveyed};
use crate::store::import::Progress;
use crate::tree::Tree;

/// Find out what a variant must know of its tensors, so that its first reader need not wait
///
/// What is found out is kept in the store: digests of encoded tensors, scales, masks. A variant that was not prepared
/// prepares itself when it is first opened.
#[derive(Debug, clap::Args)]
pub struct PrepareArgs {
    /// The model and one of its variants, such as llama@fp8
    #[arg(value_name = "MODEL@VARIANT")]
    variant: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) fn run(args: &PrepareArgs) -> Result<()> {
    let wrong = |what: String| Error::Invalid(format!("{:?}: {what}", args.variant));
    let known: Vec<&str> = super::all_variants().collect();
    let (model, variant) = args.variant.split_once('@').ok_or_else(|| wrong("takes MODEL@VARIANT".into()))?;
    if !known.contains(&variant) {
        return Err(wrong(format!("there is no such variant; there are {}", known.join(", "))));
    }
    let name: ModelName = model.parse()?;
    let store = std::sync::Arc::new(args.store.open()?);
    store.find_one(&name)?;
    store.keep_memos()?;
    let tree = Tree::new(&store, store.find()?, None, [].into());
    let entry = tree.entries().iter().find(|entry| entry.found.name == name);
    let nodes = entry.map_or_else(|| Ok(Vec::new()), |entry| entry.variant(variant))?;
    let surveys = surveyed(nodes.iter().map(|node| &**node));
    let bytes = surveys.iter().map(|survey| survey.input_len).sum();
    let bar = Bar::new("preparing");
    bar.begin(bytes);
    let outcome = prepare(&surveys, store.blobs(), &|bytes| bar.advance(bytes));
    bar.finish();
    outcome?;
    let tensors = surveys.len() as u64;
    if args.json {
        return print_json(&json!({"model": name.to_string(), "variant": variant, "tensors": tensors, "bytes": bytes}));
    }
    print(&format!("{name}@{variant}: {}, {}\n", count(tensors, "tensor"), size(bytes)))
}
