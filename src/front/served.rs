//! What the threads that serve have in common, and what the kernel is told of directories and files, and for how long.
//!
//! An inode number means one content for ever, so the kernel may keep pages and attributes of files as long as it
//! likes; only names of models that can be removed or replaced, and directories, are asked for again.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use dashmap::DashMap;
use fuser::{BackingId, Errno, FileAttr, FileHandle, FileType, INodeNo, InitFlags, KernelConfig};

use super::errno::{Complaints, caught, errno};
use super::lanes::{Lanes, THREADS_OF_ONE};
use super::listing::{Attributes, Entry};
use super::passthrough::Passthrough;
use super::push::Push;
use super::readpath::{Mode, ReadPath};
use super::splice::Splicing;
use super::tolerate::Tolerance;
use super::{machine, sys};
use crate::error::Result;
use crate::vfs::{Access, Attr, Kind, Listing, Vfs};

/// For what cannot change while mounted.
pub(super) const LONG: Duration = Duration::from_secs(1_000_000);
/// For what can: the time after which a removed model is no longer found.
const SHORT: Duration = Duration::from_secs(1);

/// What all threads that serve have in common.
pub struct Served {
    pub(super) vfs: Arc<Vfs>,
    pub(super) owner: (u32, u32),
    /// The listing of each open directory as it was when it was opened: the pages of one reading then agree.
    pub(super) listings: DashMap<u64, Arc<Listing>>,
    pub(super) next_listing: AtomicU64,
    pub(super) passthrough: Arc<Passthrough<BackingId>>,
    pub(super) readpath: ReadPath,
    pub(super) push: Arc<Push>,
    pub(super) splicing: Arc<Splicing>,
    pub(super) complaints: Arc<Complaints>,
    pub(super) tolerance: Arc<Tolerance>,
    pub(super) lanes: Arc<Lanes>,
}

impl Served {
    /// Serves `vfs` with so many threads, with every file owned by the user of this process.
    pub fn new(vfs: Arc<Vfs>, mode: Mode, tolerance: Arc<Tolerance>, threads: usize) -> Served {
        Served {
            vfs,
            owner: sys::owner(),
            listings: DashMap::new(),
            next_listing: AtomicU64::new(1),
            passthrough: Arc::default(),
            readpath: ReadPath::new(mode),
            push: Arc::default(),
            splicing: Arc::new(Splicing::new(threads.saturating_add(THREADS_OF_ONE))),
            complaints: Arc::default(),
            tolerance,
            lanes: Arc::new(Lanes::new(threads)),
        }
    }

    /// Asks the kernel for passthrough, if that can come to anything.
    pub(super) fn negotiate_passthrough(&self, config: &mut KernelConfig) -> Result<(), &'static str> {
        if self.readpath.mode() != Mode::Auto {
            return Err("another way to read was asked for");
        }
        if self.tolerance.is_on() {
            return Err("--tolerate-rw: the kernel would let writes through, too");
        }
        if !machine::may_administer() {
            return Err("this process lacks CAP_SYS_ADMIN");
        }
        config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).map_err(|_| "this kernel lacks it (Linux 6.9 has it)")?;
        // The least depth that serves: with 2, this mount could not lie below an overlay.
        let depth = if machine::is_stacked(self.vfs.store().root()) { 2 } else { 1 };
        config.set_max_stack_depth(depth).map_err(|_| "this kernel allows no stacking")?;
        Ok(())
    }

    /// Runs one request.
    pub(super) fn ask<T>(&self, request: &str, ino: INodeNo, work: impl FnOnce(&Vfs) -> Result<T>) -> Result<T, Errno> {
        caught(|| work(&self.vfs)).map_err(|error| {
            self.complaints.log(request, ino.0, &error);
            errno(&error)
        })
    }

    /// A node's attributes, as the kernel wants them.
    pub(super) fn file_attr(&self, attr: &Attr) -> FileAttr {
        let read = attr.access.mode;
        let (kind, perm) = match attr.kind {
            Kind::Dir => (FileType::Directory, read | read >> 2),
            // Who may read may write as far as that is tolerated.
            Kind::File => (FileType::RegularFile, (read | read >> 1) & self.tolerance.mode()),
        };
        let Attr { ino, size, mtime, nlink, access, .. } = *attr;
        Attributes { ino, size, mtime, kind, perm, nlink, access }.of(self.owner)
    }

    /// The listing of an open directory.
    pub(super) fn listing(&self, fh: FileHandle) -> Result<Arc<Listing>, Errno> {
        self.listings.get(&fh.0).map(|listing| Arc::clone(&listing)).ok_or(Errno::EBADF)
    }

    /// Attributes of a listed name, and for how long they hold.
    ///
    /// What cannot be looked up just now, or not in time, is listed with what is known and a lifetime of zero, so that one
    /// damaged model does not hide the others and whoever touches it is told.
    pub(super) fn listed_attr(&self, dir: INodeNo, entry: &Entry) -> (FileAttr, Duration) {
        let found = match &*entry.name {
            "." | ".." => self.ask("readdirplus", INodeNo(entry.ino), |vfs| vfs.attr(entry.ino)),
            name if self.vfs.is_awaited(dir.0, name) => Err(Errno::EAGAIN),
            name => self.ask("readdirplus", dir, |vfs| vfs.lookup(dir.0, name)),
        };
        match found {
            Ok(attr) => (self.file_attr(&attr), attr_ttl(&attr).min(entry_ttl(&attr))),
            Err(_) => {
                let (ino, kind) = (entry.ino, entry.kind);
                let attr = Attr {
                    ino,
                    kind,
                    size: 0,
                    nlink: 1,
                    mtime: SystemTime::UNIX_EPOCH,
                    access: Access::ALL,
                    fleeting: true,
                };
                (self.file_attr(&attr), Duration::ZERO)
            }
        }
    }
}

/// For how long the kernel may keep attributes.
pub(super) fn attr_ttl(attr: &Attr) -> Duration {
    if attr.kind == Kind::Dir { SHORT } else { LONG }
}

/// For how long the kernel may keep a name.
pub(super) fn entry_ttl(attr: &Attr) -> Duration {
    if attr.fleeting { SHORT } else { LONG }
}
