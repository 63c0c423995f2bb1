//! Variants: the same model with its weights cast or quantised.

use serde_json::{Value, json};

use crate::extent::{Computed, ExtentMap};
use crate::model::Tensor;
use crate::transform::{ADAPTIVE_BLOCK, Bits, BlockSize, Float, Transform};

/// What is done to the weights of a model. Its name follows the `@`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Variant {
    F16,
    Int8,
    Int4(BlockSize),
    Int5(BlockSize),
    Adaptive,
}

impl Variant {
    /// All of them, by name.
    pub const ALL: [(&'static str, Variant); 7] = [
        ("f16", Variant::F16),
        ("int8", Variant::Int8),
        ("int4-32", Variant::Int4(BlockSize::B32)),
        ("int4-128", Variant::Int4(BlockSize::B128)),
        ("int5-32", Variant::Int5(BlockSize::B32)),
        ("int5-128", Variant::Int5(BlockSize::B128)),
        ("adaptive-32", Variant::Adaptive),
    ];

    /// The value of `quant` in the config section.
    pub fn quant(self) -> Value {
        let block =
            |kind: &str, size: BlockSize| json!({"type": kind, "block_size": size.elements(), "scale_type": "fp16"});
        match self {
            Variant::F16 => json!({"type": "fp16"}),
            Variant::Int8 => json!({"type": "int8", "block_size": 0, "scale_type": "fp32"}),
            Variant::Int4(size) => block("int4_block", size),
            Variant::Int5(size) => block("int5_block", size),
            Variant::Adaptive => json!({"type": "adaptive", "block_size": ADAPTIVE_BLOCK, "scale_type": "fp16"}),
        }
    }

    fn transform(self, float: Float) -> Transform {
        match self {
            Variant::F16 => Transform::F16(float),
            Variant::Int8 => Transform::Int8(float),
            Variant::Int4(size) => Transform::Block(float, Bits::Four, size),
            Variant::Int5(size) => Transform::Block(float, Bits::Five, size),
            Variant::Adaptive => Transform::Adaptive(float),
        }
    }

    /// What is done to a tensor. `None` if it stays as it is stored, as one does that is too large for the transform.
    pub fn computed(self, tensor: &Tensor) -> Option<Computed> {
        let float = Float::of(tensor.dtype).filter(|_| is_weight(tensor))?;
        let is_cast = (self, float) != (Variant::F16, Float::F16);
        let computed = is_cast.then(|| tensor.computed(self.transform(float)))?;
        computed.transform.output_len(computed.input_len).map(|_| computed)
    }

    /// Code and data of a record. `None` if the tensor stays as it is stored.
    pub(super) fn record(self, tensor: &Tensor) -> Option<(u8, ExtentMap)> {
        let computed = self.computed(tensor)?;
        // The prefix: quantisation type, block size, scale type.
        let block = |code: u8, size: u64| (code, Some([code, size as u8, (size >> 8) as u8, 1]));
        let (code, prefix) = match self {
            Variant::F16 => (1, None),
            Variant::Int8 => (3, Some([3, 0, 0, 0])),
            Variant::Int4(size) => block(6, size.elements() as u64),
            Variant::Int5(size) => block(7, size.elements() as u64),
            Variant::Adaptive => block(8, ADAPTIVE_BLOCK),
        };
        let mut data = ExtentMap::new();
        prefix.iter().for_each(|prefix| data.push_inline(prefix));
        data.push_computed(computed, tensor.blob_len).expect("checked when the model was loaded");
        Some((code, data))
    }
}

/// Whether variants touch the tensor: matrices and the like do not lose by it what vectors and norms would.
fn is_weight(tensor: &Tensor) -> bool {
    let norm = |part: &str| part.to_ascii_lowercase().contains("norm");
    tensor.shape.len() > 1 && tensor.len > 0 && !tensor.name.split('.').any(norm)
}
