//! Imports that are killed, and imports at the same time.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use common::{Store, digest_of, succeed, words};
use wmount::sample::LanguageModel;

const KILLS: u32 = 40;

/// Large enough that there is time to kill its import.
fn large(store: &Store) -> PathBuf {
    store.language_model("large", &LanguageModel { shards: 2, ..LanguageModel::new(5, 256, 4, 1000) })
}

/// The digest of a file of the tree.
fn shown(store: &Store, path: &str) -> wmount::digest::Digest {
    let output = store.command(&["cat", path]).output().unwrap();
    assert!(output.status.success(), "{}", words(&output));
    wmount::digest::Digest::of(&output.stdout)
}

#[test]
fn a_killed_import_leaves_a_store_that_works_and_can_be_gone_on_with() {
    let store = Store::none();
    let source = large(&store);
    let began = Instant::now();
    let whole = Store::none();
    whole.add("large", &[&source]);
    let took = began.elapsed();
    // The last that is made of an empty store.
    let is_store = || store.path().join("blobs").exists();
    for turn in 0..KILLS {
        let mut child = store.import("large", &[&source]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(took * turn / (KILLS - 1));
        let _ = child.kill();
        child.wait().unwrap();
        if is_store() {
            let models = store.json(&["ls"]);
            assert!(models.as_array().unwrap().len() <= 1, "{models}");
            store.check();
        }
        if turn % 4 == 3 && is_store() {
            store.run(&["gc"]);
            store.check();
        }
    }
    store.add("large", &[&source]);
    store.run(&["gc"]);
    store.check();
    assert_eq!(store.listing().keys().collect::<Vec<_>>(), whole.listing().keys().collect::<Vec<_>>());
    let shard = "model-00001-of-00002.safetensors";
    assert_eq!(shown(&store, &format!("original/large/latest/large/{shard}")), digest_of(&source.join(shard)));
    assert!(!store.path().join(".wmount/tmp").exists());
}

#[test]
fn a_store_whose_making_was_cut_short_is_made_by_the_next_import() {
    for parts in [&[][..], &["manifests"], &["blobs"], &["manifests", "blobs"]] {
        let store = Store::none();
        for part in parts {
            std::fs::create_dir_all(store.path().join(part)).unwrap();
        }
        store.add("llama", &[&store.chat()]);
        store.check();
    }
}

#[test]
fn two_imports_at_once_both_work_or_one_says_that_it_must_wait() {
    for turn in 0..4 {
        let store = Store::none();
        let sources = [("one", store.chat()), ("two", large(&store))];
        let children = sources.each_ref().map(|(name, source)| {
            let mut command = store.import(name, &[source]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            let child = command.spawn().unwrap();
            // Both make the store, or the second finds the first at work.
            thread::sleep(Duration::from_millis(turn * 10));
            child
        });
        let outputs = children.map(|child| child.wait_with_output().unwrap());
        for (output, (name, source)) in outputs.iter().zip(&sources) {
            if !output.status.success() {
                assert!(words(output).contains("another wmount is writing"), "{}", words(output));
                succeed(&mut store.import(name, &[source]));
            }
        }
        store.check();
        assert_eq!(store.json(&["ls"]).as_array().unwrap().len(), 2);
    }
}

#[test]
fn an_import_beside_gc_and_rm_loses_nothing() {
    for turn in 0..6 {
        let store = Store::of_two();
        // What gc is about to remove is what the import brings.
        store.run(&["rm", "llama:code"]);
        let commands = [
            ("again", store.import("again", &[&store.code()])),
            ("gc", store.command(&["gc"])),
            ("rm", store.command(&["rm", "llama:chat"])),
        ];
        let children = commands.map(|(name, mut command)| {
            let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            thread::sleep(Duration::from_millis(turn * 3));
            (name, child)
        });
        let mut imported = false;
        for (name, child) in children {
            let output = child.wait_with_output().unwrap();
            let said = words(&output);
            assert!(output.status.success() || said.contains("another wmount is writing"), "{name}: {said}");
            imported |= name == "again" && output.status.success();
        }
        store.check();
        if !imported {
            store.add("again", &[&store.code()]);
        }
        store.run(&["gc"]);
        store.check();
        let original = store.code().join("model.safetensors");
        assert_eq!(shown(&store, "original/again/latest/code/model.safetensors"), digest_of(&original));
    }
}

#[test]
fn readers_do_not_wait_for_a_writer() {
    let store = Store::of_two();
    let source = large(&store);
    let mut child = store.import("large", &[&source]).stdout(Stdio::null()).spawn().unwrap();
    let mut reads = 0;
    while child.try_wait().unwrap().is_none() {
        store.run(&["ls"]);
        store.check();
        reads += 1;
    }
    assert!(reads > 0 && child.wait().unwrap().success());
}
