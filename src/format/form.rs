//! The two forms in which ollama has stored a tensor in a safetensors blob of its own.

use std::str::FromStr;

use super::safetensors::{blob_header, named_header};
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::model::Tensor;

/// How ollama stores tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Under their own names.
    Today,
    /// As `data`, with the name in the layer; so does wmount.
    Seed,
}

impl Form {
    /// Both.
    pub const ALL: [Form; 2] = [Form::Today, Form::Seed];

    /// Its name in `MODEL@FORM`.
    pub fn name(self) -> &'static str {
        match self {
            Form::Today => "today",
            Form::Seed => "seed",
        }
    }

    /// The bytes before those of a tensor in its blob.
    pub fn header(self, name: &str, dtype: Dtype, shape: &[u64], len: u64) -> Vec<u8> {
        match self {
            Form::Today => named_header(name, dtype, shape, len),
            Form::Seed => blob_header(dtype, shape, len),
        }
    }

    /// The same of a model's tensor.
    pub fn header_of(self, tensor: &Tensor) -> Vec<u8> {
        self.header(&tensor.name, tensor.dtype, &tensor.shape, tensor.len)
    }

    /// The digest of a tensor's blob of this form, where it is known.
    pub fn digest(self, tensor: &Tensor) -> Option<Digest> {
        match self {
            Form::Today => tensor.named,
            Form::Seed => tensor.plain,
        }
    }

    /// Makes it known.
    pub fn set_digest(self, tensor: &mut Tensor, digest: Digest) {
        let known = match self {
            Form::Today => &mut tensor.named,
            Form::Seed => &mut tensor.plain,
        };
        *known = Some(digest);
    }

    /// Whether the store has the tensor in this form.
    pub fn is_stored(self, tensor: &Tensor) -> bool {
        self.digest(tensor) == Some(tensor.blob)
    }
}

impl FromStr for Form {
    type Err = ();

    fn from_str(name: &str) -> Result<Form, ()> {
        Form::ALL.into_iter().find(|form| form.name() == name).ok_or(())
    }
}
