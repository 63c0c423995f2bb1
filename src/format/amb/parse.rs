//! From the bytes of a file to its sections and records.

use std::collections::HashSet;
use std::ops::Range;

use serde_json::{Map, Value};

use crate::dtype::Dtype;
use crate::error::Fault;
use crate::format::{Bytes, MAX_TENSORS, json, too_many_tensors, u32_at, u64_at};

/// Length of the header.
pub(super) const HEADER: u64 = 28;
/// Length of the fixed part of a tokenizer section.
const TOKENIZER: u64 = 11;
/// Bytes of all names and shapes together.
const MAX_NAMES: usize = 128 << 20;
/// The longest JSON section that is read, in bytes.
const MAX_JSON: u64 = 64 << 20;

/// What a file holds.
#[derive(Debug, Clone)]
pub struct File {
    /// The flags as they are: no bit is defined.
    pub flags: u16,
    /// The metadata section, in bytes of the file.
    pub metadata: Range<u64>,
    /// The config section.
    pub config: Range<u64>,
    /// The tokenizer section.
    pub tokenizer: Range<u64>,
    /// The weights section.
    pub weights: Range<u64>,
    /// The tensors in the order of the file.
    pub records: Vec<Record>,
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its name.
    pub name: String,
    /// Its dimensions, slowest first.
    pub shape: Vec<u32>,
    /// Its data type code.
    pub code: u8,
    /// The dtype of its data; `None` for quantised data, which stays opaque.
    pub dtype: Option<Dtype>,
    /// First byte of the data in the file.
    pub offset: u64,
    /// Length of the data in bytes.
    pub len: u64,
}

impl Record {
    /// The data type as the format's document calls it.
    pub fn type_name(&self) -> &'static str {
        ["FP32", "FP16", "BF16", "INT8", "INT4", "INT5", "INT4BLOCK", "INT5BLOCK", "ADAPTIVE"][usize::from(self.code)]
    }

    /// The dimensions as other containers have them.
    pub fn dims(&self) -> Vec<u64> {
        self.shape.iter().map(|&dim| dim.into()).collect()
    }
}

/// Whether a file begins as AMB files do.
pub fn is_amb(head: &[u8]) -> bool {
    head.starts_with(b"AMBEE")
}

/// Parses a file: magic, version, section sizes, sections, records, in this order.
pub fn parse(bytes: &(impl Bytes + ?Sized)) -> Result<File, Fault> {
    if bytes.len() < 5 || bytes.get(0, 5)?[..] != *b"AMBEE" {
        return Err(Fault::new(0, "is no AMB file: it does not begin with AMBEE"));
    }
    if bytes.len() < HEADER {
        return Err(Fault::new(5, format!("the header needs {HEADER} bytes but the file has {}", bytes.len())));
    }
    let header = bytes.get(0, HEADER as usize)?;
    if header[5] != 1 {
        return Err(Fault::new(5, format!("its version is {}, and only 1 is known", header[5])));
    }
    let sizes = [8, 12, 16].map(|at| u64::from(u32_at(&header, at)));
    let weights_size = u64_at(&header, 20);
    let weights_at = HEADER + sizes.iter().sum::<u64>();
    match weights_at.checked_add(weights_size) {
        None => return Err(Fault::new(8, "the sizes of its sections overflow")),
        Some(end) if end > bytes.len() => {
            return Err(Fault::new(8, format!("its sections need {end} bytes but the file has {}", bytes.len())));
        }
        Some(end) if end < bytes.len() => {
            return Err(Fault::new(end, format!("{} bytes follow its last section", bytes.len() - end)));
        }
        Some(_) => {}
    }
    let [metadata, config, tokenizer] = sizes;
    let metadata = HEADER..HEADER + metadata;
    let config = metadata.end..metadata.end + config;
    let tokenizer = config.end..config.end + tokenizer;
    json_section(bytes, "metadata", &metadata)?;
    json_section(bytes, "config", &config)?;
    let length = tokenizer.end - tokenizer.start;
    if length > 0 && length < TOKENIZER {
        let what =
            format!("the tokenizer section has {length} bytes: none or at least {TOKENIZER}, a type and five ids");
        return Err(Fault::new(tokenizer.start, what));
    }
    let weights = weights_at..bytes.len();
    let records = records(bytes, &weights)?;
    Ok(File { flags: u16::from_le_bytes([header[6], header[7]]), metadata, config, tokenizer, weights, records })
}

/// A JSON section's object; an empty section has none.
pub fn json_section(
    bytes: &(impl Bytes + ?Sized),
    what: &str,
    range: &Range<u64>,
) -> Result<Option<Map<String, Value>>, Fault> {
    let fault = |text: String| Fault::new(range.start, format!("the {what} section {text}"));
    let len = range.end - range.start;
    if len == 0 {
        return Ok(None);
    }
    if len > MAX_JSON {
        return Err(fault(format!("has {len} bytes, more than {MAX_JSON}")));
    }
    let text = bytes.get(range.start, len as usize)?;
    let place = |fault: Fault| {
        Fault::new(range.start + fault.at, format!("the {what} section is no JSON object: {}", fault.what))
    };
    json::object(&text).map(Some).map_err(place)
}

fn records(bytes: &(impl Bytes + ?Sized), weights: &Range<u64>) -> Result<Vec<Record>, Fault> {
    let (mut records, mut names, mut held) = (Vec::new(), HashSet::new(), 0usize);
    let mut at = weights.start;
    while at < weights.end {
        let (record, end) = record(bytes, at, weights.end, records.len())?;
        if records.len() == MAX_TENSORS {
            return Err(too_many_tensors(at));
        }
        held = held.saturating_add(record.name.len()).saturating_add(size_of_val(&record.shape[..]));
        if held > MAX_NAMES {
            let what = format!("the names and shapes of its tensors come to more than {} MiB", MAX_NAMES >> 20);
            return Err(Fault::new(at, what));
        }
        if !names.insert(record.name.clone()) {
            return Err(Fault::new(at, format!("tensor {:?} occurs twice", record.name)));
        }
        records.push(record);
        at = end;
    }
    Ok(records)
}

/// The record at `at` and where the next one starts.
fn record(bytes: &(impl Bytes + ?Sized), at: u64, end: u64, index: usize) -> Result<(Record, u64), Fault> {
    let take = |at: u64, len: u64, what: &str| match at.checked_add(len) {
        Some(stop) if stop <= end => bytes.get(at, len as usize),
        _ => Err(Fault::new(at, format!("{what} of tensor number {index} runs past the weights section"))),
    };
    let name_len = take(at, 2, "the length of the name")?;
    let name_len = u64::from(u16::from_le_bytes([name_len[0], name_len[1]]));
    let name_at = at + 2;
    let name = take(name_at, name_len, "the name")?;
    let name = std::str::from_utf8(&name)
        .map_err(|_| Fault::new(name_at, format!("the name of tensor number {index} is not UTF-8")))?
        .to_owned();
    let dims_at = name_at + name_len;
    let dims = u64::from(take(dims_at, 1, "the number of dimensions")?[0]);
    let shape = take(dims_at + 1, 4 * dims, "the shape")?;
    let shape: Vec<u32> = shape.as_chunks().0.iter().map(|&dim| u32::from_le_bytes(dim)).collect();
    let code_at = dims_at + 1 + 4 * dims;
    let tail = take(code_at, 9, "the data type or size")?;
    let (code, len) = (tail[0], u64_at(&tail, 1));
    let offset = code_at + 9;
    let fault = |at: u64, what: String| Fault::new(at, format!("tensor {name:?}: {what}"));
    if code > 8 {
        return Err(fault(code_at, format!("data type {code} is not known")));
    }
    let stop = offset.checked_add(len).filter(|&stop| stop <= end);
    let stop = stop.ok_or_else(|| fault(offset, format!("its {len} bytes run past the weights section")))?;
    let record = Record { name: name.clone(), shape, code, dtype: None, offset, len };
    let dtype = plain_dtype(bytes, &record)?;
    let next = stop.checked_next_multiple_of(8).filter(|&next| next <= end);
    let next = next.ok_or_else(|| fault(stop, "its padding runs past the weights section".into()))?;
    if bytes.get(stop, (next - stop) as usize)?.iter().any(|&byte| byte != 0) {
        return Err(fault(stop, "its padding is not zero".into()));
    }
    Ok((Record { dtype, ..record }, next))
}

/// The dtype of a record's data, checked against its shape; `None` if the data is quantised.
fn plain_dtype(bytes: &(impl Bytes + ?Sized), record: &Record) -> Result<Option<Dtype>, Fault> {
    let Some(dtype) = Dtype::from_amb_code(record.code) else { return Ok(None) };
    let elements = Dtype::elements(&record.dims());
    match dtype.bytes(&record.dims()) {
        Some(len) if len == record.len => Ok(Some(dtype)),
        _ if record.code == 3 && quantised_int8(bytes, record, elements)? => Ok(None),
        _ => {
            let what = format!("its shape {:?} of {} has not {} bytes", record.shape, record.type_name(), record.len);
            Err(Fault::new(record.offset, format!("tensor {:?}: {what}", record.name)))
        }
    }
}

/// Whether INT8 data begins with the prefix of quantised data: only its length tells it from plain bytes.
fn quantised_int8(bytes: &(impl Bytes + ?Sized), record: &Record, elements: Option<u64>) -> Result<bool, Fault> {
    if record.len < 4 {
        return Ok(false);
    }
    let prefix = bytes.get(record.offset, 4)?;
    let block = u64::from(u16::from_le_bytes([prefix[1], prefix[2]]));
    let width = if prefix[3] == 0 { 4 } else { 2 };
    let expected = elements.and_then(|elements| {
        let scales = if block == 0 { 1 } else { elements.div_ceil(block) };
        elements.checked_add(scales.checked_mul(width)?)?.checked_add(4)
    });
    Ok(prefix[0] == 3 && prefix[3] <= 1 && expected == Some(record.len))
}
