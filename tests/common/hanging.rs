//! A file system that passes a flat directory through and stops answering for chosen files, as a network store can.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyOpen, Request,
};

const TTL: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    names: HashMap<u64, String>,
    hung: HashSet<String>,
    waiting: Vec<(u64, u64, u32, ReplyData)>,
    shut: HashSet<String>,
    opening: Vec<ReplyOpen>,
}

struct Through {
    dir: PathBuf,
    state: Arc<Mutex<State>>,
}

impl Through {
    fn path(&self, ino: u64) -> PathBuf {
        if ino == 1 {
            return self.dir.clone();
        }
        self.dir.join(&self.state.lock().unwrap().names[&ino])
    }

    fn attr(&self, ino: u64) -> FileAttr {
        let found = fs::metadata(self.path(ino)).unwrap();
        FileAttr {
            ino: INodeNo(ino),
            size: found.len(),
            blocks: found.blocks(),
            atime: UNIX_EPOCH,
            mtime: found.modified().unwrap(),
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if found.is_dir() { FileType::Directory } else { FileType::RegularFile },
            perm: if found.is_dir() { 0o755 } else { 0o444 },
            nlink: 1,
            uid: found.uid(),
            gid: found.gid(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

fn answer(dir: &Path, name: &str, offset: u64, size: u32, reply: ReplyData) {
    let mut bytes = vec![0; size as usize];
    let read = File::open(dir.join(name)).unwrap().read_at(&mut bytes, offset).unwrap();
    reply.data(&bytes[..read]);
}

fn opened(reply: ReplyOpen) {
    // Nothing is kept by the kernel, so that every read comes to us.
    reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
}

impl Filesystem for Through {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_str().unwrap().to_owned();
        let Ok(found) = fs::metadata(self.dir.join(&name)) else { return reply.error(Errno::ENOENT) };
        self.state.lock().unwrap().names.insert(found.ino(), name);
        reply.entry(&TTL, &self.attr(found.ino()), Generation(0));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino.0));
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let mut state = self.state.lock().unwrap();
        match state.shut.contains(&state.names[&ino.0]) {
            true => state.opening.push(reply),
            false => opened(reply),
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
        let mut state = self.state.lock().unwrap();
        let name = state.names[&ino.0].clone();
        if state.hung.contains(&name) {
            state.waiting.push((ino.0, offset, size, reply));
        } else {
            drop(state);
            answer(&self.dir, &name, offset, size, reply);
        }
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let names = fs::read_dir(&self.dir).unwrap().map(|entry| entry.unwrap());
        for (at, entry) in names.enumerate().skip(offset as usize) {
            if reply.add(
                INodeNo(entry.metadata().unwrap().ino()),
                at as u64 + 1,
                FileType::RegularFile,
                entry.file_name(),
            ) {
                break;
            }
        }
        reply.ok();
    }
}

/// The file system, mounted over the directory that it shows.
pub struct Hanging {
    at: PathBuf,
    dir: PathBuf,
    state: Arc<Mutex<State>>,
    session: Option<BackgroundSession>,
}

impl Hanging {
    /// Moves `dir` to `aside` and shows it in its place.
    pub fn over(dir: &Path, aside: &Path) -> Hanging {
        fs::rename(dir, aside).unwrap();
        fs::create_dir(dir).unwrap();
        let state = Arc::<Mutex<State>>::default();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("hanging".into()), MountOption::RO];
        let through = Through { dir: aside.to_owned(), state: state.clone() };
        let session = fuser::Session::new(through, dir, &config).unwrap().spawn().unwrap();
        Hanging { at: dir.to_owned(), dir: aside.to_owned(), state, session: Some(session) }
    }

    /// From here on, reads of this file are not answered.
    pub fn hang(&self, name: &str) {
        self.state.lock().unwrap().hung.insert(name.to_owned());
    }

    /// From here on, nobody who opens this file is answered.
    pub fn shut(&self, name: &str) {
        self.state.lock().unwrap().shut.insert(name.to_owned());
    }

    /// How many are not answered.
    pub fn waiting(&self) -> usize {
        let state = self.state.lock().unwrap();
        state.waiting.len() + state.opening.len()
    }

    /// Answers all that was not answered, and everything from here on.
    pub fn answer(&self) {
        let mut state = self.state.lock().unwrap();
        state.hung.clear();
        state.shut.clear();
        std::mem::take(&mut state.opening).into_iter().for_each(opened);
        for (ino, offset, size, reply) in std::mem::take(&mut state.waiting) {
            answer(&self.dir, &state.names[&ino], offset, size, reply);
        }
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.answer();
        // By force: whoever still waits for an answer gets an error, and the process can end.
        for how in ["-f", "-l"] {
            let _ = std::process::Command::new("umount")
                .arg(how)
                .arg(&self.at)
                .stderr(std::process::Stdio::null())
                .status();
        }
        drop(self.session.take());
    }
}
