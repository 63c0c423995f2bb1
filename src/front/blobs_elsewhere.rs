//! Notices blobs of a mounted store that somebody writes to or replaces, where there is no inotify.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use notify::event::EventKind;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};

use crate::digest::Digest;
use crate::vfs::Written;

/// A directory of blobs that is watched until this is dropped.
#[derive(Debug)]
pub struct BlobWatch {
    _watcher: RecommendedWatcher,
}

impl BlobWatch {
    /// Has `tell` called, from a thread of its own, with blobs that were written to and that `is_known` knows; with none if
    /// the directory was moved or removed. It says whether anybody listens.
    pub fn start(
        dir: &Path,
        is_known: impl Fn(&Digest) -> bool + Send + 'static,
        tell: impl Fn(Written) -> bool + Send + 'static,
    ) -> io::Result<BlobWatch> {
        let known = move |path: &Path| Digest::from_file_name(path.file_name()?.to_str()?).filter(&is_known);
        let watched = dir.to_owned();
        let hear = move |event: notify::Result<notify::Event>| {
            let written = match event {
                Ok(event) if event.need_rescan() => Written::Any,
                Ok(event) if matches!(event.kind, EventKind::Access(_)) => return,
                Ok(event) if event.paths.contains(&watched) => Written::default(),
                Ok(event) => {
                    let these: HashSet<Digest> = event.paths.iter().filter_map(|path| known(path)).collect();
                    if these.is_empty() {
                        return;
                    }
                    Written::These(these)
                }
                Err(_) => Written::Any,
            };
            // Nobody listens when the mount ends.
            tell(written);
        };
        let mut watcher = notify::recommended_watcher(hear).map_err(io::Error::other)?;
        watcher.watch(dir, RecursiveMode::NonRecursive).map_err(io::Error::other)?;
        Ok(BlobWatch { _watcher: watcher })
    }
}
