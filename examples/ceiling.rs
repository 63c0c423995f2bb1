//! The files of a directory, all zeros: what reading through FUSE costs when the bytes cost nothing.
//!
//! No server can answer faster than from one buffer that stays in the processor's cache, so its rates are the ceiling that
//! `contrib/bench/read.py` holds the mount against. Requests, threads and read-ahead are those of the mount.
//!
//! ```text
//! cargo run --release --example ceiling -- DIRECTORY MOUNTPOINT [direct]
//! ```

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};

const TTL: Duration = Duration::from_secs(3600);
const LONGEST_REQUEST: usize = 512 << 10;
const READ_AHEAD_KIB: &str = "4096";

struct Zeros {
    files: Vec<(OsString, u64)>,
    direct: bool,
    buffer: Vec<u8>,
}

impl Zeros {
    fn of(directory: &Path, direct: bool) -> io::Result<Zeros> {
        let mut files = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_file() {
                files.push((entry.file_name(), metadata.len()));
            }
        }
        Ok(Zeros { files, direct, buffer: vec![0; LONGEST_REQUEST] })
    }

    /// The root is inode 1, and the files follow it.
    fn file(&self, ino: INodeNo) -> Option<&(OsString, u64)> {
        self.files.get(usize::try_from(ino.0).ok()?.checked_sub(2)?)
    }

    fn attr(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match self.file(ino) {
            Some((_, size)) => (FileType::RegularFile, 0o444, *size),
            None if ino == INodeNo::ROOT => (FileType::Directory, 0o555, 0),
            None => return None,
        };
        Some(FileAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 1 << 20,
            flags: 0,
        })
    }
}

impl Filesystem for Zeros {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for flag in [InitFlags::FUSE_ASYNC_READ, InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP] {
            // A kernel that lacks one is measured without it.
            let _ = config.add_capabilities(flag);
        }
        config.set_max_background(256).map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let index = self.files.iter().position(|(file, _)| file == name);
        match index.and_then(|index| self.attr(INodeNo(index as u64 + 2))) {
            Some(attr) => reply.entry(&TTL, &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Some(attr) => reply.attr(&TTL, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let how = if self.direct { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::FOPEN_KEEP_CACHE };
        reply.opened(FileHandle(0), how | FopenFlags::FOPEN_NOFLUSH);
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
        let left = self.file(ino).map_or(0, |(_, length)| length.saturating_sub(offset));
        reply.data(&self.buffer[..usize::try_from(left).unwrap_or(usize::MAX).min(size as usize)]);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [directory, mountpoint, rest @ ..] = &args[..] else {
        return Err("usage: ceiling DIRECTORY MOUNTPOINT [direct]".into());
    };
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("ceiling".into()),
        MountOption::RO,
        MountOption::CUSTOM(format!("max_read={LONGEST_REQUEST}")),
    ];
    config.n_threads = Some(std::thread::available_parallelism()?.get().max(4) + 1);
    let zeros = Zeros::of(Path::new(directory), rest.iter().any(|word| word == "direct"))?;
    let session = fuser::Session::new(zeros, mountpoint, &config)?.spawn()?;
    let device = fs::metadata(mountpoint)?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), READ_AHEAD_KIB)?;
    session.join()?;
    Ok(())
}
