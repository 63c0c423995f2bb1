//! The same as the outline and the patches do, by decoding a whole model and writing it again: what the tests hold them
//! against.

use buffa::{DecodeOptions, Message};

use super::proto::model::Type;
use super::{Kind, NESTING, Reference, proto, words};
use crate::error::Fault;

mod references;
mod relocate;

/// Fields that are carried and not decoded; every inline constant is one.
const UNKNOWN_FIELDS: usize = 4_000_000;

/// Bytes of memory for decoded messages, which can be a hundred times as large as what is in the file.
const MESSAGES: usize = 512 << 20;

/// Gives the new file and offset for the file and offset of a reference.
pub type Placer<'a> = dyn FnMut(&str, u64) -> Result<(String, u64), Fault> + 'a;

/// A parsed `model.mlmodel`.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    model: proto::Model,
}

impl Program {
    /// Reads a model.
    pub fn parse(bytes: &[u8]) -> Result<Program, Fault> {
        let model: proto::Model = DecodeOptions::new()
            .with_recursion_limit(NESTING)
            .with_max_message_size(bytes.len())
            .with_unknown_field_limit(UNKNOWN_FIELDS)
            .with_element_memory_limit(MESSAGES)
            .decode_from_slice(bytes)
            .map_err(|error| Fault::new(0, format!("no Core ML model: {}", words(&error))))?;
        if model.specification_version < 1 {
            return Err(Fault::new(0, "no Core ML model: it has no specification version"));
        }
        Ok(Program { model })
    }

    /// The bytes of the model; a fault only if relocation made it larger than the 2 GiB of a message.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Fault> {
        self.model.try_encode_to_vec().map_err(|error| Fault::new(0, error.to_string()))
    }

    /// What kind of model it is.
    pub fn kind(&self) -> Kind {
        match self.model.r#type {
            Some(Type::MlProgram(_)) => Kind::MlProgram,
            Some(Type::NeuralNetwork(_) | Type::NeuralNetworkClassifier(_) | Type::NeuralNetworkRegressor(_)) => {
                Kind::NeuralNetwork
            }
            Some(Type::Pipeline(_) | Type::PipelineClassifier(_) | Type::PipelineRegressor(_)) => Kind::Pipeline,
            None => Kind::Other,
        }
    }

    /// All values that are in weight files, wherever they are in the model; several may be at one offset.
    ///
    /// In the order of the program's operations; functions, inputs and attributes by name.
    pub fn references(&self) -> Result<Vec<Reference>, Fault> {
        references::of(&self.model)
    }

    /// Points every reference elsewhere. After a fault some of them have moved and others not.
    pub fn relocate(&mut self, place: &mut Placer<'_>) -> Result<(), Fault> {
        relocate::model(&mut self.model, place)
    }
}

/// Indices of the entries of a map, sorted by key. Of entries with the same key the last one counts.
fn live<T>(entries: &[T], key: impl Fn(&T) -> &str) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..entries.len()).collect();
    indices.sort_by(|&a, &b| key(&entries[a]).cmp(key(&entries[b])).then(b.cmp(&a)));
    indices.dedup_by(|&mut a, &mut b| key(&entries[a]) == key(&entries[b]));
    indices
}
