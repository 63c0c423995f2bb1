//! Models that claim what they do not have: an error where that is touched, in a mount that goes on.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::{Mounted, Store, walk};
use serde_json::{Value, json};
use wmount::digest::Digest;

const TENSOR: &str = "application/vnd.ollama.image.tensor";
const JSON: &str = "application/vnd.ollama.image.json";
const RECIPE: &str = "application/vnd.wmount.recipe";

/// Puts a blob into a store; its layer.
fn put(store: &Path, media_type: &str, name: &str, bytes: &[u8]) -> Value {
    fs::create_dir_all(store.join("blobs")).unwrap();
    let digest = Digest::of(bytes);
    fs::write(store.join("blobs").join(digest.file_name()), bytes).unwrap();
    json!({"mediaType": media_type, "digest": digest.to_string(), "size": bytes.len(), "name": name})
}

/// A store of `evil`, which has these layers, and of a model that is whole.
fn store_of(layers: impl FnOnce(&Path) -> Vec<Value>) -> Store {
    let store = Store::none();
    store.add("good", &[&store.code()]);
    let path = store.path();
    let manifest = json!({"schemaVersion": 2, "config": put(&path, "", "", b"{}"), "layers": layers(&path)});
    let at = path.join("manifests/registry.ollama.ai/library/evil/latest");
    fs::create_dir_all(at.parent().unwrap()).unwrap();
    fs::write(at, manifest.to_string()).unwrap();
    store
}

fn recipe(store: &Path, kind: &str, name: &str, files: Value) -> Value {
    let recipe = json!({"version": 1, "kind": kind, "blobs": [], "dirs": [], "files": files});
    put(store, RECIPE, name, recipe.to_string().as_bytes())
}

fn is_eio<T>(outcome: io::Result<T>) -> bool {
    outcome.is_err_and(|error| error.raw_os_error() == Some(libc::EIO))
}

fn check_good(mounted: &Mounted) {
    assert_eq!(mounted.read("amb/good/latest.amb").unwrap()[..5], *b"AMBEE");
}

#[test]
fn a_tensor_of_an_exabyte_takes_no_memory_to_survey() {
    let store = store_of(|store| {
        let mut layer = put(store, TENSOR, "w", b"short");
        layer["size"] = json!(1u64 << 58);
        layer["dtype"] = json!("F32");
        layer["shape"] = json!([1u64 << 24, 1u64 << 31, 2]);
        vec![layer]
    });
    let mounted = store.mount();
    for path in ["amb/evil/latest@adaptive-32.amb", "amb/evil/latest@int8.amb", "gds_export/evil/latest@fp8/w.fp8"] {
        let file = File::open(mounted.path(path)).unwrap();
        assert!(is_eio(file.read_at(&mut [0; 100], file.metadata().unwrap().len() / 2)), "{path}");
    }
    check_good(&mounted);
    let refusal = store.refused(&["prepare", "evil@int8"]);
    assert!(refusal.contains("it is shorter than its manifest says"), "{refusal}");
}

#[test]
fn a_small_file_that_is_put_together_of_zeros_is_not_held_in_memory() {
    let package = store_of(|store| {
        vec![recipe(
            store,
            "mlpackage",
            "a.mlpackage",
            json!([{"path": "Manifest.json", "mtime": [0, 0], "extents": [1u64 << 58]}]),
        )]
    });
    let mounted = package.mount();
    let shown = fs::metadata(mounted.path("coreml/evil/latest/a.mlpackage/Manifest.json")).unwrap();
    assert_eq!(shown.len(), 1 << 58);
    check_good(&mounted);
    let tokenizer = u32::MAX;
    let header = [b"AMBEE\x01\0\0\0\0\0\0\0\0\0\0".as_slice(), &tokenizer.to_le_bytes(), &[0; 8]].concat();
    let hex: String = header.iter().map(|byte| format!("{byte:02x}")).collect();
    let amb = store_of(|store| {
        let content = json!([{"path": "m.amb", "mtime": [0, 0], "extents": [hex, tokenizer]}]);
        let mut tensor = put(store, TENSOR, "w", &[0; 64]);
        tensor["dtype"] = json!("F32");
        tensor["shape"] = json!([4, 4]);
        vec![recipe(store, "amb", "m.amb", content), tensor]
    });
    let mounted = amb.mount();
    assert_eq!(fs::metadata(mounted.path("amb/evil/latest.amb")).unwrap().len(), 28 + u64::from(tokenizer));
    assert!(is_eio(mounted.read("amb/evil/latest@f16.amb")));
    check_good(&mounted);
}

#[test]
fn paths_of_thousands_of_names_are_refused() {
    let deep = vec!["a"; 2000].join("/");
    let file = store_of(|store| vec![put(store, JSON, &deep, b"{}"), put(store, JSON, "config.json", b"{}")]);
    let mounted = file.mount();
    assert_eq!(mounted.read("safetensors/evil/latest/config.json").unwrap_or_default(), b"");
    walk(&mounted.at);
    check_good(&mounted);
    let files = json!([{"path": deep, "mtime": [0, 0], "extents": ["00"]}]);
    let source = store_of(|store| vec![recipe(store, "safetensors", "s", files)]);
    let mounted = source.mount();
    assert!(is_eio(fs::read_dir(mounted.path("original/evil/latest"))));
    check_good(&mounted);
    // Nothing is imported that could not be shown.
    let dir = source.dir.path().join("deep");
    fs::create_dir_all(dir.join(&deep[..300])).unwrap();
    fs::copy(source.code().join("model.safetensors"), dir.join("model.safetensors")).unwrap();
    assert!(source.refused(&["import", dir.to_str().unwrap(), "-n", "deep"]).contains("it has more than 100 names"));
}

#[test]
fn many_directories_are_refused() {
    let path = |number: usize| format!("{}/{number}", vec![number.to_string(); 98].join("/"));
    let files: Vec<Value> = (0..700).map(|it| json!({"path": path(it), "mtime": [0, 0], "extents": []})).collect();
    let source = store_of(|store| vec![recipe(store, "safetensors", "s", json!(files))]);
    assert!(source.refused(&["show", "evil"]).contains("more than 65536 directories"));
    let layers = |store: &Path| (0..700).map(|it| put(store, JSON, &path(it), b"{}")).collect();
    let file = store_of(layers);
    let mounted = file.mount();
    assert!(is_eio(fs::read_dir(mounted.path("original/evil/latest"))));
    check_good(&mounted);
}

#[test]
fn a_map_that_thousands_of_files_name_takes_the_memory_of_one_or_the_model_is_refused() {
    let store = |uses: usize| {
        store_of(|store| {
            let extents = "\"00\",70,".repeat(100_000);
            let map = format!(r#"{{"version":1,"blobs":[],"extents":[{extents}"00"]}}"#);
            let layer = put(store, "application/vnd.wmount.fragment", "", map.as_bytes());
            let digest = layer["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
            let file = |at: usize| json!({"path": format!("{at}.bin"), "mtime": [0, 0], "map": [digest, map.len()]});
            let sources =
                (0..4).map(|at| recipe(store, "safetensors", &format!("s{at}"), (0..uses).map(file).collect()));
            sources.chain([layer.clone()]).collect()
        })
    };
    let few = store(10);
    let mounted = few.mount();
    assert_eq!(fs::metadata(mounted.path("original/evil/latest/s3/9.bin")).unwrap().len(), 7_100_001);
    check_good(&mounted);
    drop(mounted);
    // Forty of them are eight million extents, and some.
    let many = store(11);
    assert!(many.refused(&["show", "evil"]).contains("evil/latest: the model is too large"));
    let mounted = many.mount();
    assert!(is_eio(fs::read_dir(mounted.path("original/evil/latest"))));
    check_good(&mounted);
}

#[test]
fn headers_of_thousands_of_blobs_are_not_all_read() {
    let header = "x".repeat(90 << 20);
    let blob = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    let store = store_of(|store| {
        let first = put(store, TENSOR, "", &blob);
        let name = |digest: &str| store.join("blobs").join(digest.replace(':', "-"));
        let other = |number: u8| {
            let mut layer = first.clone();
            layer["digest"] = json!(Digest::of(&[number]).to_string());
            let (from, to) = (name(first["digest"].as_str().unwrap()), name(layer["digest"].as_str().unwrap()));
            fs::hard_link(from, to).unwrap();
            layer
        };
        (0..20).map(other).collect()
    });
    assert!(store.refused(&["show", "evil"]).contains("headers have more than"));
    check_good(&store.mount());
}

#[test]
fn a_digest_that_two_models_claim_makes_nobody_wait_for_other_blobs() {
    const LEN: u64 = 1 << 41;
    let store = store_of(|_| Vec::new());
    let path = store.path();
    let claimed = Digest::of(b"claimed");
    for model in ["one", "two"] {
        let header = json!({"data": {"dtype": "F32", "shape": [LEN / 4], "data_offsets": [0, LEN]}}).to_string();
        let head = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        let digest = Digest::of(model.as_bytes());
        let blob = File::create(path.join("blobs").join(digest.file_name())).unwrap();
        blob.write_all_at(&head, 0).unwrap();
        blob.set_len(head.len() as u64 + LEN).unwrap();
        let tensor = json!({"mediaType": TENSOR, "digest": digest.to_string(), "size": head.len() as u64 + LEN,
            "name": "w", "dtype": "F32", "shape": [LEN / 4], "named": claimed.to_string()});
        let config = put(&path, JSON, "config.json", br#"{"model_type":"llama"}"#);
        let manifest = json!({"schemaVersion": 2, "config": put(&path, "", "", b"{}"), "layers": [tensor, config]});
        let at = path.join(format!("manifests/registry.ollama.ai/library/{model}/latest"));
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        fs::write(at, manifest.to_string()).unwrap();
    }
    let mounted = store.mount();
    assert_eq!(mounted.read(&format!("ollama/blobs/{}", Digest::of(b"{}").file_name())).unwrap(), b"{}");
    let names: Vec<_> = fs::read_dir(mounted.path("ollama/blobs")).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert!(names.contains(&claimed.file_name().into()));
    // Nobody is to read terabytes to find out that neither is right.
    assert!(is_eio(File::open(mounted.path(&format!("ollama/blobs/{}", claimed.file_name())))));
    check_good(&mounted);
}

#[test]
fn configs_of_many_components_are_not_all_read() {
    let store = store_of(|store| {
        let tensor = |name: &str| {
            let mut layer = put(store, TENSOR, name, &[0; 64]);
            (layer["dtype"], layer["shape"]) = (json!("F32"), json!([4, 4]));
            layer
        };
        let mut large = put(store, JSON, "b/config.json", b"large");
        let digest = large["digest"].as_str().unwrap().replace(':', "-");
        File::options().write(true).open(store.join("blobs").join(digest)).unwrap().set_len(128 << 20).unwrap();
        large["size"] = json!(128 << 20);
        vec![tensor("a/w"), tensor("b/w"), put(store, JSON, "a/config.json", b"{}"), large]
    });
    let mounted = store.mount();
    assert!(is_eio(fs::read_dir(mounted.path("safetensors/evil/latest"))));
    check_good(&mounted);
}

#[test]
fn a_manifest_of_a_package_that_is_mostly_blank_is_not_read() {
    let store = store_of(|store| {
        let files = json!([{"path": "Manifest.json", "mtime": [0, 0], "extents": ["20", 2 << 20, "7b7d"]}]);
        vec![recipe(store, "mlpackage", "a.mlpackage", files)]
    });
    let mounted = store.mount();
    let shown = fs::metadata(mounted.path("coreml/evil/latest/a.mlpackage/Manifest.json")).unwrap();
    assert_eq!(shown.len(), (2 << 20) + 3);
    check_good(&mounted);
}

#[test]
fn one_large_config_under_many_names_is_looked_at_once_and_many_are_not() {
    let store = store_of(|store| {
        let config = put(store, JSON, "", format!("{{{}\"a\":1}}", " ".repeat(1 << 20)).as_bytes());
        let named = |name: String| {
            let mut layer = config.clone();
            layer["name"] = json!(name);
            layer
        };
        let large = |number: u8| {
            let mut layer = put(store, JSON, &format!("z{number}/config.json"), &[number]);
            layer["size"] = json!((128 << 20) + 1);
            layer
        };
        (0..300).map(|at| named(format!("{at:03}/config.json"))).chain((0..8).map(large)).collect()
    });
    let shown = store.json(&["show", "evil"]);
    let files = shown["files"].as_array().unwrap();
    let told =
        |what: &str| files.iter().filter(|file| file["fault"].as_str().is_some_and(|it| it.contains(what))).count();
    assert_eq!(files.iter().filter(|file| file["fault"].is_null()).count(), 300);
    assert_eq!(
        (told("more than 134217728"), told("it and what comes before it have more than 536870912 bytes")),
        (3, 5)
    );
}

#[test]
fn a_tensor_of_very_many_rows_is_not_encoded() {
    let (rows, row) = ((1u64 << 24) + 1, 128u64);
    let store = store_of(|store| {
        let mut layer = put(store, TENSOR, "w", b"sparse");
        let digest = layer["digest"].as_str().unwrap().replace(':', "-");
        let blob = File::options().write(true).open(store.join("blobs").join(digest)).unwrap();
        blob.set_len(rows * row * 2).unwrap();
        layer["size"] = json!(rows * row * 2);
        (layer["dtype"], layer["shape"]) = (json!("F16"), json!([rows, row]));
        vec![layer]
    });
    let mounted = store.mount();
    let dir = "gds_export/evil/latest@fp8";
    assert_eq!(fs::metadata(mounted.path(&format!("{dir}/w.bin"))).unwrap().len(), rows * row * 2);
    assert!(fs::metadata(mounted.path(&format!("{dir}/w.fp8"))).is_err());
    check_good(&mounted);
}
