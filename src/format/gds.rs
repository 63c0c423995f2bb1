//! gds_export: a directory with one raw file per tensor and `manifest.json`, as oLLM reads it.
//!
//! ```json
//! {"model.layers.0.mlp.up_proj.weight": {
//!     "path": "model__layers__0__mlp__up_proj__weight.bin", "dtype": "float16", "shape": [11008, 4096]}}
//! ```
//!
//! A file is the tensor's bytes in C order from byte 0 on and nothing else, so its size is that of its shape and dtype.
//! `dtype` is torch's name. Exporters also write pickled tensors (`.pt`, dtype `torch.bfloat16`) and packed ones
//! (`"packed": "mxfp4"`): both are refused by name, and nothing of a file is ever executed.
//!
//! A tensor's file has its name with every `.` and `/` replaced by `__`. Files made by wmount end in `.bin`, in `@raw` in `.raw`.
//!
//! # Encoded tensors
//!
//! A tensor that is encoded for its way to the device has an object `transport` ([`Transport`]) beside these three,
//! which then say what the file at `path` holds: encoded elements, of the encoded type. There is one encoding,
//! [`FP8_ROWS`], of float32, float16 and bfloat16 tensors of two dimensions or more that are not empty; all others are plain
//! files. Two files are of a tensor of shape `[rows, ...]`:
//!
//! | file | bytes |
//! |---|---|
//! | `.fp8` | one for each element, in C order: e4m3fn, which is a sign bit, 4 bits of exponent with the bias 7 and 3 of fraction, without infinities; 0x7f and 0xff are NaN, 448 is the largest |
//! | `.scale` | a little-endian fp32 for each row, which is what one index of the first dimension selects |
//!
//! An element is its code times the scale of its row, in fp32, rounded to the decoded type. They are made so, in IEEE 754 with
//! rounding to nearest even and subnormal numbers; BF16 and FP16 elements are first made FP32, exactly:
//!
//! 1. `max` is the largest finite absolute value of the row; infinities and NaN are passed over.
//! 2. `scale = max / 448` in FP32, a division; at least 2^-126, since some devices take subnormal numbers for 0. A row whose
//!    `max` is 0 has the scale 1.
//! 3. `q = x / scale` in FP32, a division. It is limited to `-448..448`, which is what infinities become, and rounded to the
//!    nearest e4m3fn, of two as near to the one whose last bit is 0. The sign stays, also that of a zero and of a NaN.
//!
//! `checksum` is the sha256 of the `.fp8` file; a reader should see for itself that scales are finite and positive. Where an
//! artefact breaks a rule, none of the export is to be used, and the plain export takes its place. `decode_location` is the
//! place that the encoding is meant for: a reader may decode elsewhere, and says so.

use std::collections::HashMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::json;
use crate::dtype::Dtype;
use crate::error::Fault;
use crate::model::check_path;

/// The manifest's name.
pub const MANIFEST: &str = "manifest.json";
/// The longest manifest that is read, in bytes.
pub const MAX_MANIFEST: u64 = 64 << 20;
/// Extensions of raw files.
pub const EXTENSIONS: [&str; 2] = ["bin", "raw"];
/// Extensions of files that only a pickle interpreter could read.
const PICKLED: [&str; 5] = ["pt", "pth", "ckpt", "pkl", "pickle"];

/// Identifies e4m3fn elements with a scale per output row; a reader that does not know it must not read the tensor.
pub const FP8_ROWS: &str = "fp8-e4m3fn-rows";
/// Identifies scales that are little-endian fp32 numbers, one for each output row, in order.
pub const ROW_SCALES: &str = "fp32-rows";
/// Where the encoded elements are to be decoded: on the device that they were moved to.
pub const CUDA_UPCAST: &str = "cuda-upcast";

/// How a tensor is encoded for its way to the device. The stored tensor stays the authoritative one, and what the device
/// computes in is its own affair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transport {
    /// Stable name of the encoding, such as [`FP8_ROWS`].
    pub encoding: String,
    /// Element type of the encoded file.
    pub encoded_dtype: String,
    /// Length of the encoded file in bytes.
    pub encoded_nbytes: u64,
    /// Element type after decoding: that of the stored tensor.
    pub decoded_dtype: String,
    /// Shape after decoding.
    pub decoded_shape: Vec<u64>,
    /// Bytes after decoding.
    pub decoded_nbytes: u64,
    /// Stable name of the scales' encoding, such as [`ROW_SCALES`].
    pub scale_encoding: String,
    /// The file of scales.
    pub scale_path: String,
    /// `sha256:` and the digest of the encoded file in hexadecimal.
    pub checksum: String,
    /// Where it is to be decoded, such as [`CUDA_UPCAST`].
    pub decode_location: String,
}

/// A tensor in a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its file, relative to the manifest's directory.
    pub path: String,
    /// Element type of the file.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: Vec<u64>,
    /// How the file is encoded, if it is.
    pub transport: Option<Transport>,
}

impl Entry {
    /// The length that its file must have. Checked when the entry was made or parsed.
    pub fn len(&self) -> u64 {
        self.dtype.bytes(&self.shape).unwrap_or(u64::MAX)
    }

    /// Whether its file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks the length of its file.
    pub fn check_len(&self, len: u64) -> Result<(), Fault> {
        if len == self.len() {
            return Ok(());
        }
        let (dtype, shape) = (torch_name(self.dtype).unwrap_or_default(), &self.shape);
        Err(fault(&self.name, format!("{dtype} {shape:?} is {} bytes, but {:?} has {len}", self.len(), self.path)))
    }
}

/// What torch calls a dtype, without `torch.`; `None` if it has no such type.
pub fn torch_name(dtype: Dtype) -> Option<&'static str> {
    TORCH.iter().find(|(other, _)| *other == dtype).map(|(_, name)| *name)
}

/// The dtype of a torch name.
pub fn from_torch_name(name: &str) -> Option<Dtype> {
    TORCH.iter().find(|(_, other)| *other == name).map(|(dtype, _)| *dtype)
}

const TORCH: [(Dtype, &str); 19] = [
    (Dtype::Bool, "bool"),
    (Dtype::U8, "uint8"),
    (Dtype::I8, "int8"),
    (Dtype::F8E5M2, "float8_e5m2"),
    (Dtype::F8E4M3, "float8_e4m3fn"),
    (Dtype::F8E8M0, "float8_e8m0fnu"),
    (Dtype::F8E4M3Fnuz, "float8_e4m3fnuz"),
    (Dtype::F8E5M2Fnuz, "float8_e5m2fnuz"),
    (Dtype::I16, "int16"),
    (Dtype::U16, "uint16"),
    (Dtype::F16, "float16"),
    (Dtype::BF16, "bfloat16"),
    (Dtype::I32, "int32"),
    (Dtype::U32, "uint32"),
    (Dtype::F32, "float32"),
    (Dtype::C64, "complex64"),
    (Dtype::F64, "float64"),
    (Dtype::I64, "int64"),
    (Dtype::U64, "uint64"),
];

/// The file name that exporters give a tensor, without its extension. Theirs have no slash, which no file name may have.
pub fn file_stem(name: &str) -> String {
    name.replace(['.', '/'], "__")
}

/// Parses a manifest. The files themselves are checked by [`Entry::check_len`].
pub fn parse(bytes: &[u8]) -> Result<Vec<Entry>, Fault> {
    let fields: Fields = json::loose(bytes)?;
    let mut entries: Vec<Entry> = Vec::new();
    let (mut names, mut paths) = (HashMap::new(), HashMap::new());
    for (name, value) in fields.0 {
        if names.insert(name.clone(), ()).is_some() {
            return Err(fault(&name, "occurs twice".into()));
        }
        let entry = entry(name, &value)?;
        if let Some(other) = paths.insert(entry.path.clone(), entry.name.clone()) {
            return Err(fault(&entry.name, format!("has the file {:?}, which is that of {other:?}", entry.path)));
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn entry(name: String, value: &Value) -> Result<Entry, Fault> {
    let wrong = |what: String| fault(&name, what);
    let field = |key: &str| value.get(key).ok_or_else(|| wrong(format!("has no {key}")));
    let text = |key: &str| field(key)?.as_str().ok_or_else(|| wrong(format!("its {key} is no text")));
    match value.get("packed") {
        None | Some(Value::Null) => {}
        Some(packed) => return Err(wrong(format!("is packed as {packed}: only plain tensors can be read"))),
    }
    if value.get("transport").is_some_and(|transport| !transport.is_null()) {
        return Err(wrong("is encoded for transport: import the export that it was made of".into()));
    }
    let path = text("path")?.to_owned();
    check_path(&path).map_err(wrong)?;
    check_extension(&path, &EXTENSIONS).map_err(wrong)?;
    let dtype = text("dtype")?;
    if dtype.starts_with("torch") {
        return Err(wrong(format!(
            "its dtype {dtype:?} says that it was pickled by torch: only raw files can be read"
        )));
    }
    let unknown = || wrong(format!("its dtype {:?} is not known", dtype.chars().take(40).collect::<String>()));
    let dtype = from_torch_name(dtype).ok_or_else(unknown)?;
    let shape = field("shape")?.as_array().ok_or_else(|| wrong("its shape is no list".into()))?;
    let shape: Option<Vec<u64>> = shape.iter().map(Value::as_u64).collect();
    let shape = shape.ok_or_else(|| wrong("its shape is no list of sizes".into()))?;
    dtype.bytes(&shape).ok_or_else(|| wrong(format!("its shape {shape:?} is too large")))?;
    Ok(Entry { path, dtype, shape, transport: None, name })
}

/// Whether a path ends as it must; what only a pickle interpreter could read is named as that.
fn check_extension(path: &str, allowed: &[&str]) -> Result<(), String> {
    let file = path.rsplit('/').next().unwrap_or(path);
    let extension = file.rsplit_once('.').map_or("", |(_, extension)| extension).to_ascii_lowercase();
    if allowed.contains(&extension.as_str()) {
        return Ok(());
    }
    if PICKLED.contains(&extension.as_str()) {
        return Err(format!("{path:?} is a pickle, which can run code: only raw files are read"));
    }
    Err(format!("{path:?} does not end in .{}", allowed.join(" or .")))
}

fn fault(name: &str, what: String) -> Fault {
    Fault::new(0, format!("tensor {:?}: {what}", name.chars().take(200).collect::<String>()))
}

/// Renders a manifest as exporters do: an object in the order of the entries, indented by two.
///
/// # Panics
/// If a dtype has no name in torch.
pub fn render(entries: &[Entry]) -> Vec<u8> {
    let mut manifest = Map::with_capacity(entries.len());
    for entry in entries {
        let dtype = torch_name(entry.dtype).expect("the layout checked that torch has the dtype");
        let mut fields = serde_json::json!({"path": entry.path, "dtype": dtype, "shape": entry.shape});
        if let (Some(transport), Some(fields)) = (&entry.transport, fields.as_object_mut()) {
            fields.insert("transport".into(), serde_json::to_value(transport).expect("a transport is plain data"));
        }
        manifest.insert(entry.name.clone(), fields);
    }
    serde_json::to_vec_pretty(&manifest).expect("a manifest is plain data")
}

/// An object whose repeated keys are all seen.
struct Fields(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_survives() {
        let entry = |name: &str, dtype, shape: &[u64]| Entry {
            name: name.into(),
            path: file_stem(name) + ".bin",
            dtype,
            shape: shape.into(),
            transport: None,
        };
        let entries = [entry("b.weight", Dtype::BF16, &[2, 3]), entry("a", Dtype::F32, &[])];
        let text = render(&entries);
        assert_eq!(parse(&text), Ok(entries.to_vec()));
        assert!(
            text.starts_with(b"{\n  \"b.weight\": {\n    \"path\": \"b__weight.bin\",\n    \"dtype\": \"bfloat16\",")
        );
        assert_eq!(entries[0].check_len(12), Ok(()));
        let words = entries[0].check_len(11).expect_err("too short").what;
        assert!(words.contains("b.weight") && words.contains("12 bytes") && words.contains("11"), "{words}");
    }

    #[test]
    fn every_rule_refuses_by_name() {
        let of = |fields: &str| format!(r#"{{"t": {{{fields}}}}}"#);
        let with = |path: &str, dtype: &str, shape: &str| {
            of(&format!(r#""path": "{path}", "dtype": "{dtype}", "shape": {shape}"#))
        };
        assert!(parse(with("a/t.raw", "float16", "[2]").as_bytes()).is_ok());
        assert!(parse(of(r#""path": "t.bin", "dtype": "int8", "shape": [], "packed": null"#).as_bytes()).is_ok());
        for (text, reason) in [
            ("[]".into(), "object of tensors"),
            ("{".into(), "EOF"),
            (r#"{"t": 1}"#.into(), "has no path"),
            (with("../t.bin", "float16", "[2]"), "plain relative path"),
            (with("/t.bin", "float16", "[2]"), "plain relative path"),
            (with("t.pt", "float16", "[2]"), "pickle"),
            (with("t.PKL", "float16", "[2]"), "pickle"),
            (with("t.npy", "float16", "[2]"), ".bin or .raw"),
            (with("bin", "float16", "[2]"), ".bin or .raw"),
            (with("t.bin", "torch.bfloat16", "[2]"), "pickled by torch"),
            (with("t.bin", "float4", "[2]"), "not known"),
            (with("t.bin", "float16", "2"), "no list"),
            (with("t.bin", "float16", "[-2]"), "sizes"),
            (with("t.bin", "float16", "[1.5]"), "sizes"),
            (with("t.bin", "float16", "[9223372036854775807, 2]"), "too large"),
            (of(r#""path": 1, "dtype": "int8", "shape": []"#), "no text"),
            (of(r#""path": "t.bin", "dtype": "int8", "shape": [], "packed": "mxfp4""#), "mxfp4"),
            (of(r#""path": "t.fp8", "dtype": "float8_e4m3fn", "shape": [], "transport": {}"#), "the export that it was made of"),
            (
                r#"{"t": {"path": "t.bin", "dtype": "int8", "shape": []}, "t": {"path": "u.bin", "dtype": "int8", "shape": []}}"#.into(),
                "twice",
            ),
            (
                r#"{"t": {"path": "t.bin", "dtype": "int8", "shape": []}, "u": {"path": "t.bin", "dtype": "int8", "shape": []}}"#.into(),
                "which is that of",
            ),
        ] {
            let fault = parse(text.as_bytes()).expect_err(&text);
            assert!(fault.what.contains(reason), "{text}: {fault}");
        }
    }

    #[test]
    fn torch_names_are_unique() {
        for (dtype, name) in TORCH {
            assert_eq!((torch_name(dtype), from_torch_name(name)), (Some(name), Some(dtype)));
        }
    }
}
