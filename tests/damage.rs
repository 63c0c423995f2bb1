//! Damaged stores: an error where the damage is touched, and nowhere else.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use common::{Store, eventually, facts_of_vfs};
use wmount::digest::Digest;
use wmount::error::Error;
use wmount::tree::{Body, Node, SkeletonDir, Step};
use wmount::vfs::{Children, ROOT};

/// The paths of all files that need a blob.
fn needing(store: &Store, digest: &Digest) -> BTreeSet<String> {
    fn node(path: String, it: &Node, digest: &Digest, found: &mut BTreeSet<String>) {
        match &it.body {
            Body::Dir(children) => {
                children.iter().for_each(|(name, child)| node(format!("{path}/{name}"), child, digest, found));
            }
            Body::File(file) => {
                if file.content.digests().any(|it| it == *digest) {
                    found.insert(path);
                }
            }
        }
    }
    fn dir(it: &SkeletonDir, digest: &Digest, found: &mut BTreeSet<String>) {
        for (name, ..) in it.entries().unwrap() {
            match it.child(&name).unwrap() {
                Step::Dir(below) => dir(below, digest, found),
                Step::Node(below, _) => node(format!("{}/{name}", it.path), &below, digest, found),
            }
        }
    }
    let (vfs, mut found) = (store.whole_vfs(), BTreeSet::new());
    let tree = vfs.tree();
    for layout in vfs.entries(ROOT).unwrap().children.iter().filter(|layout| &*layout.name != ".wmount") {
        dir(tree.dir(&layout.name).unwrap(), digest, &mut found);
    }
    found
}

/// The blob of a tensor of a model.
fn blob_of(store: &Store, model: &str, tensor: &str) -> Digest {
    let shown = store.json(&["show", model]);
    let found = shown["tensors"].as_array().unwrap().iter().find(|it| it["name"] == tensor).unwrap();
    serde_json::from_value(found["digest"].clone()).unwrap()
}

fn blob_path(store: &Store, digest: &Digest) -> PathBuf {
    store.path().join("blobs").join(digest.file_name())
}

fn is_eio(answer: &io::Result<Vec<u8>>) -> bool {
    matches!(answer, Err(error) if error.raw_os_error() == Some(libc::EIO))
}

/// Damages the blob of one layer under a running mount, and looks at everything.
fn damaged(damage: impl FnOnce(&PathBuf)) {
    let store = Store::of_two();
    let files: Vec<String> = facts_of_vfs(&store.whole_vfs())
        .into_keys()
        .filter(|path| path.contains('.') || path.contains("sha256"))
        .collect();
    let digest = blob_of(&store, "llama:code", "model.layers.1.mlp.down_proj.weight");
    let hurt = needing(&store, &digest);
    assert_eq!(hurt.len(), 18, "{hurt:?}");
    let mounted = store.mount_whole();
    let (path, aside) = (blob_path(&store, &digest), store.dir.path().join("aside"));
    fs::copy(&path, &aside).unwrap();
    damage(&path);

    for file in &files {
        let place = mounted.path(file);
        let metadata = fs::metadata(&place).unwrap();
        if metadata.is_file() {
            let answer = fs::read(&place);
            assert_eq!(is_eio(&answer), hurt.contains(file), "{file}: {:?}", answer.err());
            assert!(hurt.contains(file) || answer.is_ok_and(|bytes| bytes.len() as u64 == metadata.len()), "{file}");
        }
    }
    // Parts of a hurt file that lie elsewhere are read as ever; its name and size are there.
    let amb = File::open(mounted.path("amb/llama/code.amb")).unwrap();
    amb.read_exact_at(&mut [0; 30], 0).unwrap();
    let problems = mounted.status()["problems"].to_string();
    for part in [digest.to_string().as_str(), "llama:code", "model.layers.1.mlp.down_proj.weight"] {
        assert!(problems.contains(part), "{part} is not in {problems}");
    }
    assert!(!problems.contains("llama:chat"), "{problems}");
    let report = store.command(&["verify", "--json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!(report["damaged"][0]["models"], serde_json::json!(["llama:code"]));
    assert_eq!(report["damaged"][0]["digest"], digest.to_string());

    // An error is not remembered: with the blob back, every file is whole.
    let _ = fs::remove_dir(&path).or_else(|_| fs::remove_file(&path));
    fs::rename(&aside, &path).unwrap();
    for file in &hurt {
        common::eventually(&format!("{file} can be read again"), || mounted.read(file).is_ok());
    }
    common::eventually("mended damage is no problem", || mounted.status()["problems"] == serde_json::json!([]));
    let shown = mounted.read("original/llama/code/code/model.safetensors").unwrap();
    assert!(shown == fs::read(store.code().join("model.safetensors")).unwrap());
    assert!(mounted.is_there());
}

#[test]
fn a_missing_blob_is_an_error_of_the_files_that_need_it() {
    damaged(|path| fs::remove_file(path).unwrap());
}

#[test]
fn a_cut_blob_is_an_error_of_the_files_that_need_it() {
    damaged(|path| {
        fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
        File::options().write(true).open(path).unwrap().set_len(100).unwrap();
    });
}

#[test]
fn a_directory_in_place_of_a_blob_is_an_error_of_the_files_that_need_it() {
    damaged(|path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    });
}

#[test]
fn a_fifo_in_place_of_a_blob_makes_nobody_wait() {
    damaged(|path| {
        fs::remove_file(path).unwrap();
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    });
}

#[test]
fn a_blob_that_was_changed_is_found_by_verify() {
    let store = Store::of_two();
    let digest = blob_of(&store, "llama:chat", "lm_head.weight");
    let path = blob_path(&store, &digest);
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    File::options().write(true).open(&path).unwrap().write_all_at(b"x", 1000).unwrap();
    let output = store.command(&["verify", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["damaged"].as_array().unwrap().len(), 1);
    assert_eq!(report["damaged"][0]["models"], serde_json::json!(["llama:chat", "llama:code"]));
    // Only one of the models is asked for.
    assert_eq!(store.command(&["verify", "llama:code"]).output().unwrap().status.code(), Some(1));
}

#[test]
fn a_manifest_that_cannot_be_read_hurts_its_own_model() {
    let store = Store::of_two();
    let manifest = store.path().join("manifests/registry.ollama.ai/library/llama/code");
    fs::write(&manifest, "{}").unwrap();
    let mounted = store.mount();
    for file in ["amb/llama/chat.amb", "safetensors/llama/chat/model.safetensors"] {
        assert!(!mounted.read(file).unwrap().is_empty());
    }
    assert!(mounted.path("original/llama").read_dir().unwrap().any(|it| it.unwrap().file_name() == "code"));
    assert!(is_eio(&fs::read_dir(mounted.path("original/llama/code")).map(|_| Vec::new())));
    assert!(mounted.status()["problems"].to_string().contains("llama"));
    let listed = store.json(&["ls"]);
    let keys = |model: &serde_json::Value| model.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&listed[0]), keys(&listed[1]));
    let verified = String::from_utf8(store.command(&["verify"]).output().unwrap().stdout).unwrap();
    assert!(verified.ends_with(": 1 damaged manifest\n"), "{verified}");
    // Nobody knows what it reaches, so nothing is removed.
    assert!(store.refused(&["gc"]).contains("llama/code"));
}

#[test]
fn a_model_that_is_gone_is_no_damage() {
    let store = Store::of_two();
    let digest = blob_of(&store, "llama:code", "model.layers.1.mlp.down_proj.weight");
    let vfs = store.vfs();
    let problems = || {
        let status: serde_json::Value = serde_json::from_slice(&vfs.status_text()).unwrap();
        status["problems"].as_array().unwrap().len()
    };
    let code = vfs.resolve("safetensors/llama/code/model.safetensors").unwrap();
    vfs.resolve("original/llama").unwrap();
    fs::remove_file(blob_path(&store, &digest)).unwrap();
    assert!(vfs.read(code.ino, 0, &mut vec![0; code.size as usize]).is_err());
    vfs.review_problems();
    assert_eq!(problems(), 1);
    store.run(&["rm", "llama:code"]);
    vfs.refresh().unwrap();
    vfs.review_problems();
    assert_eq!(problems(), 0);
    // One that was removed since the last look is not there either.
    store.run(&["rm", "llama:chat"]);
    assert!(matches!(vfs.resolve("original/llama/chat"), Err(Error::NotFound(_))));
    assert_eq!(problems(), 0);
}

#[test]
fn a_model_of_a_store_that_is_away_is_damage() {
    let store = Store::of_two();
    let vfs = store.vfs();
    vfs.resolve("original/llama").unwrap();
    fs::rename(store.path(), store.dir.path().join("away")).unwrap();
    assert!(matches!(vfs.resolve("original/llama/chat"), Err(Error::Hurts { .. })));
}

#[test]
fn a_recipe_without_its_map_is_told_of_wherever_its_model_is_touched() {
    let store = Store::of_two();
    let manifest = fs::read(store.path().join("manifests/registry.ollama.ai/library/llama/code")).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let layers = manifest["layers"].as_array().unwrap();
    let map = layers.iter().rfind(|it| it["mediaType"] == "application/vnd.wmount.fragment").unwrap();
    let digest: Digest = serde_json::from_value(map["digest"].clone()).unwrap();
    let (path, aside) = (blob_path(&store, &digest), store.dir.path().join("aside"));
    fs::rename(&path, &aside).unwrap();
    let fault = format!("blob {digest}: it is missing; it is part of the recipe of \"code\"");
    let listed = store.json(&["ls"]);
    assert_eq!((&listed[0]["damaged"], &listed[1]["damaged"]), (&serde_json::Value::Null, &fault.as_str().into()));
    let verified = store.command(&["verify"]).output().unwrap();
    let line = format!("blob {digest}: it is missing; it hurts llama:code; it holds a part of original/\n");
    assert!(String::from_utf8(verified.stdout).unwrap().starts_with(&line));
    let said = store.refused(&["cat", "safetensors/llama/code/config.json"]);
    assert_eq!(said, format!("wmount: model llama:code: {fault}\n"));
    let mounted = store.mount();
    assert!(is_eio(&mounted.read("safetensors/llama/code/config.json")));
    assert_eq!(mounted.status()["problems"], serde_json::json!([format!("model llama:code: {fault}")]));
    fs::rename(&aside, &path).unwrap();
    assert!(!mounted.read("safetensors/llama/code/config.json").unwrap().is_empty());
    common::eventually("mended damage is no problem", || mounted.status()["problems"] == serde_json::json!([]));
}

#[test]
fn a_recipe_that_is_none_is_found_by_verify_though_its_blob_is_what_its_name_says() {
    let store = Store::of_two();
    let manifest = store.path().join("manifests/registry.ollama.ai/library/llama/code");
    let mut changed: serde_json::Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    let layers = changed["layers"].as_array_mut().unwrap();
    let recipe = layers.iter_mut().find(|it| it["mediaType"] == "application/vnd.wmount.recipe").unwrap();
    let digest = Digest::of(b"{}");
    fs::write(blob_path(&store, &digest), "{}").unwrap();
    recipe["digest"] = digest.to_string().into();
    recipe["size"] = 2.into();
    fs::write(&manifest, changed.to_string()).unwrap();
    let verified = store.command(&["verify", "--json"]).output().unwrap();
    assert_eq!(verified.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert_eq!(report["damaged"].as_array().unwrap().len(), 1, "{report}");
    assert_eq!(report["damaged"][0]["models"], serde_json::json!(["llama:code"]));
    assert!(report["damaged"][0]["fault"].as_str().unwrap().contains("recipe of \"code\""), "{report}");
}

#[test]
fn a_command_that_meets_damage_says_so_once() {
    let store = Store::of_two();
    let digest = blob_of(&store, "llama:code", "model.layers.1.mlp.down_proj.weight");
    fs::remove_file(blob_path(&store, &digest)).unwrap();
    let to = store.dir.path().join("exported");
    let line = format!(
        "wmount: model llama:code: blob {digest}: it is missing; it holds tensor \"model.layers.1.mlp.down_proj.weight\"\n"
    );
    for args in [&["export", "safetensors/llama/code", to.to_str().unwrap()][..], &["cat", "amb/llama/code.amb"]] {
        assert_eq!(store.refused(args), line);
    }
    assert!(!to.exists());
    let shown = store.json(&["show", "llama:code"]);
    assert_eq!(shown["damaged"], serde_json::json!([format!("blob {digest}: it is missing")]));
}

#[test]
fn what_no_command_reads_is_damage_in_the_list_too() {
    let store = Store::of_two();
    let digest = blob_of(&store, "llama:code", "model.layers.1.mlp.down_proj.weight");
    let (path, outside) = (blob_path(&store, &digest), store.dir.path().join("blob"));
    fs::rename(&path, &outside).unwrap();
    let link = || symlink(&outside, &path).unwrap();
    let within = || {
        fs::rename(&outside, path.with_file_name("blob")).unwrap();
        symlink("blob", &path).unwrap();
    };
    let make = |what: &str| assert!(Command::new(what).arg(&path).status().unwrap().success());
    let (make_fifo, make_dir) = (|| make("mkfifo"), || make("mkdir"));
    for (put, what) in [
        (&make_fifo as &dyn Fn(), Some("is no regular file")),
        (&make_dir, Some("is no regular file")),
        (&link, Some("is a link that leads out of the store")),
        (&within, None),
    ] {
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
        put();
        let fault = what.map(|what| format!("blob {digest}: {what}"));
        assert_eq!(store.json(&["ls"])[1]["damaged"], serde_json::json!(fault));
        assert_eq!(store.json(&["show", "llama:code"])["damaged"], serde_json::json!(Vec::from_iter(fault.clone())));
        let read = store.command(&["cat", "amb/llama/code.amb"]).output().unwrap();
        let said = common::words(&read);
        assert!(read.status.success() == fault.is_none() && said.contains(&fault.unwrap_or_default()), "{said}");
    }
}

#[test]
fn an_import_mends_a_blob_that_was_cut() {
    let store = Store::of_two();
    let path = blob_path(&store, &blob_of(&store, "llama:chat", "lm_head.weight"));
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(10).unwrap();
    store.add("llama:chat", &[&store.chat()]);
    store.check();
}

#[test]
fn an_import_replaces_what_has_a_blobs_name_and_length_and_is_none() {
    let outside = tempfile::tempdir().unwrap();
    let zeros = |path: &PathBuf| {
        let len = fs::metadata(path).unwrap().len();
        fs::remove_file(path).unwrap();
        fs::write(path, vec![0; len as usize]).unwrap();
    };
    let link = |path: &PathBuf| {
        let moved = outside.path().join("blob");
        fs::rename(path, &moved).unwrap();
        symlink(&moved, path).unwrap();
    };
    for damage in [&zeros as &dyn Fn(&PathBuf), &link] {
        let store = Store::none();
        store.add("one", &[&store.chat()]);
        let digest = blob_of(&store, "one", "lm_head.weight");
        damage(&blob_path(&store, &digest));
        // A mount that has the wrong bytes open gives the right ones afterwards.
        let mount = store.mount();
        let file = "original/one/latest/chat/model.safetensors";
        let _ = mount.read(file);
        store.add("two", &[&store.chat()]);
        store.check();
        let whole = fs::read(store.chat().join("model.safetensors")).unwrap();
        eventually("the mount reads the new blob", || mount.read(file).is_ok_and(|bytes| bytes == whole));
    }
}

#[test]
fn a_blob_that_another_program_wrote_stays_if_it_is_what_its_name_says() {
    let store = Store::none();
    store.add("one", &[&store.chat()]);
    let path = blob_path(&store, &blob_of(&store, "one", "lm_head.weight"));
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let inode = fs::metadata(&path).unwrap().ino();
    assert_eq!(store.add("two", &[&store.chat()])["added"]["tensors"], 0);
    assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
}

#[test]
fn the_blobs_of_whole_models_are_not_sought_anew_for_a_damaged_one() {
    let store = Store::of_two();
    let config = blob_path(&store, &Digest::of(&fs::read(store.code().join("config.json")).unwrap()));
    let bytes = fs::read(&config).unwrap();
    fs::remove_file(&config).unwrap();
    let vfs = store.vfs();
    let blobs = || match vfs.entries(vfs.resolve("ollama/blobs").unwrap().ino).unwrap().children {
        Children::Blobs(union) => union,
        Children::Few(_) => panic!("they are listed one by one"),
    };
    let damaged = blobs();
    assert!(Arc::ptr_eq(&damaged, &blobs()));
    fs::write(&config, bytes).unwrap();
    let whole = blobs();
    assert!(whole.len() > damaged.len() && Arc::ptr_eq(&whole, &blobs()));
}
