//! Core ML's `model.mlmodel`: a protobuf message whose ML program refers to the weight files beside it.
//!
//! Only what leads to those references is decoded (`coreml.proto`); everything else is carried as unknown fields, so
//! that a model which is parsed and written again is the same model.

use buffa::{DecodeError, DecodeOptions, Message};

use self::proto::model::Type;
use crate::dtype::Dtype;
use crate::error::Fault;

mod references;
mod relocate;

#[allow(missing_docs, dead_code, unused_imports, clippy::all, clippy::unwrap_used)]
pub(crate) mod proto {
    include!(concat!(env!("OUT_DIR"), "/coreml.mod.rs"));
}

/// The directory of the weight files, as programs write it.
const WEIGHTS: &str = "@model_path/weights/";

/// Messages within messages, as deep as Python's protobuf reads: deeper models cannot be loaded anyway.
const NESTING: u32 = 100;

/// Fields that are carried and not decoded; every inline constant is one.
const UNKNOWN_FIELDS: usize = 4_000_000;

/// Bytes of memory for decoded messages, which can be a hundred times as large as what is in the file.
const MESSAGES: usize = 512 << 20;

/// What kind of model it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An ML program, with weights in files beside it.
    MlProgram,
    /// A neural network of the older form (classifier and regressor too), with all weights in the message.
    NeuralNetwork,
    /// Models in a row, each of any kind (classifier and regressor too).
    Pipeline,
    /// Anything else: tree ensembles, custom and compiled models.
    Other,
}

/// A value that is in a weight file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The tensor's name: the output of a `const`, otherwise `<output>.<key>` or `<output>.<key>.<index>`, with
    /// `<function>/` before it outside of `main` and `<model>/` in a pipeline.
    ///
    /// Unique if the program names its outputs uniquely, which is not checked.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// The dimensions.
    pub shape: Vec<u64>,
    /// The weight file, as the program names it; see [`weight_file`].
    pub file: String,
    /// Offset of the blob's metadata in that file.
    pub offset: u64,
}

/// Gives the new file and offset for the file and offset of a reference.
pub type Place<'a> = dyn FnMut(&str, u64) -> Result<(String, u64), Fault> + 'a;

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
    pub fn relocate(&mut self, place: &mut Place<'_>) -> Result<(), Fault> {
        relocate::model(&mut self.model, place)
    }
}

/// The name of a file in the `weights` directory; a fault for any place but that.
pub fn weight_file(file: &str) -> Result<&str, Fault> {
    file.strip_prefix(WEIGHTS)
        .filter(|name| !matches!(*name, "" | "." | "..") && !name.contains(['/', '\0']))
        .ok_or_else(|| {
            let file: String = file.chars().take(200).collect();
            Fault::new(0, format!("the weight file {file:?} is not of the form {WEIGHTS}NAME"))
        })
}

/// What a program calls the file `name` of the `weights` directory: the opposite of [`weight_file`].
pub fn weight_file_reference(name: &str) -> String {
    format!("{WEIGHTS}{name}")
}

fn words(error: &DecodeError) -> String {
    match error {
        DecodeError::UnexpectedEof => "the file ends within a message".into(),
        DecodeError::RecursionLimitExceeded => format!("messages are nested more than {NESTING} deep"),
        DecodeError::UnknownFieldLimitExceeded => format!("it has more than {UNKNOWN_FIELDS} fields"),
        DecodeError::ElementMemoryLimitExceeded => format!("its messages need more than {} MiB", MESSAGES >> 20),
        other => other.to_string(),
    }
}

/// Indices of the entries of a map, sorted by key. Of entries with the same key the last one counts.
fn live<T>(entries: &[T], key: impl Fn(&T) -> &str) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..entries.len()).collect();
    indices.sort_by(|&a, &b| key(&entries[a]).cmp(key(&entries[b])).then(b.cmp(&a)));
    indices.dedup_by(|&mut a, &mut b| key(&entries[a]) == key(&entries[b]));
    indices
}

#[cfg(test)]
mod tests;
