//! A model made of the functions of several others.

use std::ops::Range;

use super::wire::{Wire, bytes_record, number_record, record_head};
use crate::error::Fault;
use crate::extent::ExtentMap;
use crate::format::Bytes;

/// iOS 18, the first version with several functions.
const VERSION: u64 = 9;

/// The longest description that is read.
const MOST: u64 = 16 << 20;

/// What a model says of its inputs, outputs and states, as records of a `FunctionDescription`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described(Vec<u8>);

impl Described {
    /// How many bytes it takes.
    pub fn size(&self) -> u64 {
        self.0.len() as u64
    }
}

/// Reads the description of a model, which is at `range`.
pub fn described(bytes: &(impl Bytes + ?Sized), range: Range<u64>) -> Result<Described, Fault> {
    /// Fields of a `ModelDescription` and what they are called in a `FunctionDescription`: inputs, outputs, the names of
    /// a predicted feature and its probabilities, states.
    const SAME: [(u32, u32); 5] = [(1, 2), (10, 3), (11, 4), (12, 5), (13, 6)];
    if range.end.saturating_sub(range.start) > MOST {
        return Err(Fault::new(range.start, format!("a description of more than {} MiB", MOST >> 20)));
    }
    let (mut wire, mut records, mut at) = (Wire::new(bytes), Vec::new(), range.start);
    while at < range.end {
        let field = wire.field(at, range.end)?;
        at = field.end;
        if let Some((_, number)) = SAME.into_iter().find(|(number, _)| *number == field.number) {
            let len = usize::try_from(field.bytes()?.len()).unwrap_or(usize::MAX);
            records.extend(bytes_record(number, &bytes.get(field.start, len)?));
        }
    }
    Ok(Described(records))
}

/// A model of these functions, given by name; the first one is the default. Their bodies are `Function` messages.
pub fn multifunction<'a>(
    specification_version: u64,
    functions: impl Iterator<Item = (&'a str, &'a Described, &'a ExtentMap)>,
) -> ExtentMap {
    let (mut description, mut default) = (Vec::new(), Vec::new());
    let mut program = ExtentMap::from_bytes(number_record(1, 1));
    for (name, Described(records), body) in functions {
        if default.is_empty() {
            default = bytes_record(21, name.as_bytes());
        }
        let name = bytes_record(1, name.as_bytes());
        description.extend(bytes_record(20, &[&name[..], records].concat()));
        let value = record_head(2, body.size());
        program.push_inline(&record_head(2, (name.len() + value.len()) as u64 + body.size()));
        program.push_inline(&name);
        program.push_inline(&value);
        program.append(body);
    }
    description.extend(default);
    let mut model = ExtentMap::from_bytes(number_record(1, specification_version.max(VERSION)));
    model.push_inline(&bytes_record(2, &description));
    model.push_inline(&record_head(502, program.size()));
    model.append(&program);
    model
}
