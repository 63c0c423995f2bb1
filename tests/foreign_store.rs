//! Stores that wmount did not write: ollama's own, as it makes them today.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;

use common::{Store, eventually, refuse, walk};
use serde_json::{Value, json};
use wmount::digest::Digest;

const TENSOR: &str = "application/vnd.ollama.image.tensor";
const JSON: &str = "application/vnd.ollama.image.json";
const CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const CONFIG_JSON: &[u8] = br#"{"model_type": "llama", "hidden_size": 2}"#;

/// A safetensors file of these tensors: name, dtype, shape, bytes.
fn safetensors(tensors: &[(&str, &str, &[u64], &[u8])]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert((*name).into(), entry);
    }
    let header = Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    file
}

/// Puts a blob into a store; its layer, which has nothing but what ollama writes.
fn put(store: &Path, media_type: &str, name: &str, bytes: &[u8]) -> Value {
    let digest = Digest::of(bytes);
    fs::write(store.join("blobs").join(digest.file_name()), bytes).unwrap();
    let mut layer = json!({"mediaType": media_type, "digest": digest.to_string(), "size": bytes.len()});
    if !name.is_empty() {
        layer["name"] = json!(name);
    }
    layer
}

fn write_manifest(store: &Path, path: &str, config: Value, layers: &[Value]) {
    let path = store.join("manifests").join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let media_type = "application/vnd.docker.distribution.manifest.v2+json";
    let manifest = json!({"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": layers});
    fs::write(path, manifest.to_string()).unwrap();
}

/// A store as ollama leaves it: named blobs, one of them of two tensors; a GGUF model; a download that was cut short.
fn ollamas() -> Store {
    let store = Store::none();
    let path = store.path();
    fs::create_dir_all(path.join("blobs")).unwrap();
    let config = put(&path, CONFIG, "", br#"{"model_format":"safetensors"}"#);
    let layers = [
        put(&path, TENSOR, "a.weight", &safetensors(&[("a.weight", "F32", &[2], &[1; 8])])),
        put(&path, TENSOR, "b", &safetensors(&[("b.q", "U8", &[3], b"abc"), ("b.scale", "BF16", &[1], b"xy")])),
        put(&path, JSON, "config.json", CONFIG_JSON),
        put(&path, "application/vnd.ollama.image.license", "", b"free"),
    ];
    write_manifest(&path, "registry.ollama.ai/library/tiny/latest", config.clone(), &layers);
    let gguf = put(&path, "application/vnd.ollama.image.model", "", b"GGUF....");
    write_manifest(&path, "registry.ollama.ai/library/old/7b", config, &[gguf]);
    fs::write(path.join("blobs/sha256-partial-0"), "...").unwrap();
    fs::write(path.join("manifests/.DS_Store"), "...").unwrap();
    store
}

#[test]
fn a_store_of_ollama_is_mounted_with_its_tensors_as_one_safetensors_file() {
    let store = ollamas();
    let before = store.listing();
    let mounted = store.mount();
    let file = mounted.read("safetensors/tiny/latest/model.safetensors").unwrap();
    let data = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..data]).unwrap();
    let tensor = |name: &str| {
        let range: Vec<usize> = serde_json::from_value(header[name]["data_offsets"].clone()).unwrap();
        (header[name]["dtype"].as_str().unwrap(), &file[data + range[0]..data + range[1]])
    };
    assert_eq!(tensor("a.weight"), ("F32", &[1; 8][..]));
    assert_eq!(tensor("b.q"), ("U8", &b"abc"[..]));
    assert_eq!(tensor("b.scale"), ("BF16", &b"xy"[..]));
    assert_eq!(mounted.read("safetensors/tiny/latest/config.json").unwrap(), CONFIG_JSON);
    assert_eq!(mounted.status()["problems"], json!([]));
    // Looking changed nothing, not even below our own directory.
    drop(mounted);
    assert_eq!(store.listing(), before);
    assert!(!walk(&store.path()).contains_key(".wmount"));
}

#[test]
fn what_a_layout_cannot_show_is_told_with_its_reason() {
    let store = ollamas();
    let shown = store.json(&["show", "old:7b"]);
    for (layout, told) in shown["layouts"].as_object().unwrap() {
        if ["ollama", "gguf", "lmstudio"].contains(&layout.as_str()) {
            assert!(told["shown"] == true, "{layout}: {told}");
            continue;
        }
        assert!(told["shown"] == false && told["reason"].as_str().unwrap().len() > 5, "{layout}: {told}");
    }
    let shown = store.json(&["show", "tiny"]);
    assert!(shown["layouts"]["amb"]["reason"].as_str().unwrap().contains("U8"), "{shown}");
    assert_eq!(shown["layouts"]["safetensors"]["shown"], true);
    assert_eq!(store.json(&["ls"]).as_array().unwrap().len(), 2);
    assert_eq!(store.json(&["verify"])["damaged"], json!([]));
}

#[test]
fn gguf_files_stand_where_llama_cpp_and_lm_studio_look_for_them() {
    let store = ollamas();
    let path = store.path();
    let config = put(&path, CONFIG, "", b"{}");
    let image = |kind: &str, bytes: &[u8]| put(&path, &format!("application/vnd.ollama.image.{kind}"), "", bytes);
    let (one, two) = (image("adapter", b"GGUF adapter 1"), image("adapter", b"GGUF adapter 2"));
    let layers = [image("model", b"GGUF model"), image("projector", b"GGUF projector"), one, two];
    write_manifest(&path, "hf.co/me/see-GGUF/Q4", config.clone(), &layers);
    write_manifest(&path, "registry.ollama.ai/library/old/13b", config.clone(), &layers[..2]);
    write_manifest(&path, "registry.ollama.ai/library/ancient/1", config.clone(), &[image("model", b"ggla....")]);
    let gone = image("model", b"GGUF gone");
    fs::remove_file(path.join("blobs").join(Digest::of(b"GGUF gone").file_name())).unwrap();
    write_manifest(&path, "registry.ollama.ai/library/gone/1", config, &[gone]);
    let mounted = store.mount();
    let files: Vec<String> = common::facts_of_mount(&mounted.at)
        .into_keys()
        .filter(|path| path.starts_with("gguf/") || path.starts_with("lmstudio/"))
        .filter(|path| path.ends_with(".gguf"))
        .collect();
    let expected = [
        "gguf/gone/1.gguf",
        "gguf/hf.co/me/see-GGUF/Q4.gguf",
        "gguf/hf.co/me/see-GGUF/adapter-Q4-2.gguf",
        "gguf/hf.co/me/see-GGUF/adapter-Q4.gguf",
        "gguf/hf.co/me/see-GGUF/mmproj-Q4.gguf",
        "gguf/old/13b.gguf",
        "gguf/old/7b.gguf",
        "gguf/old/mmproj-13b.gguf",
        "lmstudio/library/gone-1/gone-1.gguf",
        "lmstudio/library/old-13b/mmproj-old-13b.gguf",
        "lmstudio/library/old-13b/old-13b.gguf",
        "lmstudio/library/old-7b/old-7b.gguf",
        "lmstudio/me/see-GGUF-Q4/mmproj-see-GGUF-Q4.gguf",
        "lmstudio/me/see-GGUF-Q4/see-GGUF-Q4.gguf",
    ];
    assert_eq!(files, expected);
    assert_eq!(mounted.read("gguf/hf.co/me/see-GGUF/adapter-Q4-2.gguf").unwrap(), b"GGUF adapter 2");
    assert_eq!(mounted.read("lmstudio/library/old-13b/mmproj-old-13b.gguf").unwrap(), b"GGUF projector");
    assert_eq!(mounted.read("gguf/gone/1.gguf").unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_eq!(mounted.read("gguf/old/mmproj-7b.gguf").unwrap_err().raw_os_error(), Some(libc::ENOENT));
    let told = &store.json(&["show", "ancient:1"])["layouts"]["gguf"];
    assert!(told["reason"].as_str().unwrap().contains("ggla"), "{told}");
}

#[test]
fn gc_beside_a_pull_of_ollama_keeps_the_layers_that_are_there_already() {
    use std::fs::{File, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, SystemTime};

    let store = Store::of_two();
    let layer = |content: &[u8], mode, age| {
        let path = store.path().join("blobs").join(Digest::of(content).file_name());
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        File::open(&path).unwrap().set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        path
    };
    let pulled = layer(b"of a model that is yet to come", 0o644, 60);
    let (old, ours) = (layer(b"of one that never came", 0o644, 3700), layer(b"written by wmount", 0o444, 0));
    let report = store.json(&["gc"]);
    assert_eq!((&report["removed"], &report["young"]), (&2.into(), &1.into()));
    assert!(pulled.exists() && !old.exists() && !ours.exists());
    assert!(store.run(&["gc"]).contains("kept 1 blob that ollama wrote"));
    store.check();
}

#[test]
fn importing_into_a_store_of_ollama_and_gc_leave_what_is_its_own() {
    let store = ollamas();
    let before = store.listing();
    store.add("llama", &[&store.chat()]);
    store.run(&["gc"]);
    let after = store.listing();
    assert!(before.iter().all(|(path, digest)| after.get(path) == Some(digest)));
    store.run(&["rm", "llama"]);
    store.run(&["gc"]);
    assert_eq!(store.listing(), before);
}

#[test]
fn a_model_that_gives_a_blob_two_lengths_is_never_copied() {
    let store = Store::none();
    let path = store.path();
    fs::create_dir_all(path.join("blobs")).unwrap();
    let config = put(&path, CONFIG, "", b"{}");
    let layers: Vec<Value> = (0..20)
        .flat_map(|number: u32| {
            let layer = put(&path, JSON, "a.json", number.to_string().as_bytes());
            let mut longer = layer.clone();
            longer["size"] = json!(layer["size"].as_u64().unwrap() + 1);
            [longer, layer]
        })
        .collect();
    write_manifest(&path, "registry.ollama.ai/library/two/latest", config, &layers);
    let other = Store::none();
    let line = refuse(other.command(&["import"]).arg(&path));
    assert!(line.contains("its manifest says"), "{line}");
    assert!(other.listing().is_empty());
}

#[test]
fn a_copied_store_tells_of_what_may_be_models_and_cannot_be_looked_at() {
    let store = ollamas();
    let library = store.path().join("manifests/registry.ollama.ai/library");
    std::os::unix::fs::symlink("/nowhere/disk", library.join("away")).unwrap();
    let other = Store::none();
    let output = other.command(&["import", "--json"]).arg(store.path()).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(!report["models"].as_array().unwrap().is_empty());
    let failed = report["failed"].as_array().unwrap();
    assert!(failed.len() == 1 && failed[0].as_str().unwrap().contains("library/away"), "{report}");
}

#[test]
fn a_lying_header_hurts_its_model_alone() {
    let store = ollamas();
    let path = store.path();
    let config = put(&path, CONFIG, "", b"{}");
    let mut lie = safetensors(&[("x", "F32", &[2], &[0; 8])]);
    lie.truncate(lie.len() - 1);
    let lies = [lie, u64::MAX.to_le_bytes().to_vec(), Vec::new(), b"\x02\0\0\0\0\0\0\0[]".to_vec()];
    for (number, lie) in lies.iter().enumerate() {
        let layer = put(&path, TENSOR, "x", lie);
        write_manifest(&path, &format!("registry.ollama.ai/library/lie/{number}"), config.clone(), &[layer]);
    }
    let mounted = store.mount();
    assert!(mounted.read("safetensors/tiny/latest/model.safetensors").is_ok());
    for number in 0..lies.len() {
        let error = mounted.read(&format!("safetensors/lie/{number}/model.safetensors")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{number}");
        let shown = store.json(&["show", &format!("lie:{number}")]);
        assert!(shown["damaged"][0].as_str().is_some_and(|what| what.len() > 5), "{shown}");
    }
}

#[test]
fn a_model_whose_damage_is_mended_is_shown_again() {
    let store = ollamas();
    let path = store.path();
    fs::create_dir_all(path.join(".wmount")).unwrap();
    let whole = safetensors(&[("x", "F32", &[2], &[0; 8])]);
    let config = put(&path, CONFIG, "", b"{}");
    let layer = put(&path, TENSOR, "x", &whole);
    write_manifest(&path, "registry.ollama.ai/library/mended/latest", config, &[layer]);
    let blob = path.join("blobs").join(Digest::of(&whole).file_name());
    fs::remove_file(&blob).unwrap();
    let before: Vec<String> = common::facts_of_vfs(&store.vfs()).into_keys().collect();
    assert!(!before.iter().any(|path| path == "amb/mended/latest.amb"), "{before:?}");
    fs::write(&blob, &whole).unwrap();
    // A mount of its own remembers nothing of the other but what is in the store.
    let after: Vec<String> = common::facts_of_vfs(&store.vfs()).into_keys().collect();
    assert!(after.iter().any(|path| path == "amb/mended/latest.amb"), "{after:?}");
}

#[test]
fn a_blob_that_was_away_is_read_again_when_it_is_back() {
    let store = ollamas();
    let blob = safetensors(&[("a.weight", "F32", &[2], &[1; 8])]);
    let (blob, aside) =
        (store.path().join("blobs").join(Digest::of(&blob).file_name()), store.dir.path().join("aside"));
    fs::rename(&blob, &aside).unwrap();
    let mounted = store.mount();
    let file = "safetensors/tiny/latest/model.safetensors";
    assert_eq!(mounted.read(file).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_ne!(mounted.status()["problems"], json!([]));
    fs::rename(&aside, &blob).unwrap();
    eventually("the file is whole", || mounted.read(file).is_ok());
    eventually("mended damage is no problem", || mounted.status()["problems"] == json!([]));
    assert_eq!(mounted.read("gds_export/tiny/latest/a__weight.bin").unwrap(), [1; 8]);
}

#[test]
fn the_files_beside_a_model_that_cannot_be_read_are_there() {
    let store = ollamas();
    let path = store.path();
    let config = put(&path, CONFIG, "", b"{}");
    for (tag, projector) in [("a", b"GGUF-one"), ("b", b"GGUF-two")] {
        let layers = [
            put(&path, "application/vnd.ollama.image.model", "", b"GGUF...."),
            put(&path, "application/vnd.ollama.image.projector", "", projector),
        ];
        write_manifest(&path, &format!("registry.ollama.ai/library/vision/{tag}"), config.clone(), &layers);
    }
    let vfs = store.vfs();
    vfs.tree().look();
    fs::remove_file(path.join("manifests/registry.ollama.ai/library/vision/a")).unwrap();
    assert_eq!(vfs.resolve("gguf/vision/mmproj-b.gguf").unwrap().size, 8);
    assert!(vfs.resolve("gguf/vision/mmproj-a.gguf").is_err());
}

#[test]
fn a_blob_of_thousands_of_quantised_tensors_is_planned_at_once() {
    const COUNT: usize = 6000;
    let names: Vec<(String, String)> =
        (0..COUNT).map(|it| (format!("l.{it}.weight"), format!("l.{it}.weight.scale"))).collect();
    let tensors: Vec<(&str, &str, &[u64], &[u8])> = names
        .iter()
        .flat_map(|(weight, scale)| {
            [(weight.as_str(), "U32", &[1u64, 8][..], &[0u8; 32][..]), (scale.as_str(), "BF16", &[1, 1], &[0; 2])]
        })
        .collect();
    let store = ollamas();
    let path = store.path();
    let layers = [put(&path, TENSOR, "all", &safetensors(&tensors)), put(&path, JSON, "config.json", CONFIG_JSON)];
    write_manifest(&path, "registry.ollama.ai/library/packed/latest", put(&path, CONFIG, "", b"{}"), &layers);
    let vfs = store.vfs();
    let read = |path: &str| {
        let attr = vfs.resolve(path).unwrap();
        let mut bytes = vec![0; attr.size as usize];
        vfs.read(attr.ino, 0, &mut bytes).unwrap();
        bytes
    };
    let config: Value = serde_json::from_slice(&read("safetensors/packed/latest/config.json")).unwrap();
    assert_eq!(config["quantization"], json!({"group_size": 32, "bits": 8, "mode": "mxfp8"}));
    let file = read("safetensors/packed/latest/model.safetensors");
    assert!(file.windows(12).any(|name| name == b"l.5999.scale"));
}
