//! `wmount rm MODEL...`.

use serde_json::json;

use super::StoreArgs;
use super::output::{print, print_json};
use crate::error::Result;
use crate::model::ModelName;

/// Remove models; their blobs stay until `wmount gc`
#[derive(Debug, clap::Args)]
pub struct RmArgs {
    /// The models
    #[arg(required = true, value_name = "MODEL")]
    models: Vec<ModelName>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) fn run(args: &RmArgs) -> Result<()> {
    let store = args.store.open()?;
    let mut names = args.models.clone();
    names.sort();
    names.dedup();
    // One that is not there must not leave the others half done.
    names.iter().try_for_each(|name| store.find_asked(name).map(drop))?;
    names.iter().try_for_each(|name| store.remove(name))?;
    let removed: Vec<String> = names.iter().map(ToString::to_string).collect();
    if args.json {
        print_json(&json!({"removed": removed}))
    } else {
        print(&format!("removed {}\n", removed.join(", ")))
    }
}
