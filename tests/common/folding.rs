//! A file system that passes a directory through and takes names for one that differ only in case, as most Macs' do.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

/// Whoever asks again has its answer from here.
const TTL: Duration = Duration::ZERO;

struct Through {
    /// By inode number.
    paths: Mutex<HashMap<u64, PathBuf>>,
}

fn attr(path: &Path) -> io::Result<FileAttr> {
    let found = fs::symlink_metadata(path)?;
    Ok(FileAttr {
        ino: INodeNo(found.ino()),
        size: found.len(),
        blocks: found.blocks(),
        atime: UNIX_EPOCH,
        mtime: found.modified()?,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if found.is_dir() { FileType::Directory } else { FileType::RegularFile },
        perm: (found.mode() & 0o777) as u16,
        nlink: found.nlink() as u32,
        uid: found.uid(),
        gid: found.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    })
}

fn errno(error: io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

impl Through {
    fn path(&self, ino: INodeNo) -> PathBuf {
        self.paths.lock().unwrap()[&ino.0].clone()
    }

    /// What is called so in a directory, or would be.
    fn at(&self, dir: INodeNo, name: &OsStr) -> PathBuf {
        let dir = self.path(dir);
        let names = fs::read_dir(&dir).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        let there = names.into_iter().find(|there| there.eq_ignore_ascii_case(name));
        dir.join(there.as_deref().unwrap_or(name))
    }

    fn entry(&self, path: PathBuf) -> Result<FileAttr, Errno> {
        let mut attr = attr(&path).map_err(errno)?;
        let mut paths = self.paths.lock().unwrap();
        if paths[&1] == path {
            attr.ino = INodeNo(1);
        }
        paths.insert(attr.ino.0, path);
        Ok(attr)
    }

    fn tell(&self, ino: INodeNo, reply: ReplyAttr) {
        match self.entry(self.path(ino)) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(errno),
        }
    }
}

fn answer<T>(outcome: Result<T, Errno>, reply: ReplyEmpty) {
    match outcome {
        Ok(_) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Through {
    fn lookup(&self, _: &Request, dir: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.entry(self.at(dir, name)) {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.tell(ino, reply);
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let path = self.path(ino);
        if let Some(mode) = mode {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        }
        if let Some(size) = size {
            File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
        }
        let mtime = mtime.map(|time| match time {
            TimeOrNow::SpecificTime(time) => time,
            TimeOrNow::Now => SystemTime::now(),
        });
        mtime.into_iter().for_each(|time| File::open(&path).unwrap().set_modified(time).unwrap());
        self.tell(ino, reply);
    }

    fn mkdir(&self, _: &Request, dir: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let path = self.at(dir, name);
        match fs::create_dir(&path).map_err(errno).and_then(|()| self.entry(path)) {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn unlink(&self, _: &Request, dir: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(fs::remove_file(self.at(dir, name)).map_err(errno), reply);
    }

    fn rmdir(&self, _: &Request, dir: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(fs::remove_dir(self.at(dir, name)).map_err(errno), reply);
    }

    fn rename(
        &self,
        _: &Request,
        dir: INodeNo,
        name: &OsStr,
        new_dir: INodeNo,
        new_name: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = (self.at(dir, name), self.at(new_dir, new_name));
        answer(fs::rename(from, &to).map_err(errno).and_then(|()| self.entry(to)), reply);
    }

    fn create(&self, _: &Request, dir: INodeNo, name: &OsStr, mode: u32, _: u32, _: i32, reply: ReplyCreate) {
        let path = self.at(dir, name);
        let made = File::create(&path).and_then(|file| file.set_permissions(Permissions::from_mode(mode)));
        match made.map_err(errno).and_then(|()| self.entry(path)) {
            Ok(attr) => reply.created(&TTL, &attr, Generation(0), FileHandle(0), FopenFlags::empty()),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut bytes = vec![0; size as usize];
        match File::open(self.path(ino)).and_then(|file| file.read_at(&mut bytes, offset)) {
            Ok(len) => reply.data(&bytes[..len]),
            Err(error) => reply.error(errno(error)),
        }
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
        let file = File::options().write(true).open(self.path(ino));
        match file.and_then(|file| file.write_all_at(data, offset)) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let entries = fs::read_dir(self.path(ino)).unwrap().map(|entry| entry.unwrap());
        for (at, entry) in entries.enumerate().skip(offset as usize) {
            let found = entry.metadata().unwrap();
            let kind = if found.is_dir() { FileType::Directory } else { FileType::RegularFile };
            if reply.add(INodeNo(found.ino()), at as u64 + 1, kind, entry.file_name()) {
                break;
            }
        }
        reply.ok();
    }
}

/// The file system, mounted.
pub struct Folding {
    at: PathBuf,
    session: Option<BackgroundSession>,
}

impl Folding {
    /// Shows `dir` at `at`, which is made.
    pub fn new(dir: &Path, at: &Path) -> Folding {
        fs::create_dir(at).unwrap();
        let paths = Mutex::new(HashMap::from([(1, dir.to_owned())]));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("folding".into())];
        let session = fuser::Session::new(Through { paths }, at, &config).unwrap().spawn().unwrap();
        Folding { at: at.to_owned(), session: Some(session) }
    }
}

impl Drop for Folding {
    fn drop(&mut self) {
        let is_root = rustix::process::geteuid().is_root();
        let (program, lazily) = if is_root { ("umount", "-l") } else { ("fusermount3", "-uz") };
        let umount = std::process::Command::new(program).arg(lazily).arg(&self.at).status();
        assert!(umount.is_ok_and(|status| status.success()));
        drop(self.session.take());
    }
}
