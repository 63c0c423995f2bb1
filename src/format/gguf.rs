//! GGUF: magic, version, counts, keys with values, tensor descriptions, padding, data. Little-endian.
//!
//! A GGUF file is kept and shown whole, so what is read here is what tells a sound file from a broken one, the few values
//! that ollama's config repeats, and how the parts of a split file are merged. Versions 2 and 3 are the same to a reader;
//! version 1 had other counts.

use std::borrow::Cow;
use std::ops::Range;

use super::{Bytes, u32_at, u64_at};
use crate::error::Fault;

mod merge;

pub use merge::{Merged, Run, merge};

/// What every GGUF file begins with.
const MAGIC: &[u8; 4] = b"GGUF";
/// Most dimensions of a tensor that readers take.
const MAX_DIMS: u32 = 4;
/// Deepest nesting of arrays; writers use none.
const MAX_DEPTH: u32 = 8;
/// Longest key that is looked at; longer ones are none of those that matter here.
const MAX_KEY: u64 = 256;
/// Longest string value that is looked at.
const MAX_WORD: u64 = 4096;
/// The fewest bytes that a key with its value takes.
const KEY_MIN: u64 = 8 + 4 + 1;
/// The fewest bytes that the description of a tensor takes.
const TENSOR_MIN: u64 = 8 + 4 + 4 + 8;
/// Where the first key is.
const START: u64 = 24;
/// Alignment of the data in a file that does not give its own.
const ALIGNMENT: u64 = 32;

/// Says which of several files one is, from 0 on.
const SPLIT_NO: &str = "split.no";
/// Says of how many files one is.
const SPLIT_COUNT: &str = "split.count";

const U16: u32 = 2;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
/// Bytes of a value by its type's code; 0 for strings and arrays.
const VALUE_BYTES: [u64; 13] = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8];

/// ggml's types by code: elements of a block and bytes of one. A row is whole blocks.
const TYPES: [(u32, u64, u64); 35] = [
    (0, 1, 4),
    (1, 1, 2),
    (2, 32, 18),
    (3, 32, 20),
    (6, 32, 22),
    (7, 32, 24),
    (8, 32, 34),
    (9, 32, 40),
    (10, 256, 84),
    (11, 256, 110),
    (12, 256, 144),
    (13, 256, 176),
    (14, 256, 210),
    (15, 256, 292),
    (16, 256, 66),
    (17, 256, 74),
    (18, 256, 98),
    (19, 256, 50),
    (20, 32, 18),
    (21, 256, 110),
    (22, 256, 82),
    (23, 256, 136),
    (24, 1, 1),
    (25, 1, 2),
    (26, 1, 4),
    (27, 1, 8),
    (28, 1, 8),
    (29, 256, 56),
    (30, 1, 2),
    (34, 256, 54),
    (35, 256, 66),
    (39, 32, 17),
    (40, 64, 36),
    (41, 128, 18),
    (42, 64, 18),
];

/// The names of `general.file_type`, in order of code; the empty ones are no longer in use.
const FILE_TYPES: [&str; 41] = [
    "F32",
    "F16",
    "Q4_0",
    "Q4_1",
    "",
    "",
    "",
    "Q8_0",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K_S",
    "Q3_K_M",
    "Q3_K_L",
    "Q4_K_S",
    "Q4_K_M",
    "Q5_K_S",
    "Q5_K_M",
    "Q6_K",
    "IQ2_XXS",
    "IQ2_XS",
    "Q2_K_S",
    "IQ3_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ3_M",
    "IQ2_S",
    "IQ2_M",
    "IQ4_XS",
    "IQ1_M",
    "BF16",
    "",
    "",
    "",
    "TQ1_0",
    "TQ2_0",
    "MXFP4_MOE",
    "NVFP4",
    "Q1_0",
];

/// The name of a `general.file_type`.
pub fn file_type_name(code: u32) -> Option<&'static str> {
    FILE_TYPES.get(code as usize).copied().filter(|name| !name.is_empty())
}

/// What is said of a file as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Header {
    /// `general.architecture`, such as `llama` or `clip`.
    pub architecture: String,
    /// `general.type`, such as `model`, `mmproj` or `adapter`; empty in older files.
    pub kind: String,
    /// `general.file_type`: which quantisation most tensors have.
    pub file_type: Option<u32>,
    /// `split.count`: of how many files this is one; 0 if it is whole.
    pub parts: u64,
    /// Number of tensors.
    pub tensors: u64,
    /// Number of their elements.
    pub elements: u64,
}

/// Why something is no GGUF file by its first bytes; `None` if it is one.
pub fn check_magic(bytes: &(impl Bytes + ?Sized)) -> Result<Option<String>, Fault> {
    let head = bytes.get(0, bytes.len().min(4) as usize)?;
    if *head == *MAGIC {
        return Ok(None);
    }
    Ok(Some(format!("it begins with \"{}\", not with \"GGUF\"", head.escape_ascii())))
}

/// Reads everything before the data, and checks that the data of every tensor is within the file.
pub fn parse(bytes: &(impl Bytes + ?Sized)) -> Result<Header, Fault> {
    walk(bytes, |_| Ok(())).map(|walked| walked.header)
}

/// Where the parts of a file are.
struct Walked {
    header: Header,
    /// How many keys there are.
    keys: u64,
    /// `split.no`: which of several files this is, from 0 on.
    number: Option<u64>,
    /// `split.count`, key and value; empty if it is not there.
    count: Range<u64>,
    alignment: u64,
    /// The descriptions of all tensors.
    tensors: Range<u64>,
    /// Where the data begins.
    data: u64,
    /// Bytes of the data up to the end of the last tensor.
    data_len: u64,
}

/// Reads everything before the data, and gives `each` the tensors in the order of their descriptions.
fn walk(
    bytes: &(impl Bytes + ?Sized),
    mut each: impl FnMut(Description) -> Result<(), Fault>,
) -> Result<Walked, Fault> {
    if let Some(what) = check_magic(bytes)? {
        return Err(Fault::new(0, what));
    }
    let mut cursor = Cursor { bytes, at: 4, window: Cow::Borrowed(&[]), window_at: 0 };
    match cursor.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() <= 0xffff => {
            return Err(Fault::new(4, "is big-endian, which only big-endian machines read"));
        }
        version => return Err(Fault::new(4, format!("is GGUF of version {version}, not 2 or 3"))),
    }
    let (tensors, keys) = (cursor.u64()?, cursor.u64()?);
    let rest = bytes.len().saturating_sub(START);
    if keys > rest / KEY_MIN || tensors > rest / TENSOR_MIN {
        let what = format!("{tensors} tensors and {keys} keys do not fit into {} bytes", bytes.len());
        return Err(Fault::new(8, what));
    }
    let mut header = Header { tensors, ..Header::default() };
    let (mut alignment, mut number, mut count) = (ALIGNMENT, None, 0..0);
    for _ in 0..keys {
        let begin = cursor.at;
        let key = cursor.word(MAX_KEY)?;
        let at = cursor.at;
        let kind = cursor.u32()?;
        match (&*key, kind) {
            ("general.architecture", STRING) => header.architecture = cursor.word(MAX_WORD)?,
            ("general.type", STRING) => header.kind = cursor.word(MAX_WORD)?,
            ("general.file_type", _) => header.file_type = u32::try_from(cursor.integer(kind)?).ok(),
            (SPLIT_NO, _) => number = Some(cursor.integer(kind)?),
            (SPLIT_COUNT, _) => {
                header.parts = cursor.integer(kind)?;
                count = begin..cursor.at;
            }
            ("general.alignment", _) => {
                alignment = cursor.integer(kind)?;
                if !alignment.is_power_of_two() {
                    return Err(Fault::new(at, format!("an alignment of {alignment} is no power of two")));
                }
            }
            _ => cursor.skip_value(kind, MAX_DEPTH)?,
        }
    }
    let begin = cursor.at;
    let (mut end, mut end_at) = (0, cursor.at);
    for _ in 0..tensors {
        let tensor = cursor.tensor(alignment)?;
        header.elements = header.elements.saturating_add(tensor.elements);
        if tensor.end > end {
            (end, end_at) = (tensor.end, tensor.at);
        }
        each(tensor)?;
    }
    let tensors = begin..cursor.at;
    let data = cursor.at.checked_next_multiple_of(alignment);
    let needed = data.and_then(|data| data.checked_add(end));
    match needed {
        Some(needed) if needed <= bytes.len() || end == 0 => {
            Ok(Walked { header, keys, number, count, alignment, tensors, data: needed - end, data_len: end })
        }
        _ => {
            let shown = needed.map_or("more bytes than there can be".into(), |needed| format!("{needed} bytes"));
            Err(Fault::new(end_at, format!("the tensor here needs {shown}, and the file has {}", bytes.len())))
        }
    }
}

/// What is needed of a tensor's description.
struct Description {
    /// Where it is.
    at: u64,
    /// Bytes of the name, which is at `at + 8`.
    name: u64,
    elements: u64,
    /// Where the number is that says where the data begins.
    offset_at: u64,
    /// Where its data begins and ends, from the beginning of all data.
    offset: u64,
    end: u64,
    /// The code of its type, if that is none of those whose sizes are known: `end` is then `offset`.
    unknown: Option<u32>,
}

/// A place in the file, and the bytes around it.
struct Cursor<'a, B: ?Sized> {
    bytes: &'a B,
    at: u64,
    window: Cow<'a, [u8]>,
    window_at: u64,
}

impl<B: Bytes + ?Sized> Cursor<'_, B> {
    /// Moves on by `len` bytes, which must be there.
    fn skip(&mut self, len: u64) -> Result<(), Fault> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let what = || format!("{len} bytes are needed but the file has {} in all", self.bytes.len());
        self.at = end.ok_or_else(|| Fault::new(self.at, what()))?;
        Ok(())
    }

    /// The next `len` bytes, few enough to be held.
    fn take(&mut self, len: usize) -> Result<&[u8], Fault> {
        /// A vocabulary is read word by word, so not every word is to be a read of the file.
        const WINDOW: u64 = 1 << 16;
        let from = self.at;
        self.skip(len as u64)?;
        let held = self.window_at..self.window_at + self.window.len() as u64;
        if !(held.contains(&from) && self.at <= held.end) {
            let size = WINDOW.min(self.bytes.len() - from).max(len as u64);
            (self.window, self.window_at) = (self.bytes.get(from, size as usize)?, from);
        }
        let begin = (from - self.window_at) as usize;
        Ok(&self.window[begin..begin + len])
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        self.take(4).map(|bytes| u32_at(bytes, 0))
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        self.take(8).map(|bytes| u64_at(bytes, 0))
    }

    /// A string of at most `max` bytes; nothing in place of a longer one.
    fn word(&mut self, max: u64) -> Result<String, Fault> {
        let len = self.u64()?;
        if len > max {
            self.skip(len)?;
            return Ok(String::new());
        }
        self.take(len as usize).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// A number that is not negative.
    fn integer(&mut self, kind: u32) -> Result<u64, Fault> {
        let at = self.at;
        let len = VALUE_BYTES.get(kind as usize).copied().filter(|_| !matches!(kind, 6..=9 | 12));
        let len = len.ok_or_else(|| Fault::new(at, format!("type {kind} is no integer, which this key has")))?;
        let mut raw = [0; 8];
        raw[..len as usize].copy_from_slice(self.take(len as usize)?);
        let signed = matches!(kind, 1 | 3 | 5 | 11);
        match raw[len as usize - 1] >> 7 {
            1 if signed => Err(Fault::new(at, "a number is negative that cannot be")),
            _ => Ok(u64::from_le_bytes(raw)),
        }
    }

    fn skip_value(&mut self, kind: u32, depth: u32) -> Result<(), Fault> {
        let at = self.at;
        match kind {
            STRING => {
                let len = self.u64()?;
                self.skip(len)
            }
            ARRAY => {
                let (kind, count) = (self.u32()?, self.u64()?);
                let rest = self.bytes.len() - self.at;
                // Each element takes at least a byte, and a string its length.
                let fits = count.checked_mul(if kind == STRING { 8 } else { 1 }).is_some_and(|len| len <= rest);
                if !fits {
                    return Err(Fault::new(at, format!("an array of {count} does not fit into the file")));
                }
                match VALUE_BYTES.get(kind as usize) {
                    Some(0) if depth == 0 => Err(Fault::new(at, "arrays are nested too deeply")),
                    Some(0) => (0..count).try_for_each(|_| self.skip_value(kind, depth - 1)),
                    Some(size) => self.skip(size.saturating_mul(count)),
                    None => Err(Fault::new(at, format!("there is no type {kind} of values"))),
                }
            }
            _ => match VALUE_BYTES.get(kind as usize) {
                Some(size) => self.skip(*size),
                None => Err(Fault::new(at, format!("there is no type {kind} of values"))),
            },
        }
    }

    fn tensor(&mut self, alignment: u64) -> Result<Description, Fault> {
        let at = self.at;
        let fault = |what: String| Fault::new(at, format!("a tensor {what}"));
        let name = self.u64()?;
        self.skip(name)?;
        let count = self.u32()?;
        if count > MAX_DIMS {
            return Err(fault(format!("has {count} dimensions, more than {MAX_DIMS}")));
        }
        let (mut elements, mut row) = (1_u64, 1);
        for index in 0..count {
            let dim = self.u64()?;
            if index == 0 {
                row = dim;
            }
            elements = elements.checked_mul(dim).ok_or_else(|| fault("has more elements than can be".into()))?;
        }
        let kind = self.u32()?;
        let offset_at = self.at;
        let offset = self.u64()?;
        if !offset.is_multiple_of(alignment) {
            return Err(fault(format!("begins at {offset}, no multiple of {alignment}")));
        }
        // A type that is newer than this table is its reader's affair; where its data begins is known all the same.
        let known = TYPES.iter().find(|(code, ..)| *code == kind);
        let len = match known {
            None => Some(0),
            Some((_, block, _)) if !row.is_multiple_of(*block) => {
                return Err(fault(format!("has rows of {row} elements, no multiple of the {block} of its type")));
            }
            Some((_, block, bytes)) => (elements / block).checked_mul(*bytes),
        };
        let end = len.and_then(|len| offset.checked_add(len));
        let end = end.ok_or_else(|| fault("is larger than a file can be".into()))?;
        let unknown = known.is_none().then_some(kind);
        Ok(Description { at, name, elements, offset_at, offset, end, unknown })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    pub(super) fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        [&string(name)[..], &kind.to_le_bytes(), value].concat()
    }

    pub(super) fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
        let dims: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        let count = (dims.len() as u32 / 8).to_le_bytes();
        [&string(name)[..], &count, &dims, &kind.to_le_bytes(), &offset.to_le_bytes()].concat()
    }

    pub(super) fn file(version: u32, keys: &[Vec<u8>], tensors: &[Vec<u8>], data: usize) -> Vec<u8> {
        let counts = [(tensors.len() as u64).to_le_bytes(), (keys.len() as u64).to_le_bytes()].concat();
        let mut file = [&MAGIC[..], &version.to_le_bytes(), &counts, &keys.concat(), &tensors.concat()].concat();
        file.resize(file.len().next_multiple_of(32) + data, 0);
        file
    }

    fn keys() -> Vec<Vec<u8>> {
        let words = [&STRING.to_le_bytes()[..], &2_u64.to_le_bytes(), &string("a"), &string("bc")].concat();
        let nested = [&ARRAY.to_le_bytes()[..], &1_u64.to_le_bytes(), &2_u32.to_le_bytes(), &3_u64.to_le_bytes()];
        vec![
            key("general.architecture", STRING, &string("llama")),
            key("general.file_type", 4, &7_u32.to_le_bytes()),
            key("general.type", STRING, &string("model")),
            key("tokenizer.ggml.tokens", ARRAY, &words),
            key("nested", ARRAY, &[&nested.concat()[..], &[0; 6]].concat()),
            key("x.eps", 6, &[0; 4]),
        ]
    }

    #[test]
    fn a_file_is_read_up_to_its_data() {
        let tensors = [tensor("a", &[64, 3], 8, 0), tensor("b", &[5], 0, 224), tensor("new", &[7], 99, 256)];
        let bytes = file(3, &keys(), &tensors, 256);
        let expected = Header {
            architecture: "llama".into(),
            kind: "model".into(),
            file_type: Some(7),
            parts: 0,
            tensors: 3,
            elements: 192 + 5 + 7,
        };
        assert_eq!(parse(&bytes[..]), Ok(expected));
        assert_eq!(parse(&file(2, &[], &[], 0)[..]).map(|header| header.tensors), Ok(0));
    }

    #[test]
    fn every_file_that_is_cut_off_is_a_fault_and_none_a_panic() {
        let bytes = file(3, &keys(), &[tensor("a", &[64, 3], 8, 0)], 204);
        assert!(parse(&bytes[..]).is_ok());
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len]).is_err(), "{len}");
        }
        for at in 0..bytes.len() - 204 {
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[at] = byte;
                let _ = parse(&changed[..]);
            }
        }
    }

    #[test]
    fn faults_are_named() {
        let whole = file(3, &keys(), &[], 0);
        let with = |at: usize, bytes: &[u8]| {
            let mut changed = whole.clone();
            changed[at..at + bytes.len()].copy_from_slice(bytes);
            changed
        };
        let of = |tensor: Vec<u8>| file(3, &[], &[tensor], 64);
        let deep = (0..20).map(|_| [&ARRAY.to_le_bytes()[..], &1_u64.to_le_bytes()].concat()).collect::<Vec<_>>();
        for (bytes, what) in [
            (b"ggla".to_vec(), "ggla"),
            (Vec::new(), "\"\""),
            (with(4, &1_u32.to_le_bytes()), "version 1"),
            (with(4, &3_u32.to_be_bytes()), "big-endian"),
            (with(8, &u64::MAX.to_le_bytes()), "do not fit"),
            (with(16, &(1_u64 << 40).to_le_bytes()), "do not fit"),
            (with(24, &u64::MAX.to_le_bytes()), "bytes are needed"),
            (file(3, &[key("general.alignment", 4, &3_u32.to_le_bytes())], &[], 0), "power of two"),
            (file(3, &[key("general.alignment", 5, &(-8_i32).to_le_bytes())], &[], 0), "negative"),
            (file(3, &[key("split.count", 6, &[0; 4])], &[], 0), "no integer"),
            (file(3, &[key("x", 77, &[0; 4])], &[], 0), "no type 77"),
            (file(3, &[key("x", ARRAY, &deep.concat())], &[], 99), "nested"),
            (of(tensor("a", &[1; 5], 0, 0)), "5 dimensions"),
            (of(tensor("a", &[u64::MAX, 2], 0, 0)), "more elements"),
            (of(tensor("a", &[33], 8, 0)), "no multiple of the 32"),
            (of(tensor("a", &[4], 0, 5)), "no multiple of 32"),
            (of(tensor("a", &[u64::MAX], 27, 0)), "larger than a file"),
            (of(tensor("a", &[17], 0, 0)), "needs 132 bytes, and the file has 128"),
        ] {
            let fault = parse(&bytes[..]).expect_err(what);
            assert!(fault.what.contains(what), "{fault}");
        }
    }
}
