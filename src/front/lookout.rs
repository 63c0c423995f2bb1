//! Looks every second at what happens without a request that could tell of it: blobs that are cut while the kernel
//! reads them, blobs that do not answer, models that had to be done without, damage that was mended, and how far the kernel
//! reads ahead.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use fuser::BackingId;
use serde_json::{Value, json};

use super::lanes::Lanes;
use super::passthrough::Passthrough;
use super::readpath::describe_read_ahead;
use crate::digest::Digest;
use crate::error::{AtPath, Result};
use crate::vfs::Vfs;
use crate::waits::{Looks, Wait};

const EVERY: Duration = Duration::from_secs(1);
/// After this time without an answer no more requests are let wait for a blob.
const PATIENCE: Duration = Duration::from_secs(60);
/// The key of the status under which it says which blobs do not answer.
const FACT: &str = "waiting";

/// Looks until it is dropped.
pub struct Lookout {
    _stop: [Sender<()>; 2],
}

impl Lookout {
    /// Begins, in threads of its own: a look at a blob can itself find no answer.
    pub fn start(
        vfs: Arc<Vfs>,
        passthrough: Arc<Passthrough<BackingId>>,
        lanes: Arc<Lanes>,
        read_ahead: PathBuf,
    ) -> Result<Lookout> {
        vfs.describe(FACT, json!([]));
        let (mut looks, mut told, shown) = (Looks::default(), HashSet::new(), vfs.clone());
        let waits = every("waits", move || {
            tell(&shown, &lanes, &looks.look(), &mut told);
            describe_read_ahead(&shown, &read_ahead);
        })?;
        let blobs = every("blobs", move || {
            passthrough.look(&vfs);
            vfs.review_problems();
            if vfs.tree().is_behind()
                && let Err(error) = vfs.refresh()
            {
                tracing::error!("models are shown as they were: {error}");
            }
        })?;
        Ok(Lookout { _stop: [waits, blobs] })
    }
}

fn every(name: &str, mut look: impl FnMut() + Send + 'static) -> Result<Sender<()>> {
    let (stop, stopped) = channel::<()>();
    let work = move || {
        while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
            look();
        }
    };
    thread::Builder::new().name(name.into()).spawn(work).at(name)?;
    Ok(stop)
}

/// Passes on which blobs are waited for; each is logged when that begins and when it ends.
fn tell(vfs: &Vfs, lanes: &Lanes, waits: &[Wait], told: &mut HashSet<Digest>) {
    if waits.is_empty() && told.is_empty() {
        return;
    }
    for Wait { digest, threads, .. } in waits {
        if told.insert(*digest) {
            tracing::warn!("the store does not answer for blob {digest}: {threads} reads wait");
        }
    }
    told.retain(|digest| {
        let waits = waits.iter().any(|wait| wait.digest == *digest);
        if !waits {
            tracing::info!("the store answers again for blob {digest}");
        }
        waits
    });
    let shown = |wait: &Wait| json!({"blob": wait.digest, "seconds": wait.time.as_secs(), "threads": wait.threads});
    vfs.describe(FACT, waits.iter().map(shown).collect::<Vec<Value>>().into());
    let stuck: HashMap<u64, bool> = waits.iter().map(|wait| (wait.digest.prefix(), wait.time >= PATIENCE)).collect();
    lanes.set_stuck(stuck);
}
