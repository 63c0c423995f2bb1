//! safetensors: u64 header length, JSON header, data.
//!
//! The rules are those of the Rust crate (`safetensors/src/tensor.rs`), the strictest reader: the header is at most
//! 100,000,000 bytes, the tensors tile the data exactly, sizes follow from dtype and shape. Names that occur twice
//! are refused, also where the crate takes the last one.
//!
//! Three kinds of header are written: that of a tensor blob in the store, whose one tensor is called `data`, so that
//! the blob's digest does not depend on the tensor's name; that of an ollama blob, which carries the name; and that
//! of a whole file.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::{Bytes, MAX_TENSORS, json};
use crate::dtype::Dtype;
use crate::error::Fault;

/// The longest header that readers accept, in bytes.
pub const MAX_HEADER: u64 = 100_000_000;

/// The entry of a header that is no tensor.
const METADATA: &str = "__metadata__";

/// The most entries of `__metadata__`.
const MAX_METADATA: usize = 1 << 18;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRange {
    /// Its name, any string.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: Vec<u64>,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// A parsed header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Where the data begins: 8 and the header's length.
    pub data_start: u64,
    /// The tensors in the order of their data.
    pub tensors: Vec<TensorRange>,
    /// The entries of `__metadata__`.
    pub metadata: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct RawTensor<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's entries in the order of the file; a map would hide a name that occurs twice.
#[derive(Default)]
struct RawHeader<'a> {
    tensors: Vec<(String, RawTensor<'a>)>,
    metadata: Vec<(String, String)>,
}

impl<'de> Deserialize<'de> for RawHeader<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader<'de>, A::Error> {
                let mut raw = RawHeader::default();
                let mut metadata = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key == METADATA {
                        // MLX writes null when it is given none.
                        let entries = map.next_value::<Option<Metadata>>()?.unwrap_or_default().0;
                        if metadata.replace(entries).is_some() {
                            return Err(serde::de::Error::duplicate_field(METADATA));
                        }
                    } else if raw.tensors.len() < MAX_TENSORS {
                        raw.tensors.push((key, map.next_value()?));
                    } else {
                        return Err(serde::de::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    }
                }
                raw.metadata = metadata.unwrap_or_default();
                Ok(raw)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// The entries of `__metadata__`.
#[derive(Default)]
struct Metadata(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings as __metadata__")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    if pairs.len() == MAX_METADATA {
                        let what = format!("more than {MAX_METADATA} entries of __metadata__");
                        return Err(serde::de::Error::custom(what));
                    }
                    pairs.push(pair);
                }
                Ok(Metadata(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// Reads the header of a file.
///
/// Every fault names its place: byte 0 for the length, 8 for the header's text, the tensor's offset otherwise.
pub fn parse(bytes: &(impl Bytes + ?Sized)) -> Result<Header, Fault> {
    let header_len = super::u64_at(&bytes.get(0, 8)?, 0);
    let data_start = header_len.checked_add(8).filter(|&end| end <= bytes.len()).ok_or_else(|| {
        Fault::new(0, format!("the header claims {header_len} bytes but the file has {} in all", bytes.len()))
    })?;
    if header_len > MAX_HEADER {
        return Err(Fault::new(0, format!("the header has {header_len} bytes, more than {MAX_HEADER}")));
    }
    let text = bytes.get(8, header_len as usize)?;
    let raw: RawHeader =
        json::typed(&text).map_err(|fault| Fault::new(8 + fault.at, format!("header: {}", fault.what)))?;
    let mut tensors = Vec::with_capacity(raw.tensors.len());
    for (name, tensor) in raw.tensors {
        tensors.push(tensor_range(name, tensor, data_start, bytes.len())?);
    }
    check_names(&tensors)?;
    check_tiling(&mut tensors, data_start, bytes.len())?;
    Ok(Header { data_start, tensors, metadata: raw.metadata })
}

fn tensor_range(name: String, raw: RawTensor, data_start: u64, file_len: u64) -> Result<TensorRange, Fault> {
    let (begin, end) = raw.data_offsets;
    let fault = |what: String| {
        let name: String = name.chars().take(200).collect();
        Fault::new(data_start.saturating_add(begin), format!("tensor {name:?}: {what}"))
    };
    let dtype: Dtype = raw.dtype.parse().map_err(fault)?;
    if !dtype.in_safetensors() {
        return Err(fault(format!("{dtype} is no safetensors dtype")));
    }
    let offset = data_start.checked_add(begin);
    let len = end.checked_sub(begin).ok_or_else(|| fault(format!("its data ends at {end} but begins at {begin}")))?;
    let offset = offset
        .filter(|offset| offset.checked_add(len).is_some_and(|end| end <= file_len))
        .ok_or_else(|| fault(format!("its data ends at {end}, past the end of the file")))?;
    let bits = Dtype::elements(&raw.shape).and_then(|n| n.checked_mul(dtype.bits().into()));
    match bits {
        Some(bits) if bits % 8 == 0 && bits / 8 == len => {
            Ok(TensorRange { name, dtype, shape: raw.shape, offset, len })
        }
        _ => Err(fault(format!("{dtype} {:?} does not fill {len} bytes", raw.shape))),
    }
}

/// Sorts the tensors by their data and checks that they cover it without hole or overlap.
fn check_tiling(tensors: &mut [TensorRange], data_start: u64, file_len: u64) -> Result<(), Fault> {
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.len));
    let mut end = data_start;
    for tensor in tensors.iter() {
        if tensor.offset != end {
            let relation =
                if tensor.offset < end { "overlaps the tensor before it" } else { "leaves a hole before it" };
            return Err(Fault::new(tensor.offset, format!("tensor {:?} {relation}", tensor.name)));
        }
        end = tensor.offset + tensor.len;
    }
    if end != file_len {
        return Err(Fault::new(end, format!("{} bytes belong to no tensor", file_len - end)));
    }
    Ok(())
}

fn check_names(tensors: &[TensorRange]) -> Result<(), Fault> {
    let mut seen = std::collections::HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|tensor| !seen.insert(&tensor.name)) {
        Some(twice) => Err(Fault::new(twice.offset, format!("tensor {:?} occurs twice", twice.name))),
        None => Ok(()),
    }
}

/// The bytes before the data of a tensor blob of the store.
///
/// `stored` is the dtype and shape that safetensors can name; types it cannot are stored as U8.
pub fn blob_header(dtype: Dtype, shape: &[u64], len: u64) -> Vec<u8> {
    let mut text = String::from("{");
    if dtype.in_safetensors() {
        push_entry(&mut text, "\"data\"", dtype, shape, 0, len);
    } else {
        push_entry(&mut text, "\"data\"", Dtype::U8, &[len], 0, len);
    }
    text.push('}');
    finish(text)
}

/// The bytes before the data of an ollama tensor blob: as its writer does it, with the name as Go's JSON escapes it.
pub fn named_header(name: &str, dtype: Dtype, shape: &[u64], len: u64) -> Vec<u8> {
    let mut text = String::from("{");
    push_entry(&mut text, &go_string(name), dtype, shape, 0, len);
    text.push('}');
    finish(text)
}

/// The bytes before the data of a whole file whose tensors follow each other in the given order.
///
/// A tensor is its name, dtype, shape and length in bytes.
pub fn file_header<'a>(
    metadata: &[(&str, &str)],
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64], u64)>,
) -> Vec<u8> {
    let mut text = String::from("{");
    if !metadata.is_empty() {
        let pairs: Vec<String> =
            metadata.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
        text += &format!("\"__metadata__\":{{{}}}", pairs.join(","));
    }
    let mut begin = 0;
    for (name, dtype, shape, len) in tensors {
        if text.len() > 1 {
            text.push(',');
        }
        push_entry(&mut text, &quoted(name), dtype, shape, begin, len);
        begin += len;
    }
    text.push('}');
    finish(text)
}

/// Sorts as the Rust crate writes: widest dtype first, then by name.
pub fn sort_key<'a>(dtype: Dtype, name: &'a str) -> impl Ord + 'a {
    (std::cmp::Reverse(dtype), name)
}

fn push_entry(text: &mut String, key: &str, dtype: Dtype, shape: &[u64], begin: u64, len: u64) {
    *text += &format!("{key}:{{\"dtype\":\"{dtype}\",\"shape\":[");
    for (index, dim) in shape.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        *text += &dim.to_string();
    }
    *text += &format!("],\"data_offsets\":[{begin},{}]}}", begin + len);
}

/// Pads with spaces to a multiple of 8 and puts the length before it.
fn finish(mut text: String) -> Vec<u8> {
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(text.as_bytes());
    header
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A string as Go's `encoding/json` writes it.
///
/// serde_json differs in `<`, `>`, `&`, U+2028 and U+2029, which Go escapes; both write `\b` and `\f` short
/// and other control characters as `\u00xx`, lower case.
pub fn go_string(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 2);
    for char in quoted(text).chars() {
        match char {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => escaped += &format!("\\u{:04x}", char as u32),
            _ => escaped.push(char),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn parse_text(header: &str, data: usize) -> Result<Header, Fault> {
        parse(file(header, data).as_slice())
    }

    #[test]
    fn reads_what_the_libraries_write() {
        let mlx = r#"{"__metadata__":null,"b":{"data_offsets":[4,8],"dtype":"F32","shape":[]},"a":{"data_offsets":[0,4],"dtype":"BF16","shape":[2]}}"#;
        let header = parse_text(mlx, 8).expect("valid");
        assert_eq!(header.tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(header.tensors[1].offset, header.data_start + 4);
        let hf = r#"{"__metadata__":{"format":"pt"},"":{"dtype":"U8","shape":[0,9],"data_offsets":[0,0]}}  "#;
        assert_eq!(parse_text(hf, 0).expect("valid").metadata, [("format".into(), "pt".into())]);
        assert!(parse_text("{}", 0).expect("valid").tensors.is_empty());
    }

    #[test]
    fn refuses_what_is_broken() {
        let t = |name: &str, dtype: &str, shape: &str, offsets: &str| {
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
        };
        for (header, data, fault) in [
            (t("a", "F32", "[1]", "[0,4]"), 3, "past the end"),
            (t("a", "F32", "[2]", "[0,4]"), 4, "does not fill"),
            (t("a", "F32", "[4294967296,4294967296]", "[0,0]"), 0, "does not fill"),
            (t("a", "F4", "[3]", "[0,2]"), 2, "does not fill"),
            (t("a", "F32", "[1]", "[4,0]"), 4, "ends at 0 but begins at 4"),
            (t("a", "F32", "[1]", "[18446744073709551615,18446744073709551615]"), 4, "past the end"),
            (t("a", "I4", "[2]", "[0,1]"), 1, "no safetensors dtype"),
            (t("a", "F33", "[1]", "[0,4]"), 4, "no known dtype"),
            (t("a", "F32", "[-1]", "[0,4]"), 4, "header:"),
            (t("a", "F32", "[1.0]", "[0,4]"), 4, "header:"),
            (t("a", "F32", "[1]", "[0,4]"), 5, "belong to no tensor"),
            (t("a", "F32", "[1]", "[1,5]"), 5, "hole"),
            (t("a", "U8", "[4]", "[0,4]") + "," + &t("b", "U8", "[2]", "[2,4]"), 4, "overlaps"),
            (t("a", "U8", "[2]", "[0,2]") + "," + &t("a", "U8", "[2]", "[2,4]"), 4, "occurs twice"),
            (t("a", "U8", "[2]", "[0,2]") + "," + &t("a", "U8", "[2]", "[0,2]"), 2, "occurs twice"),
            (r#""__metadata__":{},"__metadata__":null"#.into(), 0, "duplicate field"),
            (r#""__metadata__":{"a":1}"#.into(), 0, "expected a string"),
            (r#""__metadata__":[]"#.into(), 0, "an object of strings as __metadata__"),
        ] {
            let error = parse_text(&format!("{{{header}}}"), data).expect_err(&header).to_string();
            assert!(error.contains(fault), "{header}: {error}");
        }
        assert!(parse([1, 2, 3].as_slice()).is_err());
        assert!(parse(u64::MAX.to_le_bytes().as_slice()).expect_err("length").what.contains("claims"));
        assert!(parse_text("[]", 0).is_err());
        assert!(parse(file("{\"\u{1}\":1}", 0).as_slice()).is_err());
    }

    #[test]
    fn header_bytes_are_fixed() {
        let header = blob_header(Dtype::BF16, &[2560, 9728], 49_807_360);
        let text = r#"{"data":{"dtype":"BF16","shape":[2560,9728],"data_offsets":[0,49807360]}}"#;
        assert_eq!(&header[..8], 80u64.to_le_bytes());
        assert_eq!(std::str::from_utf8(&header[8..]), Ok(format!("{text:<80}").as_str()));
        let packed = blob_header(Dtype::I4, &[3], 2);
        assert!(std::str::from_utf8(&packed[8..]).expect("ASCII").contains(r#""dtype":"U8","shape":[2]"#));
        assert_eq!(go_string("a<b>&\u{2028}\"\u{1}\u{8}"), r#""a\u003cb\u003e\u0026\u2028\"\u0001\b""#);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), text in ".{0,80}") {
            let _ = parse(bytes.as_slice());
            let _ = parse_text(&text, 3);
        }

        #[test]
        fn what_is_written_is_read(names in prop::collection::btree_set(".{0,12}", 1..6), len in 0u64..50) {
            prop_assume!(!names.contains("__metadata__"));
            let shape = [len];
            let header = file_header(&[("format", "pt")], names.iter().map(|n| (n.as_str(), Dtype::U8, &shape[..], len)));
            prop_assert_eq!(header.len() % 8, 0);
            let mut bytes = header.clone();
            bytes.resize(header.len() + names.len() * len as usize, 7);
            let parsed = parse(bytes.as_slice())?;
            prop_assert_eq!(parsed.data_start, header.len() as u64);
            let mut read: Vec<String> = parsed.tensors.into_iter().map(|tensor| tensor.name).collect();
            read.sort();
            prop_assert_eq!(read, names.into_iter().collect::<Vec<_>>());
        }
    }
}
