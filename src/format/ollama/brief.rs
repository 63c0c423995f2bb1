//! A manifest in brief: with one layer for all tensors of a kind.
//!
//! Which layouts show a model follows from the kinds of its tensors, as long as their names are nothing special. To find
//! that out for a store of a million tensors no value is made of most of the text, and only the very form that wmount and
//! Go write is read: keys in order, no space, no escapes. What is in another form, or needs a closer look, is left to
//! [`Manifest::parse`].

use super::{Layer, Manifest, OWN_TENSOR, TENSOR};
use crate::digest::Digest;
use crate::dtype::Dtype;

/// Longer texts are left to who counts their values first.
const MAX_TEXT: usize = 16 << 20;
/// Digits of a size: no sum of them overflows.
const SIZE_DIGITS: usize = 12;
/// Digits of a dimension: every container has room for it.
const DIM_DIGITS: usize = 9;
/// More dimensions than tensors have.
const MAX_DIMS: usize = 8;
/// With its dots made longer and an ending it is still a file's name.
const MAX_NAME: usize = 120;

/// Characters that a string can have as they are: printable ASCII but quotes and backslashes.
const PLAIN: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = b' ';
    while byte <= b'~' {
        plain[byte as usize] = byte != b'"' && byte != b'\\';
        byte += 1;
    }
    plain
};

/// What layouts tell tensors apart by.
#[derive(PartialEq, Eq)]
struct Kind<'a> {
    media_type: &'a [u8],
    dtype: &'a [u8],
    /// Whether its digest under its name is known, and whether it is that of the blob.
    named: Option<bool>,
}

/// A [`Layer`] in the text.
struct Line<'a> {
    media_type: &'a [u8],
    digest: &'a [u8],
    size: u64,
    name: &'a [u8],
    dtype: &'a [u8],
    shape: Option<Shape>,
    named: Option<&'a [u8]>,
}

struct Shape {
    dims: [u64; MAX_DIMS],
    len: usize,
}

impl Shape {
    fn dims(&self) -> &[u64] {
        &self.dims[..self.len]
    }
}

impl Manifest {
    /// The manifest with the first layer of each kind of tensors in the place of all; `None` if only [`Manifest::parse`]
    /// can tell what it says.
    ///
    /// Its tensors are all described by their layers and fit into their blobs, and their names make file names, no two the
    /// same. Neither the manifest nor the sum of all sizes is longer than what is read.
    pub fn brief(text: &[u8]) -> Option<Manifest> {
        let mut text = Text((text.len() <= MAX_TEXT).then_some(text)?);
        text.skip(br#"{"schemaVersion":2,"mediaType":""#)?;
        let media_type = owned(text.string()?)?;
        text.skip(br#","config":"#)?;
        let config = text.line()?.to_layer()?;
        text.skip(br#","layers":["#)?;
        let (mut layers, mut kinds, mut names) = (Vec::new(), Vec::<(Kind<'_>, Dtype)>::new(), Vec::new());
        loop {
            let line = text.line()?;
            if line.media_type != TENSOR.as_bytes() && line.media_type != OWN_TENSOR.as_bytes() {
                layers.push(line.to_layer()?);
            } else {
                let shape = line.shape.as_ref()?;
                is_usual(line.name).then(|| names.push((line.media_type.len(), line.name)))?;
                let kind = line.kind();
                let dtype = match kinds.iter().find(|(known, _)| *known == kind) {
                    Some((_, dtype)) => *dtype,
                    None => {
                        let dtype = std::str::from_utf8(line.dtype).ok()?.parse().ok()?;
                        layers.push(line.to_layer()?);
                        kinds.push((kind, dtype));
                        dtype
                    }
                };
                dtype.bytes(shape.dims()).filter(|&len| len <= line.size)?;
            }
            if text.skip(b",").is_none() {
                break;
            }
        }
        text.skip(b"]}")?;
        if !matches!(text.0, b"" | b"\n") {
            return None;
        }
        // Mostly they are in order already.
        names.sort_unstable();
        let differ = names.windows(2).all(|pair| pair[0] != pair[1]);
        differ.then_some(Manifest { schema_version: 2, media_type, config, layers })
    }
}

/// Whether a tensor's name makes a file name, which no other name makes for which this is true, and belongs to no
/// component.
fn is_usual(name: &[u8]) -> bool {
    if name.is_empty() || name.len() > MAX_NAME || name.starts_with(b"draft.") {
        return false;
    }
    let is_mark = |byte: u8| byte == b'_' || byte == b'.';
    // Neither loop has a way out in the middle, so that compilers make few wide steps of them.
    let plain =
        name.iter().fold(true, |plain, &byte| plain & (byte.is_ascii_alphanumeric() | is_mark(byte) | (byte == b'-')));
    // Dots become two underscores: of marks that stand alone it can be told what they were.
    let alone = name.iter().zip(&name[1..]).fold(true, |alone, (&a, &b)| alone & !(is_mark(a) & is_mark(b)));
    plain && alone
}

fn owned(text: &[u8]) -> Option<String> {
    String::from_utf8(text.to_vec()).ok()
}

impl<'a> Line<'a> {
    fn kind(&self) -> Kind<'a> {
        let named = self.named.map(|named| named == self.digest);
        Kind { media_type: self.media_type, dtype: self.dtype, named }
    }

    fn to_layer(&self) -> Option<Layer> {
        let digest = |hex: &[u8]| Digest::from_hex(std::str::from_utf8(hex).ok()?);
        Some(Layer {
            media_type: owned(self.media_type)?,
            digest: digest(self.digest)?,
            size: self.size,
            name: owned(self.name)?,
            dtype: owned(self.dtype)?,
            shape: self.shape.as_ref().map(|shape| shape.dims().to_vec()),
            named: self.named.map_or(Some(None), |named| digest(named).map(Some))?,
        })
    }
}

/// The rest of the text.
struct Text<'a>(&'a [u8]);

impl<'a> Text<'a> {
    fn skip(&mut self, word: &[u8]) -> Option<()> {
        self.0 = self.0.strip_prefix(word)?;
        Some(())
    }

    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// A string without its first quote, with no escapes.
    fn string(&mut self) -> Option<&'a [u8]> {
        let text = self.take(self.0.iter().position(|&byte| !PLAIN[usize::from(byte)])?)?;
        self.skip(b"\"")?;
        Some(text)
    }

    /// The 64 digits of a digest.
    fn digest(&mut self) -> Option<&'a [u8]> {
        self.skip(b"sha256:")?;
        let digits: &[u8; 64] = self.take(64)?.try_into().ok()?;
        let right = digits.iter().fold(true, |right, digit| right & matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        self.skip(b"\"")?;
        right.then_some(digits)
    }

    fn number(&mut self, most_digits: usize) -> Option<u64> {
        let digits = self.take(self.0.iter().position(|byte| !byte.is_ascii_digit())?)?;
        // JSON knows no number that begins with a zero, but zero.
        if !(1..=most_digits).contains(&digits.len()) || (digits.len() > 1 && digits[0] == b'0') {
            return None;
        }
        Some(digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
    }

    fn shape(&mut self) -> Option<Shape> {
        let mut shape = Shape { dims: [0; MAX_DIMS], len: 0 };
        if self.skip(b"]").is_some() {
            return Some(shape);
        }
        loop {
            *shape.dims.get_mut(shape.len)? = self.number(DIM_DIGITS)?;
            shape.len += 1;
            if self.skip(b",").is_none() {
                self.skip(b"]")?;
                return Some(shape);
            }
        }
    }

    fn line(&mut self) -> Option<Line<'a>> {
        self.skip(br#"{"mediaType":""#)?;
        let media_type = self.string()?;
        self.skip(br#","digest":""#)?;
        let digest = self.digest()?;
        self.skip(br#","size":"#)?;
        let size = self.number(SIZE_DIGITS)?;
        let mut line = Line { media_type, digest, size, name: b"", dtype: b"", shape: None, named: None };
        if self.skip(br#","name":""#).is_some() {
            line.name = self.string()?;
        }
        if self.skip(br#","dtype":""#).is_some() {
            line.dtype = self.string()?;
        }
        if self.skip(br#","shape":["#).is_some() {
            line.shape = Some(self.shape()?);
        }
        if self.skip(br#","named":""#).is_some() {
            line.named = Some(self.digest()?);
        }
        self.skip(b"}")?;
        Some(line)
    }
}
