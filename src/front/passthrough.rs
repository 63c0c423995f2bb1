//! Files that are one whole blob: the kernel reads and maps the blob itself, and this process is not asked.
//!
//! The kernel (Linux 6.9) wants of an inode that all its open files have the same backing, or that none has one: an
//! open that differs fails with EIO. So the first open decides for those that come while the file stays open, and
//! the backing goes with the last of them. Registering a backing needs CAP_SYS_ADMIN; a store on a stacked file
//! system, or on another FUSE, can be refused. Then the file is served like any other.
//!
//! Each such inode holds a file open in this process, which may have so many. From half of them on inodes are served like any
//! other, so that who opens very many takes nothing from the rest.
//!
//! A blob is immutable by contract. One that is cut off while it is open behaves as the plain file would: reads end
//! early, maps fault. The kernel offers no way to take a backing back, so such a blob is looked for, told of, and not
//! given to anyone who opens it anew.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::SystemTime;

use dashmap::DashMap;

use super::sys;
use crate::error::Result;
use crate::vfs::Vfs;

/// The key of the status under which it says whether files are passed through.
pub const FACT: &str = "passthrough";

/// The inodes that are open and could be passed through; `T` is the kernel's handle of a backing file.
#[derive(Debug)]
pub struct Passthrough<T> {
    on: AtomicBool,
    /// How many inodes may be passed through at a time, and how many are.
    most: AtomicUsize,
    backed: AtomicUsize,
    opened: DashMap<u64, Opened<T>>,
}

#[derive(Debug)]
struct Opened<T> {
    count: u64,
    /// `None` while it was first opened without.
    backed: Option<Backed<T>>,
}

/// A blob that the kernel reads, as it was when it was handed over.
#[derive(Debug)]
struct Backed<T> {
    backing: Arc<T>,
    blob: Arc<Blob>,
}

#[derive(Debug)]
struct Blob {
    file: Arc<File>,
    len: u64,
    mtime: Option<SystemTime>,
    /// Whether its fault was told.
    told: AtomicBool,
}

// A store can take its time to answer, so that none of this is done while the table is locked.
impl Blob {
    fn of(file: Arc<File>) -> Option<Blob> {
        let found = file.metadata().ok()?;
        Some(Blob { file, len: found.len(), mtime: found.modified().ok(), told: AtomicBool::new(false) })
    }

    /// Whether the blob has become shorter or longer, or only other, and that in words.
    fn fault(&self) -> Option<(bool, String)> {
        let now = self.file.metadata().ok()?;
        match now.len() {
            len if len != self.len => {
                Some((true, format!("it has {len} bytes, not {}, since it was opened", self.len)))
            }
            _ if now.modified().ok() != self.mtime => Some((false, "it was written to while it was open".into())),
            _ => None,
        }
    }

    /// A fault that was not told yet.
    fn news(&self) -> Option<String> {
        if self.told.load(Ordering::Relaxed) {
            return None;
        }
        let (_, fault) = self.fault()?;
        (!self.told.swap(true, Ordering::Relaxed)).then_some(fault)
    }

    /// Why nobody else is to have it.
    fn refusal(&self, vfs: &Vfs, ino: u64) -> Option<String> {
        if let Some((true, fault)) = self.fault() {
            self.told.store(true, Ordering::Relaxed);
            return Some(fault);
        }
        let replaced = self.file.metadata().is_ok_and(|found| vfs.is_replaced(ino, found.ino()));
        replaced.then(|| "it was replaced, and somebody still has the one before open: close it there".into())
    }
}

/// How a file was opened.
#[derive(Debug, PartialEq, Eq)]
pub enum Opening<T> {
    /// Its reads are requests.
    Served,
    /// The same, and it is counted.
    Counted,
    /// It is counted, and the kernel reads this.
    Backed(Arc<T>),
}

impl<T> Opened<T> {
    fn blob(&self) -> Option<Arc<Blob>> {
        self.backed.as_ref().map(|backed| backed.blob.clone())
    }

    fn opening(&self) -> Opening<T> {
        self.backed.as_ref().map_or(Opening::Counted, |backed| Opening::Backed(backed.backing.clone()))
    }
}

impl<T> Default for Passthrough<T> {
    fn default() -> Self {
        let (most, backed) = (AtomicUsize::new(usize::MAX), AtomicUsize::new(0));
        Passthrough { on: AtomicBool::new(false), most, backed, opened: DashMap::new() }
    }
}

impl<T> Passthrough<T> {
    /// Says what the kernel and this process's rights allow; until then nothing is passed through.
    pub fn begin(&self, vfs: &Vfs, allowed: Result<(), &str>) {
        /// What blobs that are read, pipes and models in use take.
        const OTHERS: usize = 768;
        self.most.store(sys::files_allowed().saturating_sub(OTHERS) / 2, Ordering::Relaxed);
        self.on.store(allowed.is_ok(), Ordering::Relaxed);
        let fact = allowed.map_or_else(|why| format!("off: {why}"), |()| "on".to_owned());
        vfs.describe(FACT, fact.into());
    }

    /// Whether to ask at all.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Opens `ino`; what is counted is followed by a call of [`Passthrough::release`].
    ///
    /// # Errors
    /// The file is open already, and its blob has another length by now.
    pub fn open(&self, vfs: &Vfs, ino: u64, register: impl Fn(&File) -> io::Result<T>) -> Result<Opening<T>> {
        if !self.is_on() || !vfs.is_whole_blob(ino) {
            return Ok(Opening::Served);
        }
        self.count(vfs, ino, || vfs.whole_blob(ino), register).map_err(|fault| vfs.damaged(ino, fault))
    }

    fn count(
        &self,
        vfs: &Vfs,
        ino: u64,
        blob: impl FnOnce() -> Option<Arc<File>>,
        register: impl Fn(&File) -> io::Result<T>,
    ) -> Result<Opening<T>, String> {
        let known = self.opened.get(&ino).map(|opened| opened.blob());
        let blob = match known {
            Some(Some(blob)) => match blob.refusal(vfs, ino) {
                Some(fault) => return Err(fault),
                None => None,
            },
            Some(None) => None,
            None => blob().and_then(Blob::of),
        };
        let mut opened = self.opened.entry(ino).or_insert_with(|| {
            let backed = blob.and_then(|blob| self.back(vfs, blob, register));
            Opened { count: 0, backed }
        });
        opened.count += 1;
        Ok(opened.opening())
    }

    fn back(&self, vfs: &Vfs, blob: Blob, register: impl Fn(&File) -> io::Result<T>) -> Option<Backed<T>> {
        if self.backed.load(Ordering::Relaxed) >= self.most.load(Ordering::Relaxed) {
            return None;
        }
        match register(&blob.file) {
            Ok(backing) => {
                self.backed.fetch_add(1, Ordering::Relaxed);
                Some(Backed { backing: Arc::new(backing), blob: Arc::new(blob) })
            }
            Err(error) => {
                self.refused(vfs, &error);
                None
            }
        }
    }

    /// The reverse of [`Passthrough::open`].
    pub fn release(&self, vfs: &Vfs, ino: u64) {
        let mut last = None;
        if let Some(mut opened) = self.opened.get_mut(&ino) {
            opened.count -= 1;
            last = if opened.count == 0 { opened.blob() } else { None };
        }
        let closed = self.opened.remove_if(&ino, |_, opened| opened.count == 0);
        if closed.is_some_and(|(_, opened)| opened.backed.is_some()) {
            self.backed.fetch_sub(1, Ordering::Relaxed);
        }
        last.and_then(|blob| blob.news()).into_iter().for_each(|fault| _ = vfs.damaged(ino, fault));
    }

    /// Looks whether blobs that the kernel reads have changed, and tells of those that have.
    pub fn look(&self, vfs: &Vfs) {
        let blobs: Vec<_> = self.opened.iter().filter_map(|opened| Some((*opened.key(), opened.blob()?))).collect();
        for (ino, blob) in blobs {
            blob.news().into_iter().for_each(|fault| _ = vfs.damaged(ino, fault));
        }
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

    fn open(
        passthrough: &Passthrough<&'static str>,
        vfs: &Vfs,
        register: impl Fn(&File) -> io::Result<&'static str>,
    ) -> Opening<&'static str> {
        passthrough.count(vfs, 7, || tempfile::tempfile().ok().map(Arc::new), register).unwrap()
    }

    #[test]
    fn opens_of_an_inode_share_a_backing_that_goes_with_the_last() {
        let (_place, vfs) = empty();
        let passthrough = Passthrough::default();
        passthrough.begin(&vfs, Ok(()));
        let Opening::Backed(first) = open(&passthrough, &vfs, |_| Ok("a")) else { panic!("not backed") };
        let second = open(&passthrough, &vfs, |_| panic!("registered twice"));
        assert!(matches!(&second, Opening::Backed(second) if Arc::ptr_eq(&first, second)));
        let kept = Arc::downgrade(&first);
        drop((first, second));
        passthrough.release(&vfs, 7);
        assert!(kept.upgrade().is_some());
        passthrough.release(&vfs, 7);
        assert!(kept.upgrade().is_none());
        assert_eq!(fact(&vfs), "on");
    }

    #[test]
    fn a_file_that_is_open_without_stays_without() {
        let (_place, vfs) = empty();
        let passthrough = Passthrough::default();
        passthrough.begin(&vfs, Ok(()));
        let refused = open(&passthrough, &vfs, |_| Err(io::ErrorKind::TooManyLinks.into()));
        assert_eq!(refused, Opening::Counted);
        assert!(passthrough.is_on());
        assert!(fact(&vfs).starts_with("in part"));
        assert_eq!(open(&passthrough, &vfs, |_| Ok("a")), Opening::Counted);
        passthrough.release(&vfs, 7);
        passthrough.release(&vfs, 7);
        assert!(matches!(open(&passthrough, &vfs, |_| Ok("a")), Opening::Backed(_)));
    }

    #[test]
    fn beyond_so_many_files_are_served_until_others_are_closed() {
        let (_place, vfs) = empty();
        let passthrough = Passthrough::default();
        passthrough.begin(&vfs, Ok(()));
        passthrough.most.store(2, Ordering::Relaxed);
        let open = |ino| passthrough.count(&vfs, ino, || tempfile::tempfile().ok().map(Arc::new), |_| Ok("a")).unwrap();
        let is_backed = |ino| matches!(open(ino), Opening::Backed(_));
        assert_eq!([1, 2, 3, 1].map(is_backed), [true, true, false, true]);
        passthrough.release(&vfs, 3);
        passthrough.release(&vfs, 1);
        assert!(!is_backed(3));
        passthrough.release(&vfs, 3);
        passthrough.release(&vfs, 1);
        assert!(is_backed(3));
    }

    #[test]
    fn a_blob_that_is_cut_while_it_is_open_is_not_opened_again() {
        let (_place, vfs) = empty();
        let blob = Arc::new(tempfile::tempfile().unwrap());
        blob.set_len(100).unwrap();
        let passthrough = Passthrough::default();
        passthrough.begin(&vfs, Ok(()));
        let open = || passthrough.count(&vfs, 7, || Some(blob.clone()), |_| Ok("a"));
        assert!(matches!(open(), Ok(Opening::Backed(_))));
        blob.set_len(60).unwrap();
        assert!(open().is_err_and(|fault| fault.contains("60 bytes, not 100")));
        passthrough.release(&vfs, 7);
        assert!(passthrough.opened.is_empty());
    }

    #[test]
    fn one_refusal_for_want_of_rights_is_enough() {
        let (_place, vfs) = empty();
        let passthrough = Passthrough::default();
        passthrough.begin(&vfs, Ok(()));
        assert_eq!(open(&passthrough, &vfs, |_| Err(io::ErrorKind::PermissionDenied.into())), Opening::Counted);
        assert!(!passthrough.is_on());
        assert!(fact(&vfs).contains("CAP_SYS_ADMIN"));
    }
}
