//! `wmount verify [MODEL...]`.

use std::path::PathBuf;
use std::process::ExitCode;

use super::StoreArgs;
use super::output::{Bar, count, print, print_json, size};
use crate::error::Result;
use crate::model::ModelName;
use crate::store::import::Progress;
use crate::store::{Repaired, Survey, VerifyReport};

/// Hash every blob and name the models that a damaged one hurts; mend them if asked
#[derive(Debug, clap::Args)]
pub struct VerifyArgs {
    /// Only the blobs of these models
    #[arg(value_name = "MODEL")]
    models: Vec<ModelName>,
    /// Get the bytes of damaged blobs back from wherever else the store has them
    #[arg(long)]
    repair: bool,
    /// Look for them also here: another store, or original files (safetensors, mlpackage and so on)
    #[arg(long, value_name = "DIR", requires = "repair")]
    from: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) fn run(args: &VerifyArgs) -> Result<ExitCode> {
    let store = args.store.open()?;
    let Survey { models, hidden, .. } = store.survey_of(&args.models)?;
    let bar = Bar::new("verifying");
    bar.begin(store.total_bytes(&models));
    let report = store.verify(&models, &|bytes| bar.advance(bytes));
    bar.finish();
    let mut report = report?;
    report.add_hidden(hidden);
    if args.repair && !report.damaged.is_empty() {
        let bar = Bar::new("looking for bytes");
        let repaired = store.repair(&mut report, &args.from, &bar);
        bar.finish();
        repaired?;
    }
    if args.json {
        print_json(&report)?
    } else {
        print(&text(&report))?
    }
    Ok(if report.damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(report: &VerifyReport) -> String {
    let mut text = String::new();
    for Repaired { damage, from } in &report.repaired {
        let digest = damage.digest.map(|digest| digest.to_string()).unwrap_or_default();
        text += &format!("blob {digest}: {}; repaired from {from}\n", damage.fault);
    }
    report.notes.iter().for_each(|note| text += &format!("not searched: {note}\n"));
    for damage in &report.damaged {
        let what = damage.digest.map_or_else(|| "manifest".into(), |digest| format!("blob {digest}"));
        text += &format!("{what}: {}", damage.fault);
        for (relation, names) in [("hurts", &damage.models), ("holds", &damage.holds)] {
            if !names.is_empty() {
                text += &format!("; it {relation} {}", names.join(", "));
            }
        }
        text.push('\n');
    }
    let (blobs, manifests): (Vec<_>, Vec<_>) = report.damaged.iter().partition(|damage| damage.digest.is_some());
    let damaged = [(blobs.len(), "damaged blob"), (manifests.len(), "damaged manifest")];
    let damaged = damaged.iter().filter(|(faults, _)| *faults > 0).map(|(faults, what)| count(*faults as u64, what));
    let verdict = match report.damaged.len() {
        0 if !report.repaired.is_empty() => format!("{} repaired", count(report.repaired.len() as u64, "blob")),
        0 => "no damage".into(),
        _ => damaged.collect::<Vec<_>>().join(", "),
    };
    text + &format!("{}, {}: {verdict}\n", count(report.blobs, "blob"), size(report.bytes))
}
