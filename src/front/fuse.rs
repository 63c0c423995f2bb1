//! The kernel's requests, passed to [`Vfs`] and answered. Nothing is decided here but flags and lifetimes.
//!
//! An inode number means one content for ever, so the kernel may keep pages and attributes of files as long as it
//! likes; only names of models that can be removed or replaced, and directories, are asked for again.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use dashmap::DashMap;
use fuser::{
    AccessFlags, BackingId, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, RequestId,
    TimeOrNow, WriteFlags,
};

use super::errno::{Complaints, caught, errno};
use super::lanes::{Lanes, THREADS_OF_ONE};
use super::listing::{Attributes, Entry, entries_from, file_type};
use super::passthrough::{Opening, Passthrough};
use super::push::Push;
use super::readpath::{Mode, ReadPath};
use super::splice::Splicing;
use super::tolerate::Tolerance;
use super::{machine, sys};
use crate::error::{Error, Result};
use crate::extent::Sink;
use crate::vfs::{Access, Attr, Kind, Listing, Vfs};

/// For what cannot change while mounted.
pub(super) const LONG: Duration = Duration::from_secs(1_000_000);
/// For what can: the time after which a removed model is no longer found.
const SHORT: Duration = Duration::from_secs(1);
/// Requests of readahead and asynchronous reads that the kernel may have under way at a time (its default is 12).
/// A blob that does not answer must not take all of them from the others.
const BACKGROUND: u16 = 256;
/// Longest name in bytes.
const NAME_MAX: u32 = 255;
const BLOCK: u32 = 4096;
/// The numbers in use are hashes and never used again for other content, so one generation is enough.
pub(super) const GENERATION: Generation = Generation(0);
/// In the handle of an open file: [`Passthrough`] counts it.
const COUNTED: u64 = 1;

thread_local! {
    /// Reads of one thread follow each other, so one buffer, of the largest size yet asked for, serves them all.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A [`Vfs`] as the kernel sees it.
#[derive(Clone)]
pub struct Fuse(Arc<Served>);

/// What all threads that serve have in common.
pub struct Served {
    vfs: Arc<Vfs>,
    owner: (u32, u32),
    /// The listing of each open directory as it was when it was opened: the pages of one reading then agree.
    listings: DashMap<u64, Arc<Listing>>,
    next_listing: AtomicU64,
    passthrough: Arc<Passthrough<BackingId>>,
    readpath: ReadPath,
    push: Arc<Push>,
    splicing: Arc<Splicing>,
    complaints: Arc<Complaints>,
    tolerance: Arc<Tolerance>,
    lanes: Arc<Lanes>,
}

impl Deref for Fuse {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.0
    }
}

impl Fuse {
    /// Serves `vfs` with so many threads, with every file owned by the user of this process.
    pub fn new(vfs: Arc<Vfs>, mode: Mode, tolerance: Arc<Tolerance>, threads: usize) -> Fuse {
        Fuse(Arc::new(Served {
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
        }))
    }

    /// Who serves the requests.
    pub fn lanes(&self) -> Arc<Lanes> {
        self.lanes.clone()
    }

    /// Serves a request here, or has another thread do it if this is the last that is free.
    fn serve(&self, ino: INodeNo, work: impl FnOnce(&Fuse) + Send + 'static) {
        match self.lanes.enter() {
            Some(_lane) => work(self),
            None => {
                let fuse = self.clone();
                self.lanes.hand_over(ino.0, Vec::new(), move || work(&fuse));
            }
        }
    }

    fn read_now(&self, request: RequestId, ino: INodeNo, offset: u64, size: usize, reply: ReplyData) {
        let send = |sink: &mut dyn Sink| caught(|| Ok(self.vfs.send(ino.0, offset, size, sink))).ok().flatten();
        let Some(reply) = self.splicing.answer(request, size, reply, send) else { return };
        BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < size {
                buffer.resize(size, 0);
            }
            match self.ask("read", ino, |vfs| vfs.read(ino.0, offset, &mut buffer[..size])) {
                Ok(len) => reply.data(&buffer[..len]),
                Err(errno) => reply.error(errno),
            }
        });
    }

    /// What gives pages to the kernel before it asks.
    pub fn push(&self) -> Arc<Push> {
        self.push.clone()
    }

    /// What moves pages of blobs into replies.
    pub fn splicing(&self) -> Arc<Splicing> {
        self.splicing.clone()
    }

    /// The files that the kernel reads past us.
    pub fn passthrough(&self) -> Arc<Passthrough<BackingId>> {
        self.passthrough.clone()
    }

    pub(super) fn vfs(&self) -> &Vfs {
        &self.vfs
    }

    pub(super) fn owner(&self) -> (u32, u32) {
        self.owner
    }

    pub(super) fn file_mode(&self) -> u16 {
        self.tolerance.mode()
    }

    /// Asks the kernel for passthrough, if that can come to anything.
    fn negotiate_passthrough(&self, config: &mut KernelConfig) -> Result<(), &'static str> {
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
    fn ask<T>(&self, request: &str, ino: INodeNo, work: impl FnOnce(&Vfs) -> Result<T>) -> Result<T, Errno> {
        caught(|| work(&self.vfs)).map_err(|error| {
            self.complaints.log(request, ino.0, &error);
            errno(&error)
        })
    }

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

    fn listing(&self, fh: FileHandle) -> Result<Arc<Listing>, Errno> {
        self.listings.get(&fh.0).map(|listing| Arc::clone(&listing)).ok_or(Errno::EBADF)
    }

    /// Attributes of a listed name, and for how long they hold.
    ///
    /// What cannot be looked up just now is listed with what is known and a lifetime of zero, so that one damaged
    /// model does not hide the others and whoever touches it is told.
    fn listed_attr(&self, dir: INodeNo, entry: &Entry) -> (FileAttr, Duration) {
        let found = match &*entry.name {
            "." | ".." => self.ask("readdirplus", INodeNo(entry.ino), |vfs| vfs.attr(entry.ino)),
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

fn attr_ttl(attr: &Attr) -> Duration {
    if attr.kind == Kind::Dir { SHORT } else { LONG }
}

fn entry_ttl(attr: &Attr) -> Duration {
    if attr.fleeting { SHORT } else { LONG }
}

/// A reader with O_DIRECT may ask for any range here, which the blob's own file system would refuse: its reads come to
/// us, past the page cache; what it maps is the blob all the same.
fn passthrough_flags(flags: OpenFlags) -> FopenFlags {
    let direct = if machine::asks_for_direct(flags.0) { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() };
    FopenFlags::FOPEN_NOFLUSH | direct
}

fn known_name(name: &OsStr) -> Result<&str> {
    // Every name of the tree is text, so another one is the name of nothing.
    name.to_str().ok_or_else(|| Error::NotFound(name.to_string_lossy().into_owned()))
}

impl Filesystem for Fuse {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
        ];
        let passthrough = self.negotiate_passthrough(config);
        self.passthrough.begin(&self.vfs, passthrough);
        if config.add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP).is_ok() {
            self.readpath.direct_can_be_mapped();
        }
        // An older kernel goes without; it answers with what it lacks.
        let lacking: Vec<_> = wanted.into_iter().filter_map(|flag| config.add_capabilities(flag).err()).collect();
        config.set_max_background(BACKGROUND).map_err(|_| io::ErrorKind::InvalidInput)?;
        tracing::debug!(?lacking, abi = ?config.kernel_abi(), "the kernel answers");
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        // The kernel's own limit is 1024.
        if name.len() > NAME_MAX as usize {
            return reply.error(Errno::ENAMETOOLONG);
        }
        let name = name.to_owned();
        self.serve(parent, move |fuse| {
            match fuse.ask("lookup", parent, |vfs| vfs.lookup(parent.0, known_name(&name)?)) {
                Ok(attr) => {
                    reply.entry_with_ttls(&attr_ttl(&attr), &entry_ttl(&attr), &fuse.file_attr(&attr), GENERATION);
                }
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.serve(ino, move |fuse| match fuse.ask("getattr", ino, |vfs| vfs.attr(ino.0)) {
            Ok(attr) => reply.attr(&attr_ttl(&attr), &fuse.file_attr(&attr)),
            Err(errno) => reply.error(errno),
        });
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.serve(ino, move |fuse| match fuse.ask("opendir", ino, |vfs| vfs.entries(ino.0)) {
            Ok(listing) => {
                let fh = fuse.next_listing.fetch_add(1, Ordering::Relaxed);
                fuse.listings.insert(fh, Arc::new(listing));
                reply.opened(FileHandle(fh), FopenFlags::empty());
            }
            Err(errno) => reply.error(errno),
        });
    }

    fn readdir(&self, _: &Request, ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        match self.listing(fh) {
            Ok(listing) => {
                let mut entries = entries_from(ino, &listing, offset);
                let _full = entries.any(|it| reply.add(INodeNo(it.ino), it.next, file_type(it.kind), &*it.name));
                reply.ok();
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(&self, _: &Request, ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        self.serve(ino, move |fuse| match fuse.listing(fh) {
            Ok(listing) => {
                let mut entries = entries_from(ino, &listing, offset);
                let _full = entries.any(|it| {
                    let (attr, ttl) = fuse.listed_attr(ino, &it);
                    reply.add(attr.ino, it.next, &*it.name, &ttl, &attr, GENERATION)
                });
                reply.ok();
            }
            Err(errno) => reply.error(errno),
        });
    }

    fn releasedir(&self, _: &Request, _: INodeNo, fh: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.listings.remove(&fh.0);
        reply.ok();
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.tolerance.admits(flags) {
            return self.serve(ino, move |fuse| match fuse.ask("open", ino, |vfs| vfs.open(ino.0)) {
                Ok(()) => reply.opened(FileHandle(0), Tolerance::flags(&fuse.readpath)),
                Err(errno) => reply.error(errno),
            });
        }
        if flags.acc_mode() != OpenAccMode::O_RDONLY || flags.0 & libc::O_TRUNC != 0 {
            return reply.error(Errno::EROFS);
        }
        self.serve(ino, move |fuse| {
            let opening = fuse.ask("open", ino, |vfs| {
                vfs.open(ino.0)?;
                let opening = fuse.passthrough.open(vfs, ino.0, |blob| reply.open_backing(blob));
                opening.inspect_err(|_| vfs.release(ino.0))
            });
            match opening {
                Ok(Opening::Served) => reply.opened(FileHandle(0), fuse.readpath.flags()),
                Ok(Opening::Counted) => reply.opened(FileHandle(COUNTED), fuse.readpath.flags()),
                Ok(Opening::Backed(backing)) => {
                    reply.opened_passthrough(FileHandle(COUNTED), passthrough_flags(flags), &backing);
                }
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if !machine::asks_for_direct(flags.0) {
            self.push.saw(ino, offset, size);
        }
        let (request, size) = (request.unique(), size as usize);
        if self.vfs.is_slow(ino.0, offset, size as u64) {
            // The threads that serve requests must not all wait for one survey.
            let (vfs, complaints) = (self.vfs.clone(), self.complaints.clone());
            let work = move || {
                let mut buffer = vec![0; size];
                match vfs.read(ino.0, offset, &mut buffer) {
                    Ok(len) => reply.data(&buffer[..len]),
                    Err(error) => {
                        complaints.log("read", ino.0, &error);
                        reply.error(errno(&error));
                    }
                }
            };
            // Without a thread the reply goes down with the work, which the reader sees as an I/O error.
            let _ = std::thread::Builder::new().spawn(work);
            return;
        }
        let blobs = || self.vfs.blobs_of(ino.0, offset, size as u64);
        let stuck = if self.lanes.are_some_stuck() { Some(blobs()) } else { None };
        let lane = match &stuck {
            Some(blobs) if self.lanes.is_stuck(blobs) => None,
            _ => self.lanes.enter(),
        };
        match lane {
            Some(_lane) => self.read_now(request, ino, offset, size, reply),
            None => {
                let fuse = self.clone();
                let blobs = stuck.unwrap_or_else(blobs);
                self.lanes.hand_over(ino.0, blobs, move || fuse.read_now(request, ino, offset, size, reply));
            }
        }
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        if fh.0 & COUNTED != 0 {
            self.passthrough.release(&self.vfs, ino.0);
        }
        self.vfs.release(ino.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, ino: INodeNo, reply: ReplyStatfs) {
        self.serve(ino, move |fuse| match fuse.ask("statfs", ino, |vfs| vfs.space()) {
            Ok(space) => {
                let block = u32::try_from(space.block_size).unwrap_or(BLOCK);
                reply.statfs(space.blocks, space.free, space.free, space.files, 0, block, NAME_MAX, block);
            }
            Err(errno) => reply.error(errno),
        });
    }

    fn access(&self, _: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        if mask.contains(AccessFlags::W_OK) {
            return reply.error(Errno::EROFS);
        }
        match self.ask("access", ino, |vfs| vfs.attr(ino.0)) {
            Ok(attr) if attr.kind == Kind::File && mask.contains(AccessFlags::X_OK) => reply.error(Errno::EACCES),
            Ok(_) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    // ENOSYS is not a failure here: the kernel then answers by itself and asks no more.

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        reply.error(Errno::ENOSYS);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS);
    }

    /// Programs ask of every file that they open whether it is a terminal.
    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    // Everything below would change the tree.

    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.error(Errno::EROFS);
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::EROFS);
        self.tolerance.refuse(ino, offset, data.len());
    }

    fn fallocate(&self, _: &Request, _: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }

    fn create(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        reply.error(Errno::EROFS);
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }

    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn rename(&self, _: &Request, _: INodeNo, _: &OsStr, _: INodeNo, _: &OsStr, _: RenameFlags, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }

    fn link(&self, _: &Request, _: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }

    fn setxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }

    fn removexattr(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_no_text_are_absent() {
        use std::os::unix::ffi::OsStrExt;

        assert!(matches!(known_name(OsStr::from_bytes(b"\xff")), Err(Error::NotFound(_))));
    }
}
