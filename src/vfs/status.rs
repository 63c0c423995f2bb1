//! `.wmount/status.json`: what the mount does, made when it is looked up.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde_json::json;

use super::Vfs;
use crate::tree::{Entry, number};

/// How long a status is shown before it is made anew.
const AGE: Duration = Duration::from_millis(100);
/// The kernel reads a status soon after it looked it up: so many of the newest can be read.
const KEPT: usize = 32;

/// A status as it was when it was asked for: its number means one content, like any other.
#[derive(Debug)]
pub(super) struct Status {
    pub ino: u64,
    made: Instant,
    pub mtime: SystemTime,
    pub text: Vec<u8>,
}

impl Vfs {
    pub(super) fn current_status(&self) -> Arc<Status> {
        let mut statuses = self.statuses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(status) = statuses.back().filter(|status| status.made.elapsed() < AGE) {
            return status.clone();
        }
        let text = self.status_text();
        let before = statuses.back().map_or(0, |status| status.ino);
        let ino = number(&["status"], &[&text, &before.to_le_bytes()]);
        let status = Arc::new(Status { ino, made: Instant::now(), mtime: SystemTime::now(), text });
        statuses.push_back(status.clone());
        while statuses.len() > KEPT {
            let oldest = statuses.pop_front();
            oldest.into_iter().for_each(|oldest| _ = self.inodes.remove(&oldest.ino));
        }
        status
    }

    /// The status as JSON.
    pub fn status_text(&self) -> Vec<u8> {
        let tree = self.tree();
        let seconds = |time: SystemTime| crate::model::to_unix(time).0;
        let model = |entry: &Arc<Entry>| {
            let found = &entry.found;
            json!({"model": found.name.to_string(), "path": entry.path, "written": seconds(found.written)})
        };
        let (reads, bytes) = self.meters.total();
        let mut status = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "store": self.store.root().to_string_lossy(),
            "pid": std::process::id(),
            "started": seconds(self.started),
            "models": tree.entries().iter().map(model).collect::<Vec<_>>(),
            "reads": reads,
            "bytes_read": bytes,
            "layouts": self.meters.json(),
            "problems": self.problems.texts(),
        });
        if let Some(status) = status.as_object_mut() {
            if let Some((blobs, bytes)) = self.store.checked() {
                status.insert("verified".into(), json!({"blobs": blobs, "bytes": bytes}));
            }
            status.extend(self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone());
        }
        let mut text = serde_json::to_vec_pretty(&status).expect("a status is plain data");
        text.push(b'\n');
        text
    }
}
