//! Files that are one whole blob: the kernel reads and maps the blob itself, and this process is not asked.
//!
//! The kernel (Linux 6.9) wants of an inode that all its open files have the same backing, or that none has one: an
//! open that differs fails with EIO. So the first open decides for those that come while the file stays open, and
//! the backing goes with the last of them. Registering a backing needs CAP_SYS_ADMIN; a store on a stacked file
//! system, or on another FUSE, can be refused. Then the file is served like any other.
//!
//! A blob is immutable by contract. One that is cut off while it is open behaves as the plain file would.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dashmap::DashMap;

use crate::vfs::Vfs;

/// The key of the status under which it says whether files are passed through.
pub const FACT: &str = "passthrough";

/// The inodes that are open and could be passed through; `T` is the kernel's handle of a backing file.
#[derive(Debug)]
pub struct Passthrough<T> {
    on: AtomicBool,
    opened: DashMap<u64, Opened<T>>,
}

#[derive(Debug)]
struct Opened<T> {
    count: u64,
    /// `None` while it was first opened without.
    backing: Option<Arc<T>>,
}

impl<T> Default for Passthrough<T> {
    fn default() -> Self {
        Passthrough { on: AtomicBool::new(false), opened: DashMap::new() }
    }
}

impl<T> Passthrough<T> {
    /// Says what the kernel and this process's rights allow; until then nothing is passed through.
    pub fn begin(&self, vfs: &Vfs, allowed: Result<(), &str>) {
        self.on.store(allowed.is_ok(), Ordering::Relaxed);
        let fact = allowed.map_or_else(|why| format!("off: {why}"), |()| "on".to_owned());
        vfs.describe(FACT, fact.into());
    }

    /// Whether to ask at all.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Counts an open of `ino`, whose blob is `blob`; returns what the kernel is to read in our place.
    ///
    /// Every call is followed by one of [`Passthrough::release`].
    pub fn open(&self, vfs: &Vfs, ino: u64, blob: &File, register: impl Fn(&File) -> io::Result<T>) -> Option<Arc<T>> {
        let first = || match register(blob) {
            Ok(backing) => Some(Arc::new(backing)),
            Err(error) => {
                self.refused(vfs, &error);
                None
            }
        };
        let mut opened = self.opened.entry(ino).or_insert_with(|| Opened { count: 0, backing: first() });
        opened.count += 1;
        opened.backing.clone()
    }

    /// The reverse of [`Passthrough::open`].
    pub fn release(&self, ino: u64) {
        if let Some(mut opened) = self.opened.get_mut(&ino) {
            opened.count -= 1;
        }
        self.opened.remove_if(&ino, |_, opened| opened.count == 0);
    }

    fn refused(&self, vfs: &Vfs, error: &io::Error) {
        tracing::debug!("a blob is not passed through: {error}");
        if error.kind() == io::ErrorKind::PermissionDenied {
            return self.begin(vfs, Err("this process lacks CAP_SYS_ADMIN"));
        }
        vfs.describe(FACT, format!("in part: the kernel refused a blob of this store: {error}").into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;

    fn empty() -> (tempfile::TempDir, Vfs) {
        let place = tempfile::tempdir().unwrap();
        let vfs = Vfs::new(Arc::new(Store::create(place.path().join("store")).unwrap())).unwrap();
        (place, vfs)
    }

    fn fact(vfs: &Vfs) -> String {
        let status: serde_json::Value = serde_json::from_slice(&vfs.status_text()).unwrap();
        status[FACT].as_str().unwrap().to_owned()
    }

    #[test]
    fn opens_of_an_inode_share_a_backing_that_goes_with_the_last() {
        let (_place, vfs) = empty();
        let blob = tempfile::tempfile().unwrap();
        let passthrough = Passthrough::default();
        passthrough.begin(&vfs, Ok(()));
        let first = passthrough.open(&vfs, 7, &blob, |_| Ok("a")).unwrap();
        let second = passthrough.open(&vfs, 7, &blob, |_| panic!("registered twice")).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        let kept = Arc::downgrade(&first);
        drop((first, second));
        passthrough.release(7);
        assert!(kept.upgrade().is_some());
        passthrough.release(7);
        assert!(kept.upgrade().is_none());
        assert_eq!(fact(&vfs), "on");
    }

    #[test]
    fn a_file_that_is_open_without_stays_without() {
        let (_place, vfs) = empty();
        let blob = tempfile::tempfile().unwrap();
        let passthrough = Passthrough::default();
        passthrough.begin(&vfs, Ok(()));
        assert!(passthrough.open(&vfs, 7, &blob, |_| Err(io::ErrorKind::TooManyLinks.into())).is_none());
        assert!(passthrough.is_on());
        assert!(fact(&vfs).starts_with("in part"));
        assert!(passthrough.open(&vfs, 7, &blob, |_| Ok("a")).is_none());
        passthrough.release(7);
        passthrough.release(7);
        assert!(passthrough.open(&vfs, 7, &blob, |_| Ok("a")).is_some());
    }

    #[test]
    fn one_refusal_for_want_of_rights_is_enough() {
        let (_place, vfs) = empty();
        let passthrough = Passthrough::<()>::default();
        passthrough.begin(&vfs, Ok(()));
        let blob = tempfile::tempfile().unwrap();
        assert!(passthrough.open(&vfs, 7, &blob, |_| Err(io::ErrorKind::PermissionDenied.into())).is_none());
        assert!(!passthrough.is_on());
        assert!(fact(&vfs).contains("CAP_SYS_ADMIN"));
    }
}
