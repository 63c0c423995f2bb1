//! The kernel's requests, passed to [`Vfs`] and answered. Nothing is decided here but flags and lifetimes.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek,
    ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, RequestId, TimeOrNow, WriteFlags,
};

use super::errno::{caught, errno};
use super::listing::{entries_from, file_type};
use super::machine;
use super::passthrough::Opening;
use super::readpath::Mode;
use super::served::{Served, attr_ttl, entry_ttl};
use super::tolerate::Tolerance;
use crate::error::{Error, Result};
use crate::extent::Sink;
use crate::vfs::{Kind, Vfs};

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

impl Deref for Fuse {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.0
    }
}

impl Fuse {
    /// Serves `vfs` with so many threads, with every file owned by the user of this process.
    pub fn new(vfs: Arc<Vfs>, mode: Mode, tolerance: Arc<Tolerance>, threads: usize) -> Fuse {
        Fuse(Arc::new(Served::new(vfs, mode, tolerance, threads)))
    }

    /// Serves a request here, or has another thread do it if this is the last that is free.
    pub(super) fn serve(&self, ino: INodeNo, work: impl FnOnce(&Fuse) + Send + 'static) {
        match self.lanes.enter() {
            Some(_lane) => work(self),
            None => {
                let fuse = self.clone();
                self.lanes.hand_over(ino.0, Vec::new(), move || work(&fuse));
            }
        }
    }

    pub(super) fn attr(&self, ino: INodeNo, reply: ReplyAttr) {
        match self.ask("getattr", ino, |vfs| vfs.attr(ino.0)) {
            Ok(attr) => reply.attr(&attr_ttl(&attr), &self.file_attr(&attr)),
            Err(errno) => reply.error(errno),
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
        self.serve(ino, move |fuse| fuse.attr(ino, reply));
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
        let blobs = || self.vfs.blobs_of(ino.0, offset, size as u64);
        let stuck = self.lanes.are_some_stuck().then(blobs);
        let is_stuck = stuck.as_ref().is_some_and(|blobs| self.lanes.is_stuck(blobs));
        if !is_stuck && self.vfs.is_slow(ino.0, offset, size as u64) {
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
        let lane = if is_stuck { None } else { self.lanes.enter() };
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
                reply.statfs(space.blocks, space.free, space.free, 0, 0, block, NAME_MAX, block);
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
