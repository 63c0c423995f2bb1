//! What is found in a model: every value that is in a weight file, or could be, and the lengths that enclose it.

use std::ops::Range;

use super::{Kind, Reference};
use crate::dtype::Dtype;

/// MIL's data types; strings have no dtype.
pub(super) const DTYPES: [(u64, Dtype); 21] = [
    (1, Dtype::Bool),
    (10, Dtype::F16),
    (11, Dtype::F32),
    (12, Dtype::F64),
    (13, Dtype::BF16),
    (21, Dtype::I8),
    (22, Dtype::I16),
    (23, Dtype::I32),
    (24, Dtype::I64),
    (25, Dtype::I4),
    (31, Dtype::U8),
    (32, Dtype::U16),
    (33, Dtype::U32),
    (34, Dtype::U64),
    (35, Dtype::U4),
    (36, Dtype::U2),
    (37, Dtype::U1),
    (38, Dtype::U6),
    (39, Dtype::U3),
    (40, Dtype::F8E4M3),
    (41, Dtype::F8E5M2),
];

/// A tensor whose bytes are in the message itself, one after the other as they would be in a weight file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inline {
    /// Its name, made as that of a [`Reference`].
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// The dimensions.
    pub shape: Vec<u64>,
    /// Where its bytes are.
    pub range: Range<u64>,
}

/// A message with a value to be changed somewhere in it.
#[derive(Debug)]
pub(super) struct Frame {
    /// Index of the message around it; `None` for the whole model.
    pub parent: Option<usize>,
    /// Where its length is written, up to where its payload begins.
    pub len_at: Range<u64>,
    /// Bytes of its payload.
    pub len: u64,
}

/// Where a reference is written.
#[derive(Debug)]
pub(super) struct Spot {
    /// The `BlobFileValue`.
    pub frame: usize,
    pub file: Option<Range<u64>>,
    pub offset: Option<Range<u64>>,
    /// End of the message, where a field that it does not have can be put.
    pub end: u64,
}

/// A function of a program that is no part of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionRange {
    /// Its name; `main` if it is the only one.
    pub name: String,
    /// Where the message is.
    pub range: Range<u64>,
}

/// What the walk found.
#[derive(Debug)]
pub struct Outline {
    /// What kind of model it is.
    pub kind: Kind,
    /// What readers must know: 7 is iOS 16, 8 iOS 17, 9 iOS 18.
    pub specification_version: u64,
    /// Where the description of inputs and outputs is.
    pub description: Option<Range<u64>>,
    /// The functions of the program, in order of name.
    pub functions: Vec<FunctionRange>,
    /// Values in weight files, wherever they are in the model; several may be at one offset.
    pub references: Vec<Reference>,
    /// Those inline tensors that were wanted.
    pub inline: Vec<Inline>,
    pub(super) frames: Vec<Frame>,
    /// One for each reference.
    pub(super) spots: Vec<Spot>,
    /// For each inline tensor the message of its value and the whole field in it.
    pub(super) records: Vec<(usize, Range<u64>)>,
}
