//! `wmount prepare MODEL@VARIANT`.

use serde_json::json;

use super::StoreArgs;
use super::output::{Bar, count, print, print_json, size};
use super::variant::{Named, Variant};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::format::Form;
use crate::layout;
use crate::model::{ModelName, Tensor};
use crate::prepare::{form_digests, prepare, surveyed};
use crate::store::import::Progress;
use crate::tree::Tree;

/// Find out what a variant must know of its tensors, so that its first reader need not wait
///
/// What is found out is kept in the store: digests of encoded tensors, scales, masks. A variant that was not prepared
/// prepares itself when it is first opened.
///
/// MODEL@today and MODEL@seed compute the digests that the tensors of a model of another program have in ollama's other
/// form: today's, with names in the blobs, or the first one. Only then is the model in ollama@today/ or ollama@seed/.
#[derive(Debug, clap::Args)]
pub struct PrepareArgs {
    /// The model and one of its variants, such as llama@fp8
    #[arg(value_name = "MODEL@VARIANT", value_parser = wanted)]
    wanted: (ModelName, Variant),
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) fn run(args: &PrepareArgs) -> Result<()> {
    match args.wanted.1 {
        Variant::Form(form) => prepare_form(args, &args.wanted.0, form),
        Variant::Computed(variant) => prepare_variant(args, &args.wanted.0, variant),
    }
}

/// A model and its variant, which must be named.
fn wanted(text: &str) -> Result<(ModelName, Variant), String> {
    let Named { model, variant } = text.parse()?;
    let which = || format!("say which variant, such as {model}@fp8 or {model}@seed");
    Ok((model.clone(), variant.ok_or_else(which)?))
}

/// Finds out what a computed variant must know of its tensors.
fn prepare_variant(args: &PrepareArgs, name: &ModelName, variant: &str) -> Result<()> {
    let store = std::sync::Arc::new(args.store.open()?);
    store.find_asked(name)?;
    store.keep_memos()?;
    let tree = Tree::new(&store, store.survey()?, None, [].into());
    let entry = tree.entries().iter().find(|entry| entry.found.name == *name);
    let nodes = entry.map_or_else(|| Ok(Vec::new()), |entry| entry.variant(variant))?;
    let surveys = surveyed(nodes.iter().map(|node| &**node));
    let bytes = surveys.iter().map(|survey| survey.input_len).sum();
    let bar = Bar::new("preparing");
    bar.begin(bytes);
    let outcome = prepare(&surveys, store.blobs(), &|survey| bar.advance(survey.input_len));
    bar.finish();
    outcome?;
    report(args, name, variant, surveys.len(), bytes)
}

fn report(args: &PrepareArgs, name: &ModelName, variant: &str, tensors: usize, bytes: u64) -> Result<()> {
    if args.json {
        return print_json(&json!({"model": name.to_string(), "variant": variant, "tensors": tensors, "bytes": bytes}));
    }
    let what = match tensors {
        0 => "nothing is left to be found out".into(),
        _ => format!("{}, {}", count(tensors as u64, "tensor"), size(bytes)),
    };
    print(&format!("{name}@{variant}: {what}\n"))
}

/// Computes the digests of a form that is not the model's own.
fn prepare_form(args: &PrepareArgs, name: &ModelName, form: Form) -> Result<()> {
    let store = args.store.open()?;
    let found = store.find_asked(name)?;
    let model = store.load(&found)?;
    model.check_whole()?;
    let layout = layout::of_form(form);
    // Whether it can be shown at all does not depend on what the digests are.
    let mut shown = model.clone();
    let unknown = |tensor: &&mut Tensor| form.digest(tensor).is_none();
    shown.tensors.iter_mut().filter(unknown).for_each(|tensor| form.set_digest(tensor, Digest::of(b"")));
    layout.expresses(&shown).map_err(|why| Error::Invalid(format!("{}/ cannot show {name}: {why}", layout.name())))?;
    let missing: Vec<&Tensor> = model.tensors.iter().filter(|tensor| form.digest(tensor).is_none()).collect();
    let bytes = missing.iter().map(|tensor| tensor.blob_len).sum();
    if !missing.is_empty() {
        let bar = Bar::new("preparing");
        bar.begin(bytes);
        let digests = form_digests(&model.tensors, form, store.blobs(), &|bytes| bar.advance(bytes));
        bar.finish();
        store.set_form(&found, form, &digests?)?;
    }
    report(args, name, form.name(), missing.len(), bytes)
}
