//! The text of a compiled program (`model.mil` of an `.mlmodelc`): only what it says of weight files.
//!
//! ```text
//! tensor<fp16, [3, 4]> w = const()[name = string("w"),
//!     val = tensor<fp16, [3, 4]>(BLOBFILE(path = string("@model_path/weights/weight.bin"), offset = uint64(64)))];
//! ```
//!
//! The text is written by Core ML's compiler and described nowhere, so what does not look like this is passed over.

use super::mlprogram::Reference;
use crate::dtype::Dtype;

/// The longest text that is read, in bytes.
pub const MAX_TEXT: u64 = 128 << 20;

const BLOBFILE: &str = "BLOBFILE(";

/// MIL's words for the types that weight files hold.
const DTYPES: [(&str, Dtype); 18] = [
    ("bool", Dtype::Bool),
    ("fp16", Dtype::F16),
    ("fp32", Dtype::F32),
    ("bf16", Dtype::BF16),
    ("int8", Dtype::I8),
    ("int16", Dtype::I16),
    ("int32", Dtype::I32),
    ("int4", Dtype::I4),
    ("uint8", Dtype::U8),
    ("uint16", Dtype::U16),
    ("uint32", Dtype::U32),
    ("uint4", Dtype::U4),
    ("uint2", Dtype::U2),
    ("uint1", Dtype::U1),
    ("uint6", Dtype::U6),
    ("uint3", Dtype::U3),
    ("fp8e4m3fn", Dtype::F8E4M3),
    ("fp8e5m2", Dtype::F8E5M2),
];

/// The references to weight files of a program's text, in its order.
///
/// A statement's name is repeated in each of its references; where all names come to more than the text, the rest of it
/// is passed over.
pub fn references(text: &[u8]) -> Vec<Reference> {
    let Ok(text) = std::str::from_utf8(text) else { return Vec::new() };
    let (mut found, mut names) = (Vec::new(), 0);
    for statement in text.split(';') {
        let name = output(statement);
        let mut parts = statement.split(BLOBFILE);
        let mut before = parts.next().unwrap_or_default();
        for part in parts {
            if let Some(reference) = reference(name, before, part) {
                names += reference.name.len();
                if names > text.len() {
                    return found;
                }
                found.push(reference);
            }
            before = part;
        }
    }
    found
}

/// The name that a statement gives its first output: the last word before ` = op(inputs)[attributes]`.
fn output(statement: &str) -> &str {
    let (head, _) = statement.split_once(")[").unwrap_or((statement, ""));
    let line = head.lines().next_back().unwrap_or_default();
    let (left, _) = line.split_once(" = ").unwrap_or((line, ""));
    left.split_whitespace().next_back().unwrap_or_default()
}

/// One reference, from the text before its `BLOBFILE(` and after it, each up to the next one.
fn reference(name: &str, before: &str, after: &str) -> Option<Reference> {
    let (value, ty) = before.strip_suffix('(')?.rsplit_once("tensor<")?;
    let (dtype, shape) = ty.strip_suffix('>')?.split_once(',')?;
    let (_, dtype) = DTYPES.into_iter().find(|(word, _)| *word == dtype.trim())?;
    let dimensions = shape.trim().strip_prefix('[')?.strip_suffix(']')?;
    let dimensions = dimensions.split(',').map(str::trim).filter(|size| !size.is_empty());
    let shape = dimensions.map(|size| size.parse().ok()).collect::<Option<Vec<u64>>>()?;
    let key = value.trim_end().strip_suffix('=')?.split(['[', ',', '(']).next_back()?.trim();
    let (arguments, _) = after.split_once("))")?;
    let (path, offset) = arguments.split_once("\"")?.1.split_once('"')?;
    let offset = offset.rsplit_once('(')?.1.trim().parse().ok()?;
    let name = if key == "val" { name.to_owned() } else { format!("{name}.{key}") };
    Some(Reference { name, dtype, shape, file: path.into(), offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"program(1.0)
[buildInfo = dict<tensor<string, []>, tensor<string, []>>({{"coremlc-version", "3400.43.1"}})]
{
    func main<ios17>(tensor<fp32, [1, 4]> x) {
            tensor<fp16, [3, 4]> w = const()[name = tensor<string, []>("w"), val = tensor<fp16, [3, 4]>(BLOBFILE(path = tensor<string, []>("@model_path/weights/weight.bin"), offset = tensor<uint64, []>(64)))];
            tensor<fp16, [9]> p = constexpr_lut_to_dense()[indices = tensor<uint8, [7]>(BLOBFILE(path = string("@model_path/weights/weight.bin"), offset = uint64(256))), lut = tensor<fp16, [4]>([0, 1, 2, 3]), name = string("p")];
            tensor<fp32, []> odd = const()[val = fp32(BLOBFILE(path = string("x"), offset = uint64(1)))];
        } -> (w);
}"#;

    #[test]
    fn references_are_found_and_other_things_are_passed_over() {
        let found = references(TEXT.as_bytes());
        let file = "@model_path/weights/weight.bin".to_owned();
        let reference = |name: &str, dtype, shape: &[u64], offset| Reference {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            file: file.clone(),
            offset,
        };
        assert_eq!(found, [reference("w", Dtype::F16, &[3, 4], 64), reference("p.indices", Dtype::U8, &[7], 256)]);
        assert_eq!(references(b"\xff"), []);
        assert_eq!(references(b"BLOBFILE(BLOBFILE(;=BLOBFILE("), []);
    }

    #[test]
    fn a_statement_of_many_references_costs_no_more_than_its_text() {
        let open = "a = tensor<fp16, [1]>(BLOBFILE(";
        assert_eq!(references(open.repeat(1 << 19).as_bytes()), []);
        let whole = format!("{open}path = \"x\", offset = uint64(64))), ");
        let text = format!("int {} = const()[{}", "n".repeat(1 << 20), whole.repeat(1 << 16));
        let found = references(text.as_bytes());
        assert!(!found.is_empty() && found.iter().map(|reference| reference.name.len()).sum::<usize>() <= text.len());
    }
}
