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
use crate::dtype::Dtype;
use crate::error::Result;
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

/// Gives the tensors mlx-lm's names and the config the entry that describes them; `true` if the config changed.
pub(super) fn adapt(tensors: &mut [Named<'_>], config: &mut Map<String, Value>, files: Files<'_>) -> Result<bool> {
    let by_name: HashMap<String, &Tensor> = tensors.iter().map(|named| (named.name.clone(), named.tensor)).collect();
    let mut schemes: BTreeMap<String, Scheme> = BTreeMap::new();
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
                        schemes.extend(scheme(weight, packed, scale, affine, files)?.map(|it| (module.clone(), it)));
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
        return Ok(false);
    }
    let mut counts: BTreeMap<Scheme, usize> = BTreeMap::new();
    schemes.values().for_each(|scheme| *counts.entry(*scheme).or_default() += 1);
    let Some((usual, _)) = counts.into_iter().max_by_key(|(_, count)| *count) else { return Ok(false) };
    let entry = |it: Scheme| json!({"group_size": it.group, "bits": it.bits, "mode": it.mode});
    let mut quantization = entry(usual);
    for (module, scheme) in schemes.into_iter().filter(|(_, scheme)| *scheme != usual) {
        quantization[module] = entry(scheme);
    }
    config.insert("quantization".into(), quantization.clone());
    config.insert("quantization_config".into(), quantization);
    Ok(true)
}

/// How a tensor is quantised, by the metadata of its blob or, without any, by the shapes.
fn scheme(name: &str, packed: &Tensor, scale: &Tensor, affine: bool, files: Files<'_>) -> Result<Option<Scheme>> {
    let bytes = BlobBytes { blobs: files.0, digest: packed.blob, len: packed.blob_len };
    let metadata = safetensors::parse(&bytes).map(|header| header.metadata).unwrap_or_default();
    let word = |key: &str| {
        let own = format!("{name}.{key}");
        let find = |key: &str| metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str());
        find(&own).or_else(|| find(key))
    };
    if let Some(kind) = word("quant_type") {
        let known = SCHEMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(kind)).map(|(_, scheme)| *scheme);
        let group = word("group_size").and_then(|text| text.parse().ok());
        return Ok(known.map(|scheme| Scheme { group: group.unwrap_or(scheme.group), ..scheme }));
    }
    // bits * group follows from the widths of the rows.
    let (Some(&words), Some(&scales)) = (packed.shape.last(), scale.shape.last()) else { return Ok(None) };
    let product = words.saturating_mul(32).checked_div(scales).unwrap_or(0);
    let fits = |scheme: &Scheme| (scheme.mode == "affine") == affine && scheme.bits * scheme.group == product;
    let older = Scheme { bits: 4, group: 32, mode: "affine" };
    Ok(SCHEMES.iter().map(|(_, scheme)| *scheme).chain([older]).find(fits))
}
