//! `wmount import PATH...`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::StoreArgs;
use super::output::{Bar, count, print, print_json, size};
use crate::error::{AtPath, Error, Result, quoted};
use crate::front::mounts;
use crate::model::ModelName;
use crate::store::import::{
    BLOB_THRESHOLD, CopyOptions, Counts, ImportReport, Options, copy, import, is_store, name_of_split,
};

/// Copy models into the store, every tensor once
///
/// A PATH is a directory with safetensors files, a safetensors file, an AMB or GGUF file, an .mlpackage, .mlmodel or
/// .mlmodelc, a gds_export, or a directory of packages; which it is, its content says. Several packages are the shapes of
/// one model; with -n they join one that is there, and so do projectors and adapters in GGUF. Of a split GGUF file, any
/// part stands for all. If PATH is a store, such as ~/.ollama/models, its models are copied, with their blobs cloned or
/// linked where the file system can.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// What to import
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// The model's name [default: the name of what is imported]
    #[arg(short, long, value_name = "NAME[:TAG]")]
    name: Option<ModelName>,
    /// Of a store, this model only; may be repeated
    #[arg(short, long = "model", value_name = "MODEL")]
    models: Vec<ModelName>,
    /// Put the new model in the place of one that is there, with all that one has
    #[arg(long)]
    replace: bool,
    /// Follow links in PATH that lead out of it
    ///
    /// Within what is imported, and from a snapshot of a hub cache to its blobs, links are followed in any case. Others
    /// are refused: a model that came with a link to your keys would take them into the store, which all may read.
    #[arg(long)]
    follow_links: bool,
    /// Store constants inside Core ML programs as tensors from this size on
    #[arg(long, value_name = "BYTES", default_value_t = BLOB_THRESHOLD)]
    blob_threshold: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) fn run(args: &ImportArgs) -> Result<ExitCode> {
    let misuse = |what: &str| {
        super::output::complain(&Error::Invalid(what.into()));
        Ok(ExitCode::from(2))
    };
    if let [path] = &args.paths[..]
        && is_store(path)
    {
        return copy_store(args, path);
    }
    if let Some(store) = args.paths.iter().find(|path| is_store(path)) {
        return misuse(&format!("{}: is a store, which is imported by itself", store.display()));
    }
    if !args.models.is_empty() {
        return misuse("--model chooses from a store, and what is to be imported is none");
    }
    if args.name.is_none() && args.paths.len() > 1 && name_of_split(&args.paths).is_none() {
        return misuse("several paths make one model: say its name with -n NAME");
    }
    let bar = Bar::new("importing");
    let options = Options {
        name: args.name.clone(),
        replace: args.replace,
        follow_links: args.follow_links,
        blob_threshold: Some(args.blob_threshold),
        ..Options::default()
    };
    let report = import(&args.store.path()?, &args.paths, &options, &bar);
    bar.finish();
    let report = report?;
    if args.json {
        print_json(&report)?
    } else {
        print(&text(&report))?
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses what a mount shows in the form of a store: it has no recipes, so `original/` would be lost.
fn check_is_no_view(path: &Path) -> Result<()> {
    let Some(mount) = mounts::ours_with(path).at(path)? else { return Ok(()) };
    let store = if is_store(&mount.source) {
        format!("import the store itself, {}", quoted(&mount.source))
    } else {
        "import the store that it shows".into()
    };
    Err(Error::Invalid(format!("{}: is a view on a mount, without the original files: {store}", path.display())))
}

fn copy_store(args: &ImportArgs, from: &Path) -> Result<ExitCode> {
    check_is_no_view(from)?;
    let bar = Bar::new("copying");
    let options = CopyOptions { models: args.models.clone(), name: args.name.clone(), replace: args.replace };
    let report = copy(&args.store.path()?, from, &options, &bar);
    bar.finish();
    let report = report?;
    if args.json {
        print_json(&report)?;
    } else {
        print(&report.models.iter().map(text).collect::<String>())?;
    }
    for fault in &report.failed {
        super::output::complain(&Error::Invalid(fault.clone()));
    }
    Ok(if report.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(report: &ImportReport) -> String {
    let counts = |counts: &Counts| {
        format!("{}, {}, {}", count(counts.tensors, "tensor"), count(counts.files, "file"), size(counts.bytes))
    };
    let sources = if report.formats.is_empty() { &report.sources } else { &report.formats };
    let mut text = format!("{}: {}\n", report.model, sources.join(", "));
    for (what, list) in [("joins", &report.joined), ("components", &report.components)] {
        if !list.is_empty() {
            text += &format!("  {what:<13}  {}\n", list.join(", "));
        }
    }
    if !report.dropped.is_empty() {
        text += &format!("  dropped        {}; gc removes what no other model has\n", report.dropped.join(", "));
    }
    text += &format!("  added          {}\n", counts(&report.added));
    // Parts of recipes are neither.
    let present = match report.present {
        Counts { tensors: 0, files: 0, bytes: 0 } => "nothing".into(),
        Counts { tensors: 0, files: 0, bytes } => format!("{} saved", size(bytes)),
        present => format!("{} saved", counts(&present)),
    };
    text += &format!("  already there  {present}\n");
    for path in &report.kept {
        text += &format!("  kept as files  {path}; imported by itself, it is shown in its layouts\n");
    }
    for path in &report.skipped {
        text += &format!("  not imported   {}\n", path.display());
    }
    text
}
