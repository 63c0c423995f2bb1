//! Notices models that come and go in the store of a mount, and blobs that are mended.
//!
//! Changes are collected until the store is quiet for a moment. Where the system cannot watch, or changes can be made
//! on another machine, the manifests are looked through every few seconds; blobs, of which there are far more, are not.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};

use super::blobs::BlobWatch;
use super::sys;
use crate::error::{AtPath, Result};
use crate::vfs::{Vfs, Written};

/// A store this long without a change is looked through.
const QUIET: Duration = Duration::from_millis(100);
/// One that changes all the time is looked through this often.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often a store is looked through that cannot be watched.
const POLL: Duration = Duration::from_secs(5);

#[derive(Debug, PartialEq, Eq)]
enum News {
    Changed,
    Blobs(Written),
    Stop,
}

/// Keeps a [`Vfs`] up to date until it is dropped.
pub struct Watch {
    news: Sender<News>,
}

impl Watch {
    /// Watches the manifests and the blobs of the store at `store` from threads of its own.
    ///
    /// `drop_pages` is called with each file of which the kernel may keep bytes that are known to be wrong.
    pub fn start(vfs: Arc<Vfs>, store: &Path, drop_pages: impl Fn(u64) + Send + Sync + 'static) -> Result<Watch> {
        let (news, heard) = channel();
        let watch = Watch { news: news.clone() };
        let directory = store.join("manifests");
        let mend = mender(vfs.clone(), drop_pages);
        let mut blobs = BlobsWatched::new(vfs.clone(), store.join("blobs"), news.clone());
        // Before anything is read.
        blobs.keep();
        let work = move || keep_up(&vfs, &mend, &directory, blobs, &news, &heard);
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

/// Takes notice of mended blobs.
fn mender(vfs: Arc<Vfs>, drop_pages: impl Fn(u64) + Send + Sync + 'static) -> impl Fn(Written) {
    let drop_pages = Arc::new(drop_pages);
    move |written| match vfs.mend(written) {
        Ok(hurt) if hurt.is_empty() => {}
        Ok(hurt) => {
            tracing::info!("blobs of the store were mended or written to; {} files are read anew", hurt.len());
            // The kernel waits for pages that are being read, and those may wait for a store that does not answer.
            let drop_pages = drop_pages.clone();
            let work = move || hurt.into_iter().for_each(|ino| drop_pages(ino));
            if let Err(error) = thread::Builder::new().name("mend".into()).spawn(work) {
                tracing::error!("mended blobs may be shown as they were: {error}");
            }
        }
        Err(error) => tracing::error!("mended blobs may be shown as they were: {error}"),
    }
}

/// The watch over the directory of the blobs, which may be moved.
struct BlobsWatched {
    vfs: Arc<Vfs>,
    directory: PathBuf,
    news: Sender<News>,
    watch: Option<(BlobWatch, (u64, u64))>,
    told: bool,
}

impl BlobsWatched {
    fn new(vfs: Arc<Vfs>, directory: PathBuf, news: Sender<News>) -> BlobsWatched {
        BlobsWatched { vfs, directory, news, watch: None, told: false }
    }

    /// Watches the directory that is there now, and says whether it came to be watched only by this: what is in it may be
    /// other than what was read.
    fn keep(&mut self) -> bool {
        let now = identity(&self.directory).ok();
        if self.watch.as_ref().is_some_and(|(_, watched)| Some(*watched) == now) {
            return false;
        }
        self.watch = self.begin().ok().zip(now);
        if now.is_some() && self.watch.is_none() && !std::mem::replace(&mut self.told, true) {
            let shown = self.directory.display();
            tracing::info!("{shown} cannot be watched: mount anew when a blob was mended by hand");
        }
        self.watch.is_some()
    }

    /// Whether the directory is not there, as while it is moved to another disk.
    fn is_missing(&self) -> bool {
        identity(&self.directory).is_err()
    }

    fn begin(&self) -> io::Result<BlobWatch> {
        // Unknown counts as local: watching it is then tried and says.
        if sys::is_remote(&self.directory).unwrap_or(false) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (vfs, news) = (self.vfs.clone(), self.news.clone());
        let tell = move |written| news.send(News::Blobs(written)).is_ok();
        BlobWatch::start(&self.directory, move |digest| vfs.store().has_used(digest), tell)
    }
}

fn keep_up(
    vfs: &Vfs,
    mend: &dyn Fn(Written),
    directory: &Path,
    mut blobs: BlobsWatched,
    news: &Sender<News>,
    heard: &Receiver<News>,
) {
    let mut watcher = None;
    let mut told = false;
    let mut trouble = None;
    loop {
        if blobs.keep() {
            mend(Written::Any);
        }
        match &watcher {
            Some((_, watched)) if identity(directory).ok() == Some(*watched) => {}
            _ => {
                watcher = watch(directory, news.clone());
                // A model may have come before the watch was set.
                mend(Written::default());
                refresh(vfs, &mut trouble);
            }
        }
        if watcher.is_none() && !std::mem::replace(&mut told, true) {
            let every = POLL.as_secs();
            tracing::info!("{} cannot be watched; looking for changes every {every} s", directory.display());
        }
        let first = match watcher {
            Some(_) if !blobs.is_missing() => heard.recv().map_err(RecvTimeoutError::from),
            _ => heard.recv_timeout(POLL),
        };
        let mut written = Written::default();
        match first {
            Ok(News::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
            Ok(first) => {
                if !settled(first, heard, &mut written) {
                    return;
                }
            }
        }
        mend(written);
        refresh(vfs, &mut trouble);
    }
}

/// Waits until the changes pause; `false` if that is the end.
fn settled(first: News, heard: &Receiver<News>, written: &mut Written) -> bool {
    let began = Instant::now();
    let mut next = Ok(first);
    loop {
        match next {
            Ok(News::Changed) => {}
            Ok(News::Blobs(blobs)) => written.add(blobs),
            Err(RecvTimeoutError::Timeout) => return true,
            Ok(News::Stop) | Err(RecvTimeoutError::Disconnected) => return false,
        }
        if began.elapsed() >= PATIENCE {
            return true;
        }
        next = heard.recv_timeout(QUIET);
    }
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
        let mut written = Written::default();
        news.send(News::Blobs(Written::Any)).unwrap();
        assert!(settled(News::Changed, &heard, &mut written));
        assert_eq!(written, Written::Any);
        news.send(News::Stop).unwrap();
        assert!(!settled(News::Changed, &heard, &mut written));
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
