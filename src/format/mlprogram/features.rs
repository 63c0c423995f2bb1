//! What a model takes and gives, for people to read.

use std::ops::Range;

use buffa::Message;

use super::proto;
use super::proto::feature_type::Type;
use crate::error::Fault;
use crate::format::Bytes;

/// An input or output.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Feature {
    /// Its name.
    pub name: String,
    /// The type of an array's elements; empty for what is no array.
    pub dtype: String,
    /// An array's dimensions.
    pub shape: Vec<i64>,
}

/// The inputs and outputs of a model whose description is at `range`.
pub fn features(bytes: &(impl Bytes + ?Sized), range: Range<u64>) -> Result<(Vec<Feature>, Vec<Feature>), Fault> {
    /// Longer descriptions are not shown.
    const MOST: usize = 4 << 20;
    let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
    if len > MOST {
        return Ok((Vec::new(), Vec::new()));
    }
    let bytes = bytes.get(range.start, len)?;
    let description = proto::ModelDescription::decode_from_slice(&bytes)
        .map_err(|error| Fault::new(range.start, format!("its description: {}", super::words(&error))))?;
    let all = |features: Vec<proto::FeatureDescription>| features.into_iter().map(feature).collect();
    Ok((all(description.input), all(description.output)))
}

fn feature(feature: proto::FeatureDescription) -> Feature {
    let array = match feature.r#type.r#type.clone() {
        Some(Type::MultiArrayType(array)) => Some(*array),
        _ => None,
    };
    let dtype = match array.as_ref().map(|array| array.data_type) {
        Some(65568) => "F32",
        Some(65600) => "F64",
        Some(65552) => "F16",
        Some(131_104) => "I32",
        Some(131_080) => "I8",
        _ => "",
    };
    let shape = array.map(|array| array.shape).unwrap_or_default();
    Feature { name: feature.name, dtype: dtype.into(), shape }
}
