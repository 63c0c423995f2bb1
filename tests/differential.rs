//! The mount against an exported copy: the same calls, the same answers.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Random, Store, facts_of_mount, facts_of_vfs, succeed, walk};

/// Random calls of each test.
const CALLS: usize = 20_000;

/// An exported copy, read-only as far as this user can make it so.
struct Copy {
    root: PathBuf,
    read_only: bool,
}

impl Copy {
    fn of(store: &Store) -> Copy {
        let root = store.dir.path().join("copy");
        fs::create_dir(&root).unwrap();
        // Layouts come with all that is in them but variants, which are exported by their names.
        let facts = facts_of_vfs(&store.whole_vfs());
        for path in facts.keys().filter(|path| !path.is_empty()) {
            let place = root.join(path);
            if !place.exists() {
                store.run(&["export", path, place.to_str().unwrap()]);
            }
        }
        for (path, (.., time)) in facts.iter().filter(|(path, _)| !path.is_empty()) {
            File::open(root.join(path)).unwrap().set_modified(*time).unwrap();
        }
        let mount = |args: &[&str]| {
            let mount = Command::new("mount").args(args).arg(&root).status();
            mount.is_ok_and(|status| status.success())
        };
        let read_only = rustix::process::geteuid().is_root()
            && mount(&["--bind", root.to_str().unwrap()])
            && mount(&["-o", "remount,bind,ro"]);
        Copy { root, read_only }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if self.read_only {
            let _ = Command::new("umount").arg(&self.root).status();
        }
    }
}

/// A read-only call on one path; its answer can be compared.
#[derive(Debug, Clone, Copy)]
enum Call {
    Read { offset: u64, len: usize },
    Stat,
    List,
    Map,
    Open { flags: i32 },
    Below,
    Remove,
    Rename,
    MakeDir,
    Truncate,
}

impl Call {
    fn any(random: &mut Random, size: u64) -> Call {
        match random.below(20) {
            0..8 => {
                let near = [0, size, size.saturating_sub(100), random.below(size + 5000), u64::from(u32::MAX), 1 << 62];
                let len = [0, 1, 4096, random.below(300_000) as usize];
                Call::Read { offset: *random.choose(&near), len: *random.choose(&len) }
            }
            8..10 => Call::Stat,
            10 | 11 => Call::List,
            12 | 13 => Call::Map,
            14 => {
                let flags =
                    [libc::O_WRONLY, libc::O_RDWR, libc::O_RDWR | libc::O_CREAT, libc::O_WRONLY | libc::O_TRUNC];
                Call::Open { flags: *random.choose(&flags) }
            }
            15 => Call::Below,
            16 => Call::Remove,
            17 => Call::Rename,
            18 => Call::MakeDir,
            _ => Call::Truncate,
        }
    }

    fn writes(self) -> bool {
        matches!(self, Call::Open { .. } | Call::Remove | Call::Rename | Call::MakeDir | Call::Truncate)
    }

    /// The answer in a form that can be compared, or the errno.
    fn on(self, path: &Path) -> Result<Vec<u8>, Option<i32>> {
        self.answer(path).map_err(|error| error.raw_os_error())
    }

    fn answer(self, path: &Path) -> io::Result<Vec<u8>> {
        let mut options = OpenOptions::new();
        match self {
            Call::Read { offset, len } => {
                let mut buf = vec![0; len];
                let read = File::open(path)?.read_at(&mut buf, offset)?;
                buf.truncate(read);
                Ok(buf)
            }
            Call::Stat => {
                let it = fs::symlink_metadata(path)?;
                // Sizes and names of directories are the file system's own affair.
                let file = if it.is_dir() { (0, 0) } else { (it.len(), it.nlink()) };
                Ok(format!("{:?} {file:?} {} {}", it.file_type(), it.mtime(), it.mtime_nsec()).into())
            }
            Call::List => {
                let names = fs::read_dir(path)?.map(|entry| entry.map(|entry| (entry.file_name(), entry.file_type())));
                let names = names.collect::<io::Result<Vec<_>>>()?;
                let mut names: Vec<_> = names.into_iter().map(|(name, kind)| format!("{name:?} {kind:?}")).collect();
                names.sort();
                Ok(names.join("\n").into())
            }
            Call::Map => {
                // SAFETY: nobody writes to either file, which is what this test is about.
                let map = unsafe { memmap2::Mmap::map(&File::open(path)?) }?;
                Ok(map.to_vec())
            }
            Call::Open { flags } => {
                options.read(true).write(flags & libc::O_ACCMODE != libc::O_RDONLY).custom_flags(flags);
                options.open(path).map(|_| Vec::new())
            }
            Call::Below => fs::metadata(path.join("none")).map(|_| Vec::new()),
            Call::Remove => fs::remove_file(path).map(|()| Vec::new()),
            Call::Rename => fs::rename(path, path.with_file_name("renamed")).map(|()| Vec::new()),
            Call::MakeDir => fs::create_dir(path.with_file_name("made")).map(|()| Vec::new()),
            Call::Truncate => rustix::fs::open(path, rustix::fs::OFlags::WRONLY, rustix::fs::Mode::empty())
                .map(|_| Vec::new())
                .map_err(io::Error::from),
        }
    }
}

#[test]
fn every_call_has_the_answer_of_the_copy() {
    let store = Store::of_two();
    let (copy, mounted) = (Copy::of(&store), store.mount_whole());
    let mut random = Random(1);
    let mut paths: Vec<(String, u64)> = walk(&copy.root).into_iter().map(|(path, it)| (path, it.len())).collect();
    let root = paths.remove(0);
    assert_eq!(root.0, "");
    paths.push(("amb/none".into(), 0));
    paths.push((format!("amb/{}", "x".repeat(255)), 0));
    for turn in 0..CALLS {
        let (path, size) = random.choose(&paths).clone();
        let call = Call::any(&mut random, size);
        if call.writes() && !copy.read_only {
            continue;
        }
        // Where a top-level name is made or moved, the copy has other neighbours.
        if matches!(call, Call::Rename | Call::MakeDir) && !path.contains('/') {
            continue;
        }
        let (found, expected) = (call.on(&mounted.path(&path)), call.on(&copy.root.join(&path)));
        assert!(
            found == expected,
            "turn {turn}: {call:?} on {path}: {} instead of {}",
            shown(&found),
            shown(&expected)
        );
    }
}

fn shown(answer: &Result<Vec<u8>, Option<i32>>) -> String {
    match answer {
        Ok(bytes) => format!("{} bytes {:?}", bytes.len(), String::from_utf8_lossy(&bytes[..bytes.len().min(200)])),
        Err(errno) => format!("errno {errno:?}"),
    }
}

#[test]
fn every_file_of_the_copy_is_the_mounted_one_byte_for_byte() {
    let store = Store::of_two();
    let (copy, mounted) = (Copy::of(&store), store.mount_whole());
    assert_eq!(walk(&copy.root).len(), facts_of_mount(&mounted.at).len());
    for (path, metadata) in walk(&copy.root) {
        if metadata.is_file() {
            assert!(fs::read(copy.root.join(&path)).unwrap() == mounted.read(&path).unwrap(), "{path}");
        }
    }
}

#[test]
fn the_kernel_shows_the_tree_that_a_process_without_it_sees_now_and_later() {
    let store = Store::of_two();
    let vfs = facts_of_vfs(&store.vfs());
    assert!(vfs.len() > 60, "{}", vfs.len());
    let first = facts_of_mount(&store.mount().at);
    assert_eq!(first, vfs);
    assert_eq!(facts_of_mount(&store.mount().at), vfs);
    assert_eq!(facts_of_vfs(&store.vfs()), vfs);
    // A copy of the store at another place, whose manifests are other inodes, shows the same files.
    let moved = Store::none();
    succeed(Command::new("cp").arg("-a").arg(store.path()).arg(moved.path()));
    assert_eq!(facts_of_vfs(&moved.vfs()), vfs);
}

#[test]
fn one_inode_has_all_names_of_equal_weights() {
    let store = Store::of_two();
    let mounted = store.mount();
    let weights = |shape: &str| {
        let inside = format!("coreml/llama/chat/{shape}.mlpackage/Data/com.apple.CoreML/weights/weight.bin");
        fs::metadata(mounted.path(&inside)).unwrap()
    };
    let (one, eight) = (weights("s1"), weights("s8"));
    assert_eq!((one.ino(), one.nlink()), (eight.ino(), 3));
}

#[test]
fn cat_writes_what_the_mount_shows() {
    let store = Store::of_two();
    let mounted = store.mount();
    let manifest = "ollama/manifests/registry.ollama.ai/library/llama/code";
    assert_eq!(store.run(&["cat", manifest]).into_bytes(), mounted.read(manifest).unwrap());
}
