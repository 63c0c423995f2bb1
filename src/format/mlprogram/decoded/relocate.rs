//! The walk that points every reference to a weight file elsewhere. It goes where the naming walk goes.

use super::super::proto::binding::Binding;
use super::super::proto::immediate_value::Value as Immediate;
use super::super::proto::model::Type as ModelType;
use super::super::proto::value::Value as Stored;
use super::super::proto::value_type::Type;
use super::{Placer, live, proto};
use crate::error::Fault;

pub(super) fn model(model: &mut proto::Model, place: &mut Placer<'_>) -> Result<(), Fault> {
    let pipeline = match &mut model.r#type {
        Some(ModelType::MlProgram(it)) => return program(it, place),
        Some(ModelType::Pipeline(pipeline)) => Some(&mut **pipeline),
        Some(ModelType::PipelineClassifier(it) | ModelType::PipelineRegressor(it)) => it.pipeline.as_option_mut(),
        _ => None,
    };
    pipeline.into_iter().flat_map(|pipeline| &mut pipeline.models).try_for_each(|it| self::model(it, place))
}

fn program(program: &mut proto::Program, place: &mut Placer<'_>) -> Result<(), Fault> {
    attributes(&mut program.attributes, place)?;
    for index in live(&program.functions, |entry| &entry.key) {
        let Some(function) = program.functions[index].value.as_option_mut() else { continue };
        named_types(&mut function.inputs, place)?;
        attributes(&mut function.attributes, place)?;
        for index in live(&function.block_specializations, |entry| &entry.key) {
            let it = function.block_specializations[index].value.as_option_mut();
            it.map_or(Ok(()), |it| block(it, place))?;
        }
    }
    Ok(())
}

fn block(block: &mut proto::Block, place: &mut Placer<'_>) -> Result<(), Fault> {
    named_types(&mut block.inputs, place)?;
    attributes(&mut block.attributes, place)?;
    block.operations.iter_mut().try_for_each(|it| operation(it, place))
}

fn operation(operation: &mut proto::Operation, place: &mut Placer<'_>) -> Result<(), Fault> {
    for index in live(&operation.inputs, |entry| &entry.key) {
        let argument = operation.inputs[index].value.as_option_mut();
        for binding in argument.into_iter().flat_map(|argument| &mut argument.arguments) {
            if let Some(Binding::Value(it)) = &mut binding.binding {
                value(it, place)?;
            }
        }
    }
    attributes(&mut operation.attributes, place)?;
    named_types(&mut operation.outputs, place)?;
    operation.blocks.iter_mut().try_for_each(|it| block(it, place))
}

fn attributes(attributes: &mut [proto::ValueEntry], place: &mut Placer<'_>) -> Result<(), Fault> {
    for index in live(attributes, |entry| &entry.key) {
        attributes[index].value.as_option_mut().map_or(Ok(()), |it| value(it, place))?;
    }
    Ok(())
}

fn named_types(types: &mut [proto::NamedValueType], place: &mut Placer<'_>) -> Result<(), Fault> {
    types.iter_mut().try_for_each(|named| ty(named.r#type.as_option_mut(), place))
}

fn ty(ty: Option<&mut proto::ValueType>, place: &mut Placer<'_>) -> Result<(), Fault> {
    match ty.and_then(|ty| ty.r#type.as_mut()) {
        Some(Type::TensorType(tensor)) => attributes(&mut tensor.attributes, place),
        Some(Type::ListType(list)) => self::ty(list.r#type.as_option_mut(), place),
        Some(Type::StateType(state)) => self::ty(state.wrapped.as_option_mut(), place),
        Some(Type::TupleType(tuple)) => tuple.types.iter_mut().try_for_each(|it| self::ty(Some(it), place)),
        Some(Type::DictionaryType(dictionary)) => {
            self::ty(dictionary.key.as_option_mut(), place)?;
            self::ty(dictionary.value.as_option_mut(), place)
        }
        None => Ok(()),
    }
}

fn value(value: &mut proto::Value, place: &mut Placer<'_>) -> Result<(), Fault> {
    ty(value.r#type.as_option_mut(), place)?;
    match &mut value.value {
        Some(Stored::BlobFileValue(blob)) => (blob.file_name, blob.offset) = place(&blob.file_name, blob.offset)?,
        Some(Stored::ImmediateValue(immediate)) => match &mut immediate.value {
            Some(Immediate::Tuple(list) | Immediate::List(list)) => {
                list.values.iter_mut().try_for_each(|it| self::value(it, place))?;
            }
            Some(Immediate::Dictionary(dictionary)) => {
                for pair in &mut dictionary.values {
                    for it in [pair.key.as_option_mut(), pair.value.as_option_mut()].into_iter().flatten() {
                        self::value(it, place)?;
                    }
                }
            }
            Some(Immediate::Tensor(_)) | None => {}
        },
        None => {}
    }
    Ok(())
}
