//! Import: what it adds, what it refuses, and that a refusal leaves the store as it was.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use common::{Store, digest_of, refuse, succeed, wmount, words};
use wmount::budget::Limits;
use wmount::dtype::Dtype;
use wmount::format::{milblob, safetensors};
use wmount::sample::LanguageModel;
use wmount::store::import::{Options, Progress, import};

/// The same sizes as the other sample models, but other weights.
fn other(seed: u64) -> LanguageModel {
    LanguageModel::new(seed, 32, 2, 300)
}

/// Imports what must be refused for a reason, and leaves nothing in the store.
fn refused(store: &Store, name: &str, paths: &[&PathBuf], reason: &str) {
    let before = store.listing();
    let words = refuse(&mut store.import(name, paths));
    assert!(words.contains(reason), "{words}");
    assert_eq!(store.listing(), before, "{words}");
    let left: Vec<_> = fs::read_dir(store.path().join(".wmount")).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "lock" || name == "removed"), "{left:?}");
}

fn package_file(package: &str) -> String {
    format!("{package}.mlpackage/Data/com.apple.CoreML/weights/weight.bin")
}

#[test]
fn importing_the_same_again_adds_nothing() {
    let store = Store::of_two();
    let before = store.listing();
    for (name, path) in [("llama:chat", store.chat()), ("llama:code", store.code())] {
        let report = store.add(name, &[&path]);
        assert_eq!(report["added"]["bytes"], 0, "{report}");
    }
    assert_eq!(store.listing(), before);
}

#[test]
fn a_fine_tune_adds_only_the_tensors_that_it_changed() {
    let store = Store::none();
    let report = store.add("llama:chat", &[&store.chat()]);
    assert_eq!((&report["present"]["tensors"], &report["present"]["bytes"]), (&0.into(), &0.into()), "{report}");
    let report = store.add("llama:code", &[&store.code()]);
    // Nine tensors in a layer; the other twelve are shared.
    assert_eq!((&report["added"]["tensors"], &report["present"]["tensors"]), (&9.into(), &12.into()), "{report}");
}

#[test]
fn packages_join_a_model_and_share_its_tensors() {
    let store = Store::of_two();
    let report = store.add("llama:chat", &[&store.package("s64", 64, &other(7))]);
    assert_eq!(report["added"]["tensors"], 0, "{report}");
    let shown = store.json(&["show", "llama:chat"]);
    assert_eq!(shown["programs"], serde_json::json!(["s1.mlpackage", "s8.mlpackage", "s64.mlpackage"]));
    let vfs = store.vfs();
    let links = |shape| vfs.resolve(&format!("coreml/llama/chat/{}", package_file(shape))).unwrap();
    assert_eq!((links("s1").ino, links("s1").nlink), (links("s64").ino, 4));
}

#[test]
fn a_directory_of_models_is_refused_and_one_model_with_others_files_says_what_it_took() {
    let store = Store::of_two();
    let everything = store.dir.path().join("everything");
    fs::create_dir(&everything).unwrap();
    for dir in [store.chat(), store.code(), store.package("s2", 2, &other(7))] {
        fs::rename(&dir, everything.join(dir.file_name().unwrap())).unwrap();
    }
    refused(&store, "all", &[&everything], "everything holds 2 models and is none itself");
    fs::remove_dir_all(everything.join("code")).unwrap();
    fs::write(everything.join("chat/lora.gguf"), "GGUF").unwrap();
    let said = store.run(&["import", everything.to_str().unwrap(), "-n", "all"]);
    for line in ["all:latest: everything (safetensors)", "  components     chat", "  kept as files  s2.mlpackage;"] {
        assert!(said.contains(line), "{said}");
    }
    assert!(said.contains("  kept as files  chat/lora.gguf;") && !said.contains("joins"), "{said}");
}

#[test]
fn an_import_says_which_model_it_joined() {
    let store = Store::of_two();
    let package = store.package("s2", 2, &other(7));
    let said = store.run(&["import", package.to_str().unwrap(), "-n", "llama:chat"]);
    assert!(said.starts_with("llama:chat: s2.mlpackage\n"), "{said}");
    assert!(said.contains("  joins          chat (safetensors), s1.mlpackage, s8.mlpackage\n"), "{said}");
    // Once more it is the model itself.
    let report = store.add("llama:code", &[&store.code()]);
    assert_eq!(report["joined"], serde_json::json!([]));
}

#[test]
fn blobs_that_the_header_does_not_count_are_there_if_the_program_says_so() {
    let shown_of_two = |change: &dyn Fn(&mut Vec<u8>)| {
        let store = Store::none();
        let packages = [store.package("one", 1, &other(7)), store.package("two", 2, &other(7).tune(1))];
        let weights = store.dir.path().join(package_file("one"));
        let mut bytes = fs::read(&weights).unwrap();
        change(&mut bytes);
        fs::write(&weights, &bytes).unwrap();
        store.add("encoder", &[&packages[0], &packages[1]]);
        let shown = store.dir.path().join("shown.mlpackage");
        store.run(&["export", "coreml/encoder/latest/two.mlpackage", shown.to_str().unwrap()]);
        let report = store.add("again", &[&shown]);
        assert_eq!(report["present"]["tensors"], 4, "{report}");
        store.check();
        (bytes, fs::read(shown.join("Data/com.apple.CoreML/weights/weight.bin")).unwrap())
    };
    let (bytes, plain) = shown_of_two(&|_| {});
    assert_eq!((bytes[0], plain[0]), (4, 6));
    // A walk does not get past bytes that are no blob's.
    let (bytes, longer) = shown_of_two(&|bytes| bytes.extend([1; 100]));
    assert_eq!((longer[0], longer.starts_with(&bytes)), (4, true));
    // Nothing is there a second time.
    let (_, uncounted) = shown_of_two(&|bytes| bytes[0] = 0);
    assert_eq!((uncounted[0], &uncounted[4..]), (0, &plain[4..]));
}

#[test]
fn equal_names_of_other_content_stand_below_the_name_of_their_package() {
    let store = Store::none();
    let packages = [store.package("one", 1, &other(1)), store.package("two", 1, &other(2))];
    store.add("encoder", &[&packages[0], &packages[1]]);
    let shown = store.json(&["show", "encoder"]);
    let names: Vec<&str> = shown["tensors"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    let plain: Vec<&str> = names.iter().filter(|name| !name.contains('/')).copied().collect();
    assert_eq!((plain.len(), names.len()), (4, 8), "{names:?}");
    assert!(plain.iter().all(|name| names.contains(&format!("two/{name}").as_str())), "{names:?}");
    // Each package still reads its own weights.
    for (name, source) in ["one", "two"].iter().zip(&packages) {
        let shown = store.command(&["cat", &format!("coreml/encoder/latest/{}", package_file(name))]).output().unwrap();
        let weights = source.join("Data/com.apple.CoreML/weights/weight.bin");
        assert!(shown.stdout == fs::read(weights).unwrap(), "{name}");
    }
}

#[test]
fn a_source_of_the_same_name_and_other_content_is_refused() {
    let store = Store::of_two();
    let elsewhere = Store::none();
    let package = elsewhere.package("s8", 16, &other(7));
    refused(&store, "llama:chat", &[&package], "other content");
    let weights = elsewhere.language_model("chat", &other(8));
    refused(&store, "llama:chat", &[&weights], "other content");
}

#[test]
fn a_second_set_of_weights_is_refused_for_one_model() {
    let store = Store::of_two();
    let second = store.language_model("second", &other(8));
    refused(&store, "llama:chat", &[&second], "--replace");
    refused(&store, "new", &[&store.chat(), &second], "one set of weights");
}

#[test]
fn replacing_shows_the_new_content_and_gc_takes_the_old() {
    let store = Store::of_two();
    let second = store.language_model("second", &other(8));
    succeed(store.import("llama:code", &[&second]).arg("--replace"));
    assert_eq!(store.json(&["show", "llama:code"])["sources"][0]["name"], "second");
    assert!(store.json(&["gc"])["removed"].as_u64().unwrap() >= 9);
    store.check();
    let shown = store.command(&["cat", "original/llama/code/second/model.safetensors"]).output().unwrap();
    assert!(shown.stdout == fs::read(second.join("model.safetensors")).unwrap());
    // What the other model shares with the old one is still there.
    let shown = store.command(&["cat", "safetensors/llama/chat/model.safetensors"]).output().unwrap();
    assert!(shown.stdout == fs::read(store.chat().join("model.safetensors")).unwrap());
}

#[test]
fn what_a_replaced_model_has_no_more_is_told_before_and_after() {
    let store = Store::of_two();
    let elsewhere = Store::none();
    let package = elsewhere.package("s8", 16, &other(7));
    let gone = ["chat", "s1.mlpackage"];
    refused(&store, "llama:chat", &[&package], "--replace it, which takes chat, s1.mlpackage away from it");
    let report = succeed(store.import("llama:chat", &[&package]).arg("--replace"));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["dropped"], serde_json::json!(gone));
    let text = succeed(store.command(&["import", "-n", "llama:code", "--replace"]).arg(&package));
    assert!(text.contains("dropped        code; gc removes"), "{text}");
    assert_eq!(store.add("llama:code", &[&package])["dropped"], serde_json::json!([]));
    // Another model of the name in another store.
    let path = elsewhere.path();
    elsewhere.add("llama:chat", &[&elsewhere.chat()]);
    let line = refuse(store.command(&["import"]).arg(&path));
    assert!(line.contains("--replace it, which takes s8.mlpackage away from it"), "{line}");
    let report = succeed(store.command(&["import", "--replace", "--json"]).arg(&path));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["models"][0]["dropped"], serde_json::json!(["s8.mlpackage"]));
}

#[test]
fn every_damaged_input_is_refused_and_leaves_the_store_as_it_was() {
    let store = Store::of_two();
    let names = ["model.safetensors"; 4].into_iter().chain(["config"; 1]);
    for (turn, name) in names.enumerate() {
        let dir = store.language_model(&format!("bad{turn}"), &other(9));
        let path = dir.join(name);
        let file = File::options().write(true).create(true).truncate(false).open(&path).unwrap();
        let len = file.metadata().unwrap().len();
        let reason = match turn {
            0 => file.set_len(len - 1).map(|()| "model.safetensors"),
            1 => file.write_all_at(&u64::MAX.to_le_bytes(), 0).map(|()| "model.safetensors"),
            2 => file.write_all_at(b"!", 8).map(|()| "model.safetensors"),
            3 => file.set_len(len + 1).map(|()| "model.safetensors"),
            _ => {
                drop(file);
                fs::remove_file(&path).unwrap();
                std::os::unix::fs::symlink(&path, &path).map(|()| "config")
            }
        };
        refused(&store, "bad", &[&dir], reason.unwrap());
    }
    let package = store.package("bad", 1, &other(9));
    let weights = package.join("Data/com.apple.CoreML/weights/weight.bin");
    File::options().write(true).open(&weights).unwrap().set_len(4096).unwrap();
    refused(&store, "bad", &[&package], "weight.bin");
    // Good ones beside it do not come in alone.
    let good = store.package("good", 1, &other(9));
    refused(&store, "bad", &[&good, &package], "weight.bin");
}

/// Changes a source when all of it has been looked at, and none of it has been stored.
struct Meddler<'a>(&'a (dyn Fn() + Sync));

impl Progress for Meddler<'_> {
    fn begin(&self, _: u64) {
        (self.0)();
    }
    fn advance(&self, _: u64) {}
}

#[test]
fn what_changes_while_it_is_imported_is_refused_and_leaves_the_store_as_it_was() {
    let store = Store::of_two();
    let before = store.listing();
    type Change<'a> = (&'a str, &'a (dyn Fn(&Path) + Sync));
    // As backups do, and who switches between two versions; the clock of inodes has ticked since the first one was made.
    let swap = |path: &Path| {
        thread::sleep(Duration::from_millis(50));
        let other = path.with_extension("other");
        let (mut bytes, time) = (fs::read(path).unwrap(), fs::metadata(path).unwrap().modified().unwrap());
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&other, bytes).unwrap();
        File::open(&other).unwrap().set_modified(time).unwrap();
        fs::rename(&other, path).unwrap();
    };
    let changes: [Change<'_>; 6] = [
        ("model.safetensors", &swap),
        ("config.json", &|path| fs::write(path, "{\"of\": \"another length\"}").unwrap()),
        ("config.json", &|path| File::open(path).unwrap().set_modified(SystemTime::now()).unwrap()),
        ("more.txt", &|path| fs::write(path, "").unwrap()),
        ("more", &|path| fs::create_dir(path).unwrap()),
        ("tokenizer.json", &|path| fs::rename(path, path.with_extension("old")).unwrap()),
    ];
    for (turn, (name, change)) in changes.into_iter().enumerate() {
        let dir = store.language_model(&format!("busy{turn}"), &other(9));
        let meddle = || change(&dir.join(name));
        let error = import(&store.path(), std::slice::from_ref(&dir), &Options::default(), &Meddler(&meddle))
            .unwrap_err()
            .to_string();
        assert!(error.contains(name), "{error}");
        assert_eq!(store.listing(), before, "{error}");
        store.add(&format!("quiet{turn}"), &[&dir]);
        store.run(&["rm", &format!("quiet{turn}")]);
        store.run(&["gc"]);
    }
}

#[test]
fn a_model_that_could_not_be_read_back_is_not_imported() {
    let store = Store::none();
    let weights = store.chat().join("model.safetensors");
    let odd = store.dir.path().join("a\u{7}.safetensors");
    fs::copy(&weights, &odd).unwrap();
    refuse(&mut store.import("odd", &[&odd]));
    store.add("chat", &[&weights]);
    // The same import finds the recipe in the store, read only, and trusts its name.
    let manifest = store.path().join("manifests/registry.ollama.ai/library/chat/latest");
    let layers: serde_json::Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    let layers = layers["layers"].as_array().unwrap();
    let recipe = layers.iter().find(|it| it["mediaType"] == "application/vnd.wmount.recipe").unwrap();
    let blob = store.path().join("blobs").join(recipe["digest"].as_str().unwrap().replace(':', "-"));
    let len = fs::metadata(&blob).unwrap().len();
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, vec![b' '; len as usize]).unwrap();
    fs::set_permissions(&blob, Permissions::from_mode(0o444)).unwrap();
    fs::remove_file(&manifest).unwrap();
    refused(&store, "chat", &[&weights], "is not imported");
}

#[test]
fn a_store_in_what_is_imported_is_refused() {
    let store = Store::none();
    let around = store.dir.path().to_owned();
    store.chat();
    assert!(refuse(&mut store.import("all", &[&around])).contains("is in what is to be imported"));
    assert!(!store.path().exists());
}

#[test]
fn the_store_is_imported_and_not_what_a_mount_shows_of_it() {
    let store = Store::of_two();
    let mount = store.mount();
    let other = Store::none();
    let line = refuse(other.command(&["import"]).arg(mount.path("ollama")));
    assert!(line.contains(&format!("import the store itself, {}", store.path().display())), "{line}");
    succeed(other.command(&["import"]).arg(store.path()));
    assert_eq!(other.listing(), store.listing());
}

#[test]
fn what_lies_beside_packages_is_kept() {
    let store = Store::none();
    let all = store.dir.path().join("all");
    for dir in [".git", "empty", "docs/.cache"] {
        fs::create_dir_all(all.join(dir)).unwrap();
    }
    for name in ["s1", "s2"] {
        let package = format!("{name}.mlpackage");
        fs::rename(store.package(name, name[1..].parse().unwrap(), &other(7)), all.join(package)).unwrap();
    }
    for name in [".gitattributes", "README.md", "config.json", "docs/all"] {
        fs::write(all.join(name), format!("{{\"name\": {name:?}}}")).unwrap();
    }
    fs::write(all.join("._s1.mlpackage"), b"\x00\x05\x16\x07 and more").unwrap();
    fs::create_dir(all.join("s1.mlpackage/.git")).unwrap();
    let report = store.add("all", &[&all]);
    assert_eq!(report["formats"], serde_json::json!(["s1.mlpackage", "s2.mlpackage", "all (files)"]));
    let mut skipped: Vec<String> = serde_json::from_value(report["skipped"].clone()).unwrap();
    skipped.sort();
    let expected = ["._s1.mlpackage", ".git", "docs/.cache", "s1.mlpackage/.git"];
    assert_eq!(skipped, expected.map(|name| all.join(name).to_str().unwrap().to_owned()));
    // Again, with another package: what is there stays, and what has changed is not taken for the same.
    fs::rename(store.package("s3", 3, &other(7)), all.join("s3.mlpackage")).unwrap();
    assert_eq!(store.add("all", &[&all])["added"]["tensors"], 0);
    let readme = all.join("README.md");
    let (text, time) = (fs::read(&readme).unwrap(), fs::metadata(&readme).unwrap().modified().unwrap());
    fs::write(&readme, "other words").unwrap();
    refused(&store, "all", &[&all], "\"all\", with other content, is in model all:latest already");
    fs::write(&readme, text).unwrap();
    fs::File::options().write(true).open(&readme).unwrap().set_modified(time).unwrap();
    // As it was, in the layout of what was imported, and configs and the like beside the weights made of packages.
    let back = store.dir.path().join("back");
    store.run(&["export", "original/all/latest", back.to_str().unwrap()]);
    let made = store.dir.path().join("made");
    store.run(&["export", "safetensors/all/latest", made.to_str().unwrap()]);
    for name in [".gitattributes", "README.md", "config.json", "docs/all"] {
        let written = fs::read(all.join(name)).unwrap();
        assert_eq!(
            (fs::read(back.join("all").join(name)).unwrap(), fs::read(made.join(name)).unwrap()),
            (written.clone(), written)
        );
        let time = |path: PathBuf| fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(time(back.join("all").join(name)), time(all.join(name)));
    }
    assert!(back.join("all/empty").is_dir() && made.join("model.safetensors").is_file());
    assert_eq!(fs::read_dir(back.join("all")).unwrap().count(), 5);
    store.check();
}

#[test]
fn packages_beside_another_model_are_to_be_imported_by_themselves() {
    let store = Store::of_two();
    let all = store.dir.path().join("all");
    fs::create_dir_all(all.join("sub/b.mlpackage")).unwrap();
    fs::rename(store.package("s8", 8, &other(7)), all.join("a.mlpackage")).unwrap();
    for beside in ["model.amb", "sub/model.gguf", "sub/b.mlpackage/Manifest.json"] {
        fs::write(all.join(beside), "{}").unwrap();
        let advice = format!("import them, such as {}/a.mlpackage\n", all.display());
        refused(&store, "all", &[&all], &advice);
        fs::remove_file(all.join(beside)).unwrap();
    }
    let around = store.dir.path().join("around");
    fs::create_dir_all(around.join("deep")).unwrap();
    fs::rename(&all, around.join("deep/all")).unwrap();
    refused(&store, "all", &[&around], "deep/all/a.mlpackage\n");
    store.add("all", &[&around.join("deep/all/a.mlpackage")]);
}

#[test]
fn what_cannot_be_done_is_told_with_what_can() {
    let store = Store::of_two();
    let both = store.import("both", &[&store.path(), &store.chat()]).output().unwrap();
    assert!(both.status.code() == Some(2) && words(&both).contains("is a store, which is imported by itself"));
    fs::write(store.chat().join("model.safetensors"), "").unwrap();
    refused(&store, "other", &[&store.chat()], "a download may have been cut short; fetch it again");
    let missing = store.dir.path().join("missing");
    let inside = missing.join("inside");
    let named = format!("wmount: {}: No such file or directory", missing.display());
    assert!(store.refused(&["export", "amb/llama/code.amb", inside.to_str().unwrap()]).starts_with(&named));
    let at = tempfile::tempdir().unwrap();
    let said = refuse(wmount(["--log"]).arg(&inside).arg(store.path()).arg(at.path()));
    assert!(said.starts_with(&named), "{said}");
    let home = store.dir.path().join("home");
    let said = refuse(wmount(["ls"]).env("WMOUNT_STORE", "").env("HOME", &home));
    assert!(said.contains(&format!("there is no store at {}/models", home.display())), "{said}");
}

#[test]
fn what_macos_keeps_beside_a_file_is_no_part_of_a_model() {
    let store = Store::none();
    let dir = store.chat();
    let (theirs, mine) = (dir.join("._model.safetensors"), dir.join("._mine"));
    fs::write(&theirs, b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X").unwrap();
    fs::write(&mine, "of another form").unwrap();
    assert_eq!(store.add("chat", &[&dir])["skipped"], serde_json::json!([theirs]));
    assert_eq!(store.run(&["cat", "original/chat/latest/chat/._mine"]), "of another form");
}

#[test]
fn another_empty_directory_is_other_content() {
    let store = Store::of_two();
    fs::create_dir(store.chat().join("empty")).unwrap();
    refused(&store, "llama:chat", &[&store.chat()], "other content");
}

#[test]
fn tensors_over_the_same_bytes_keep_their_own_shapes() {
    let store = Store::none();
    let dir = store.dir.path().join("two.mlmodelc");
    fs::create_dir_all(dir.join("weights")).unwrap();
    let plan = milblob::plan([(Dtype::F16, 12, 0)]).unwrap();
    let mut weights = plan.header.to_vec();
    weights.extend(milblob::metadata(&plan.blobs[0]));
    weights.extend(b"twelve bytes");
    fs::write(dir.join("weights/weight.bin"), weights).unwrap();
    let value = |name: &str, shape: &str| {
        let file = "BLOBFILE(path = string(\"@model_path/weights/weight.bin\"), offset = uint64(64))";
        format!("tensor<fp16, {shape}> {name} = const()[val = tensor<fp16, {shape}>({file})];\n")
    };
    fs::write(dir.join("model.mil"), value("a", "[6]") + &value("b", "[2, 3]") + &value("c", "[6]")).unwrap();
    store.add("two", &[&dir]);
    let shown = store.json(&["show", "two"]);
    let tensors = shown["tensors"].as_array().unwrap().iter().map(|it| (&it["name"], &it["shape"]));
    let (flat, square) = (serde_json::json!([6]), serde_json::json!([2, 3]));
    assert!(tensors.eq([(&"a".into(), &flat), (&"b".into(), &square), (&"c".into(), &flat)]), "{shown}");
    store.check();
}

/// A safetensors file of one tensor, of four bytes.
fn small_weights(path: PathBuf, tensor: &str) {
    let shape: &[u64] = &[4];
    let mut file = safetensors::file_header(&[], [(tensor, Dtype::U8, shape, 4)].into_iter());
    file.extend(path.to_str().unwrap().bytes().rev().skip(ENDING.len()).take(4));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, file).unwrap();
}

const ENDING: &str = ".safetensors";

/// The names of all tensors, its own first, of a model of these files with one tensor each and an index of some.
fn tensors_of(files: &[(&str, &str)], indexed: &[(&str, &str)]) -> Vec<String> {
    let store = Store::none();
    let dir = store.dir.path().join("model");
    files.iter().for_each(|(path, tensor)| small_weights(dir.join(format!("{path}{ENDING}")), tensor));
    fs::write(dir.join(if files[0].0.contains('/') { "model_index.json" } else { "config.json" }), "{}").unwrap();
    let map: serde_json::Map<_, _> =
        indexed.iter().map(|(path, tensor)| ((*tensor).into(), format!("{path}{ENDING}").into())).collect();
    if !map.is_empty() {
        let index = serde_json::json!({ "weight_map": map }).to_string();
        fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    }
    store.add("model", &[&dir]);
    store.check();
    for (path, _) in files {
        let shown = store.command(&["cat", &format!("original/model/latest/model/{path}{ENDING}")]).output().unwrap();
        assert!(shown.stdout == fs::read(dir.join(format!("{path}{ENDING}"))).unwrap(), "{path}");
    }
    let shown = store.json(&["show", "model"]);
    shown["tensors"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn of_two_forms_of_a_model_in_a_directory_the_one_that_loaders_take_is_its_own() {
    let both = [("model", "a"), ("model.fp16", "a"), ("other", "a")];
    assert_eq!(tensors_of(&both, &[]), ["a", "model.fp16/a", "other/a"]);
    let shards = [("model-1-of-1", "a"), ("model.fp16-1-of-1", "a"), ("model-1-of-1.int8", "a")];
    assert_eq!(tensors_of(&shards, &[]), ["a", "model-1-of-1.int8/a", "model.fp16-1-of-1/a"]);
    // Alone, or with other tensors, such a file is one as any other.
    assert_eq!(tensors_of(&[("model.fp16", "a")], &[]), ["a"]);
    assert_eq!(tensors_of(&[("model", "a"), ("model.more", "b")], &[]), ["a", "b"]);
    // What a pipeline's own directory has beside its components is not loaded with them.
    let pipeline = [("unet/x", "a"), ("unet/x.fp16", "a"), ("vae/x.fp16", "a"), ("sd", "a"), ("sd-ema", "a")];
    assert_eq!(tensors_of(&pipeline, &[]), ["unet/a", "vae/a", "sd-ema/a", "sd/a", "unet/x.fp16/a"]);
    // The index chooses where there is no whole model.
    let two = [("model-1-of-1", "a"), ("model-extra", "b"), ("model-old", "a")];
    assert_eq!(tensors_of(&two, &[("model-1-of-1", "a")]), ["a", "b", "model-old/a"]);
    let both = [("model", "a"), ("model-1-of-2", "a"), ("model-2-of-2", "b")];
    let index = [("model-1-of-2", "a"), ("model-2-of-2", "b")];
    assert_eq!(tensors_of(&both, &index), ["a", "model-1-of-2/a", "model-2-of-2/b"]);
    // An index can be that of the whole model.
    assert_eq!(tensors_of(&[("model", "a"), ("model-extra", "b")], &[("model", "a")]), ["a", "b"]);
}

#[test]
fn an_index_of_which_nothing_is_there_is_that_of_another_model() {
    assert_eq!(tensors_of(&[("model", "a")], &[("model-1-of-2", "a"), ("model-2-of-2", "b")]), ["a"]);
    assert_eq!(tensors_of(&[("model-1-of-1", "a")], &[("model-1-of-2", "a")]), ["a"]);
}

#[test]
fn what_git_did_not_fetch_is_told_as_that() {
    let store = Store::of_two();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    let weights =
        ["chat/model.safetensors", "m.gguf", "m.amb", "m.mlmodel", "s8.mlpackage/Data/com.apple.CoreML/model.mlmodel"];
    for path in weights.iter().chain([&&*package_file("s1")]).map(|path| store.dir.path().join(path)) {
        fs::write(&path, pointer).unwrap();
        let source = path.ancestors().find(|above| above.parent() == Some(store.dir.path())).unwrap().to_owned();
        refused(&store, "pointer", &[&source], &format!("{}: is what Git LFS has", path.display()));
    }
}

#[test]
fn a_name_that_is_none_is_misuse() {
    let store = Store::of_two();
    let before = store.listing();
    for name in ["", "../x", "a b", "a:b:c", "/etc", ":"] {
        let output = store.import(name, &[&store.chat()]).output().unwrap();
        assert!(output.status.code() == Some(2) && words(&output).contains("--name"), "{name:?}: {output:?}");
        assert_eq!(store.listing(), before);
    }
}

#[test]
fn a_refused_import_makes_no_store() {
    let store = Store::none();
    let empty = store.dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    refuse(&mut store.import("x", &[&empty]));
    assert!(!store.path().exists());
}

#[test]
fn originals_come_back_byte_for_byte_from_a_store_whose_sources_are_gone() {
    let store = Store::none();
    let dir = store.language_model("odd", &LanguageModel { shards: 3, ..other(3) });
    fs::create_dir(dir.join("empty")).unwrap();
    fs::write(dir.join("nothing"), "").unwrap();
    fs::write(dir.join("odd"), "a file that is called like its directory").unwrap();
    fs::write(dir.join("zeros.bin"), vec![0; 100_000]).unwrap();
    let before = common::walk(&dir);
    let digests: Vec<_> =
        before.iter().filter(|(_, it)| it.is_file()).map(|(path, _)| (path, digest_of(&dir.join(path)))).collect();
    store.add("odd", &[&dir]);
    store.check();
    let gone = store.dir.path().join("gone");
    fs::rename(&dir, &gone).unwrap();
    let back = store.dir.path().join("back");
    store.run(&["export", "original/odd/latest/odd", back.to_str().unwrap()]);
    let after = common::walk(&back);
    assert!(before.keys().eq(after.keys()), "{:?} {:?}", before.keys(), after.keys());
    for (path, digest) in digests {
        assert_eq!(digest_of(&back.join(path)), digest, "{path}");
        assert_eq!(before[path].modified().unwrap(), after[path].modified().unwrap(), "{path}");
    }
}

#[test]
fn a_model_that_is_over_its_budget_is_refused_and_leaves_nothing() {
    struct Silent;
    impl Progress for Silent {
        fn begin(&self, _: u64) {}
        fn advance(&self, _: u64) {}
    }
    let store = Store::none();
    store.add("llama:code", &[&store.code()]);
    let (weights, package) = (store.chat(), store.package("s1", 1, &other(3)));
    let before = store.listing();
    let import = |path: &PathBuf, limits: Limits| {
        let options = Options { name: Some("llama:chat".parse().unwrap()), limits, ..Options::default() };
        let done = import(&store.path(), std::slice::from_ref(path), &options, &Silent);
        done.map(|_| ()).map_err(|error| error.to_string())
    };
    let header = fs::read(weights.join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(header[..8].try_into().unwrap());
    let all = Limits::default();
    for (path, limits, what) in [
        (&weights, Limits { text: header - 1, ..all }, "model.safetensors: the model is too large"),
        (&weights, Limits { extents: 20, ..all }, "model.safetensors: the model is too large"),
        (&package, Limits { text: 100, ..all }, "model.mlmodel: the model is too large"),
        (&package, Limits { extents: 20, ..all }, "weight.bin: the model is too large"),
        // The header alone is not too long, but what is written of it.
        (&weights, Limits { text: header, ..all }, "could not be read from the store"),
    ] {
        let told = import(path, limits).unwrap_err();
        assert!(told.contains(what) && told.contains("make several models of it"), "{told}");
        assert_eq!(store.listing(), before, "{told}");
        assert!(!store.path().join(".wmount/tmp").exists(), "{told}");
    }
    assert_eq!(import(&weights, all), Ok(()));
    store.check();
}
