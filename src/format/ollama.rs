//! ollama manifests: the documents below `manifests/` and the config blob that each of them names.
//!
//! The form is ollama's own (`manifest/manifest.go`, `types/model/config.go`): schemaVersion 2, one config, a list of
//! layers. Go reads unknown keys silently, so the layers of a model that wmount imported carry `dtype`, `shape` and
//! `named` beside ollama's keys, and layers whose media type begins with [`OURS`] are skipped by ollama.

mod brief;

use serde::{Deserialize, Serialize};

use super::gguf;
use super::json;
use super::safetensors::go_string;
use crate::digest::Digest;
use crate::error::Fault;

/// Media type of a manifest.
pub const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Media type of the config blob.
pub const CONFIG: &str = "application/vnd.docker.container.image.v1+json";
/// A tensor of the model: a safetensors blob.
pub const TENSOR: &str = "application/vnd.ollama.image.tensor";
/// A JSON file of the model.
pub const JSON: &str = "application/vnd.ollama.image.json";
/// What the seed of the format called [`JSON`].
pub const JSON_OLD: &str = "application/vnd.ollama.image.config";
/// A file of weights, today always GGUF.
pub const MODEL: &str = "application/vnd.ollama.image.model";
/// A GGUF file that makes images or sound into input of the model.
pub const PROJECTOR: &str = "application/vnd.ollama.image.projector";
/// A GGUF file of a LoRA adapter.
pub const ADAPTER: &str = "application/vnd.ollama.image.adapter";
/// A GGUF file of a model that guesses ahead.
pub const DRAFT: &str = "application/vnd.ollama.image.draft";
/// How our own media types begin.
pub const OURS: &str = "application/vnd.wmount.";
/// A tensor that only a CoreML program, or a file beside the model's own weights, holds.
pub const OWN_TENSOR: &str = "application/vnd.wmount.tensor";
/// A file of what was imported that is no JSON.
pub const OWN_FILE: &str = "application/vnd.wmount.file";
/// The recipes of all files of one imported directory or file.
pub const OWN_RECIPE: &str = "application/vnd.wmount.recipe";
/// Bytes of an imported file that are no tensor, such as a long header.
pub const OWN_FRAGMENT: &str = "application/vnd.wmount.fragment";

/// The longest manifest that is read, in bytes.
pub const MAX_MANIFEST: u64 = 64 << 20;

/// A manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// [`MANIFEST`].
    #[serde(default)]
    pub media_type: String,
    /// The config blob.
    pub config: Layer,
    /// Everything else.
    #[serde(deserialize_with = "list_or_null")]
    pub layers: Vec<Layer>,
}

/// Go writes a list that was never appended to as null. One that is not there may be one of another name, whose blobs
/// nobody would know of.
fn list_or_null<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Layer>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// One blob of a manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Layer {
    /// What it is.
    #[serde(default)]
    pub media_type: String,
    /// Its name in `blobs/`.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
    /// Tensor name or path of the file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Dtype of a tensor, in layers that carry it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub dtype: String,
    /// Shape of a tensor, in layers that carry it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<u64>>,
    /// Digest of the same tensor as the blob that today's ollama reads, with the name in its header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<Digest>,
}

impl Layer {
    /// A layer with a name and nothing of a tensor.
    pub fn new(media_type: &str, digest: Digest, size: u64, name: &str) -> Layer {
        let (media_type, name) = (media_type.to_owned(), name.to_owned());
        Layer { media_type, digest, size, name, dtype: String::new(), shape: None, named: None }
    }

    /// Whether ollama does not know it.
    pub fn is_ours(&self) -> bool {
        self.media_type.starts_with(OURS)
    }

    /// Whether it holds tensors.
    pub fn is_tensor(&self) -> bool {
        self.media_type == TENSOR || self.media_type == OWN_TENSOR
    }
}

impl Manifest {
    /// A manifest of these layers.
    pub fn new(config: Layer, layers: Vec<Layer>) -> Manifest {
        Manifest { schema_version: 2, media_type: MANIFEST.into(), config, layers }
    }

    /// Whether wmount added layers to it.
    pub fn has_ours(&self) -> bool {
        self.layers.iter().any(Layer::is_ours)
    }

    /// Whether another program than wmount stored the weights: what wmount imports has [`Layer::named`] tensors, or
    /// nothing but layers of its own and small files.
    pub fn is_foreign(&self) -> bool {
        let weights = |layer: &&Layer| layer.media_type == TENSOR || layer.media_type == MODEL;
        match self.layers.iter().find(weights) {
            Some(layer) => layer.named.is_none(),
            None => !self.has_ours(),
        }
    }

    /// Reads a manifest.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, Fault> {
        let manifest: Manifest =
            json::typed(bytes).map_err(|fault| Fault::new(fault.at, format!("no manifest: {}", fault.what)))?;
        if manifest.schema_version != 2 {
            return Err(Fault::new(0, format!("schemaVersion is {}, not 2", manifest.schema_version)));
        }
        Ok(manifest)
    }

    /// The stored form: JSON as Go's encoder orders it, with our keys.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a manifest is plain data");
        bytes.push(b'\n');
        bytes
    }

    /// Every blob that the manifest names, the config's included.
    pub fn blobs(&self) -> impl Iterator<Item = &Layer> {
        std::iter::once(&self.config).chain(&self.layers)
    }

    /// The bytes that Go's `json.Encoder` would write: what ollama finds below `manifests/`, without our keys.
    pub fn to_go_bytes(&self) -> Vec<u8> {
        let layer = |layer: &Layer| {
            let media_type = go_string(&layer.media_type);
            let mut text = format!(r#"{{"mediaType":{media_type},"digest":"{}","size":{}"#, layer.digest, layer.size);
            if !layer.name.is_empty() {
                text += &format!(r#","name":{}"#, go_string(&layer.name));
            }
            text + "}"
        };
        let layers: Vec<String> = self.layers.iter().map(layer).collect();
        let config = layer(&self.config);
        format!(
            "{{\"schemaVersion\":2,\"mediaType\":\"{MANIFEST}\",\"config\":{config},\"layers\":[{}]}}\n",
            layers.join(",")
        )
        .into_bytes()
    }
}

/// The config blob (ConfigV2) of a model made of safetensors tensors, byte for byte what ollama's importer writes.
///
/// `senses` are capabilities beside `completion`: `vision`, `audio`.
pub fn safetensors_config(senses: &[&str]) -> Vec<u8> {
    let capabilities = serde_json::to_string(&[&["completion"], senses].concat()).expect("strings are JSON");
    let config = [
        r#"{"model_format":"safetensors","model_family":"","model_families":null,"model_type":"","file_type":"","#,
        r#""requires":"0.19.0","capabilities":"#,
        &capabilities,
        r#","architecture":"","os":""}"#,
    ];
    config.concat().into_bytes()
}

/// The config blob of a model that is a GGUF file, as ollama writes it.
pub fn gguf_config(header: &gguf::Header) -> Vec<u8> {
    let family = &header.architecture;
    let config = [
        (r#"{"model_format":"gguf","model_family":"#, go_string(family)),
        (r#","model_families":["#, go_string(family)),
        (r#"],"model_type":"#, go_string(&human_number(header.elements))),
        (r#","file_type":"#, go_string(header.file_type.and_then(gguf::file_type_name).unwrap_or("unknown"))),
        (",\"architecture\":\"amd64\",\"os\":\"linux\"}\n", String::new()),
    ];
    config.map(|(text, value)| text.to_owned() + &value).concat().into_bytes()
}

/// A count as ollama says it: `1.2B`, `22.71M`, `12K`.
fn human_number(count: u64) -> String {
    const UNITS: [(u64, &str, usize); 3] = [(1_000_000_000, "B", 1), (1_000_000, "M", 2), (1_000, "K", 0)];
    let Some((unit, letter, digits)) = UNITS.iter().find(|(unit, ..)| count >= *unit) else {
        return count.to_string();
    };
    let digits = if count.is_multiple_of(*unit) { 0 } else { *digits };
    format!("{:.digits$}{letter}", count as f64 / *unit as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_survives_and_its_view_has_only_the_keys_of_ollama() {
        let digest = Digest::of(b"x");
        let mut tensor = Layer::new(TENSOR, digest, 9, "a<b");
        tensor.dtype = "F32".into();
        tensor.shape = Some(vec![]);
        let manifest = Manifest::new(Layer::new(CONFIG, digest, 1, ""), vec![tensor]);
        assert_eq!(Manifest::parse(&manifest.to_bytes()), Ok(manifest.clone()));
        let go = format!(
            concat!(
                r#"{{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json","#,
                r#""config":{{"mediaType":"application/vnd.docker.container.image.v1+json","digest":"{0}","size":1}},"#,
                r#""layers":[{{"mediaType":"application/vnd.ollama.image.tensor","digest":"{0}","size":9,"#,
                r#""name":"a\u003cb"}}]}}"#,
                "\n"
            ),
            digest
        );
        assert_eq!(String::from_utf8(manifest.to_go_bytes()), Ok(go));
    }

    #[test]
    fn broken_manifests_are_faults() {
        for text in ["", "[]", "{}", r#"{"schemaVersion":1,"config":{"digest":"sha256:x","size":1},"layers":[]}"#] {
            assert!(Manifest::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
