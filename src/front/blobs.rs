//! Notices blobs of a mounted store that somebody writes to or replaces, as who mends one by hand does.
//!
//! Heard of are files that get a name and files that were written to when they are closed. The crate `notify` would have
//! the kernel tell of every file that is opened, too, and this process opens as many as there are tensors: the first read of
//! 20,000 of 4 KiB then takes a tenth longer, and so a hundredth, which is within the scatter.

use std::collections::HashSet;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::digest::Digest;
use crate::vfs::Written;

/// Bytes of news that are read at once.
const ROOM: usize = 32 << 10;

/// A directory of blobs that is watched until this is dropped.
#[derive(Debug)]
pub struct BlobWatch {
    inotify: Arc<OwnedFd>,
    watch: i32,
}

impl BlobWatch {
    /// Has `tell` called, from a thread of its own, with blobs that were written to and that `is_known` knows; with none if
    /// the directory was moved or removed. It says whether anybody listens.
    pub fn start(
        dir: &Path,
        is_known: impl Fn(&Digest) -> bool + Send + 'static,
        tell: impl Fn(Written) -> bool + Send + 'static,
    ) -> io::Result<BlobWatch> {
        let inotify = Arc::new(inotify::init(CreateFlags::CLOEXEC)?);
        let named = WatchFlags::CREATE | WatchFlags::MOVED_TO;
        let moved = WatchFlags::MOVE_SELF | WatchFlags::DELETE_SELF | WatchFlags::ONLYDIR;
        let watch = inotify::add_watch(&inotify, dir, named | WatchFlags::CLOSE_WRITE | moved)?;
        let heard = Arc::clone(&inotify);
        thread::Builder::new().name("blobs heard".into()).spawn(move || listen(&heard, &is_known, &tell))?;
        Ok(BlobWatch { inotify, watch })
    }
}

impl Drop for BlobWatch {
    fn drop(&mut self) {
        // The listener hears of it, and ends; it fails if the directory is gone, and then so is the listener.
        let _ = inotify::remove_watch(&self.inotify, self.watch);
    }
}

fn listen(heard: &OwnedFd, is_known: &dyn Fn(&Digest) -> bool, tell: &dyn Fn(Written) -> bool) {
    let mut room = vec![MaybeUninit::uninit(); ROOM];
    let mut news = Reader::new(heard, &mut room);
    let mut written = HashSet::new();
    loop {
        let (what, digest) = match news.next() {
            Ok(event) => (event.events(), event.file_name().and_then(digest_of)),
            Err(Errno::INTR) => continue,
            Err(error) => return tracing::error!("blobs that are mended by hand may be shown as they were: {error}"),
        };
        written.extend(digest.filter(is_known));
        let is_told = if what.contains(ReadFlags::QUEUE_OVERFLOW) {
            tell(Written::Any)
        } else if what.intersects(ReadFlags::MOVE_SELF | ReadFlags::IGNORED) {
            tell(Written::default())
        } else if news.is_buffer_empty() && !written.is_empty() {
            tell(Written::These(std::mem::take(&mut written)))
        } else {
            true
        };
        if !is_told || what.contains(ReadFlags::IGNORED) {
            return;
        }
    }
}

fn digest_of(name: &CStr) -> Option<Digest> {
    Digest::from_file_name(name.to_str().ok()?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn blobs_that_are_known_are_heard_of_when_they_are_written_to_or_replaced() {
        let place = tempfile::tempdir().unwrap();
        let (dir, aside) = (place.path().join("blobs"), place.path().join("aside"));
        fs::create_dir(&dir).unwrap();
        let [known, unknown] = [b"known", b"other"].map(|bytes| Digest::of(bytes));
        let path = dir.join(known.file_name());
        let (news, heard) = channel();
        let watch = BlobWatch::start(&dir, move |digest| *digest == known, move |it| news.send(it).is_ok()).unwrap();
        let next = || heard.recv_timeout(Duration::from_secs(20)).unwrap();
        let it = || Written::These([known].into());
        fs::write(dir.join(unknown.file_name()), "x").unwrap();
        fs::write(dir.join("sha256-x"), "x").unwrap();
        fs::hard_link(dir.join("sha256-x"), &path).unwrap();
        assert_eq!(next(), it());
        fs::read(&path).unwrap();
        fs::OpenOptions::new().append(true).open(&path).unwrap();
        assert_eq!(next(), it());
        fs::rename(dir.join("sha256-x"), &path).unwrap();
        fs::write(&aside, "x").unwrap();
        fs::rename(&aside, &path).unwrap();
        assert_eq!(next(), it());
        fs::rename(&dir, &aside).unwrap();
        assert_eq!(next(), Written::default());
        drop(watch);
        assert_eq!(next(), Written::default());
        assert!(heard.recv().is_err(), "the listener goes on");
    }
}
