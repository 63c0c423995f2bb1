//! Looks every second at what goes wrong without a request that could tell of it.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use fuser::BackingId;

use super::passthrough::Passthrough;
use crate::error::{AtPath, Result};
use crate::vfs::Vfs;

const EVERY: Duration = Duration::from_secs(1);

/// Looks until it is dropped.
pub struct Lookout {
    _stop: Sender<()>,
}

impl Lookout {
    /// Begins, in a thread of its own.
    pub fn start(vfs: Arc<Vfs>, passthrough: Arc<Passthrough<BackingId>>) -> Result<Lookout> {
        let (stop, stopped) = channel::<()>();
        let work = move || {
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                passthrough.look(&vfs);
            }
        };
        thread::Builder::new().name("lookout".into()).spawn(work).at("a thread")?;
        Ok(Lookout { _stop: stop })
    }
}
