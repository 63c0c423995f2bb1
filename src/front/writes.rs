//! The kernel's requests of a mount with `--ingest`: those that change `ollama/` go to [`Ingest`], all others to
//! [`Fuse`]. Nothing is decided here but flags and lifetimes.
//!
//! What can change is never kept by the kernel: every name in `ollama/` is asked for again, and manifests are read past
//! the page cache, since ollama writes a new one through the inode of the old.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use dashmap::DashMap;
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, INodeNo,
    IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::answers::{answer, aside, attempt, file_attr, file_type, name_text, ttl};
use super::fuse::{Fuse, GENERATION};
use super::served::LONG;
use crate::error::{Error, Result};
use crate::ingest::{Form, Ingest, Names, Stat};
use crate::vfs::{Access, ROOT, Vfs};

/// Handles of open directories begin here: those of files are smaller.
const LISTINGS: u64 = 1 << 56;

/// A tree with a part that can be written to.
#[derive(Clone)]
pub struct Writes {
    fuse: Fuse,
    ingest: Arc<Ingest>,
    listings: Arc<DashMap<u64, Arc<Names>>>,
    next: Arc<AtomicU64>,
}

impl Writes {
    /// Serves a tree and its writable part.
    pub fn new(fuse: Fuse, ingest: Arc<Ingest>) -> Writes {
        Writes { fuse, ingest, listings: Arc::default(), next: Arc::new(AtomicU64::new(LISTINGS)) }
    }

    /// Serves a request for which something may have to be planned, as [`Fuse`] does.
    fn serve(&self, ino: INodeNo, work: impl FnOnce(&Writes) + Send + 'static) {
        let writes = self.clone();
        self.fuse.serve(ino, move |_| work(&writes));
    }

    fn vfs(&self) -> &Vfs {
        &self.fuse.vfs
    }

    fn file_attr(&self, stat: &Stat) -> FileAttr {
        file_attr(stat, self.fuse.owner, self.fuse.tolerance.mode())
    }

    /// The path of a directory that can be written to; elsewhere nothing can.
    fn dir(&self, dir: INodeNo) -> Result<String, Errno> {
        self.ingest.path_of(dir.0).ok_or(Errno::EROFS)
    }

    /// Why nothing in another place than `ollama/` is changed. What became a blob or a model since the kernel looked it
    /// up has another inode now, and the kernel looks again.
    fn elsewhere(&self, ino: INodeNo) -> Errno {
        match self.vfs().attr(ino.0) {
            Err(Error::Stale(_)) => Errno::ESTALE,
            _ => Errno::EROFS,
        }
    }

    fn entry(&self, reply: ReplyEntry, stat: Result<Stat, Errno>) {
        match stat {
            Ok(stat) => reply.entry_with_ttls(&ttl(&stat), &Duration::ZERO, &self.file_attr(&stat), GENERATION),
            Err(errno) => reply.error(errno),
        }
    }

    /// The attributes of a listed name, which hold for no time.
    fn listed(&self, dir: INodeNo, name: &str, ino: u64, form: Form) -> FileAttr {
        let found = match self.ingest.path_of(dir.0) {
            _ if name == "." || name == ".." => self.ingest.attr(ino),
            Some(dir) => self.ingest.lookup(&dir, name).map(Some),
            None => self.ingest.attr(ino),
        };
        match (found, self.vfs().attr(ino)) {
            (Ok(Some(stat)), _) => self.file_attr(&stat),
            (_, Ok(attr)) => self.fuse.file_attr(&attr),
            _ => {
                let (size, nlink, mtime) = (0, 1, SystemTime::UNIX_EPOCH);
                self.file_attr(&Stat {
                    ino,
                    form,
                    size,
                    nlink,
                    mtime,
                    access: Access::ALL,
                    writable: false,
                    lasting: false,
                })
            }
        }
    }
}

impl Filesystem for Writes {
    fn init(&mut self, request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        self.fuse.init(request, config)
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let is_top = parent.0 == ROOT && self.ingest.is_top(name);
        let Some(dir) = self.ingest.path_of(parent.0).or(is_top.then(String::new)) else {
            return self.fuse.lookup(request, parent, name, reply);
        };
        let name = name.to_owned();
        self.serve(parent, move |writes| {
            writes.entry(reply, attempt("lookup", || writes.ingest.lookup(&dir, name_text(&name)?)));
        });
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.serve(ino, move |writes| match attempt("getattr", || writes.ingest.attr(ino.0)) {
            Ok(Some(stat)) => reply.attr(&ttl(&stat), &writes.file_attr(&stat)),
            Ok(None) => writes.fuse.attr(ino, reply),
            Err(errno) => reply.error(errno),
        });
    }

    fn opendir(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let is_root = ino.0 == ROOT;
        let Some(dir) = self.ingest.path_of(ino.0).or(is_root.then(String::new)) else {
            return self.fuse.opendir(request, ino, flags, reply);
        };
        self.serve(ino, move |writes| match attempt("opendir", || writes.ingest.entries(ino.0, &dir)) {
            Ok(names) => {
                let fh = writes.next.fetch_add(1, Ordering::Relaxed);
                writes.listings.insert(fh, Arc::new(names));
                reply.opened(FileHandle(fh), FopenFlags::empty());
            }
            Err(errno) => reply.error(errno),
        });
    }

    fn readdir(&self, request: &Request, ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let Some(names) = self.listings.get(&fh.0).map(|names| names.clone()) else {
            return self.fuse.readdir(request, ino, fh, offset, reply);
        };
        let _full =
            names.from(offset).any(|(next, name, ino, form)| reply.add(INodeNo(ino), next, file_type(form), &*name));
        reply.ok();
    }

    fn readdirplus(&self, request: &Request, ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let Some(names) = self.listings.get(&fh.0).map(|names| names.clone()) else {
            return self.fuse.readdirplus(request, ino, fh, offset, reply);
        };
        self.serve(ino, move |writes| {
            let _full = names.from(offset).any(|(next, name, child, form)| {
                let attr = writes.listed(ino, &name, child, form);
                reply.add(attr.ino, next, &*name, &Duration::ZERO, &attr, GENERATION)
            });
            reply.ok();
        });
    }

    fn releasedir(&self, request: &Request, ino: INodeNo, fh: FileHandle, flags: OpenFlags, reply: ReplyEmpty) {
        match self.listings.remove(&fh.0) {
            Some(_) => reply.ok(),
            None => self.fuse.releasedir(request, ino, fh, flags, reply),
        }
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let write = flags.acc_mode() != OpenAccMode::O_RDONLY || flags.0 & libc::O_TRUNC != 0;
        if !self.ingest.may_write(ino.0) {
            return match if write { self.elsewhere(ino) } else { Errno::EROFS } {
                Errno::EROFS => self.fuse.open(request, ino, flags, reply),
                errno => reply.error(errno),
            };
        }
        self.serve(ino, move |writes| match attempt("open", || writes.ingest.open(ino.0, write)) {
            Ok(Some(handle)) if writes.ingest.is_manifest(ino.0) => {
                reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO);
            }
            Ok(Some(handle)) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Ok(None) => match attempt("open", || writes.vfs().open(ino.0)) {
                Ok(()) => reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO),
                Err(errno) => reply.error(errno),
            },
            Err(errno) => reply.error(errno),
        });
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let exclusive = flags & libc::O_EXCL != 0;
        let name = name.to_owned();
        self.serve(parent, move |writes| {
            let create = |dir: String| writes.ingest.create(&dir, name_text(&name)?, exclusive);
            match writes.dir(parent).and_then(|dir| attempt("create", || create(dir))) {
                Ok((stat, handle)) => {
                    let (attr, flags) = (writes.file_attr(&stat), FopenFlags::empty());
                    reply.created(&Duration::ZERO, &attr, GENERATION, FileHandle(handle), flags);
                }
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if !self.ingest.opened(fh.0) {
            return self.fuse.read(request, ino, fh, offset, size, flags, owner, reply);
        }
        let mut buf = vec![0; size as usize];
        match attempt("read", || self.ingest.read(fh.0, offset, &mut buf)) {
            Ok(len) => reply.data(&buf[..len]),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        how: WriteFlags,
        flags: OpenFlags,
        owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if !self.ingest.opened(fh.0) {
            return self.fuse.write(request, ino, fh, offset, data, how, flags, owner, reply);
        }
        let answer = |reply: ReplyWrite, outcome: Result<(), Errno>, len| match outcome {
            Ok(()) => reply.written(len),
            Err(errno) => reply.error(errno),
        };
        let len = data.len() as u32;
        if self.ingest.is_slow(fh.0) {
            let (ingest, data) = (self.ingest.clone(), data.to_vec());
            return aside(move || answer(reply, attempt("write", || ingest.write(fh.0, offset, &data)), len));
        }
        answer(reply, attempt("write", || self.ingest.write(fh.0, offset, data)), len);
    }

    fn flush(&self, _: &Request, _: INodeNo, fh: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // ENOSYS for one file would be taken for an answer for all.
        if !self.ingest.opened(fh.0) {
            return reply.ok();
        }
        let ingest = self.ingest.clone();
        aside(move || answer(reply, attempt("flush", || ingest.flush(fh.0))));
    }

    fn fsync(&self, _: &Request, _: INodeNo, fh: FileHandle, _: bool, reply: ReplyEmpty) {
        if !self.ingest.opened(fh.0) {
            return reply.ok();
        }
        let ingest = self.ingest.clone();
        aside(move || answer(reply, attempt("fsync", || ingest.sync(fh.0))));
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: OpenFlags,
        owner: Option<LockOwner>,
        flush: bool,
        reply: ReplyEmpty,
    ) {
        if !self.ingest.opened(fh.0) {
            return self.fuse.release(request, ino, fh, flags, owner, flush, reply);
        }
        self.ingest.release(fh.0);
        reply.ok();
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if !self.ingest.has(ino.0) {
            return reply.error(self.elsewhere(ino));
        }
        let mtime = mtime.map(|time| match time {
            TimeOrNow::SpecificTime(time) => time,
            TimeOrNow::Now => SystemTime::now(),
        });
        match attempt("setattr", || self.ingest.set(ino.0, fh.map(|fh| fh.0), size, mtime)) {
            Ok(Some(stat)) => reply.attr(&ttl(&stat), &self.file_attr(&stat)),
            Ok(None) => match attempt("setattr", || self.vfs().attr(ino.0)) {
                Ok(attr) => reply.attr(&LONG, &self.fuse.file_attr(&attr)),
                Err(errno) => reply.error(errno),
            },
            Err(errno) => reply.error(errno),
        }
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _mode: u32, _umask: u32, reply: ReplyEntry) {
        let made = self.dir(parent).and_then(|dir| attempt("mkdir", || self.ingest.make_dir(&dir, name_text(name)?)));
        self.entry(reply, made);
    }

    fn symlink(&self, _: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.dir(parent).and_then(|dir| {
            attempt("symlink", || self.ingest.make_link(&dir, name_text(name)?, target.as_os_str().to_owned()))
        });
        self.entry(reply, made);
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        use std::os::unix::ffi::OsStrExt;
        match attempt("readlink", || self.ingest.read_link(ino.0)) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if !self.ingest.has(ino.0) {
            return reply.error(self.elsewhere(ino));
        }
        let made = self.dir(parent).and_then(|dir| attempt("link", || self.ingest.link(ino.0, &dir, name_text(name)?)));
        self.entry(reply, made);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let dir = match self.dir(parent) {
            Ok(dir) => dir,
            Err(errno) => return reply.error(errno),
        };
        let (ingest, name) = (self.ingest.clone(), name.to_owned());
        aside(move || answer(reply, attempt("unlink", || ingest.unlink(&dir, name_text(&name)?))));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.serve(parent, move |writes| {
            let remove = |dir: String| writes.ingest.remove_dir(&dir, name_text(&name)?);
            answer(reply, writes.dir(parent).and_then(|dir| attempt("rmdir", || remove(dir))));
        });
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = match (self.dir(parent), self.dir(new_parent)) {
            (Ok(from), Ok(to)) => (from, to),
            (Err(errno), _) | (_, Err(errno)) => return reply.error(errno),
        };
        if !(flags - RenameFlags::RENAME_NOREPLACE).is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let replace = flags.is_empty();
        let (ingest, name, new_name) = (self.ingest.clone(), name.to_owned(), new_name.to_owned());
        aside(move || {
            let rename = || ingest.rename((&from, name_text(&name)?), (&to, name_text(&new_name)?), replace);
            answer(reply, attempt("rename", rename));
        });
    }

    fn mknod(&self, _: &Request, parent: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(self.dir(parent).map_or_else(|errno| errno, |_| Errno::EPERM));
    }

    fn access(&self, request: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        if self.ingest.has(ino.0) {
            return reply.ok();
        }
        self.fuse.access(request, ino, mask, reply);
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        self.fuse.statfs(request, ino, reply);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if !self.ingest.opened(fh.0) {
            return self.fuse.fallocate(request, ino, fh, offset, len, mode, reply);
        }
        reply.error(Errno::EOPNOTSUPP);
    }

    // ENOSYS is not a failure here: the kernel then answers by itself and asks no more.

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.fuse.getxattr(request, ino, name, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.fuse.listxattr(request, ino, size, reply);
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        position: u32,
        reply: ReplyEmpty,
    ) {
        self.fuse.setxattr(request, ino, name, value, flags, position, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.fuse.removexattr(request, ino, name, reply);
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        reply.error(Errno::ENOSYS);
    }

    fn poll(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        notifier: PollNotifier,
        events: PollEvents,
        flags: PollFlags,
        reply: ReplyPoll,
    ) {
        self.fuse.poll(request, ino, fh, notifier, events, flags, reply);
    }

    fn ioctl(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: IoctlFlags,
        command: u32,
        data: &[u8],
        out: u32,
        reply: ReplyIoctl,
    ) {
        self.fuse.ioctl(request, ino, fh, flags, command, data, out, reply);
    }
}
