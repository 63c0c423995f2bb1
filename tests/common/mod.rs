//! Runs the built program on temporary stores, and looks at stores and trees from outside.
//!
//! The tests mount for real: without /dev/fuse they fail, they never skip.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use tempfile::TempDir;
use wmount::digest::Digest;
use wmount::layout;
use wmount::sample::{LanguageModel, write_package};
use wmount::store::Store as Library;
use wmount::vfs::{Kind, ROOT, Vfs};

/// The time that all sample files carry: inode numbers depend on it.
pub const MTIME: Duration = Duration::from_secs(1_700_000_000);

/// The built program; its logs go below target/.
pub fn wmount<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wmount"));
    command.args(args).stdin(Stdio::null()).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// The small models of the tests and a store for them.
pub struct Store {
    pub dir: TempDir,
}

impl Store {
    /// A store that does not exist yet.
    pub fn none() -> Store {
        Store { dir: TempDir::with_prefix("wmount-test-").unwrap() }
    }

    /// A store with `llama:chat` of two packages, and `llama:code`, which differs from it in one layer.
    pub fn of_two() -> Store {
        let store = Store::none();
        let (chat, code) = (store.chat(), store.code());
        let packages = [store.package("s1", 1, &model()), store.package("s8", 8, &model())];
        store.add("llama:chat", &[&chat, &packages[0], &packages[1]]);
        store.add("llama:code", &[&code]);
        store
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    /// The directory of the first model, made if it is not there.
    pub fn chat(&self) -> PathBuf {
        self.language_model("chat", &model())
    }

    /// The directory of the second model, made if it is not there.
    pub fn code(&self) -> PathBuf {
        self.language_model("code", &model().tune(1))
    }

    pub fn language_model(&self, name: &str, model: &LanguageModel) -> PathBuf {
        let dir = self.dir.path().join(name);
        if !dir.exists() {
            model.write(&dir).unwrap();
            set_times(&dir);
        }
        dir
    }

    pub fn package(&self, name: &str, length: u32, model: &LanguageModel) -> PathBuf {
        let dir = self.dir.path().join(format!("{name}.mlpackage"));
        write_package(&dir, length, &model.feed_forward()).unwrap();
        set_times(&dir);
        dir
    }

    /// `wmount ARGS... -s STORE`.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = wmount(args);
        command.arg("-s").arg(self.path());
        command
    }

    /// The same, which must succeed; what it printed.
    pub fn run(&self, args: &[&str]) -> String {
        succeed(&mut self.command(args))
    }

    /// The same with `--json`.
    pub fn json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.run(&[args, &["--json"]].concat())).unwrap()
    }

    /// The same, which must fail with one line; that line.
    pub fn refused(&self, args: &[&str]) -> String {
        refuse(&mut self.command(args))
    }

    pub fn import(&self, name: &str, paths: &[&PathBuf]) -> Command {
        let mut command = self.command(&["import", "--json", "-n", name]);
        command.args(paths);
        command
    }

    pub fn add(&self, name: &str, paths: &[&PathBuf]) -> serde_json::Value {
        serde_json::from_str(&succeed(&mut self.import(name, paths))).unwrap()
    }

    /// Every file of the store but our own, with its content's digest.
    pub fn listing(&self) -> BTreeMap<String, Digest> {
        let mut files = BTreeMap::new();
        for (path, metadata) in walk(&self.path()) {
            if metadata.is_file() && !path.starts_with(".wmount") {
                files.insert(path.clone(), digest_of(&self.path().join(&path)));
            }
        }
        files
    }

    /// Says what is wrong with the store, if something is: blobs that are not what their names say, models that
    /// `verify` finds hurt, files left behind.
    pub fn check(&self) {
        for (path, digest) in self.listing() {
            if let Some(name) = path.strip_prefix("blobs/") {
                assert_eq!(name, digest.file_name(), "a blob is not what its name says");
            }
        }
        assert_eq!(self.json(&["verify"])["damaged"], serde_json::json!([]));
    }

    /// A tree of the store without a mount.
    pub fn vfs(&self) -> Vfs {
        Vfs::new(Library::open(self.path()).unwrap().into()).unwrap()
    }

    /// The same with all variants among the entries of directories.
    pub fn whole_vfs(&self) -> Vfs {
        let variants = layout::all().into_iter().flat_map(|layout| layout.variants());
        let names: Vec<String> = variants.map(|(name, _)| (*name).to_owned()).collect();
        Vfs::listing(Library::open(self.path()).unwrap().into(), &names).unwrap()
    }

    pub fn mount(&self) -> Mounted {
        Mounted::new(&self.path())
    }

    /// The same with all variants among the entries of directories.
    pub fn mount_whole(&self) -> Mounted {
        Mounted::with(&["--variant", "all"], &self.path())
    }
}

fn model() -> LanguageModel {
    LanguageModel::new(7, 32, 2, 300)
}

fn set_times(dir: &Path) {
    for (path, _) in walk(dir) {
        File::open(dir.join(path)).unwrap().set_modified(SystemTime::UNIX_EPOCH + MTIME).unwrap();
    }
}

/// Runs a command that must succeed; what it printed.
pub fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", words(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that must fail with exit status 1 and one line; that line.
pub fn refuse(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let line = words(&output);
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{command:?}: {line}");
    line
}

/// What a command said on stderr.
pub fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A mounted store; unmounted at the end.
pub struct Mounted {
    pub at: PathBuf,
    _dir: TempDir,
}

impl Mounted {
    pub fn new(store: &Path) -> Mounted {
        Mounted::with(&[], store)
    }

    pub fn with(options: &[&str], store: &Path) -> Mounted {
        let dir = TempDir::with_prefix("wmount-test-").unwrap();
        let at = dir.path().canonicalize().unwrap();
        succeed(wmount(options).args([store, &at]).env_remove("WMOUNT_STORE"));
        let mounted = Mounted { at, _dir: dir };
        assert!(mounted.is_there(), "the command returned before the mount was there");
        mounted
    }

    pub fn is_there(&self) -> bool {
        is_mounted(&self.at)
    }

    pub fn path(&self, inside: &str) -> PathBuf {
        self.at.join(inside)
    }

    pub fn read(&self, inside: &str) -> std::io::Result<Vec<u8>> {
        fs::read(self.path(inside))
    }

    pub fn status(&self) -> serde_json::Value {
        // The status is made anew after a moment.
        std::thread::sleep(Duration::from_millis(150));
        serde_json::from_slice(&self.read(".wmount/status.json").unwrap()).unwrap()
    }

    /// The process that serves it.
    pub fn pid(&self) -> u32 {
        self.status()["pid"].as_u64().unwrap().try_into().unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.is_there() {
            let done = wmount(["umount", "--lazy"]).arg(&self.at).output();
            if !done.is_ok_and(|output| output.status.success()) {
                eprintln!("{} is still mounted", self.at.display());
            }
        }
    }
}

/// Whether the kernel lists a mount there.
pub fn is_mounted(path: &Path) -> bool {
    wmount::front::mounts::at(path).unwrap().is_some()
}

/// A signal to a process.
pub fn signal(pid: u32, name: &str) {
    // The shell has a `kill` of its own; the program is not on every machine.
    let status = Command::new("sh").args(["-c", "kill -s \"$0\" \"$1\"", name, &pid.to_string()]).status();
    assert!(status.unwrap().success());
}

/// Waits for a process, at most for a time.
pub fn wait(child: &mut Child) -> std::process::ExitStatus {
    let mut status = None;
    eventually("the process ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// Waits until something holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(20), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Every path below a directory, relative and in order, with what `lstat` says; the directory itself is "".
pub fn walk(root: &Path) -> BTreeMap<String, fs::Metadata> {
    let mut found = BTreeMap::new();
    let mut open = vec![PathBuf::new()];
    // A store that is written to has files that come and go.
    let vanished =
        |error: &io::Error, path: &Path| error.kind() == io::ErrorKind::NotFound && path.starts_with(".wmount/tmp");
    while let Some(path) = open.pop() {
        let place = root.join(&path);
        let metadata = match fs::symlink_metadata(&place) {
            Err(error) if vanished(&error, &path) => continue,
            metadata => metadata.unwrap_or_else(|error| panic!("{}: {error}", place.display())),
        };
        if metadata.is_dir() {
            match fs::read_dir(&place) {
                Err(error) if vanished(&error, &path) => continue,
                entries => open.extend(entries.unwrap().map(|entry| path.join(entry.unwrap().file_name()))),
            }
        }
        found.insert(path.to_str().unwrap().to_owned(), metadata);
    }
    found
}

/// Inode number, size, names and time of everything in a tree.
pub type Facts = BTreeMap<String, (u64, u64, u64, SystemTime)>;

/// The facts of a mounted tree, without our own directory and the sizes of directories.
pub fn facts_of_mount(root: &Path) -> Facts {
    let facts = walk(root).into_iter().filter(|(path, _)| !path.starts_with(".wmount"));
    facts
        .map(|(path, it)| {
            let size = if it.is_dir() { 0 } else { it.len() };
            (path, (it.ino(), size, it.nlink(), it.modified().unwrap()))
        })
        .collect()
}

/// The same of a tree without a mount.
pub fn facts_of_vfs(vfs: &Vfs) -> Facts {
    let mut facts = Facts::new();
    let mut open = vec![(String::new(), vfs.attr(ROOT).unwrap())];
    while let Some((path, attr)) = open.pop() {
        if attr.kind == Kind::Dir {
            for child in vfs.entries(attr.ino).unwrap().children.iter().filter(|child| &*child.name != ".wmount") {
                let found = vfs.lookup(attr.ino, &child.name).unwrap();
                assert_eq!((found.ino, found.kind), (child.ino, child.kind), "{path}/{}", child.name);
                let path = if path.is_empty() { child.name.to_string() } else { format!("{path}/{}", child.name) };
                open.push((path, found));
            }
        }
        facts.insert(path, (attr.ino, attr.size, attr.nlink.into(), attr.mtime));
    }
    facts
}

pub fn digest_of(path: &Path) -> Digest {
    Digest::of(&fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

/// Numbers that look random and are the same every time.
pub struct Random(pub u64);

impl Random {
    /// One below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(self.0 ^ (self.0 >> 29)) * u128::from(end.max(1))) >> 64) as u64
    }

    /// One of these.
    pub fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}
