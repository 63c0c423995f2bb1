//! Stores that stop answering, and daemons that are stopped: who does not need them goes on.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/hanging.rs"]
mod hanging;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use common::{Mounted, Random, Store, digest_of, eventually, signal, walk};
use hanging::Hanging;
use wmount::digest::Digest;

const TENSOR: &str = "model.layers.1.mlp.down_proj.weight";

fn blob_of(store: &Store, model: &str) -> Digest {
    let shown = store.json(&["show", model]);
    let found = shown["tensors"].as_array().unwrap().iter().find(|it| it["name"] == TENSOR).unwrap();
    serde_json::from_value(found["digest"].clone()).unwrap()
}

/// The files of a model in the mount, with their digests.
fn files(mounted: &Mounted, model: &str) -> Vec<(PathBuf, Digest)> {
    let files = walk(&mounted.at).into_iter().filter(|(path, found)| found.is_file() && path.contains(model));
    files.map(|(path, _)| mounted.path(&path)).map(|path| (path.clone(), digest_of(&path))).collect()
}

fn forget_pages(path: &PathBuf) {
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Readers through the page cache wait for each other's pages; each of these is a request of its own.
fn read_past_the_cache(path: &PathBuf) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    file.read_to_end(&mut bytes).map(|_| bytes)
}

#[test]
fn a_blob_that_does_not_answer_hangs_nobody_else() {
    assert!(rustix::process::geteuid().is_root(), "this mounts a file system of its own, which needs root");
    let store = Store::of_two();
    let digest = blob_of(&store, "llama:code");
    let hanging = Hanging::over(&store.path().join("blobs"), &store.dir.path().join("disk"));
    let mounted = Mounted::new(&store.path());
    let others = files(&mounted, "llama/chat");
    let hurt = mounted.path("original/llama/code/code/model.safetensors");
    let expected = digest_of(&hurt);
    others.iter().map(|(path, _)| path).chain([&hurt]).for_each(forget_pages);
    hanging.hang(&digest.file_name());
    // Many more readers than there are threads.
    let done = Arc::new(AtomicUsize::new(0));
    let amb = mounted.path("amb/llama/code.amb");
    let readers: Vec<_> = (0..48)
        .map(|number| {
            let (path, done) = (if number % 2 == 0 { hurt.clone() } else { amb.clone() }, done.clone());
            thread::spawn(move || {
                let read = read_past_the_cache(&path);
                done.fetch_add(1, Ordering::Relaxed);
                read
            })
        })
        .collect();
    eventually("somebody waits", || hanging.waiting() > 0);
    thread::sleep(Duration::from_millis(200));
    let answered = Arc::new(AtomicBool::new(false));
    let (whole, at, tell) = (others.clone(), mounted.at.clone(), answered.clone());
    let reader = thread::spawn(move || {
        for (path, digest) in &whole {
            forget_pages(path);
            assert_eq!(digest_of(path), *digest, "{}", path.display());
        }
        walk(&at.join("safetensors"));
        tell.store(true, Ordering::Relaxed);
    });
    eventually("the other model is read whole", || answered.load(Ordering::Relaxed));
    reader.join().unwrap();
    assert_eq!(done.load(Ordering::Relaxed), 0, "nobody got what cannot be read");
    assert!(hanging.waiting() <= 12, "{} threads wait", hanging.waiting());
    eventually("the status names the blob", || mounted.status()["waiting"][0]["blob"] == digest.to_string());
    hanging.answer();
    for (number, reader) in readers.into_iter().enumerate() {
        let bytes = reader.join().unwrap().unwrap();
        assert!(number % 2 == 1 || Digest::of(&bytes) == expected);
    }
    eventually("nothing waits any more", || mounted.status()["waiting"] == serde_json::json!([]));
    drop(mounted);
}

#[test]
fn a_blob_that_does_not_answer_hangs_nobody_else_where_ollama_writes() {
    assert!(rustix::process::geteuid().is_root(), "this mounts a file system of its own, which needs root");
    const LIBRARY: &str = "ollama/manifests/registry.ollama.ai/library/llama";
    let store = Store::of_two();
    let config = br#"{"model_type": "llama", "vision_config": {}}"#;
    add_alone(&store, config);
    let hanging = Hanging::over(&store.path().join("blobs"), &store.dir.path().join("disk"));
    let mounted = Mounted::with(&["--ingest"], &store.path());
    walk(&mounted.at.join("gds_export"));
    // What ollama is shown of the model follows from this file.
    hanging.hang(&Digest::of(config).file_name());
    let alone = mounted.path("ollama/manifests/registry.ollama.ai/library/alone/latest");
    // More than there are threads.
    let readers: Vec<_> = (0..12)
        .map(|_| {
            let path = alone.clone();
            thread::spawn(move || fs::read(path))
        })
        .collect();
    eventually("somebody waits", || hanging.waiting() > 0);
    thread::sleep(Duration::from_millis(200));
    let (at, chat, answered) = (mounted.at.clone(), store.chat(), Arc::new(AtomicBool::new(false)));
    let tell = answered.clone();
    let other = thread::spawn(move || {
        assert!(fs::read(at.join(LIBRARY).join("chat")).unwrap().starts_with(b"{"));
        let partial = at.join("ollama/blobs/sha256-1-partial");
        fs::write(&partial, b"some").unwrap();
        assert_eq!(fs::read(&partial).unwrap(), b"some");
        fs::remove_file(&partial).unwrap();
        let shown = at.join("original/llama/chat/chat/model.safetensors");
        assert_eq!(digest_of(&shown), digest_of(&chat.join("model.safetensors")));
        tell.store(true, Ordering::Relaxed);
    });
    eventually("the others are read and written", || answered.load(Ordering::Relaxed) || other.is_finished());
    other.join().unwrap();
    assert!(readers.iter().all(|reader| !reader.is_finished()));
    hanging.answer();
    assert!(readers.into_iter().all(|reader| reader.join().unwrap().unwrap().starts_with(b"{")));
    drop(mounted);
}

/// A model of its own name, beside the two of the store.
fn add_alone(store: &Store, config: &[u8]) {
    let dir = store.dir.path().join("alone");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
    fs::copy(store.code().join("model.safetensors"), dir.join("model.safetensors")).unwrap();
    store.add("alone", &[&dir]);
}

#[test]
fn a_manifest_that_does_not_answer_hangs_no_other_model() {
    assert!(rustix::process::geteuid().is_root(), "this mounts a file system of its own, which needs root");
    let store = Store::of_two();
    add_alone(&store, b"{}");
    let manifests = store.path().join("manifests/registry.ollama.ai/library/alone");
    let hanging = Hanging::over(&manifests, &store.dir.path().join("disk"));
    let mounted = Mounted::new(&store.path());
    let others = files(&mounted, "llama/chat");
    let alone = mounted.path("original/alone/latest/alone/model.safetensors");
    // A look at it, so that nothing is missing but the lock on its manifest.
    fs::metadata(&alone).unwrap();
    hanging.shut("latest");
    let reader = thread::spawn(move || digest_of(&alone));
    eventually("its manifest is opened", || hanging.waiting() > 0);
    let other = thread::spawn(move || others.iter().all(|(path, digest)| digest_of(path) == *digest));
    eventually("the other model is read whole", || other.is_finished());
    assert!(other.join().unwrap() && !reader.is_finished());
    hanging.answer();
    assert_eq!(reader.join().unwrap(), digest_of(&store.code().join("model.safetensors")));
    drop(mounted);
}

#[test]
fn a_variant_of_a_blob_that_does_not_answer_takes_no_thread_for_each_reader() {
    const READERS: usize = 60;
    assert!(rustix::process::geteuid().is_root(), "this mounts a file system of its own, which needs root");
    let store = Store::of_two();
    let digest = blob_of(&store, "llama:code");
    let hanging = Hanging::over(&store.path().join("blobs"), &store.dir.path().join("disk"));
    let mounted = store.mount();
    let variant = mounted.path("amb/llama/code@adaptive-32.amb");
    let size = fs::metadata(&variant).unwrap().len();
    hanging.hang(&digest.file_name());
    let read = |number: usize| {
        let path = variant.clone();
        thread::spawn(move || {
            let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
            let mut bytes = vec![0; size as usize];
            file.read_exact_at(&mut bytes, 0).map(|()| (number, Digest::of(&bytes)))
        })
    };
    let first = read(0);
    eventually("the status names the blob", || mounted.status()["waiting"][0]["blob"] == digest.to_string());
    let others: Vec<_> = (1..READERS).map(read).collect();
    let (pid, waiting) = (mounted.pid(), || others.iter().filter(|reader| !reader.is_finished()).count());
    thread::sleep(Duration::from_millis(500));
    assert_eq!(waiting(), READERS - 1);
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let threads = status.lines().find_map(|line| line.strip_prefix("Threads:")).unwrap().trim();
    assert!(threads.parse::<usize>().unwrap() < READERS, "{threads} threads");
    hanging.answer();
    let whole = first.join().unwrap().unwrap().1;
    assert!(others.into_iter().all(|reader| reader.join().unwrap().unwrap().1 == whole));
    drop(mounted);
}

#[test]
fn a_model_that_does_not_answer_to_the_first_look_hides_no_other() {
    assert!(rustix::process::geteuid().is_root(), "this mounts a file system of its own, which needs root");
    let store = Store::of_two();
    let exported = store.dir.path().join("chat.amb");
    store.run(&["export", "amb/llama/chat.amb", exported.to_str().unwrap()]);
    fs::remove_file(store.path().join(".wmount/memo.json")).unwrap();
    let manifest = fs::read(store.path().join("manifests/registry.ollama.ai/library/llama/code")).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let layers = manifest["layers"].as_array().unwrap();
    let recipe = layers.iter().find(|it| it["mediaType"] == "application/vnd.wmount.recipe").unwrap();
    let hanging = Hanging::over(&store.path().join("blobs"), &store.dir.path().join("disk"));
    hanging.hang(&recipe["digest"].as_str().unwrap().replace(':', "-"));
    let mounted = Mounted::new(&store.path());
    let names = |at: &str| -> Vec<_> {
        let mut names: Vec<_> = fs::read_dir(mounted.path(at)).unwrap().map(|it| it.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names("amb/llama"), ["chat.amb"]);
    assert!(hanging.waiting() > 0, "nobody waits for the other model");
    assert_eq!(digest_of(&mounted.path("amb/llama/chat.amb")), digest_of(&exported));
    assert_eq!(names("safetensors/llama"), ["chat"]);
    // The kernel lets a process end only when what it asked a file system for is answered.
    let mut command = store.command(&["cat", "amb/llama/code.amb"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(command.stderr.take().unwrap()).lines().map(Result::unwrap);
    let said = lines.find(|line| line.starts_with("wmount: ")).unwrap();
    assert!(said.ends_with(", which does not answer for llama:code: not found"), "{said}");
    hanging.answer();
    assert_eq!(command.wait().unwrap().code(), Some(1));
    eventually("the other model is there", || names("amb/llama") == ["chat.amb", "code.amb"]);
    assert!(mounted.path("amb/llama/code.amb").exists());
}

#[test]
fn a_model_that_no_longer_answers_hides_no_other_from_directories() {
    no_other_is_hidden(false);
}

#[test]
fn a_model_that_somebody_waits_for_hides_no_other_from_directories() {
    no_other_is_hidden(true);
}

fn no_other_is_hidden(is_waited_for: bool) {
    assert!(rustix::process::geteuid().is_root(), "this mounts a file system of its own, which needs root");
    let store = Store::of_two();
    let config = br#"{"model_type": "llama", "vision_config": {}}"#;
    add_alone(&store, config);
    let hanging = Hanging::over(&store.path().join("blobs"), &store.dir.path().join("disk"));
    let mounted = Mounted::new(&store.path());
    // The first look at the models, and a plan of one of them.
    assert!(mounted.path("amb/llama").is_dir());
    let manifest = fs::read(mounted.path("ollama/manifests/registry.ollama.ai/library/llama/chat")).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let blob = manifest["layers"][0]["digest"].as_str().unwrap().replace(':', "-");
    hanging.hang(&Digest::of(config).file_name());
    let alone = mounted.path("ollama/manifests/registry.ollama.ai/library/alone/latest");
    let ask = || {
        let alone = alone.clone();
        thread::spawn(move || fs::read(alone).unwrap())
    };
    let first = is_waited_for.then(ask);
    eventually("somebody waits", || first.is_none() || hanging.waiting() > 0);
    let (path, dir) = (mounted.path("ollama/blobs").join(&blob), mounted.path("ollama/blobs"));
    let reader = thread::spawn(move || digest_of(&path).file_name());
    eventually("the blob of another model is read", || reader.is_finished());
    assert_eq!(reader.join().unwrap(), blob);
    let names = |dir: PathBuf| -> Vec<_> { fs::read_dir(dir).unwrap().map(|it| it.unwrap().file_name()).collect() };
    let lister = thread::spawn(move || names(dir));
    eventually("blobs are listed", || lister.is_finished());
    assert!(lister.join().unwrap().iter().any(|name| *name == *blob));
    // The kernel lets a listing wait for a lookup of one of its names.
    if !is_waited_for {
        let above = mounted.path("ollama/manifests/registry.ollama.ai/library/alone");
        let lister = thread::spawn(move || names(above));
        eventually("the model itself is listed", || lister.is_finished());
        assert_eq!(lister.join().unwrap(), ["latest"]);
    }
    hanging.answer();
    let manifest: serde_json::Value = serde_json::from_slice(&first.unwrap_or_else(ask).join().unwrap()).unwrap();
    let blob = manifest["config"]["digest"].as_str().unwrap().replace(':', "-");
    eventually("its blobs are there", || mounted.path("ollama/blobs").join(&blob).exists());
    drop(mounted);
}

#[test]
fn a_stopped_daemon_goes_on_where_it_was() {
    let store = Store::of_two();
    let mounted = store.mount();
    let expected = files(&mounted, "llama/code");
    let pid = mounted.pid();
    expected.iter().for_each(|(path, _)| forget_pages(path));
    signal(pid, "STOP");
    let paths: Vec<PathBuf> = expected.iter().map(|(path, _)| path.clone()).collect();
    let reader = thread::spawn(move || paths.iter().map(|path| digest_of(path)).collect::<Vec<_>>());
    thread::sleep(Duration::from_millis(300));
    assert!(!reader.is_finished());
    signal(pid, "CONT");
    let digests: Vec<Digest> = expected.iter().map(|(_, digest)| *digest).collect();
    assert_eq!(reader.join().unwrap(), digests);
}

#[test]
fn readers_are_not_disturbed_by_imports_and_removals_of_other_models() {
    let store = Store::of_two();
    let mounted = store.mount();
    let expected = files(&mounted, "llama/chat");
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..4)
        .map(|seed| {
            let (files, stop) = (expected.clone(), stop.clone());
            thread::spawn(move || {
                let (mut random, mut reads) = (Random(seed), 0);
                while !stop.load(Ordering::Relaxed) {
                    let (path, digest) = random.choose(&files);
                    forget_pages(path);
                    assert_eq!(digest_of(path), *digest, "{}", path.display());
                    reads += 1;
                }
                reads
            })
        })
        .collect();
    for turn in 0..6 {
        let name = format!("other{turn}");
        store.add(&name, &[&store.code()]);
        eventually("it is there", || mounted.path(&format!("amb/{name}/latest.amb")).exists());
        store.run(&["rm", &name]);
        store.run(&["gc"]);
    }
    stop.store(true, Ordering::Relaxed);
    assert!(readers.into_iter().all(|reader| reader.join().unwrap() > 0));
}

/// Resident memory of a process in KiB.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn memory_is_flat_over_many_reads() {
    let reads: u64 = if std::env::var_os("WMOUNT_LONG").is_some() { 10_000_000 } else { 200_000 };
    let store = Store::of_two();
    let mounted = store.mount();
    let files: Vec<PathBuf> = files(&mounted, "llama").into_iter().map(|(path, _)| path).collect();
    let pid = mounted.pid();
    // Past the page cache, so that each read is the daemon's.
    let open = |path: &PathBuf| File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let read_many = |number: u64, seed: u64| {
        let done = AtomicUsize::new(0);
        thread::scope(|scope| {
            for thread in 0..4 {
                let (files, done) = (&files, &done);
                scope.spawn(move || {
                    let mut random = Random(seed + thread);
                    let mut buf = vec![0; 70_000];
                    while (done.load(Ordering::Relaxed) as u64) < number {
                        let file = open(random.choose(files));
                        let size = file.metadata().unwrap().len();
                        for _ in 0..50 {
                            let most = 1 << random.below(17);
                            let len = random.below(most) as usize;
                            file.read_at(&mut buf[..len], random.below(size)).unwrap();
                        }
                        done.fetch_add(50, Ordering::Relaxed);
                    }
                });
            }
        });
    };
    read_many(20_000, 1);
    let before = resident(pid);
    read_many(reads, 2);
    let after = resident(pid);
    assert!(after <= before + 4096, "{before} KiB before, {after} KiB after {reads} reads");
}
