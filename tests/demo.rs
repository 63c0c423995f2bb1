//! The demo, and that nothing of it is left.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use common::{eventually, is_mounted, signal, succeed, wait, wmount};
use tempfile::TempDir;

/// A demo whose temporary directory is known.
struct Demo {
    child: Child,
    temporary: TempDir,
}

impl Demo {
    fn start() -> Demo {
        let temporary = TempDir::with_prefix("wmount-test-").unwrap();
        let mut command = wmount(["demo"]);
        command.env("TMPDIR", temporary.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Demo { child: command.spawn().unwrap(), temporary }
    }

    /// Waits until it says how to end it; what it said.
    fn ready(&mut self) -> String {
        let mut said = String::new();
        let mut stdout = BufReader::new(self.child.stdout.take().unwrap());
        while !said.contains("Ctrl-C") {
            assert!(stdout.read_line(&mut said).unwrap() > 0, "{said}");
        }
        // Kept open, so that the last line finds a reader.
        self.child.stdout = Some(stdout.into_inner());
        said
    }

    fn mountpoint(&self) -> std::path::PathBuf {
        let entries: Vec<_> = fs::read_dir(self.temporary.path()).unwrap().map(|it| it.unwrap().path()).collect();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries[0].join("mnt").canonicalize().unwrap()
    }

    fn nothing_is_left(mut self) -> Option<i32> {
        let code = wait(&mut self.child).code();
        assert_eq!(fs::read_dir(self.temporary.path()).unwrap().count(), 0);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.temporary.path().to_str().unwrap()));
        code
    }
}

#[test]
fn the_demo_shows_what_is_shared_and_proves_it() {
    let temporary = TempDir::with_prefix("wmount-test-").unwrap();
    let said = succeed(wmount(["demo", "--once"]).env("TMPDIR", temporary.path()));
    for word in ["weight.bin", "one of its 4 names", "as copies", "times smaller", "sha256 of the source", "chat.amb"] {
        assert!(said.contains(word), "{word} is not in {said}");
    }
    for layout in ["safetensors", "original", "ollama", "amb", "coreml"] {
        assert!(said.lines().any(|line| line.starts_with(&format!("{layout} "))), "{layout} is not in {said}");
    }
    assert!(said.lines().all(|line| line.chars().count() <= 120), "{said}");
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
}

#[test]
fn ctrl_c_ends_the_demo_and_removes_it_even_if_it_is_in_use() {
    let mut demo = Demo::start();
    let said = demo.ready();
    let mountpoint = demo.mountpoint();
    assert!(said.contains(mountpoint.to_str().unwrap()));
    // A command that it suggests.
    let listed =
        succeed(Command::new("sh").args(["-c", "ls -i \"$0\"/coreml/llama/chat/*/Data/*/weights/*"]).arg(&mountpoint));
    let inodes: Vec<_> = listed.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert!(inodes.len() == 4 && inodes.iter().all(|inode| *inode == inodes[0]), "{listed}");
    let _used = File::open(mountpoint.join("amb/llama/chat.amb")).unwrap();
    signal(demo.child.id(), "INT");
    assert_eq!(demo.nothing_is_left(), Some(0));
}

#[test]
fn unmounting_it_from_outside_ends_the_demo() {
    let mut demo = Demo::start();
    demo.ready();
    let mountpoint = demo.mountpoint();
    assert!(is_mounted(&mountpoint));
    succeed(wmount(["umount"]).arg(&mountpoint));
    assert_eq!(demo.nothing_is_left(), Some(0));
}

#[test]
fn a_signal_at_any_time_leaves_nothing_behind() {
    for (turn, name) in ["TERM", "INT", "HUP", "TERM"].into_iter().enumerate() {
        let mut demo = Demo::start();
        // Not before it can hear the signal.
        let path = demo.temporary.path().to_owned();
        eventually("it has begun", || fs::read_dir(&path).unwrap().next().is_some());
        thread::sleep(Duration::from_millis(300 * turn as u64));
        signal(demo.child.id(), name);
        let mut said = String::new();
        demo.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let code = demo.nothing_is_left();
        assert!(code == Some(0) || (code == Some(1) && said.contains("interrupted")), "{code:?} {said}");
    }
}

#[test]
fn a_full_disk_is_an_error_that_leaves_nothing_behind() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let small = TempDir::with_prefix("wmount-test-").unwrap();
    succeed(Command::new("mount").args(["-t", "tmpfs", "-o", "size=30m", "none"]).arg(small.path()));
    let output = wmount(["demo", "--once"]).env("TMPDIR", small.path()).output().unwrap();
    let left = fs::read_dir(small.path()).unwrap().count();
    succeed(Command::new("umount").arg(small.path()));
    let said = common::words(&output);
    assert_eq!((output.status.code(), left), (Some(1), 0), "{said}");
    assert!(said.contains("No space left"), "{said}");
}

#[test]
fn a_machine_without_fuse_is_told_what_is_missing_before_anything_is_made() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let script = "mount -t tmpfs none /dev && exec \"$0\" demo";
    let program = env!("CARGO_BIN_EXE_wmount");
    let words = common::refuse(Command::new("unshare").args(["--mount", "sh", "-c", script, program]));
    assert!(words.contains("/dev/fuse is missing") && words.contains("modprobe fuse"), "{words}");
}
