//! `verify --repair`: damaged blobs get their bytes back from wherever else they are, and nothing else is touched.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use common::{Mounted, Store, digest_of, eventually, succeed, wmount};
use wmount::digest::Digest;
use wmount::dtype::Dtype;
use wmount::format::milblob;

const TENSOR: &str = "model.layers.1.mlp.down_proj.weight";

fn blob(store: &Store, model: &str, tensor: &str) -> (Digest, PathBuf) {
    let shown = store.json(&["show", model]);
    let found = shown["tensors"].as_array().unwrap().iter().find(|it| it["name"] == tensor).unwrap();
    let digest: Digest = serde_json::from_value(found["digest"].clone()).unwrap();
    (digest, store.path().join("blobs").join(digest.file_name()))
}

fn flip(path: &Path) {
    fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (mut byte, at) = ([0], file.metadata().unwrap().len() - 10);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

/// `verify --repair --json ARGS...`: its exit status and report.
fn repair(store: &Store, from: &[&Path]) -> (Option<i32>, serde_json::Value) {
    let mut command = store.command(&["verify", "--repair", "--json"]);
    from.iter().for_each(|from| _ = command.arg("--from").arg(from));
    let output = command.output().unwrap();
    (output.status.code(), serde_json::from_slice(&output.stdout).expect("a report"))
}

fn repaired_all(store: &Store, from: &[&Path], number: usize) -> serde_json::Value {
    let (code, report) = repair(store, from);
    assert_eq!((code, &report["damaged"]), (Some(0), &serde_json::json!([])), "{report:#}");
    assert_eq!(report["repaired"].as_array().unwrap().len(), number, "{report:#}");
    store.check();
    report
}

#[test]
fn every_kind_of_damage_is_repaired_from_another_store() {
    let (store, other) = (Store::of_two(), Store::of_two());
    let names = ["model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"];
    let paths = names.map(|name| blob(&store, "llama:code", name).1);
    flip(&paths[0]);
    fs::remove_file(&paths[1]).unwrap();
    fs::remove_file(&paths[2]).unwrap();
    fs::create_dir(&paths[2]).unwrap();
    fs::write(paths[2].join("in the way"), "x").unwrap();
    let report = repaired_all(&store, &[&other.path()], 3);
    let from = report["repaired"][0]["from"].as_str().unwrap();
    assert!(from.starts_with(other.path().to_str().unwrap()), "{from}");
    for path in &paths {
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o444);
    }
    assert!(!store.path().join(".wmount/tmp").exists());
}

#[test]
fn every_blob_of_a_model_comes_back_from_what_it_was_imported_from() {
    let store = Store::of_two();
    let packages = [store.package("s1", 1, &common_model()), store.package("s8", 8, &common_model())];
    let (chat, code) = (store.chat(), store.code());
    let blobs: Vec<PathBuf> = store.path().join("blobs").read_dir().unwrap().map(|it| it.unwrap().path()).collect();
    blobs.iter().for_each(|path| fs::remove_file(path).unwrap());
    let (code_one, report) = repair(&store, &[&chat]);
    assert_eq!(code_one, Some(1), "the other model is still damaged");
    assert!(!report["repaired"].as_array().unwrap().is_empty());
    repair(&store, &[&code, &packages[0], &packages[1]]);
    store.check();
}

fn common_model() -> wmount::sample::LanguageModel {
    wmount::sample::LanguageModel::new(7, 32, 2, 300)
}

/// Makes the blobs of today's ollama, with names in their headers, of a model: a store that another program wrote.
fn named_store(store: &Store, into: &Path) -> PathBuf {
    let named = into.join("named");
    let mounted = store.mount();
    succeed(std::process::Command::new("cp").arg("-r").args([mounted.path("ollama"), named.clone()]));
    succeed(std::process::Command::new("chmod").arg("-R").arg("u+w").arg(&named));
    named
}

#[test]
fn a_tensor_comes_back_from_a_blob_of_another_form_in_the_same_store() {
    let store = Store::of_two();
    let named = named_store(&store, store.dir.path());
    // The same tensors twice in one store: as wmount stores them, and as ollama does.
    succeed(store.command(&["import", "-m", "llama:code", "-n", "theirs"]).arg(&named));
    let (_, path) = blob(&store, "llama:code", TENSOR);
    flip(&path);
    let report = repaired_all(&store, &[], 1);
    let from = report["repaired"][0]["from"].as_str().unwrap();
    assert!(from.contains(TENSOR) && from.contains("theirs"), "{from}");
    // And the reverse: ollama's form from ours.
    let (_, path) = blob(&store, "theirs", TENSOR);
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(20).unwrap();
    repaired_all(&store, &[], 1);
    // And from the file that was imported, by the name that it has there.
    fs::remove_file(&path).unwrap();
    let (_, ours) = blob(&store, "llama:code", TENSOR);
    fs::remove_file(&ours).unwrap();
    let report = repaired_all(&store, &[&store.code()], 2);
    assert!(report["repaired"][0]["from"].as_str().unwrap().ends_with("code/model.safetensors"), "{report:#}");
}

#[test]
fn wrong_bytes_are_not_taken_and_what_is_left_is_said() {
    let (store, other) = (Store::of_two(), Store::of_two());
    let (digest, path) = blob(&store, "llama:code", TENSOR);
    flip(&path);
    let damaged = digest_of(&path);
    // The other store has the blob, damaged too; a directory has nothing of it.
    flip(&other.path().join("blobs").join(digest.file_name()));
    let (code, report) = repair(&store, &[&other.path(), &store.chat()]);
    assert_eq!(code, Some(1));
    assert_eq!(report["damaged"][0]["digest"], digest.to_string());
    assert_eq!(digest_of(&path), damaged, "what cannot be repaired stays as it is");
    let words = store.command(&["verify", "--repair"]).output().unwrap();
    let words = String::from_utf8(words.stdout).unwrap();
    assert!(words.contains("1 damaged blob") && words.contains(TENSOR), "{words}");
    assert_eq!(wmount(["verify", "--from", "x"]).output().unwrap().status.code(), Some(2));
}

#[test]
fn a_whole_file_is_found_among_others() {
    let store = Store::of_two();
    let manifest = store.path().join("manifests/registry.ollama.ai/library/llama/chat");
    let manifest: serde_json::Value = serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap();
    let layers = manifest["layers"].as_array().unwrap();
    let config = layers.iter().find(|it| it["name"] == "config.json").unwrap();
    let digest: Digest = serde_json::from_value(config["digest"].clone()).unwrap();
    let heap = store.dir.path().join("heap");
    fs::create_dir(&heap).unwrap();
    fs::write(heap.join("other"), "x").unwrap();
    fs::copy(store.chat().join("config.json"), heap.join("some name")).unwrap();
    fs::remove_file(store.path().join("blobs").join(digest.file_name())).unwrap();
    let report = repaired_all(&store, &[&heap], 1);
    assert!(report["repaired"][0]["from"].as_str().unwrap().ends_with("some name"));
}

#[test]
fn a_source_that_fails_keeps_no_other_from_being_searched() {
    let store = Store::of_two();
    // More tensors of one name than an import takes.
    let all = store.dir.path().join("all");
    let failing = all.join("a.mlmodelc");
    fs::create_dir_all(failing.join("weights")).unwrap();
    let plan = milblob::plan(std::iter::repeat_n((Dtype::U8, 2, 0), 300)).unwrap();
    let (mut weights, mut text) = (plan.header.to_vec(), String::new());
    for (number, blob) in plan.blobs.iter().enumerate() {
        weights.resize(blob.metadata as usize, 0);
        weights.extend(milblob::metadata(blob));
        weights.extend((number as u16).to_le_bytes());
        text += &format!(
            "x w = const()[val = tensor<uint8, [2]>(BLOBFILE(path = string(\"@model_path/weights/w.bin\"), offset = uint64({})))];",
            blob.metadata
        );
    }
    fs::write(failing.join("weights/w.bin"), weights).unwrap();
    fs::write(failing.join("model.mil"), text).unwrap();
    fs::rename(store.package("s8", 8, &common_model()), all.join("s8.mlpackage")).unwrap();
    let original = all.join("s8.mlpackage/Data/com.apple.CoreML/model.mlmodel");
    let blob = store.path().join("blobs").join(digest_of(&original).file_name());
    fs::remove_file(&blob).unwrap();
    let report = repaired_all(&store, &[&all], 1);
    assert!(report["notes"].to_string().contains("more than 256 tensors are called"), "{report:#}");
}

#[test]
fn an_empty_blob_is_made_anew() {
    let store = Store::none();
    fs::write(store.chat().join("nothing"), "").unwrap();
    store.add("chat", &[&store.chat()]);
    fs::remove_file(store.path().join("blobs").join(Digest::of(b"").file_name())).unwrap();
    repaired_all(&store, &[], 1);
}

#[test]
fn a_running_mount_shows_repaired_bytes() {
    let (store, other) = (Store::of_two(), Store::of_two());
    let (digest, path) = blob(&store, "llama:code", TENSOR);
    flip(&path);
    let mounted = Mounted::new(&store.path());
    let whole = format!("ollama@seed/blobs/{}", digest.file_name());
    let files = ["original/llama/code/code/model.safetensors", "amb/llama/code.amb", "amb/llama/code@int8.amb", &whole];
    let right = Mounted::new(&other.path());
    let expected = files.map(|file| Some(digest_of(&right.path(file))));
    // For what must know of the whole tensor the damage is an error.
    let shown = || files.map(|file| mounted.read(file).ok().map(|bytes| Digest::of(&bytes)));
    // Read and therefore in the page cache, wrong as they are.
    assert!(shown().iter().zip(&expected).all(|(shown, expected)| shown != expected));
    let open = File::open(mounted.path(files[0])).unwrap();
    repaired_all(&store, &[&other.path()], 1);
    eventually("the repaired bytes are shown", || shown() == expected);
    // Through a file that was open all the time, too.
    let mut bytes = vec![0; open.metadata().unwrap().len() as usize];
    open.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(Some(Digest::of(&bytes)), expected[0]);
}

#[test]
fn a_repair_is_noticed_though_the_damaged_file_has_the_inode_number_of_an_earlier_one() {
    let (store, other) = (Store::of_two(), Store::of_two());
    let (digest, path) = blob(&store, "llama:code", TENSOR);
    flip(&path);
    // As earlier versions wrote it, of a repair before the mount.
    let earlier = format!("{} {}\n", digest.file_name(), fs::metadata(&path).unwrap().ino());
    fs::write(store.path().join(".wmount/repaired"), &earlier).unwrap();
    let (mounted, right) = (Mounted::new(&store.path()), Mounted::new(&other.path()));
    let file = "original/llama/code/code/model.safetensors";
    let expected = digest_of(&right.path(file));
    assert_ne!(digest_of(&mounted.path(file)), expected);
    repaired_all(&store, &[&other.path()], 1);
    eventually("the repaired bytes are shown", || digest_of(&mounted.path(file)) == expected);
    let log = fs::read_to_string(store.path().join(".wmount/repaired")).unwrap();
    let lines: Vec<Vec<&str>> = log.lines().map(|line| line.split(' ').collect()).collect();
    assert_eq!((lines.len(), lines[0][..2].join(" ")), (2, earlier.trim_end().to_owned()), "{log}");
    assert!(lines[1][2].parse::<u128>().unwrap() > 0, "{log}");
}

#[test]
fn a_blob_that_somebody_has_open_damaged_is_not_given_to_others_when_it_is_repaired() {
    let (store, other) = (Store::of_two(), Store::of_two());
    let (digest, path) = blob(&store, "llama:code", TENSOR);
    flip(&path);
    let mounted = Mounted::new(&store.path());
    let inside = format!("ollama@seed/blobs/{}", digest.file_name());
    let open = File::open(mounted.path(&inside)).unwrap();
    repaired_all(&store, &[&other.path()], 1);
    // Where the kernel reads the blob itself, it cannot be made to read another one; where it does not, all is well.
    let good = |answer: std::io::Result<Vec<u8>>| match answer {
        Ok(bytes) => Digest::of(&bytes) == digest,
        Err(error) => error.raw_os_error() == Some(libc::EIO),
    };
    eventually("no damaged bytes are given to anyone new", || good(mounted.read(&inside)));
    drop(open);
    eventually("it is whole", || mounted.read(&inside).is_ok_and(|bytes| Digest::of(&bytes) == digest));
}

#[test]
fn a_repair_that_is_killed_leaves_each_blob_old_or_new() {
    let (store, other) = (Store::of_two(), Store::of_two());
    let paths: Vec<PathBuf> = store.path().join("blobs").read_dir().unwrap().map(|it| it.unwrap().path()).collect();
    for turn in 0..12 {
        paths.iter().filter(|path| fs::metadata(path).unwrap().len() > 100).for_each(|path| flip(path));
        let before: Vec<Digest> = paths.iter().map(|path| digest_of(path)).collect();
        let mut command = store.command(&["verify", "--repair", "--from"]);
        let mut child = command.arg(other.path()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(turn * 7));
        let _ = child.kill();
        child.wait().unwrap();
        for (path, before) in paths.iter().zip(before) {
            let now = digest_of(path);
            assert!(now == before || path.ends_with(now.file_name()), "{}", path.display());
        }
        repair(&store, &[&other.path()]);
        store.check();
    }
    assert!(!store.path().join(".wmount/tmp").exists());
}
