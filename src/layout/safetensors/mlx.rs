//! Names and settings that mlx-lm expects of tensors that ollama quantised or packed.
//!
//! | ollama | mlx-lm |
//! |---|---|
//! | `n.weight.scale`, `n.weight.bias` beside `n.weight` | `n.scales`, `n.biases` |
//! | `mlp.experts.down_proj.weight`, one stack of all experts | `mlp.switch_mlp.down_proj.weight` |
//! | `quant_type` and `group_size` in the metadata of the blob | `quantization` in `config.json` |

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value, json};

use super::super::components::Named;
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::format::{BlobBytes, safetensors};
use crate::layout::Files;
use crate::model::Tensor;

/// Bits of an element, elements that share a scale, and MLX's word for the scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Scheme {
    bits: u64,
    group: u64,
    mode: &'static str,
}

/// ollama's names of the schemes with their usual group size.
const SCHEMES: [(&str, Scheme); 5] = [
    ("int4", Scheme { bits: 4, group: 64, mode: "affine" }),
    ("int8", Scheme { bits: 8, group: 64, mode: "affine" }),
    ("mxfp4", Scheme { bits: 4, group: 32, mode: "mxfp4" }),
    ("mxfp8", Scheme { bits: 8, group: 32, mode: "mxfp8" }),
    ("nvfp4", Scheme { bits: 4, group: 16, mode: "nvfp4" }),
];

/// What the header of a blob says of the tensors in it.
type Metadata = HashMap<String, String>;

/// Gives the tensors mlx-lm's names and the config the entry that describes them; `true` if the config changed.
pub(super) fn adapt(tensors: &mut [Named<'_>], config: &mut Map<String, Value>, files: Files<'_>) -> bool {
    let by_name: HashMap<String, &Tensor> = tensors.iter().map(|named| (named.name.clone(), named.tensor)).collect();
    let (mut schemes, mut said): (BTreeMap<String, Scheme>, HashMap<Digest, Metadata>) = Default::default();
    for named in tensors.iter_mut() {
        for (part, plural) in [("", ""), (".scale", ".scales"), (".bias", ".biases")] {
            let Some(weight) = named.name.strip_suffix(part).filter(|name| name.ends_with(".weight")) else { continue };
            let stem = weight.strip_suffix(".weight").unwrap_or(weight);
            let (Some(packed), scale) = (by_name.get(weight), by_name.get(&format!("{weight}.scale"))) else {
                continue;
            };
            let module = match packed.shape.len() {
                3 => stem.replace(".mlp.experts.", ".mlp.switch_mlp."),
                _ => stem.to_owned(),
            };
            match scale {
                Some(scale) if packed.dtype == Dtype::U32 => {
                    if part.is_empty() {
                        let affine = by_name.contains_key(&format!("{weight}.bias"));
                        // Of a blob of many tensors the header is read once.
                        let said = said.entry(packed.blob).or_insert_with(|| metadata(packed, files));
                        schemes.extend(scheme(weight, packed, scale, affine, said).map(|it| (module.clone(), it)));
                    }
                    named.name = if part.is_empty() { format!("{module}.weight") } else { module + plural };
                }
                _ if part.is_empty() => named.name = format!("{module}.weight"),
                _ => continue,
            }
            break;
        }
    }
    if schemes.is_empty() || config.is_empty() || config.contains_key("quantization") {
        return false;
    }
    let mut counts: BTreeMap<Scheme, usize> = BTreeMap::new();
    schemes.values().for_each(|scheme| *counts.entry(*scheme).or_default() += 1);
    let Some((usual, _)) = counts.into_iter().max_by_key(|(_, count)| *count) else { return false };
    let entry = |it: Scheme| json!({"group_size": it.group, "bits": it.bits, "mode": it.mode});
    let mut quantization = entry(usual);
    for (module, scheme) in schemes.into_iter().filter(|(_, scheme)| *scheme != usual) {
        quantization[module] = entry(scheme);
    }
    config.insert("quantization".into(), quantization.clone());
    config.insert("quantization_config".into(), quantization);
    true
}

/// The metadata of the blob that holds a tensor.
fn metadata(packed: &Tensor, files: Files<'_>) -> Metadata {
    let bytes = BlobBytes { blobs: files.0, digest: packed.blob, len: packed.blob_len };
    safetensors::parse(&bytes).map(|header| header.metadata.into_iter().collect()).unwrap_or_default()
}

/// How a tensor is quantised, by the metadata of its blob or, without any, by the shapes.
fn scheme(name: &str, packed: &Tensor, scale: &Tensor, affine: bool, said: &Metadata) -> Option<Scheme> {
    let word = |key: &str| said.get(&format!("{name}.{key}")).or_else(|| said.get(key)).map(String::as_str);
    if let Some(kind) = word("quant_type") {
        let known = SCHEMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(kind)).map(|(_, scheme)| *scheme);
        let group = word("group_size").and_then(|text| text.parse().ok());
        return known.map(|scheme| Scheme { group: group.unwrap_or(scheme.group), ..scheme });
    }
    // bits * group follows from the widths of the rows.
    let (words, scales) = (*packed.shape.last()?, *scale.shape.last()?);
    let product = words.saturating_mul(32).checked_div(scales).unwrap_or(0);
    let fits = |scheme: &Scheme| (scheme.mode == "affine") == affine && scheme.bits * scheme.group == product;
    let older = Scheme { bits: 4, group: 32, mode: "affine" };
    SCHEMES.iter().map(|(_, scheme)| *scheme).chain([older]).find(fits)
}
