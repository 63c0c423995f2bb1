//! `wmount cp MODEL NAME`.

use std::process::ExitCode;

use serde_json::json;

use super::StoreArgs;
use super::output::{complain, print, print_json};
use crate::error::{Error, Result};
use crate::model::ModelName;
use crate::store::import::{CopyOptions, Progress, copy};

/// Give a model another name, too; with `rm` of the first it is renamed
///
/// Only a manifest is written: both names are of the same blobs.
#[derive(Debug, clap::Args)]
pub struct CpArgs {
    /// The model
    model: ModelName,
    /// Its other name
    #[arg(value_name = "NAME[:TAG]")]
    name: ModelName,
    /// Put it in the place of a model that is there
    #[arg(long)]
    replace: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) fn run(args: &CpArgs) -> Result<ExitCode> {
    // One that is not there must not be made by a copy.
    let root = args.store.open()?.root().to_owned();
    let options =
        CopyOptions { models: vec![args.model.clone()], name: Some(args.name.clone()), replace: args.replace };
    let report = copy(&root, &root, &options, &Silent)?;
    if let Some(fault) = report.failed.first() {
        complain(&Error::Invalid(fault.clone()));
        return Ok(ExitCode::FAILURE);
    }
    let (from, to) = (args.model.to_string(), args.name.to_string());
    if args.json {
        print_json(&json!({"model": from, "copy": to}))?;
    } else {
        print(&format!("{to} is a copy of {from}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Nothing is read that would take its time.
struct Silent;

impl Progress for Silent {
    fn begin(&self, _total: u64) {}
    fn advance(&self, _bytes: u64) {}
}
