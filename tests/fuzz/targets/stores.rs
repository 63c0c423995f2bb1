//! Whole imports, and stores whose manifests and blobs say anything.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;
use wmount::error::{Error, Result};
use wmount::format::amb::Variant;
use wmount::format::gguf;
use wmount::store::Store;
use wmount::store::import::{self, ImportReport, Options, Progress};
use wmount::vfs::{Attr, Kind, ROOT, Vfs};

use super::parts;

struct Silent;

impl Progress for Silent {
    fn begin(&self, _: u64) {}
    fn advance(&self, _: u64) {}
}

pub fn import_into(store: &Path, path: &Path, name: &str) -> Result<ImportReport> {
    let options = Options { name: Some(name.parse()?), blob_threshold: Some(16), ..Options::default() };
    import::import(store, &[path.to_owned()], &options, &Silent)
}

/// The tree of a store, with every variant listed.
pub fn open(store: &Path) -> Result<Vfs> {
    let variants: Vec<String> =
        Variant::ALL.iter().map(|(name, _)| *name).chain(["raw", "fp8"]).map(String::from).collect();
    Vfs::listing(Arc::new(Store::open(store)?), &variants)
}

/// The first byte of an input that is the two parts of a GGUF file; those that stand for nothing else count modulo nine.
const SPLIT: u8 = 255;

/// That of one that is a package with a config beside it.
const BESIDE: u8 = 254;

/// The part that is named to an import; it says itself whether it is one of several.
const PART: &str = "m-00001-of-00002.gguf";

/// What the first byte of an input makes of the rest: the files of a source, all below one name.
fn source(kind: u8, rest: &[u8]) -> (&'static str, Vec<(&'static str, &[u8])>) {
    const MODEL: &str = "Data/com.apple.CoreML/model.mlmodel";
    const WEIGHTS: &str = "Data/com.apple.CoreML/weights/weight.bin";
    const PACKED_MODEL: &str = "m.mlpackage/Data/com.apple.CoreML/model.mlmodel";
    const PACKED_WEIGHTS: &str = "m.mlpackage/Data/com.apple.CoreML/weights/weight.bin";
    let [a, b] = parts(rest);
    if kind == SPLIT {
        let is_whole = gguf::parse(a).is_ok_and(|header| header.parts < 2);
        let both = vec![(PART, a), ("m-00002-of-00002.gguf", b)];
        return if is_whole { (PART, vec![("", a)]) } else { ("m", both) };
    }
    if kind == BESIDE {
        let [manifest, model, weights, config] = parts(rest);
        let package = [("m.mlpackage/Manifest.json", manifest), (PACKED_MODEL, model), (PACKED_WEIGHTS, weights)];
        return ("set", package.into_iter().chain([("config.json", config)]).collect());
    }
    match kind % 9 {
        0 => ("model.safetensors", vec![("", rest)]),
        1 => ("m.mlmodel", vec![("", rest)]),
        2 => ("m.amb", vec![("", rest)]),
        8 => ("m.gguf", vec![("", rest)]),
        3 => {
            let [manifest, model, weights] = parts(rest);
            ("m.mlpackage", vec![("Manifest.json", manifest), (MODEL, model), (WEIGHTS, weights)])
        }
        4 => ("m.mlmodelc", vec![("model.mil", a), ("coremldata.bin", b""), ("weights/weight.bin", b)]),
        5 => ("export", vec![("manifest.json", a), ("w.bin", b)]),
        6 => {
            let [index, config, shard] = parts(rest);
            let index = ("model.safetensors.index.json", index);
            ("shards", vec![index, ("config.json", config), ("model-00001-of-00001.safetensors", shard)])
        }
        _ => {
            let [config, tokenizer, weights] = parts(rest);
            let files = [("config.json", config), ("tokenizer.json", tokenizer), ("model.safetensors", weights)];
            ("directory", files.into())
        }
    }
}

/// The import of one source: it comes back byte for byte and can be walked, or nothing is left of it.
pub fn import(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else { return };
    let (name, files) = source(*kind, rest);
    let dir = TempDir::with_prefix("wmount-fuzz-").unwrap();
    let (path, root) = (dir.path().join(name), dir.path().join("store"));
    for (file, bytes) in &files {
        let place = if file.is_empty() { path.clone() } else { path.join(file) };
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, bytes).unwrap();
    }
    let path = if files[0].0 == PART { path.join(PART) } else { path };
    let imported = import_into(&root, &path, "model");
    let own = root.join(".wmount/tmp");
    assert!(!own.exists() || fs::read_dir(own).unwrap().next().is_none(), "unfinished files are left");
    if let Err(error) = imported {
        let text = error.to_string().replace(dir.path().to_str().unwrap(), "");
        super::check_line(&text);
        assert!(text.contains(name), "the error does not name the file: {text}");
        assert!(!root.join("blobs").exists() || fs::read_dir(root.join("blobs")).unwrap().next().is_none());
        assert!(!root.join("manifests").exists() || fs::read_dir(root.join("manifests")).unwrap().next().is_none());
        return;
    }
    let vfs = open(&root).unwrap();
    for (file, bytes) in &files {
        let inside = match file.split_once('/') {
            _ if file.is_empty() => name.to_owned(),
            // A package in a directory is a source by itself.
            Some((package, _)) if package.ends_with(".mlpackage") => (*file).to_owned(),
            _ => format!("{name}/{file}"),
        };
        let attr = vfs.resolve(&format!("original/model/latest/{inside}")).unwrap();
        let mut shown = vec![1; bytes.len() + 1];
        assert_eq!((attr.size, vfs.read(attr.ino, 0, &mut shown).unwrap()), (bytes.len() as u64, bytes.len()));
        assert!(shown[..bytes.len()] == **bytes, "{inside} is another file now");
    }
    // What wmount has stored, every layout can read.
    walk(&vfs, true);
    let again = import_into(&root, &path, "model").unwrap();
    assert_eq!(again.added.bytes, 0, "the same import adds something");
    let store = Store::open(&root).unwrap();
    let found = store.find().unwrap();
    assert!(found.iter().all(|found| store.load(found).unwrap().defects.is_empty()));
    let damaged = store.verify(&found, &|_| ()).unwrap().damaged;
    assert!(damaged.is_empty(), "verify finds damage in what was imported: {damaged:?}");
}

/// A store with one manifest and some blobs, as another program may have left it.
pub fn store(input: &[u8]) {
    let all: [&[u8]; 7] = parts(input);
    let dir = TempDir::with_prefix("wmount-fuzz-").unwrap();
    let manifest = dir.path().join("manifests/registry.ollama.ai/library/model/latest");
    fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    fs::create_dir(dir.path().join("blobs")).unwrap();
    fs::write(&manifest, all[0]).unwrap();
    for (blob, name) in all[1..].iter().zip(["a", "b", "c", "d", "e", "f"]) {
        if !blob.is_empty() {
            fs::write(dir.path().join(format!("blobs/sha256-{}", name.repeat(64))), blob).unwrap();
        }
    }
    let vfs = open(dir.path()).unwrap();
    walk(&vfs, false);
    for found in vfs.store().find().unwrap() {
        if let Err(error) = vfs.store().load(&found) {
            super::check_line(&error.to_string().replace(dir.path().to_str().unwrap(), ""));
        }
    }
    assert!(!dir.path().join(".wmount").exists(), "something was written into another program's store");
}

/// Looks at everything in a tree.
pub fn walk(vfs: &Vfs, is_whole: bool) {
    let mut left = 2000;
    let mut dirs = vec![(String::new(), ROOT)];
    while let Some((path, ino)) = dirs.pop() {
        let entries = match vfs.entries(ino) {
            Ok(entries) => entries,
            Err(error) => {
                assert!(!is_whole, "{path}: {error}");
                continue;
            }
        };
        let mut last = None;
        for child in entries.children.iter() {
            assert!(last.as_deref() < Some(&*child.name), "{path}: {:?} is out of order", child.name);
            assert!(!child.name.is_empty() && !child.name.contains('/') && !matches!(&*child.name, "." | ".."));
            assert!(!child.name.contains(char::is_control) && child.name.len() <= 350, "{path}: {:?}", child.name);
            left -= 1;
            let inside = format!("{path}/{}", child.name);
            match vfs.lookup(ino, &child.name) {
                Ok(attr) if attr.kind == Kind::Dir => dirs.push((inside, attr.ino)),
                Ok(attr) => read(vfs, &inside, &attr, is_whole),
                // A variant that is found out to be refused when it is looked at closely.
                Err(Error::Refused(_)) => {}
                Err(error) => assert!(!is_whole, "{inside}: {error}"),
            }
            last = Some(child.name);
            if left == 0 {
                return;
            }
        }
    }
}

/// Reads the ends and the middle of a file.
fn read(vfs: &Vfs, path: &str, attr: &Attr, is_whole: bool) {
    let mut buf = [1; 600];
    for offset in [0, attr.size / 2, attr.size.saturating_sub(300), attr.size, u64::MAX] {
        let left = attr.size.saturating_sub(offset).min(600);
        match vfs.read(attr.ino, offset, &mut buf) {
            Ok(len) => assert_eq!(len as u64, left, "{path} at {offset}"),
            Err(error) => assert!(!is_whole, "{path} at {offset}: {error}"),
        }
    }
}
