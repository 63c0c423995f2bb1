//! From sections and tensors to a file.

use crate::dtype::Dtype;
use crate::extent::ExtentMap;
use crate::model::Tensor;

use super::Variant;
use super::parse::HEADER;

/// The sections before the weights. An absent JSON section is empty.
#[derive(Debug, Clone, Default)]
pub struct Sections {
    /// JSON object, or nothing.
    pub metadata: Vec<u8>,
    /// JSON object, or nothing.
    pub config: Vec<u8>,
    /// Type byte, five u16 special token ids and the vocabulary, or nothing.
    pub tokenizer: ExtentMap,
}

/// Why AMB cannot hold a tensor, if it cannot.
pub fn refusal(tensor: &Tensor) -> Option<String> {
    let name = &tensor.name;
    if tensor.dtype.amb_code().is_none() {
        return Some(format!("tensor {name:?} is {}, which AMB has no code for", tensor.dtype));
    }
    if name.len() > usize::from(u16::MAX) {
        return Some(format!("the name of a tensor has {} bytes, more than 65535", name.len()));
    }
    if tensor.shape.len() > usize::from(u8::MAX) || tensor.shape.iter().any(|&dim| dim > u32::MAX.into()) {
        return Some(format!("tensor {name:?} has the shape {:?}, too large for AMB", tensor.shape));
    }
    None
}

/// The file of these sections and tensors, cast or quantised if a variant says so, or why there is none.
pub fn plan(sections: &Sections, tensors: &[Tensor], variant: Option<Variant>) -> Result<ExtentMap, String> {
    if let Some(reason) = tensors.iter().find_map(refusal) {
        return Err(reason);
    }
    let sizes = [sections.metadata.len() as u64, sections.config.len() as u64, sections.tokenizer.size()];
    let weights_at = HEADER + sizes.iter().sum::<u64>();
    let mut weights = ExtentMap::new();
    for tensor in tensors {
        let computed = variant.and_then(|variant| variant.record(tensor));
        let (code, len) = match &computed {
            Some((code, data)) => (*code, data.size()),
            None => (tensor.dtype.amb_code().expect("refused before"), tensor.len),
        };
        weights.push_inline(&record_header(tensor, code, len));
        match computed {
            Some((_, data)) => weights.append(&data),
            None => tensor.push_to(&mut weights),
        }
        let end = weights_at + weights.size();
        weights.push_zeros(end.next_multiple_of(8) - end);
    }
    let mut header = b"AMBEE\x01\0\0".to_vec();
    for (size, what) in sizes.into_iter().zip(["metadata", "config", "tokenizer"]) {
        let size = u32::try_from(size).map_err(|_| format!("the {what} section has {size} bytes, more than u32"))?;
        header.extend(size.to_le_bytes());
    }
    header.extend(weights.size().to_le_bytes());

    let mut map = ExtentMap::from_bytes(header);
    map.push_inline(&sections.metadata);
    map.push_inline(&sections.config);
    map.append(&sections.tokenizer);
    map.append(&weights);
    Ok(map)
}

fn record_header(tensor: &Tensor, code: u8, len: u64) -> Vec<u8> {
    let mut bytes = (tensor.name.len() as u16).to_le_bytes().to_vec();
    bytes.extend(tensor.name.as_bytes());
    bytes.push(tensor.shape.len() as u8);
    bytes.extend(tensor.shape.iter().flat_map(|&dim| (dim as u32).to_le_bytes()));
    bytes.push(code);
    bytes.extend(len.to_le_bytes());
    bytes
}

/// The dtypes that records of plain data can have.
pub fn dtypes() -> impl Iterator<Item = Dtype> {
    Dtype::all().filter(|dtype| dtype.amb_code().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::extent::tests::MemoryBlobs;
    use crate::format::amb::tests::tensor;

    #[test]
    fn bytes_of_a_small_file() {
        let mut blobs = MemoryBlobs::default();
        let tensors =
            [tensor(&mut blobs, "ab", Dtype::F16, &[1, 3], b"123456"), tensor(&mut blobs, "", Dtype::I8, &[], b"x")];
        let sections = Sections { metadata: b"{}".to_vec(), ..Sections::default() };
        let bytes = plan(&sections, &tensors, None).expect("expressible").read_all(&blobs).expect("readable");
        let mut expected = b"AMBEE\x01\0\0\x02\0\0\0\0\0\0\0\0\0\0\0".to_vec();
        expected.extend((bytes.len() as u64 - 30).to_le_bytes());
        expected.extend(b"{}");
        expected.extend(b"\x02\0ab\x02\x01\0\0\0\x03\0\0\0\x01\x06\0\0\0\0\0\0\0");
        expected.extend(b"123456");
        expected.resize(expected.len().next_multiple_of(8), 0);
        expected.extend(b"\0\0\0\x03\x01\0\0\0\0\0\0\0x");
        expected.resize(expected.len().next_multiple_of(8), 0);
        assert_eq!(bytes, expected);
    }

    #[test]
    fn what_amb_cannot_hold_is_refused() {
        let tensor = |dtype, shape: &[u64]| Tensor {
            name: "t".into(),
            dtype,
            shape: shape.into(),
            blob: Digest::of(b""),
            blob_len: 0,
            offset: 0,
            len: 0,
            named: None,
            plain: None,
        };
        assert_eq!(dtypes().map(Dtype::name).collect::<Vec<_>>(), ["I8", "F16", "BF16", "F32"]);
        assert!(refusal(&tensor(Dtype::I64, &[1])).expect("no code").contains("I64"));
        assert!(refusal(&tensor(Dtype::F32, &[1 << 32, 0])).is_some());
        assert!(refusal(&tensor(Dtype::F32, &[0; 256])).is_some());
        assert!(refusal(&tensor(Dtype::F32, &[0; 255])).is_none());
    }
}
