//! A Core ML package for one input shape.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use buffa::{Message, MessageField, UnknownField, UnknownFieldData};

use super::{Tensor, write_file, write_streamed};
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Result};
use crate::format::milblob::{self, Plan};
use crate::format::mlpackage::{MODEL_PATH, Manifest, WEIGHTS_PATH};
use crate::format::mlprogram::proto::value::Value as Stored;
use crate::format::mlprogram::proto::{self, binding, dimension, feature_type, immediate_value, model, value_type};
use crate::format::mlprogram::weight_file_reference;

/// iOS 16, and its set of operations.
const SPECIFICATION_VERSION: i32 = 7;
const OPSET: &str = "CoreML6";

/// The only file in the weights directory.
const WEIGHT_FILE: &str = "weight.bin";

/// MIL's data types.
const STRING: i32 = 2;
const FLOAT32: i32 = 11;

/// The data type of an input or output array.
const ARRAY_FLOAT32: i32 = 65568;

/// Field of a tensor value that holds strings.
const STRINGS: u32 = 4;

/// Writes a package that applies the matrices one after the other to an input of `[1, sequence_length, columns]`, with a
/// `relu` between them.
///
/// The matrices are F32 and `[rows, columns]`, as many columns as the one before has rows. Packages of the same
/// matrices have the same `weight.bin`, whatever their sequence lengths.
pub fn write_package(path: &Path, sequence_length: u32, weights: &[Tensor]) -> Result<()> {
    let widths = widths(weights)?;
    let sizes = weights.iter().map(Tensor::size).collect::<Result<Vec<u64>>>()?;
    let plan = milblob::plan(sizes.into_iter().map(|size| (Dtype::F32, size, 0))).at(path)?;
    let model = model(sequence_length, &widths, weights, &plan);
    let model = model.try_encode_to_vec().map_err(|error| Error::Invalid(format!("the package's model: {error}")))?;

    let data = path.join("Data");
    let directory = data.join(WEIGHTS_PATH);
    fs::create_dir_all(&directory).at(&directory)?;
    write_streamed(&directory.join(WEIGHT_FILE), |file| write_weights(file, &plan, weights))?;
    write_file(&data.join(MODEL_PATH), &model)?;
    write_file(&path.join("Manifest.json"), &Manifest::new(&Digest::of(&model), true).render())
}

/// Width of the state before the first matrix and after each.
fn widths(weights: &[Tensor]) -> Result<Vec<u64>> {
    let mut widths = Vec::new();
    for Tensor { name, dtype, shape, .. } in weights {
        let (Dtype::F32, &[rows, columns]) = (*dtype, &shape[..]) else {
            return Err(Error::Invalid(format!("{name} is no F32 matrix; a sample package holds nothing else")));
        };
        if *widths.last().unwrap_or(&columns) != columns {
            return Err(Error::Invalid(format!(
                "{name} has {columns} columns, which the matrix before has no rows for"
            )));
        }
        if widths.is_empty() {
            widths.push(columns);
        }
        widths.push(rows);
    }
    if widths.is_empty() {
        return Err(Error::Invalid("a sample package needs at least one matrix".into()));
    }
    Ok(widths)
}

fn write_weights(file: &mut impl Write, plan: &Plan, weights: &[Tensor]) -> io::Result<()> {
    let mut written = plan.header.len() as u64;
    file.write_all(&plan.header)?;
    for (blob, tensor) in plan.blobs.iter().zip(weights) {
        let gap = [0; milblob::UNIT as usize];
        file.write_all(&gap[..(blob.metadata - written) as usize])?;
        file.write_all(&milblob::metadata(blob))?;
        tensor.write(file, blob.elements())?;
        written = blob.end();
    }
    Ok(())
}

fn model(sequence_length: u32, widths: &[u64], weights: &[Tensor], plan: &Plan) -> proto::Model {
    let state = |width: u64| tensor_type(FLOAT32, &[1, sequence_length.into(), width]);
    let mut operations = Vec::new();
    let mut current = "x".to_string();
    for (index, (tensor, blob)) in weights.iter().zip(&plan.blobs).enumerate() {
        let name = tensor.name.replace(|char: char| !char.is_ascii_alphanumeric(), "_");
        operations.push(constant(&name, &tensor.shape, blob.metadata));
        let rows = state(widths[index + 1]);
        let last = index + 1 == weights.len();
        let linear = if last { "y".to_string() } else { format!("linear_{index}") };
        operations.push(operation("linear", &linear, &[("x", &current), ("weight", &name)], rows.clone()));
        current = linear;
        if !last {
            let relu = format!("relu_{index}");
            operations.push(operation("relu", &relu, &[("x", &current)], rows));
            current = relu;
        }
    }
    let block = proto::Block { outputs: vec![current.clone()], operations, ..Default::default() };
    let main = proto::Function {
        inputs: vec![named_type("x", state(widths[0]))],
        opset: OPSET.into(),
        block_specializations: vec![proto::BlockEntry {
            key: OPSET.into(),
            value: MessageField::some(block),
            ..Default::default()
        }],
        ..Default::default()
    };
    let functions =
        vec![proto::FunctionEntry { key: "main".into(), value: MessageField::some(main), ..Default::default() }];
    let description = proto::ModelDescription {
        input: vec![feature("x", sequence_length, widths[0])],
        output: vec![feature(&current, sequence_length, widths[weights.len()])],
        ..Default::default()
    };
    proto::Model {
        specification_version: SPECIFICATION_VERSION,
        description: MessageField::some(description),
        r#type: Some(model::Type::from(proto::Program { version: 1, functions, ..Default::default() })),
        ..Default::default()
    }
}

fn feature(name: &str, sequence_length: u32, width: u64) -> proto::FeatureDescription {
    // Shapes are signed here; a tensor of this width would be too large long before the sign is.
    let shape = vec![1, sequence_length.into(), width as i64];
    let array = proto::ArrayFeatureType { shape, data_type: ARRAY_FLOAT32, ..Default::default() };
    let ty = proto::FeatureType { r#type: Some(feature_type::Type::from(array)), ..Default::default() };
    proto::FeatureDescription { name: name.into(), r#type: MessageField::some(ty), ..Default::default() }
}

fn constant(name: &str, shape: &[u64], offset: u64) -> proto::Operation {
    let ty = tensor_type(FLOAT32, shape);
    let file = proto::BlobFileValue { file_name: weight_file_reference(WEIGHT_FILE), offset, ..Default::default() };
    let mut operation = operation("const", name, &[], ty.clone());
    operation.attributes.push(attribute("val", ty, Stored::from(file)));
    operation
}

/// An operation with one output; each input is the output of another one.
fn operation(ty: &str, name: &str, inputs: &[(&str, &str)], output: proto::ValueType) -> proto::Operation {
    let inputs = inputs.iter().map(|(key, name)| {
        let binding = proto::Binding { binding: Some(binding::Binding::Name(name.to_string())), ..Default::default() };
        let argument = proto::Argument { arguments: vec![binding], ..Default::default() };
        proto::ArgumentEntry { key: key.to_string(), value: MessageField::some(argument), ..Default::default() }
    });
    proto::Operation {
        r#type: ty.into(),
        inputs: inputs.collect(),
        outputs: vec![named_type(name, output)],
        attributes: vec![attribute("name", tensor_type(STRING, &[]), text(name))],
        ..Default::default()
    }
}

fn attribute(key: &str, ty: proto::ValueType, value: Stored) -> proto::ValueEntry {
    let value = proto::Value { r#type: MessageField::some(ty), value: Some(value), ..Default::default() };
    proto::ValueEntry { key: key.into(), value: MessageField::some(value), ..Default::default() }
}

/// A string; tensor values are opaque to the parser, so this one is made of its encoded bytes.
fn text(text: &str) -> Stored {
    let strings = proto::Strings { values: vec![text.into()], ..Default::default() };
    let mut tensor = proto::Opaque::default();
    let data = UnknownFieldData::LengthDelimited(strings.encode_to_vec());
    tensor.__buffa_unknown_fields.push(UnknownField { number: STRINGS, data });
    let tensor = Some(immediate_value::Value::from(tensor));
    Stored::from(proto::ImmediateValue { value: tensor, ..Default::default() })
}

fn named_type(name: &str, ty: proto::ValueType) -> proto::NamedValueType {
    proto::NamedValueType { name: name.into(), r#type: MessageField::some(ty), ..Default::default() }
}

fn tensor_type(data_type: i32, shape: &[u64]) -> proto::ValueType {
    let dimensions = shape.iter().map(|&size| {
        let constant = proto::ConstantDimension { size, ..Default::default() };
        proto::Dimension { dimension: Some(dimension::Dimension::from(constant)), ..Default::default() }
    });
    let rank = shape.len() as i64;
    let tensor = proto::TensorType { data_type, rank, dimensions: dimensions.collect(), ..Default::default() };
    proto::ValueType { r#type: Some(value_type::Type::from(tensor)), ..Default::default() }
}
