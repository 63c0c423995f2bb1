//! Core ML's `model.mlmodel`: a protobuf message whose ML program refers to the weight files beside it.
//!
//! A model is never decoded and written again: [`outline`] finds the values that are in weight files, or could be, where
//! they lie, and [`Patches`] point them elsewhere and copy every other byte. So nothing is lost that was not understood,
//! and a model of any size needs little memory. The messages of `coreml.proto` are for making models and for the tests.

use buffa::DecodeError;

use crate::dtype::Dtype;
use crate::error::Fault;

mod features;
mod multifunction;
mod outline;
mod patches;
mod values;
mod walk;
mod wire;
#[cfg(test)]
pub(crate) mod decoded;

pub use features::{Feature, features};
pub use multifunction::{Described, described, multifunction};
pub use outline::{FunctionRange, Inline, Outline};
pub use patches::{Patches, Place};
pub use walk::{outline, surface};

#[allow(missing_docs, dead_code, unused_imports, clippy::all, clippy::unwrap_used)]
pub(crate) mod proto {
    include!(concat!(env!("OUT_DIR"), "/coreml.mod.rs"));
}

/// The directory of the weight files, as programs write it.
const WEIGHTS: &str = "@model_path/weights/";

/// Messages within messages, as deep as Python's protobuf reads: deeper models cannot be loaded anyway.
const NESTING: u32 = 100;

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
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
