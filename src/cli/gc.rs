//! `wmount gc`.

use super::StoreArgs;
use super::output::{count, print, print_json, size};
use crate::error::Result;

/// Remove the blobs that no model needs
#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) fn run(args: &GcArgs) -> Result<()> {
    let report = args.store.open()?.gc()?;
    if args.json {
        return print_json(&report);
    }
    let mut text = format!("removed {}, {}\n", count(report.removed, "blob"), size(report.bytes));
    if report.unfinished > 0 {
        text += &format!("removed {} of models that were not finished\n", count(report.unfinished, "file"));
    }
    if report.in_use > 0 {
        text += &format!("{} with files open on a mount kept its blobs\n", count(report.in_use, "removed model"));
    }
    if report.young > 0 {
        let blobs = count(report.young, "blob");
        text += &format!("kept {blobs} that ollama wrote within the hour, since it may be about to name their model\n");
    }
    print(&text)
}
