//! Writing through a mount: any calls in any order.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use tempfile::TempDir;
use wmount::digest::Digest;
use wmount::dtype::Dtype;
use wmount::format::ollama::{CONFIG, Layer, Manifest, TENSOR};
use wmount::format::safetensors;
use wmount::ingest::{Form, Ingest};
use wmount::store::Store;
use wmount::vfs::Vfs;

use super::Numbers;
use super::stores::{open, walk};

const DIRS: [&str; 6] = [
    "ollama",
    "ollama/blobs",
    "ollama/manifests",
    "ollama/manifests/registry.ollama.ai/library/m",
    "ollama/manifests/registry.ollama.ai/library",
    "ollama/other",
];

/// What is written: two blobs, the manifest of a model of them, and one of a model without them.
static CONTENTS: LazyLock<[Vec<u8>; 4]> = LazyLock::new(|| {
    let image = br#"{"model_format":"safetensors"}"#.to_vec();
    let tensor = [safetensors::named_header("w", Dtype::F32, &[2], 8), vec![7; 8]].concat();
    let layer = |kind: &str, bytes: &[u8], name: &str| Layer::new(kind, Digest::of(bytes), bytes.len() as u64, name);
    let manifest = |layers| Manifest::new(layer(CONFIG, &image, ""), layers).to_bytes();
    let whole = manifest(vec![layer(TENSOR, &tensor, "w")]);
    let broken = manifest(vec![layer(TENSOR, b"nowhere", "w")]);
    [image, tensor, whole, broken]
});

fn name(byte: u8) -> String {
    let digest = |index: usize| Digest::of(&CONTENTS[index % 4]).file_name();
    match byte % 16 {
        index @ 0..4 => digest(index.into()),
        index @ 4..6 => format!("{}-partial", digest(index.into())),
        index @ 6..8 => format!("{}-partial-{}", digest(index.into()), byte / 16),
        8..10 => "latest".into(),
        10 => "library".into(),
        11 => "m".into(),
        12 => "registry.ollama.ai".into(),
        13 => "..".into(),
        14 => "new".into(),
        _ => format!("file{}", byte / 16),
    }
}

/// Calls, two bytes or more for each.
pub fn ingest(input: &[u8]) {
    let mut numbers = Numbers(input);
    let dir = TempDir::with_prefix("wmount-fuzz-").unwrap();
    let root = dir.path();
    for part in ["blobs", "manifests"] {
        fs::create_dir(root.join(part)).unwrap();
    }
    if numbers.byte() % 2 == 1 {
        fs::create_dir_all(root.join("manifests/registry.ollama.ai/library/m")).unwrap();
        fs::write(root.join("manifests/registry.ollama.ai/library/m/latest"), &CONTENTS[2]).unwrap();
        for blob in &CONTENTS[..2] {
            fs::write(root.join("blobs").join(Digest::of(blob).file_name()), blob).unwrap();
        }
    }
    let vfs = Arc::new(Vfs::new(Arc::new(Store::open(root).unwrap())).unwrap());
    let ingest = Ingest::new(vfs.clone()).unwrap();
    let (mut handles, mut inodes) = (Vec::new(), Vec::new());
    for _ in 0..64 {
        if numbers.is_empty() {
            break;
        }
        let call = numbers.byte();
        let dir = DIRS[usize::from(numbers.byte() % 6)];
        let own = name(numbers.byte());
        let picked =
            |all: &[u64], byte: u8| all.get(usize::from(byte) % all.len().max(1)).copied().unwrap_or(u64::from(byte));
        match call % 16 {
            0 | 1 => {
                if let Ok((stat, handle)) = ingest.create(dir, &own, call & 16 > 0) {
                    assert_eq!(stat.form, Form::File);
                    handles.push(handle);
                    inodes.push(stat.ino);
                }
            }
            2..5 => {
                let handle = picked(&handles, numbers.byte());
                let content = &CONTENTS[usize::from(numbers.byte() % 4)];
                let (from, len) = (numbers.byte() as usize, numbers.byte() as usize);
                // Mostly the whole, now and then a part at a place of its own.
                let (offset, bytes) = match call & 32 {
                    0 => (0, &content[..]),
                    _ => (from as u64, &content[from.min(content.len())..content.len().min(from + len)]),
                };
                let _ = ingest.write(handle, offset, bytes);
            }
            5 => {
                let _ = ingest.flush(picked(&handles, numbers.byte()));
            }
            6 => ingest.release(picked(&handles, numbers.byte())),
            7 => {
                let (to, new) = (DIRS[usize::from(numbers.byte() % 6)], name(numbers.byte()));
                let _ = ingest.rename((dir, &own), (to, &new), call & 16 > 0);
            }
            8 => {
                let _ = ingest.unlink(dir, &own);
            }
            9 => {
                let made = if call & 16 > 0 { ingest.remove_dir(dir, &own).err().map(|_| ()) } else { None };
                let _ = made.map_or_else(|| ingest.make_dir(dir, &own).map(|stat| inodes.push(stat.ino)), Ok);
            }
            10 => {
                let link = ingest.make_link(dir, &own, OsString::from("../blobs"));
                let _ = link.map(|stat| inodes.push(stat.ino));
            }
            11 => {
                let _ = ingest.link(picked(&inodes, numbers.byte()), dir, &own).map(|stat| inodes.push(stat.ino));
            }
            12 => {
                let opened = ingest.open(picked(&inodes, numbers.byte()), call & 16 > 0);
                handles.extend(opened.ok().flatten());
            }
            13 => {
                let handle = (call & 32 > 0).then(|| picked(&handles, numbers.byte()));
                let size = (call & 16 > 0).then(|| numbers.short());
                let _ = ingest.set(picked(&inodes, numbers.byte()), handle, size, Some(SystemTime::UNIX_EPOCH));
            }
            14 => {
                let _ = ingest.lookup(dir, &own).map(|stat| inodes.push(stat.ino));
                let _ = ingest.attr(picked(&inodes, numbers.byte()));
                let _ = ingest.read_link(picked(&inodes, numbers.byte()));
                let _ = ingest.read(picked(&handles, numbers.byte()), numbers.short(), &mut [0; 64]);
            }
            _ => {
                vfs.refresh().unwrap();
                if let Ok(entries) = ingest.lookup("", dir).and_then(|stat| ingest.entries(stat.ino, dir)) {
                    entries.from(0).for_each(|(_, name, ..)| assert!(!name.is_empty() && !name.contains('/')));
                }
            }
        }
    }
    handles.into_iter().for_each(|handle| ingest.release(handle));
    drop(ingest);
    check(root);
}

/// Whatever was written, the store has whole models and blobs of their names alone.
fn check(root: &Path) {
    for entry in fs::read_dir(root.join("blobs")).unwrap() {
        let entry = entry.unwrap();
        let digest = Digest::from_file_name(entry.file_name().to_str().unwrap());
        assert_eq!(digest, Some(Digest::of(&fs::read(entry.path()).unwrap())), "{entry:?}");
    }
    let vfs = open(root).unwrap();
    for found in vfs.store().find().unwrap() {
        let model = vfs.store().load(&found).unwrap();
        assert!(model.defects.is_empty(), "{:?}", model.defects);
    }
    walk(&vfs, true);
    assert!(fs::read_dir(root).unwrap().count() <= 3, "something lies beside the store");
}
