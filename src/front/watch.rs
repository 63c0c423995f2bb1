//! Notices models that come and go in the store of a mount.
//!
//! Changes are collected until the store is quiet for a moment. Where the system cannot watch, or changes can be made
//! on another machine, the store is looked through every few seconds.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};

use super::sys;
use crate::error::{AtPath, Result};
use crate::vfs::Vfs;

/// A store this long without a change is looked through.
const QUIET: Duration = Duration::from_millis(100);
/// One that changes all the time is looked through this often.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often a store is looked through that cannot be watched.
const POLL: Duration = Duration::from_secs(5);

#[derive(Debug, PartialEq, Eq)]
enum News {
    Changed,
    Stop,
}

/// Keeps a [`Vfs`] up to date until it is dropped.
pub struct Watch {
    news: Sender<News>,
}

impl Watch {
    /// Watches the manifests of the store at `store` from a thread of its own.
    ///
    /// `drop_pages` is called with each file of which the kernel may keep bytes that are known to be wrong.
    pub fn start(vfs: Arc<Vfs>, store: &Path, drop_pages: impl Fn(u64) + Send + Sync + 'static) -> Result<Watch> {
        let (news, heard) = channel();
        let watch = Watch { news: news.clone() };
        let directory = store.join("manifests");
        let mend = mender(vfs.clone(), drop_pages);
        let work = move || keep_up(&vfs, &mend, &directory, &news, &heard);
        thread::Builder::new().name("watch".into()).spawn(work).at(store)?;
        Ok(watch)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Fails only if the thread has ended already.
        let _ = self.news.send(News::Stop);
    }
}

/// Takes notice of repaired blobs.
fn mender(vfs: Arc<Vfs>, drop_pages: impl Fn(u64) + Send + Sync + 'static) -> impl Fn() {
    let drop_pages = Arc::new(drop_pages);
    move || match vfs.mend() {
        Ok(hurt) if hurt.is_empty() => {}
        Ok(hurt) => {
            tracing::info!("blobs of the store were repaired; {} files are read anew", hurt.len());
            // The kernel waits for pages that are being read, and those may wait for a store that does not answer.
            let drop_pages = drop_pages.clone();
            let work = move || hurt.into_iter().for_each(|ino| drop_pages(ino));
            if let Err(error) = thread::Builder::new().name("mend".into()).spawn(work) {
                tracing::error!("repaired blobs may be shown as they were: {error}");
            }
        }
        Err(error) => tracing::error!("repaired blobs may be shown as they were: {error}"),
    }
}

fn keep_up(vfs: &Vfs, mend: &dyn Fn(), directory: &Path, news: &Sender<News>, heard: &Receiver<News>) {
    let mut watcher = None;
    let mut told = false;
    let mut trouble = None;
    loop {
        match &watcher {
            Some((_, watched)) if identity(directory).ok() == Some(*watched) => {}
            _ => {
                watcher = watch(directory, news.clone());
                // A model may have come before the watch was set.
                mend();
                refresh(vfs, &mut trouble);
            }
        }
        if watcher.is_none() && !std::mem::replace(&mut told, true) {
            let every = POLL.as_secs();
            tracing::info!("{} cannot be watched; looking for changes every {every} s", directory.display());
        }
        let first = match watcher {
            Some(_) => heard.recv().map_err(RecvTimeoutError::from),
            None => heard.recv_timeout(POLL),
        };
        match first {
            Ok(News::Changed) if settled(heard) => {}
            Err(RecvTimeoutError::Timeout) => {}
            _ => return,
        }
        mend();
        refresh(vfs, &mut trouble);
    }
}

/// Waits until the changes pause; `false` if that is the end.
fn settled(heard: &Receiver<News>) -> bool {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        match heard.recv_timeout(QUIET) {
            Ok(News::Changed) => {}
            Err(RecvTimeoutError::Timeout) => return true,
            _ => return false,
        }
    }
    true
}

fn watch(directory: &Path, news: Sender<News>) -> Option<(RecommendedWatcher, (u64, u64))> {
    // Unknown counts as local: watching it is then tried and says.
    if sys::is_remote(directory).unwrap_or(false) {
        return None;
    }
    let tell = move |event: notify::Result<notify::Event>| {
        if event.map_or(true, |event| is_change(event.kind)) {
            // Fails only when nobody listens any more.
            let _ = news.send(News::Changed);
        }
    };
    let watched = identity(directory).ok()?;
    let mut watcher = notify::recommended_watcher(tell).ok()?;
    watcher.watch(directory, RecursiveMode::Recursive).ok()?;
    Some((watcher, watched))
}

/// Looking through the store opens its files; taking that for a change would never end.
fn is_change(kind: EventKind) -> bool {
    !matches!(kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write))
}

fn identity(directory: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(directory).map(|found| (found.dev(), found.ino()))
}

/// Brings `vfs` up to date; a `trouble` that lasts is logged once.
fn refresh(vfs: &Vfs, trouble: &mut Option<String>) {
    let now = match vfs.refresh() {
        Ok(changed) => {
            if changed || trouble.is_some() {
                tracing::info!("the models of the store have changed");
            }
            None
        }
        Err(error) => Some(error.to_string()),
    };
    if let Some(words) = now.as_ref().filter(|_| now != *trouble) {
        tracing::error!("models are shown as they were: {words}");
    }
    *trouble = now;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_is_no_change() {
        use notify::event::{CreateKind, RemoveKind};

        assert!(!is_change(EventKind::Access(AccessKind::Open(AccessMode::Any))));
        assert!(!is_change(EventKind::Access(AccessKind::Close(AccessMode::Read))));
        assert!(is_change(EventKind::Access(AccessKind::Close(AccessMode::Write))));
        assert!(is_change(EventKind::Create(CreateKind::File)));
        assert!(is_change(EventKind::Remove(RemoveKind::Folder)));
    }

    #[test]
    fn a_burst_settles_and_a_stop_is_heard() {
        let (news, heard) = channel();
        news.send(News::Changed).unwrap();
        assert!(settled(&heard));
        news.send(News::Stop).unwrap();
        assert!(!settled(&heard));
    }

    #[test]
    fn a_new_file_is_heard_of() {
        let place = tempfile::tempdir().unwrap();
        let (news, heard) = channel();
        let _watcher = watch(place.path(), news).unwrap();
        fs::write(place.path().join("tag"), "{}").unwrap();
        assert_eq!(heard.recv_timeout(Duration::from_secs(5)), Ok(News::Changed));
    }
}
