//! `Manifest.json` of a Core ML package: which files below `Data/` make up the model.
//!
//! coremltools names the weights directory as an item of its own, go-coreml the one file in it, or nothing where there
//! are no weights; for both, the root item is the model itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::json;
use crate::digest::{Digest, Hasher};
use crate::error::Fault;

/// Where the model's file lies below `Data/`, for all known writers.
pub const MODEL_PATH: &str = "com.apple.CoreML/model.mlmodel";

/// Where the weights directory lies below `Data/`, for all known writers.
pub const WEIGHTS_PATH: &str = "com.apple.CoreML/weights";

/// The longest manifest that is read, in bytes; real ones have two thousand.
pub const MAX_MANIFEST: u64 = 1 << 20;

/// The author that coremltools looks items up by.
const AUTHOR: &str = "com.apple.CoreML";

/// The newest version of the format.
const VERSION: (u32, u32, u32) = (1, 0, 0);

/// A package's manifest. Fields are in the order of their JSON names, in which coremltools writes them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// `a.b.c`, not above 1.0.0.
    pub file_format_version: String,
    /// The items by identifier.
    #[serde(rename = "itemInfoEntries")]
    pub items: BTreeMap<String, Item>,
    /// The identifier of the item that is the model.
    pub root_model_identifier: String,
}

/// One file or directory of a package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Who made it; coremltools finds items by author and name.
    pub author: String,
    /// What it is.
    pub description: String,
    /// Its name.
    pub name: String,
    /// Its path below `Data/`, of plain components.
    pub path: String,
}

/// Reads a manifest and checks it: the version, the root item, and that no path leads out of `Data/`.
pub fn parse(json: &[u8]) -> Result<Manifest, Fault> {
    let fault = |what: String| Fault::new(0, what);
    let manifest: Manifest =
        json::typed(json).map_err(|fault| Fault::new(fault.at, format!("no manifest: {}", fault.what)))?;
    let version = &manifest.file_format_version;
    match version_of(version) {
        None => return Err(fault(format!("the version {:?} is not of the form a.b.c", abridged(version)))),
        Some(number) if number > VERSION => return Err(fault(format!("package version {version} is above 1.0.0"))),
        Some(_) => {}
    }
    for Item { name, path, .. } in manifest.items.values() {
        if !is_plain(path) {
            let (name, path) = (abridged(name), abridged(path));
            return Err(fault(format!("the path {path:?} of the item {name:?} is not one below Data/")));
        }
    }
    if !manifest.items.contains_key(&manifest.root_model_identifier) {
        return Err(fault(format!(
            "no item has the root's identifier {:?}",
            abridged(&manifest.root_model_identifier)
        )));
    }
    Ok(manifest)
}

fn version_of(text: &str) -> Option<(u32, u32, u32)> {
    let mut parts = text.split('.').map(|part| part.parse().ok());
    let version = (parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then_some(version)
}

/// Whether a path consists of names alone, so that it cannot leave the directory it is joined to.
fn is_plain(path: &str) -> bool {
    path.split('/').all(|name| !matches!(name, "" | "." | "..") && !name.contains('\0'))
}

/// The beginning of a text of unknown length, for an error.
fn abridged(text: &str) -> String {
    text.chars().take(80).collect()
}

impl Manifest {
    /// A manifest in coremltools' form. Its identifiers follow from `content`: the same package gets the same ones.
    pub fn new(content: &Digest, with_weights: bool) -> Manifest {
        let item = |name: &str, path: &str, description: &str| Item {
            author: AUTHOR.into(),
            description: description.into(),
            name: name.into(),
            path: path.into(),
        };
        let root = identifier(content, MODEL_PATH);
        let model = item("model.mlmodel", MODEL_PATH, "CoreML Model Specification");
        let mut items = BTreeMap::from([(root.clone(), model)]);
        if with_weights {
            let weights = item("weights", WEIGHTS_PATH, "CoreML Model Weights");
            items.insert(identifier(content, WEIGHTS_PATH), weights);
        }
        Manifest { file_format_version: "1.0.0".into(), items, root_model_identifier: root }
    }

    /// The same with an item for the weights directory at `dir` in the place of those for the files in it; `None` if it
    /// has one.
    pub fn with_weights(&self, content: &Digest, dir: &str) -> Option<Manifest> {
        if self.items.values().any(|item| item.path == dir) {
            return None;
        }
        let mut manifest = self.clone();
        let root = &self.root_model_identifier;
        let in_dir = |path: &str| path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'));
        manifest.items.retain(|id, item| id == root || !in_dir(&item.path));
        let (author, description) = (AUTHOR.into(), "CoreML Model Weights".into());
        let item = Item { author, description, name: "weights".into(), path: dir.into() };
        manifest.items.insert(identifier(content, WEIGHTS_PATH), item);
        Some(manifest)
    }

    /// The path of the model's file below `Data/`; `None` only if the fields were changed after [`parse`].
    pub fn model_path(&self) -> Option<&str> {
        self.items.get(&self.root_model_identifier).map(|item| item.path.as_str())
    }

    /// The JSON as coremltools writes it: keys sorted, indented by four, with a newline at the end.
    pub fn render(&self) -> Vec<u8> {
        let mut json = Vec::new();
        let indent = serde_json::ser::PrettyFormatter::with_indent(b"    ");
        let mut serializer = serde_json::Serializer::with_formatter(&mut json, indent);
        self.serialize(&mut serializer).expect("strings in maps with string keys are always JSON");
        json.push(b'\n');
        json
    }
}

/// An identifier in the form of a UUID of version 8, the one for values made by other rules than the standard's.
fn identifier(content: &Digest, path: &str) -> String {
    let mut hasher = Hasher::new();
    hasher.update(content.as_bytes());
    hasher.update(path.as_bytes());
    let digest = hasher.finish();
    let mut id = [0; 16];
    id.copy_from_slice(&digest.as_bytes()[..16]);
    id[6] = id[6] & 0x0F | 0x80;
    id[8] = id[8] & 0x3F | 0x80;
    let hex = hex::encode(id);
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COREMLTOOLS: &str = r#"{
    "fileFormatVersion": "1.0.0",
    "itemInfoEntries": {
        "71ecd80d-bf7e-430a-9d34-7b5914ae59a1": {
            "author": "com.apple.CoreML",
            "description": "CoreML Model Weights",
            "name": "weights",
            "path": "com.apple.CoreML/weights"
        },
        "99a2bbb5-7c9b-4a46-9090-27360339081f": {
            "author": "com.apple.CoreML",
            "description": "CoreML Model Specification",
            "name": "model.mlmodel",
            "path": "com.apple.CoreML/model.mlmodel"
        }
    },
    "rootModelIdentifier": "99a2bbb5-7c9b-4a46-9090-27360339081f"
}
"#;

    const GO_COREML: &str = r#"{
  "fileFormatVersion": "1.0.0",
  "itemInfoEntries": {
    "0a": {
      "author": "com.apple.CoreML",
      "description": "CoreML Model Weights",
      "name": "weight.bin",
      "path": "com.apple.CoreML/weights/weight.bin"
    },
    "0b": {
      "author": "com.apple.CoreML",
      "description": "CoreML Model Specification",
      "name": "model.mlmodel",
      "path": "com.apple.CoreML/model.mlmodel"
    }
  },
  "rootModelIdentifier": "0b"
}"#;

    #[test]
    fn both_writers_forms_are_read() {
        for (json, weights) in [(COREMLTOOLS, WEIGHTS_PATH), (GO_COREML, "com.apple.CoreML/weights/weight.bin")] {
            let manifest = parse(json.as_bytes()).unwrap();
            assert_eq!(manifest.model_path(), Some(MODEL_PATH));
            assert_eq!(manifest.items.len(), 2);
            assert!(manifest.items.values().any(|item| item.path == weights));
        }
    }

    #[test]
    fn what_coremltools_wrote_is_rendered_byte_for_byte() {
        let manifest = parse(COREMLTOOLS.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(manifest.render()).unwrap(), COREMLTOOLS);
    }

    #[test]
    fn identifiers_follow_from_the_content() {
        let manifest = Manifest::new(&Digest::of(b"a"), true);
        assert_eq!(manifest, Manifest::new(&Digest::of(b"a"), true));
        assert_eq!(manifest.root_model_identifier, "8c1207fc-2303-893c-877d-0532ef00fa29");
        assert_ne!(manifest.root_model_identifier, Manifest::new(&Digest::of(b"b"), true).root_model_identifier);
        assert_eq!(parse(&manifest.render()), Ok(manifest));
        assert_eq!(Manifest::new(&Digest::of(b"a"), false).items.len(), 1);
    }

    #[test]
    fn the_weights_directory_becomes_an_item() {
        let content = Digest::of(b"a");
        assert_eq!(parse(COREMLTOOLS.as_bytes()).unwrap().with_weights(&content, WEIGHTS_PATH), None);
        let manifest = parse(GO_COREML.as_bytes()).unwrap().with_weights(&content, WEIGHTS_PATH).unwrap();
        let mut items: Vec<(&str, &str)> =
            manifest.items.values().map(|item| (item.name.as_str(), item.path.as_str())).collect();
        items.sort_unstable();
        assert_eq!(items, [("model.mlmodel", MODEL_PATH), ("weights", WEIGHTS_PATH)]);
        assert_eq!(manifest.model_path(), Some(MODEL_PATH));
    }

    #[test]
    fn faults_are_named() {
        for (from, to, word) in [
            ("1.0.0", "1.0.1", "above"),
            ("1.0.0", "1.0", "a.b.c"),
            ("1.0.0", "1.0.0.0", "a.b.c"),
            ("1.0.0", "1.x.0", "a.b.c"),
            ("com.apple.CoreML/weights", "../weights", "Data/"),
            ("com.apple.CoreML/weights", "/weights", "Data/"),
            ("com.apple.CoreML/weights", "com.apple.CoreML//weights", "Data/"),
            ("com.apple.CoreML/weights", "com.apple.CoreML/weights/", "Data/"),
            ("com.apple.CoreML/weights", "./weights", "Data/"),
            ("com.apple.CoreML/weights", "", "Data/"),
            ("\"rootModelIdentifier\": \"99", "\"rootModelIdentifier\": \"98", "root"),
            ("\"author\"", "\"writer\"", "author"),
            ("{", "[", "no manifest"),
        ] {
            let fault = parse(COREMLTOOLS.replacen(from, to, 1).as_bytes()).unwrap_err();
            assert!(fault.what.contains(word), "{fault}");
        }
        assert!(parse(COREMLTOOLS.replace("1.0.0", "0.9.7").as_bytes()).is_ok());
    }

    proptest! {
        #[test]
        fn any_change_is_read_or_refused(at in 0..COREMLTOOLS.len(), with in any::<u8>()) {
            let mut json = COREMLTOOLS.as_bytes().to_vec();
            json[at] = with;
            let _ = parse(&json);
        }
    }
}
