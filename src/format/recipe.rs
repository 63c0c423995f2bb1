//! Recipes: the JSON document that says how the files of one imported directory are put together again.
//!
//! ```json
//! {"version": 1, "kind": "mlpackage",
//!  "blobs": [["e3b0c442...", 1234]],
//!  "dirs": [{"path": "Data", "mtime": [1700000000, 0]}],
//!  "files": [{"path": "Manifest.json", "mtime": [1700000000, 0],
//!             "extents": ["68656164", 8, [0, 72], [0, 80, 1000]]},
//!            {"path": "Data/com.apple.CoreML/weights/weight.bin", "mtime": [1700000000, 0],
//!             "map": ["01ba4719...", 5678]}]}
//! ```
//!
//! `blobs` lists sha256 digests and lengths. A file's extents follow each other from byte 0; each is
//!
//! | JSON | bytes |
//! |---|---|
//! | a string | these, in hexadecimal |
//! | a number | so many zeros |
//! | `[i, offset]` | blob number i from `offset` to its end |
//! | `[i, offset, length]` | a part of it |
//!
//! Where they are many they stand in a blob of their own, the `map`, `{"version": 1, "blobs": [...], "extents": [...]}`:
//! files that are equal in many imports, such as the weights of all shapes of a model, then have one map.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::json;
use crate::budget::Budget;
use crate::digest::Digest;
use crate::error::Fault;
use crate::extent::{ExtentBytes, ExtentMap, SHORT_ZEROS};
use crate::model::{Source, SourceDir, SourceFile, SourceKind, check_path, from_unix, to_unix};

/// The longest recipe or map that is read, in bytes.
pub const MAX_RECIPE: u64 = 128 << 20;

/// Extents from which on they stand in a blob of their own.
const MANY: usize = 16;

#[derive(Serialize, Deserialize)]
struct Recipe {
    version: u32,
    kind: String,
    blobs: Vec<Blob>,
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    extents: Option<Vec<Extent>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    map: Option<Blob>,
}

#[derive(Serialize, Deserialize)]
struct Map {
    version: u32,
    blobs: Vec<Blob>,
    extents: Vec<Extent>,
}

/// Digest and length of a blob; the digest without `sha256:`, as there are as many of them as tensors.
#[derive(Serialize, Deserialize)]
struct Blob(#[serde(with = "bare")] Digest, u64);

mod bare {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::digest::Digest;

    pub fn serialize<S: Serializer>(digest: &Digest, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&digest.hex())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = String::deserialize(deserializer)?;
        Digest::from_hex(&text).ok_or_else(|| serde::de::Error::custom("is no sha256"))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Extent {
    Inline(String),
    Zeros(u64),
    Rest(usize, u64),
    Part(usize, u64, u64),
}

/// The blobs that a document names, each once.
#[derive(Default)]
struct Named {
    blobs: Vec<Blob>,
    indices: HashMap<Digest, usize>,
}

impl Named {
    fn extents(&mut self, content: &ExtentMap, blob_len: &dyn Fn(&Digest) -> u64) -> Vec<Extent> {
        let mut extents = Vec::new();
        for extent in content.extents() {
            match extent.bytes {
                ExtentBytes::Inline(bytes) => {
                    // Metadata of MIL blobs ends in zeros; so few of them become one extent with it again when read.
                    let zeros = bytes.iter().rev().take(SHORT_ZEROS as usize).take_while(|&&byte| byte == 0).count();
                    extents.push(Extent::Inline(hex::encode(&bytes[..bytes.len() - zeros])));
                    extents.extend((zeros > 0).then_some(Extent::Zeros(zeros as u64)));
                }
                ExtentBytes::Zeros => extents.push(Extent::Zeros(extent.len)),
                ExtentBytes::Computed { .. } => unreachable!("an imported file is made of stored bytes"),
                ExtentBytes::Blob { digest, offset } => {
                    let blob = *self.indices.entry(digest).or_insert_with(|| {
                        self.blobs.push(Blob(digest, blob_len(&digest)));
                        self.blobs.len() - 1
                    });
                    let to_the_end = offset + extent.len == self.blobs[blob].1;
                    extents.push(match to_the_end {
                        true => Extent::Rest(blob, offset),
                        false => Extent::Part(blob, offset, extent.len),
                    });
                }
            }
        }
        extents
    }
}

/// Writes the recipe of a source.
///
/// `blob_len` gives the length of a blob that its files name; `put` takes a map and returns its digest.
pub fn render<E>(
    source: &Source,
    blob_len: &dyn Fn(&Digest) -> u64,
    put: &mut dyn FnMut(Vec<u8>) -> Result<Digest, E>,
) -> Result<Vec<u8>, E> {
    let mut named = Named::default();
    let mut files = Vec::with_capacity(source.files.len());
    for file in &source.files {
        let (path, mtime) = (file.path.clone(), to_unix(file.mtime));
        files.push(if file.content.extents().nth(MANY).is_some() {
            let mut named = Named::default();
            let extents = named.extents(&file.content, blob_len);
            let map = to_json(&Map { version: 1, blobs: named.blobs, extents });
            let len = map.len() as u64;
            File { path, mtime, extents: None, map: Some(Blob(put(map)?, len)) }
        } else {
            File { path, mtime, extents: Some(named.extents(&file.content, blob_len)), map: None }
        });
    }
    let dirs = source.dirs.iter().map(|dir| Dir { path: dir.path.clone(), mtime: to_unix(dir.mtime) }).collect();
    Ok(to_json(&Recipe { version: 1, kind: source.kind.name().into(), blobs: named.blobs, dirs, files }))
}

fn to_json(document: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(document).expect("a recipe is plain data")
}

/// Reads a map of the given length.
pub type GetMap<'a> = dyn Fn(&Digest, u64) -> Result<Vec<u8>, Fault> + 'a;

/// A map of nothing, for who wants to know of a source everything but the bytes of its files.
pub const NO_MAP: &[u8] = br#"{"version":1,"blobs":[],"extents":[]}"#;

/// The documents of one model, as they are read one after the other.
#[derive(Debug, Default)]
pub struct Documents {
    /// What the model may yet take.
    pub budget: Budget,
    /// Those that were read, by digest and length.
    maps: HashMap<(Digest, u64), Arc<ExtentMap>>,
}

impl Documents {
    /// None yet, for a model that may take so much.
    pub fn of(budget: Budget) -> Self {
        Documents { budget, maps: HashMap::new() }
    }
}

/// Reads the recipe of the source called `name`, and the maps that no recipe before it has named.
pub fn parse(name: &str, bytes: &[u8], get: &GetMap<'_>, documents: &mut Documents) -> Result<Source, Fault> {
    let fault = |what: String| Fault::new(0, format!("recipe of {name:?}: {what}"));
    let check_version = |version: u32| match version {
        1 => Ok(()),
        _ => Err(fault(format!("version {version} was written by a newer wmount"))),
    };
    let in_place = |it: Fault| Fault::new(it.at, fault(it.what).what);
    let recipe: Recipe = json::loose(bytes).map_err(in_place)?;
    check_version(recipe.version)?;
    let kind = SourceKind::ALL.into_iter().find(|kind| kind.name() == recipe.kind);
    let kind = kind.ok_or_else(|| fault(format!("kind {:?} is not known to this wmount", recipe.kind)))?;
    check_path(name).map_err(fault)?;
    let time = |mtime| from_unix(mtime).ok_or_else(|| fault(format!("{mtime:?} is no time")));
    let mut files = Vec::new();
    for file in recipe.files {
        check_path(&file.path).map_err(fault)?;
        let content = match (file.extents, file.map) {
            (Some(extents), None) => content(&extents, &recipe.blobs).map(Arc::new),
            (None, Some(Blob(digest, len))) => {
                documents.budget.text(len).map_err(in_place)?;
                match documents.maps.get(&(digest, len)) {
                    Some(map) => Ok(map.clone()),
                    None => {
                        let text = get(&digest, len).map_err(in_place)?;
                        let map: Map = json::loose(&text).map_err(in_place)?;
                        check_version(map.version)?;
                        let map = content(&map.extents, &map.blobs).map(Arc::new);
                        map.inspect(|map| _ = documents.maps.insert((digest, len), map.clone()))
                    }
                }
            }
            _ => Err("has not one of extents and map".into()),
        };
        let content = content.map_err(|what| fault(format!("{}: {what}", file.path)))?;
        documents.budget.file(content.count()).map_err(in_place)?;
        files.push(SourceFile { mtime: time(file.mtime)?, path: file.path, content });
    }
    let mut dirs = Vec::new();
    for dir in recipe.dirs {
        check_path(&dir.path).map_err(fault)?;
        dirs.push(SourceDir { mtime: time(dir.mtime)?, path: dir.path });
    }
    Ok(Source { name: name.into(), kind, files, dirs })
}

fn content(extents: &[Extent], blobs: &[Blob]) -> Result<ExtentMap, String> {
    /// Far above any file, far below the overflow of a sum of sizes.
    const MAX_FILE: u64 = 1 << 62;
    let blob = |index: usize| blobs.get(index).ok_or_else(|| format!("there is no blob {index}"));
    let mut map = ExtentMap::new();
    for extent in extents {
        let (range, len) = match *extent {
            Extent::Inline(ref text) => (None, text.len() as u64 / 2),
            Extent::Zeros(zeros) => (None, zeros),
            Extent::Rest(index, offset) => {
                let Blob(digest, blob_len) = blob(index)?;
                let len =
                    blob_len.checked_sub(offset).ok_or_else(|| format!("byte {offset} is not within {digest}"))?;
                (Some((index, offset)), len)
            }
            Extent::Part(index, offset, len) => (Some((index, offset)), len),
        };
        if map.size().checked_add(len).is_none_or(|size| size > MAX_FILE) {
            return Err("its size overflows".into());
        }
        match (extent, range) {
            (_, Some((index, offset))) => {
                let Blob(digest, blob_len) = blob(index)?;
                let pushed = map.push_blob(*digest, *blob_len, offset, len);
                pushed.ok_or_else(|| format!("{len} bytes at {offset} are not within {digest}"))?;
            }
            (Extent::Inline(text), _) => {
                map.push_inline(&hex::decode(text).map_err(|error| format!("inline bytes: {error}"))?);
            }
            _ => map.push_zeros(len),
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
        content.push_inline(b"head\0\0");
        content.push_blob(digest, 100, 72, 28).expect("in range");
        content.push_zeros(1000);
        let mut long = ExtentMap::new();
        for _ in 0..MANY {
            long.append(&content);
        }
        let mtime = SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5);
        let file = |path: &str, content: &ExtentMap| SourceFile {
            path: path.into(),
            mtime,
            content: Arc::new(content.clone()),
        };
        let files = vec![file("a/b", &content), file("c", &long), file("d", &long)];
        let dirs = vec![SourceDir { path: "a".into(), mtime }, SourceDir { path: "empty".into(), mtime }];
        let source = Source { name: "x.mlpackage".into(), kind: SourceKind::Mlpackage, files, dirs };
        let mut maps = HashMap::new();
        let render_to = |source: &Source, maps: &mut HashMap<Digest, Vec<u8>>| {
            let mut put = |map: Vec<u8>| {
                let digest = Digest::of(&map);
                maps.insert(digest, map);
                Ok::<_, Fault>(digest)
            };
            render(source, &|_| 100, &mut put).expect("nothing fails")
        };
        let bytes = render_to(&source, &mut maps);
        assert_eq!(maps.len(), 1);
        let read = parse("x.mlpackage", &bytes, &|digest, _| Ok(maps[digest].clone()), &mut Documents::default())
            .expect("valid");
        assert_eq!((&*read.files[0].content, &*read.files[2].content), (&content, &long));
        assert!(Arc::ptr_eq(&read.files[1].content, &read.files[2].content));
        assert_eq!((read.files[0].mtime, read.dirs.len(), read.kind), (mtime, 2, SourceKind::Mlpackage));
        assert_eq!(render_to(&read, &mut maps), bytes);
    }

    #[test]
    fn broken_recipes_are_faults() {
        let recipe = |version, kind, path, extents| {
            format!(
                r#"{{"version":{version},"kind":"{kind}","blobs":[["{}",10]],"dirs":[],"files":[{{"path":"{path}","mtime":[0,0],"extents":[{extents}]}}]}}"#,
                Digest::of(b"").hex()
            )
        };
        let good = recipe(1, "safetensors", "a", r#"[0,0,10]"#);
        let no_map = |_: &Digest, _| Err(Fault::new(0, "missing"));
        let parse = |name, bytes| parse(name, bytes, &no_map, &mut Documents::default());
        assert!(parse("m", good.as_bytes()).is_ok());
        for (name, bad) in [
            ("..", good.as_str()),
            ("m", &recipe(2, "safetensors", "a", "")),
            ("m", &recipe(1, "pickle", "a", "")),
            ("m", &recipe(1, "safetensors", "../a", "")),
            ("m", &recipe(1, "safetensors", "a", r#"[0,1,10]"#)),
            ("m", &recipe(1, "safetensors", "a", r#"[1,0]"#)),
            ("m", &recipe(1, "safetensors", "a", r#"[0,11]"#)),
            ("m", &recipe(1, "safetensors", "a", r#"18446744073709551615"#)),
            ("m", &recipe(1, "safetensors", "a", r#""0g""#)),
            ("m", "{}"),
        ] {
            assert!(parse(name, bad.as_bytes()).is_err(), "{name} {bad}");
        }
    }
}
