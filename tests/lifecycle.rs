//! The life of a mount: models that come and go under it, and its end.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Child, Command, Stdio};
use std::time::SystemTime;

use common::{Mounted, Store, eventually, facts_of_mount, is_mounted, refuse, signal, succeed, wait, walk, wmount};
use tempfile::TempDir;
use wmount::digest::Digest;
use wmount::sample::LanguageModel;
use wmount::vfs::Vfs;

/// A mount in the foreground.
struct Foreground {
    child: Child,
    at: TempDir,
}

impl Foreground {
    fn new(store: &Store) -> Foreground {
        Foreground::telling(store, Stdio::null())
    }

    fn telling(store: &Store, stderr: impl Into<Stdio>) -> Foreground {
        let at = TempDir::with_prefix("wmount-test-").unwrap();
        let child = wmount(["-f"]).arg(store.path()).arg(at.path()).stderr(stderr).spawn().unwrap();
        eventually("it is mounted", || is_mounted(at.path()));
        Foreground { child, at }
    }

    fn ends_cleanly(mut self) {
        assert_eq!(wait(&mut self.child).code(), Some(0));
        assert!(!is_mounted(self.at.path()));
        assert!(walk(self.at.path()).len() == 1, "the mountpoint is an empty directory again");
    }
}

#[test]
fn signals_and_umount_end_a_mount_cleanly() {
    let store = Store::of_two();
    for name in ["TERM", "INT", "HUP"] {
        let mount = Foreground::new(&store);
        signal(mount.child.id(), name);
        mount.ends_cleanly();
    }
    let mount = Foreground::new(&store);
    succeed(wmount(["umount"]).arg(mount.at.path()));
    mount.ends_cleanly();
    if rustix::process::geteuid().is_root() {
        let mount = Foreground::new(&store);
        succeed(Command::new("umount").arg(mount.at.path()));
        mount.ends_cleanly();
    }
}

#[test]
fn a_log_that_cannot_be_written_hurts_no_mount() {
    let store = Store::of_two();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    for name in ["TERM", "INT"] {
        let mount = Foreground::telling(&store, writer.try_clone().unwrap());
        signal(mount.child.id(), name);
        mount.ends_cleanly();
    }
    let mounted = Mounted::with(&["--log", "/dev/full"], &store.path());
    let shows = |inside: &str| fs::metadata(mounted.path(inside)).is_ok();
    let blob = format!("blobs/{}", Digest::of(&fs::read(store.code().join("config.json")).unwrap()).file_name());
    fs::remove_file(store.path().join(blob)).unwrap();
    assert!(mounted.read("safetensors/llama/code/config.json").is_err());
    store.add("late", &[&store.code()]);
    eventually("the new model is there", || shows("amb/late/latest.amb"));
    assert!(mounted.read("amb/llama/chat.amb").is_ok());
}

#[test]
fn a_mount_in_the_background_keeps_no_file_of_its_caller() {
    let store = Store::of_two();
    let (lock, at) = (store.dir.path().join("lock"), TempDir::with_prefix("wmount-test-").unwrap());
    let mut caller = Command::new("sh");
    caller.args(["-c", "exec \"$@\" 9>\"$0\""]).arg(&lock).arg(env!("CARGO_BIN_EXE_wmount"));
    succeed(caller.arg(store.path()).arg(at.path()).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR")));
    let status: serde_json::Value =
        serde_json::from_slice(&fs::read(at.path().join(".wmount/status.json")).unwrap()).unwrap();
    let files = fs::read_dir(format!("/proc/{}/fd", status["pid"])).unwrap();
    let files: Vec<_> = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok()).collect();
    succeed(wmount(["umount"]).arg(at.path()));
    assert!(!files.is_empty() && !files.contains(&lock), "{files:?}");
}

#[test]
fn a_signal_ends_a_mount_in_use_when_its_last_file_is_closed() {
    let store = Store::of_two();
    let mut mount = Foreground::new(&store);
    let file = File::open(mount.at.path().join("amb/llama/chat.amb")).unwrap();
    signal(mount.child.id(), "TERM");
    eventually("it is taken from its place", || !is_mounted(mount.at.path()));
    file.read_exact_at(&mut [0; 4096], 8192).unwrap();
    assert!(mount.child.try_wait().unwrap().is_none());
    drop(file);
    mount.ends_cleanly();
}

#[test]
fn a_mount_in_use_is_not_unmounted_and_the_user_is_named() {
    let store = Store::of_two();
    let mounted = store.mount();
    let _file = File::open(mounted.path("amb/llama/chat.amb")).unwrap();
    let words = refuse(wmount(["umount"]).arg(&mounted.at));
    assert!(words.contains(&format!("({})", std::process::id())) && words.contains("--lazy"), "{words}");
    assert!(mounted.is_there());
}

#[test]
fn a_use_that_nobody_can_be_named_for_is_waited_for_and_then_told() {
    assert!(rustix::process::geteuid().is_root(), "this mounts a file system of its own, which needs root");
    let store = Store::of_two();
    let mounted = store.mount();
    let below = mounted.path("amb");
    succeed(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&below));
    let words = refuse(wmount(["umount"]).arg(&mounted.at));
    assert!(words.contains("by a mount below it; end it") && words.contains("--lazy"), "{words}");
    let mut waiting = wmount(["umount"]).arg(&mounted.at).spawn().unwrap();
    succeed(Command::new("umount").arg(&below));
    assert!(wait(&mut waiting).success());
    assert!(!mounted.is_there());
}

#[test]
fn after_a_kill_the_same_place_can_be_mounted_again() {
    let store = Store::of_two();
    let mut mount = Foreground::new(&store);
    let path = mount.at.path().to_owned();
    let before = facts_of_mount(&path);
    mount.child.kill().unwrap();
    mount.child.wait().unwrap();
    let gone = |error: std::io::Error| error.raw_os_error() == Some(libc::ENOTCONN);
    assert!(fs::read_dir(&path).is_err_and(gone));
    let output = wmount(["status"]).arg(&path).output().unwrap();
    let status = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{status}");
    assert!(status.contains("gone") && status.contains("wmount umount"), "{status}");
    succeed(&mut wmount([store.path(), path.clone()]));
    assert_eq!(facts_of_mount(&path), before);
    succeed(wmount(["umount"]).arg(&path));
    // One that is dead can be unmounted, too.
    let mut mount = Foreground::new(&store);
    mount.child.kill().unwrap();
    mount.child.wait().unwrap();
    succeed(wmount(["umount"]).arg(mount.at.path()));
    assert!(!is_mounted(mount.at.path()));
}

#[test]
fn a_place_that_shows_a_store_is_not_mounted_over() {
    let store = Store::of_two();
    let mounted = store.mount();
    let words = refuse(&mut wmount([&store.path(), &mounted.at]));
    assert!(words.contains("already shows"), "{words}");
}

#[test]
fn models_come_and_go_without_a_remount() {
    let store = Store::of_two();
    let mounted = store.mount();
    let shows = |inside: &str| fs::metadata(mounted.path(inside)).is_ok();
    assert!(shows("amb/llama/chat.amb") && !shows("amb/late/latest.amb"));
    store.add("late", &[&store.code()]);
    eventually("the new model is there", || shows("amb/late/latest.amb"));
    store.run(&["rm", "late"]);
    eventually("it is gone", || {
        !shows("amb/late/latest.amb") && !shows("ollama/manifests/registry.ollama.ai/library/late")
    });
    assert!(shows("amb/llama/code.amb"));
    assert_eq!(rustix::fs::statvfs(&mounted.at).unwrap().f_files, 0, "a number would be one of which all are in use");
}

#[test]
fn a_directory_is_as_new_as_what_last_came_into_it_or_went() {
    let store = Store::of_two();
    store.run(&["cp", "llama:code", "me/other"]);
    let vfs = store.vfs();
    let times = |vfs: &Vfs| {
        let time = |path: &str| vfs.resolve(path).ok().map(|attr| attr.mtime);
        ["original", "original/llama", "original/me", "amb/llama", "ollama/manifests"].map(time)
    };
    let changes = [
        (&["cp", "llama:code", "llama:third"][..], [true, true, false, true, true]),
        (&["rm", "llama:third"], [true, true, false, true, true]),
        (&["cp", "llama:code", "me/third"], [true, false, true, false, true]),
        (&["rm", "me/third"], [true, false, true, false, true]),
        (&["rm", "me/other"], [true, false, false, false, true]),
        (&["rm", "llama:code", "llama:chat"], [true, false, false, false, true]),
    ];
    for (change, newer) in changes {
        let before = times(&vfs);
        let now = SystemTime::now();
        eventually("the clock of the file system goes on", || {
            File::create(store.dir.path().join("clock")).unwrap().metadata().unwrap().modified().unwrap() > now
        });
        store.run(change);
        vfs.refresh().unwrap();
        let after = times(&vfs);
        for ((before, after), newer) in before.iter().zip(after).zip(newer) {
            assert!(if newer { after > *before } else { after.is_none() || after == *before }, "{change:?}");
        }
        assert_eq!(times(&store.vfs()), after);
    }
}

#[test]
fn a_file_has_one_number_of_names_when_packages_join_its_model() {
    let store = Store::of_two();
    let vfs = store.vfs();
    let weights = |shape: &str| {
        let path = format!("coreml/llama/chat/{shape}.mlpackage/Data/com.apple.CoreML/weights/weight.bin");
        vfs.resolve(&path).unwrap()
    };
    let before = weights("s1");
    vfs.open(before.ino).unwrap();
    store.add("llama:chat", &[&store.package("s64", 64, &LanguageModel::new(7, 32, 2, 300))]);
    vfs.refresh().unwrap();
    let joined = weights("s64");
    assert_eq!((joined.ino, joined.nlink), (before.ino, before.nlink + 1));
    for attr in [weights("s1"), vfs.attr(before.ino).unwrap(), weights("s64")] {
        assert_eq!(attr.nlink, joined.nlink);
    }
    vfs.release(before.ino);
}

#[test]
fn paths_that_are_no_utf_8_are_told_as_near_as_text_can_be() {
    let made = Store::none();
    let odd = made.dir.path().join(OsStr::from_bytes(b"odd\xff"));
    fs::create_dir(&odd).unwrap();
    let (store, source, dest) = (odd.join("store"), odd.join("chat"), odd.join("x.amb"));
    fs::rename(made.chat(), &source).unwrap();
    fs::write(source.join(".DS_Store"), "").unwrap();
    let answer = |command: &mut Command| serde_json::from_str::<serde_json::Value>(&succeed(command)).unwrap();
    let report = answer(wmount(["import", "--json", "-s"]).args([&store, &source]));
    assert!(report["skipped"][0].as_str().unwrap().ends_with("/odd\u{fffd}/chat/.DS_Store"), "{report}");
    let exported = answer(wmount(["export", "--json", "-s"]).arg(&store).arg("amb/chat/latest.amb").arg(&dest));
    assert!(exported["path"].as_str().unwrap().ends_with("/odd\u{fffd}/x.amb"), "{exported}");
    let status = Mounted::new(&store).status();
    assert!(status["store"].as_str().unwrap().ends_with("/odd\u{fffd}/store"), "{status}");
}

#[test]
fn an_open_file_of_a_removed_model_is_readable_to_the_end_and_its_blobs_go_when_it_is_closed() {
    let store = Store::of_two();
    let mounted = store.mount();
    let path = mounted.path("original/llama/code/code/model.safetensors");
    let expected = fs::read(store.code().join("model.safetensors")).unwrap();
    let file = File::open(&path).unwrap();
    let mut start = [0; 100];
    file.read_exact_at(&mut start, 0).unwrap();
    store.run(&["rm", "llama:code"]);
    let report = store.json(&["gc"]);
    assert_eq!((&report["in_use"], &report["removed"]), (&1.into(), &0.into()), "{report}");
    eventually("the name is gone", || fs::metadata(&path).is_err());
    let mut shown = vec![0; expected.len()];
    file.read_exact_at(&mut shown, 0).unwrap();
    assert!(shown == expected);
    drop(file);
    // The kernel tells the server of the close in its own time.
    let mut removed = 0;
    eventually("the blobs are removed", || {
        removed = store.json(&["gc"])["removed"].as_u64().unwrap();
        removed > 0
    });
    assert!(removed >= 9, "{removed}");
    store.check();
    assert!(mounted.read("amb/llama/chat.amb").is_ok());
}

#[test]
fn an_open_file_of_a_replaced_model_keeps_its_content_and_the_name_gets_the_new_one() {
    let store = Store::of_two();
    let mounted = store.mount();
    let path = mounted.path("safetensors/llama/code/model.safetensors");
    let (old, new) = (store.code().join("model.safetensors"), store.chat().join("model.safetensors"));
    let file = File::open(&path).unwrap();
    succeed(store.import("llama:code", &[&store.chat()]).arg("--replace"));
    store.run(&["gc"]);
    eventually("the new content is there", || fs::read(&path).unwrap() == fs::read(&new).unwrap());
    let mut shown = vec![0; fs::metadata(&old).unwrap().len() as usize];
    file.read_exact_at(&mut shown, 0).unwrap();
    assert!(shown == fs::read(&old).unwrap());
}

#[test]
fn a_store_that_cannot_be_written_to_is_mounted_and_read() {
    let store = Store::of_two();
    let expected = facts_of_mount(&store.mount().at);
    fs::remove_dir_all(store.path().join(".wmount")).unwrap();
    let read_only = ReadOnly::new(&store);
    let mounted = Mounted::new(&store.path());
    assert_eq!(facts_of_mount(&mounted.at), expected);
    let shown = mounted.read("original/llama/code/code/model.safetensors").unwrap();
    assert!(shown == fs::read(store.code().join("model.safetensors")).unwrap());
    store.run(&["ls"]);
    store.check();
    refuse(&mut store.import("new", &[&store.chat()]));
    drop((mounted, read_only));
}

/// Makes a store read-only: root by a mount, anyone else by modes.
struct ReadOnly<'a>(&'a Store, bool);

impl ReadOnly<'_> {
    fn new(store: &Store) -> ReadOnly<'_> {
        let (path, root) = (store.path(), rustix::process::geteuid().is_root());
        if root {
            succeed(Command::new("mount").arg("--bind").args([&path, &path]));
            succeed(Command::new("mount").args(["-o", "remount,bind,ro"]).arg(&path));
        } else {
            walk(&path).iter().filter(|(_, it)| it.is_dir()).for_each(|(inside, _)| {
                fs::set_permissions(path.join(inside), Permissions::from_mode(0o555)).unwrap();
            });
        }
        ReadOnly(store, root)
    }
}

impl Drop for ReadOnly<'_> {
    fn drop(&mut self) {
        let path = self.0.path();
        if self.1 {
            let _ = Command::new("umount").arg("-l").arg(&path).status();
        } else {
            walk(&path).iter().filter(|(_, it)| it.is_dir()).for_each(|(inside, _)| {
                let _ = fs::set_permissions(path.join(inside), Permissions::from_mode(0o755));
            });
        }
    }
}
