//! The fields of protobuf messages where they lie in a container, found without decoding or holding what they carry.
//!
//! A [`Wire`] holds a small window of the container that grows while it is read in order and shrinks when it jumps, so
//! that a walk costs what the graph costs and not what the tensors within it do.

use std::ops::Range;

use buffa::encoding::{Tag, WireType, decode_varint, encode_varint};

use crate::error::Fault;
use crate::format::Bytes;

/// Bytes read after a jump: a few fields.
const LEAST: usize = 4 << 10;
/// Bytes read at most.
const MOST: usize = 256 << 10;
/// The longest tag and length together.
const HEAD: usize = 20;

/// One field of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field {
    pub number: u32,
    /// Offset of its tag.
    pub record: u64,
    /// Offset of what follows the tag: the length or the number.
    pub after_tag: u64,
    /// Where its payload begins.
    pub start: u64,
    /// Where it ends.
    pub end: u64,
    pub carries: Carries,
}

/// What a field carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carries {
    /// A number.
    Varint(u64),
    /// Four or eight bytes.
    Fixed,
    /// A message, a string or packed numbers.
    Bytes,
}

impl Field {
    /// The payload.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// Bytes of the payload.
    pub fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// The number that it carries.
    pub fn varint(&self) -> Result<u64, Fault> {
        match self.carries {
            Carries::Varint(value) => Ok(value),
            _ => Err(Fault::new(self.record, format!("field {} is no number", self.number))),
        }
    }

    /// Itself, if it carries bytes.
    pub fn bytes(self) -> Result<Field, Fault> {
        match self.carries {
            Carries::Bytes => Ok(self),
            _ => Err(Fault::new(self.record, format!("field {} is no message", self.number))),
        }
    }
}

/// A container of messages and the window into it.
pub(super) struct Wire<'a, B: ?Sized> {
    bytes: &'a B,
    start: u64,
    held: Vec<u8>,
    ahead: usize,
}

impl<'a, B: Bytes + ?Sized> Wire<'a, B> {
    pub fn new(bytes: &'a B) -> Self {
        Wire { bytes, start: 0, held: Vec::new(), ahead: LEAST }
    }

    /// The bytes from `at` on: as many as the window has, at least `wanted` or all up to the end.
    fn peek(&mut self, at: u64, wanted: usize) -> Result<&[u8], Fault> {
        let rest = usize::try_from(self.bytes.len().saturating_sub(at)).unwrap_or(usize::MAX);
        let wanted = wanted.min(rest);
        let end = self.start.saturating_add(self.held.len() as u64);
        let skip = at.checked_sub(self.start).and_then(|skip| usize::try_from(skip).ok());
        let skip = skip.filter(|&skip| skip.checked_add(wanted).is_some_and(|end| end <= self.held.len()));
        if let Some(skip) = skip {
            return Ok(self.held.get(skip..).unwrap_or(&[]));
        }
        let near = at.saturating_add(LEAST as u64) >= self.start && at <= end.saturating_add(LEAST as u64);
        self.ahead = if near { self.ahead.saturating_mul(2).min(MOST) } else { LEAST };
        self.held = self.bytes.get(at, self.ahead.max(wanted).min(rest))?.into_owned();
        self.start = at;
        Ok(&self.held)
    }

    /// The field at `at` of a message that ends at `end`.
    pub fn field(&mut self, at: u64, end: u64) -> Result<Field, Fault> {
        let fault = |what: &str| Fault::new(at, format!("no Core ML model: {what}"));
        let limit = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
        let window = self.peek(at, HEAD)?;
        let mut rest = window.get(..window.len().min(limit)).unwrap_or(&[]);
        let begin = rest.len();
        let read = |rest: &[u8]| at.saturating_add(begin.saturating_sub(rest.len()) as u64);
        let tag = Tag::decode(&mut rest).map_err(|error| fault(&super::words(&error)))?;
        let after_tag = read(rest);
        let mut varint = || decode_varint(&mut rest).map_err(|error| fault(&super::words(&error)));
        let (carries, len) = match tag.wire_type() {
            WireType::Varint => (Carries::Varint(varint()?), 0),
            WireType::LengthDelimited => (Carries::Bytes, varint()?),
            WireType::Fixed32 => (Carries::Fixed, 4),
            WireType::Fixed64 => (Carries::Fixed, 8),
            _ => return Err(fault("it has groups, which no version of its format has")),
        };
        let start = read(rest);
        let Some(field_end) = start.checked_add(len).filter(|field_end| *field_end <= end) else {
            let what = format!("field {} of {len} bytes ends after the message that it is in", tag.field_number());
            return Err(fault(&what));
        };
        Ok(Field { number: tag.field_number(), record: at, after_tag, start, end: field_end, carries })
    }

    /// The text of a string field of at most `max` bytes.
    pub fn text(&mut self, field: Field, max: usize) -> Result<String, Fault> {
        let field = field.bytes()?;
        let len = usize::try_from(field.len()).unwrap_or(usize::MAX);
        if len > max {
            return Err(Fault::new(field.record, format!("a name of {len} bytes; all names together have {max}")));
        }
        let bytes = self.peek(field.start, len)?.get(..len).unwrap_or(&[]).to_vec();
        String::from_utf8(bytes).map_err(|_| Fault::new(field.start, "a name is not UTF-8"))
    }
}

/// A number as a varint.
pub(super) fn varint(value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_varint(value, &mut bytes);
    bytes
}

/// The record of a number.
pub(super) fn number_record(number: u32, value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    Tag::new(number, WireType::Varint).encode(&mut bytes);
    encode_varint(value, &mut bytes);
    bytes
}

/// The record of a message or a string.
pub(super) fn bytes_record(number: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = record_head(number, payload.len() as u64);
    bytes.extend(payload);
    bytes
}

/// Tag and length of a message or a string of `len` bytes.
pub(super) fn record_head(number: u32, len: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    Tag::new(number, WireType::LengthDelimited).encode(&mut bytes);
    encode_varint(len, &mut bytes);
    bytes
}
