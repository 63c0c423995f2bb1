//! `wmount import PATH...`.

use std::path::PathBuf;
use std::process::ExitCode;

use super::StoreArgs;
use super::output::{Bar, count, print, print_json, size};
use crate::error::Result;
use crate::model::ModelName;
use crate::store::import::{BLOB_THRESHOLD, Counts, ImportReport, Options, import};

/// Copy models into the store, every tensor once
///
/// A PATH is a directory with safetensors files, a safetensors file, an .mlpackage, .mlmodel or .mlmodelc, or a directory
/// of those; which it is, its content says. Several packages are the shapes of one model; they join a model that is there.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// What to import
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// The model's name [default: the name of what is imported]
    #[arg(short, long, value_name = "NAME[:TAG]")]
    name: Option<String>,
    /// Put the new model in the place of one that is there
    #[arg(long)]
    replace: bool,
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
    let name = args.name.as_deref().map(str::parse::<ModelName>).transpose()?;
    if name.is_none() && args.paths.len() > 1 {
        super::output::complain(&crate::error::Error::Invalid(
            "several paths make one model: say its name with -n NAME".into(),
        ));
        return Ok(ExitCode::from(2));
    }
    let bar = Bar::new("importing");
    let options = Options { name, replace: args.replace, blob_threshold: Some(args.blob_threshold) };
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

fn text(report: &ImportReport) -> String {
    let counts = |counts: &Counts| {
        format!("{}, {}, {}", count(counts.tensors, "tensor"), count(counts.files, "file"), size(counts.bytes))
    };
    let mut text = format!("{}: {}\n", report.model, report.sources.join(", "));
    text += &format!("  added          {}\n", counts(&report.added));
    text += &format!("  already there  {} saved\n", counts(&report.present));
    for path in &report.skipped {
        text += &format!("  not imported   {}\n", path.display());
    }
    text
}
