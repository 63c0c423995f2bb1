//! Recipes: the JSON document that says how the files of one imported directory are put together again.
//!
//! ```json
//! {"version": 1, "kind": "safetensors",
//!  "blobs": [["sha256:...", 1234]],
//!  "dirs": [{"path": "1_Pooling", "mtime": [1700000000, 0]}],
//!  "files": [{"path": "model.safetensors", "mtime": [1700000000, 0],
//!             "extents": [{"inline": "68656164"}, {"blob": 0, "offset": 72, "len": 1152}, {"zeros": 8}]}]}
//! ```
//!
//! `blobs` lists digests and lengths; an extent names one by its index. A file's extents follow each other from byte 0.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::Fault;
use crate::extent::{ExtentBytes, ExtentMap};
use crate::model::{Source, SourceDir, SourceFile, SourceKind, check_path, from_unix, to_unix};

/// The longest recipe that is read, in bytes.
pub const MAX_RECIPE: u64 = 256 << 20;

#[derive(Serialize, Deserialize)]
struct Recipe {
    version: u32,
    kind: String,
    blobs: Vec<(Digest, u64)>,
    dirs: Vec<Dir>,
    files: Vec<File>,
}

#[derive(Serialize, Deserialize)]
struct Dir {
    path: String,
    mtime: (i64, u32),
}

#[derive(Serialize, Deserialize)]
struct File {
    path: String,
    mtime: (i64, u32),
    extents: Vec<Extent>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Extent {
    Blob { blob: usize, offset: u64, len: u64 },
    Inline { inline: String },
    Zeros { zeros: u64 },
}

/// Writes the recipe of a source; `blob_len` gives the length of a blob that its files name.
pub fn render(source: &Source, blob_len: impl Fn(&Digest) -> u64) -> Vec<u8> {
    let mut blobs = Vec::new();
    let mut indices = std::collections::HashMap::new();
    let mut extent = |extent: crate::extent::Extent| match extent.bytes {
        ExtentBytes::Inline(bytes) => Extent::Inline { inline: hex::encode(bytes) },
        ExtentBytes::Zeros => Extent::Zeros { zeros: extent.len },
        ExtentBytes::Blob { digest, offset } => {
            let blob = *indices.entry(digest).or_insert_with(|| {
                blobs.push((digest, blob_len(&digest)));
                blobs.len() - 1
            });
            Extent::Blob { blob, offset, len: extent.len }
        }
    };
    let file = |file: &SourceFile| File {
        path: file.path.clone(),
        mtime: to_unix(file.mtime),
        extents: file.content.extents().map(&mut extent).collect(),
    };
    let files = source.files.iter().map(file).collect();
    let dirs = source.dirs.iter().map(|dir| Dir { path: dir.path.clone(), mtime: to_unix(dir.mtime) }).collect();
    let recipe = Recipe { version: 1, kind: source.kind.name().into(), blobs, dirs, files };
    serde_json::to_vec(&recipe).expect("a recipe is plain data")
}

/// Reads the recipe of the source called `name`.
pub fn parse(name: &str, bytes: &[u8]) -> Result<Source, Fault> {
    let fault = |what: String| Fault::new(0, format!("recipe of {name:?}: {what}"));
    let recipe: Recipe = serde_json::from_slice(bytes).map_err(|error| fault(error.to_string()))?;
    if recipe.version != 1 {
        return Err(fault(format!("version {} was written by a newer wmount", recipe.version)));
    }
    let kind = [SourceKind::Safetensors, SourceKind::Mlpackage].into_iter().find(|kind| kind.name() == recipe.kind);
    let kind = kind.ok_or_else(|| fault(format!("kind {:?} is not known to this wmount", recipe.kind)))?;
    check_path(name).map_err(&fault)?;
    let time = |mtime| from_unix(mtime).ok_or_else(|| fault(format!("{mtime:?} is no time")));
    let mut files = Vec::new();
    for file in recipe.files {
        check_path(&file.path).map_err(&fault)?;
        let content = content(&file.extents, &recipe.blobs).map_err(|what| fault(format!("{}: {what}", file.path)))?;
        files.push(SourceFile { mtime: time(file.mtime)?, path: file.path, content });
    }
    let mut dirs = Vec::new();
    for dir in recipe.dirs {
        check_path(&dir.path).map_err(&fault)?;
        dirs.push(SourceDir { mtime: time(dir.mtime)?, path: dir.path });
    }
    Ok(Source { name: name.into(), kind, files, dirs })
}

fn content(extents: &[Extent], blobs: &[(Digest, u64)]) -> Result<ExtentMap, String> {
    /// Far above any file, far below the overflow of a sum of sizes.
    const MAX_FILE: u64 = 1 << 62;
    let mut map = ExtentMap::new();
    for extent in extents {
        let len = match extent {
            Extent::Blob { len, .. } => *len,
            Extent::Zeros { zeros } => *zeros,
            Extent::Inline { inline } => inline.len() as u64 / 2,
        };
        if map.size().checked_add(len).is_none_or(|size| size > MAX_FILE) {
            return Err("its size overflows".into());
        }
        match extent {
            Extent::Blob { blob, offset, len } => {
                let (digest, blob_len) = blobs.get(*blob).ok_or_else(|| format!("there is no blob {blob}"))?;
                let range = map.push_blob(*digest, *blob_len, *offset, *len);
                range.ok_or_else(|| format!("{len} bytes at {offset} are not within {digest}"))?;
            }
            Extent::Zeros { zeros } => map.push_zeros(*zeros),
            Extent::Inline { inline } => {
                map.push_inline(&hex::decode(inline).map_err(|error| format!("inline bytes: {error}"))?);
            }
        }
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn a_recipe_survives() {
        let mut content = ExtentMap::new();
        let digest = Digest::of(b"blob");
        content.push_inline(b"head");
        content.push_blob(digest, 100, 72, 28).expect("in range");
        content.push_zeros(1000);
        let mtime = SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5);
        let files = vec![SourceFile { path: "a/b".into(), mtime, content: content.clone() }];
        let dirs = vec![SourceDir { path: "a".into(), mtime }, SourceDir { path: "empty".into(), mtime }];
        let source = Source { name: "x.mlpackage".into(), kind: SourceKind::Mlpackage, files, dirs };
        let bytes = render(&source, |_| 100);
        let read = parse("x.mlpackage", &bytes).expect("valid");
        assert_eq!(read.files[0].content, content);
        assert_eq!((read.files[0].mtime, read.dirs.len(), read.kind), (mtime, 2, SourceKind::Mlpackage));
        assert_eq!(render(&read, |_| 100), bytes);
    }

    #[test]
    fn broken_recipes_are_faults() {
        let recipe = |version, kind, path, extents| {
            format!(
                r#"{{"version":{version},"kind":"{kind}","blobs":[["{}",10]],"dirs":[],"files":[{{"path":"{path}","mtime":[0,0],"extents":[{extents}]}}]}}"#,
                Digest::of(b"")
            )
        };
        let good = recipe(1, "safetensors", "a", r#"{"blob":0,"offset":0,"len":10}"#);
        assert!(parse("m", good.as_bytes()).is_ok());
        for (name, bad) in [
            ("..", good.as_str()),
            ("m", &recipe(2, "safetensors", "a", "")),
            ("m", &recipe(1, "pickle", "a", "")),
            ("m", &recipe(1, "safetensors", "../a", "")),
            ("m", &recipe(1, "safetensors", "a", r#"{"blob":0,"offset":1,"len":10}"#)),
            ("m", &recipe(1, "safetensors", "a", r#"{"blob":1,"offset":0,"len":1}"#)),
            ("m", &recipe(1, "safetensors", "a", r#"{"zeros":18446744073709551615}"#)),
            ("m", &recipe(1, "safetensors", "a", r#"{"inline":"0g"}"#)),
            ("m", "{}"),
        ] {
            assert!(parse(name, bad.as_bytes()).is_err(), "{name} {bad}");
        }
    }
}
