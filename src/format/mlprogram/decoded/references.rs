//! The walk that finds and names every reference to a weight file.

use std::fmt::{self, Write};

use super::super::proto::binding::Binding;
use super::super::proto::dimension::Dimension;
use super::super::proto::immediate_value::Value as Immediate;
use super::super::proto::model::Type as ModelType;
use super::super::proto::value::Value as Stored;
use super::super::proto::value_type::Type;
use super::{Reference, live, proto};
use crate::dtype::Dtype;
use crate::error::Fault;
use crate::format::mlprogram::outline::DTYPES;

/// Bytes of all names together. Each name repeats those of the function and model around it, so without a limit
/// they could grow with the square of the file.
const NAMES: usize = 64 << 20;

/// The references of a model.
pub(super) fn of(model: &proto::Model) -> Result<Vec<Reference>, Fault> {
    let mut walk = Walk { found: Vec::new(), name: String::new(), names: 0 };
    walk.model(model)?;
    Ok(walk.found)
}

struct Walk {
    found: Vec<Reference>,
    /// Name of the part of the model that the walk is in.
    name: String,
    /// Bytes of all names found.
    names: usize,
}

impl Walk {
    /// Visits a part of the model whose name has `part` at its end.
    fn within(
        &mut self,
        part: fmt::Arguments<'_>,
        visit: impl FnOnce(&mut Self) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let len = self.name.len();
        self.name.write_fmt(part).expect("writing to a string cannot fail");
        visit(self)?;
        self.name.truncate(len);
        Ok(())
    }

    fn model(&mut self, model: &proto::Model) -> Result<(), Fault> {
        match &model.r#type {
            Some(ModelType::MlProgram(program)) => self.program(program),
            Some(ModelType::Pipeline(pipeline)) => self.pipeline(pipeline),
            Some(ModelType::PipelineClassifier(model) | ModelType::PipelineRegressor(model)) => {
                self.pipeline(&model.pipeline)
            }
            _ => Ok(()),
        }
    }

    fn pipeline(&mut self, pipeline: &proto::Pipeline) -> Result<(), Fault> {
        for (index, model) in pipeline.models.iter().enumerate() {
            match pipeline.names.get(index).filter(|name| !name.is_empty()) {
                Some(name) => self.within(format_args!("{name}/"), |walk| walk.model(model))?,
                None => self.within(format_args!("{index}/"), |walk| walk.model(model))?,
            }
        }
        Ok(())
    }

    fn program(&mut self, program: &proto::Program) -> Result<(), Fault> {
        self.attributes("", &program.attributes)?;
        for index in live(&program.functions, |entry| &entry.key) {
            let proto::FunctionEntry { key, value: function, .. } = &program.functions[index];
            match key.as_str() {
                "main" => self.function(function)?,
                name => self.within(format_args!("{name}/"), |walk| walk.function(function))?,
            }
        }
        Ok(())
    }

    fn function(&mut self, function: &proto::Function) -> Result<(), Fault> {
        self.named_types(&function.inputs)?;
        self.attributes("", &function.attributes)?;
        let blocks = live(&function.block_specializations, |entry| &entry.key);
        for &index in &blocks {
            let proto::BlockEntry { key, value: block, .. } = &function.block_specializations[index];
            if blocks.len() == 1 {
                self.block(block)?;
            } else {
                self.within(format_args!("{key}/"), |walk| walk.block(block))?;
            }
        }
        Ok(())
    }

    fn block(&mut self, block: &proto::Block) -> Result<(), Fault> {
        self.named_types(&block.inputs)?;
        self.attributes("", &block.attributes)?;
        block.operations.iter().try_for_each(|operation| self.operation(operation))
    }

    fn operation(&mut self, operation: &proto::Operation) -> Result<(), Fault> {
        // Operations that only have an effect, like writing a state, have no output to be named by.
        let name = operation.outputs.first().map_or(&operation.r#type, |output| &output.name);
        self.within(format_args!("{name}"), |walk| {
            for index in live(&operation.inputs, |entry| &entry.key) {
                let proto::ArgumentEntry { key, value: argument, .. } = &operation.inputs[index];
                walk.within(format_args!(".{key}"), |walk| walk.argument(argument))?;
            }
            for index in live(&operation.attributes, |entry| &entry.key) {
                let proto::ValueEntry { key, value, .. } = &operation.attributes[index];
                if operation.r#type == "const" && key == "val" {
                    walk.value(value)?;
                } else {
                    walk.within(format_args!(".{key}"), |walk| walk.value(value))?;
                }
            }
            Ok(())
        })?;
        self.named_types(&operation.outputs)?;
        operation.blocks.iter().try_for_each(|block| self.block(block))
    }

    fn argument(&mut self, argument: &proto::Argument) -> Result<(), Fault> {
        let several = argument.arguments.len() > 1;
        for (index, binding) in argument.arguments.iter().enumerate() {
            match &binding.binding {
                Some(Binding::Value(value)) if several => {
                    self.within(format_args!(".{index}"), |walk| walk.value(value))?;
                }
                Some(Binding::Value(value)) => self.value(value)?,
                Some(Binding::Name(_)) | None => {}
            }
        }
        Ok(())
    }

    fn attributes(&mut self, before: &str, attributes: &[proto::ValueEntry]) -> Result<(), Fault> {
        for index in live(attributes, |entry| &entry.key) {
            let proto::ValueEntry { key, value, .. } = &attributes[index];
            self.within(format_args!("{before}{key}"), |walk| walk.value(value))?;
        }
        Ok(())
    }

    fn named_types(&mut self, types: &[proto::NamedValueType]) -> Result<(), Fault> {
        types.iter().try_for_each(|named| self.within(format_args!("{}", named.name), |walk| walk.ty(&named.r#type)))
    }

    /// Types carry values too: the attributes of tensor types.
    fn ty(&mut self, ty: &proto::ValueType) -> Result<(), Fault> {
        match &ty.r#type {
            Some(Type::TensorType(tensor)) => self.attributes(".type.", &tensor.attributes),
            Some(Type::ListType(list)) => self.ty(&list.r#type),
            Some(Type::StateType(state)) => self.ty(&state.wrapped),
            Some(Type::TupleType(tuple)) => {
                let mut types = tuple.types.iter().enumerate();
                types.try_for_each(|(index, ty)| self.within(format_args!(".{index}"), |walk| walk.ty(ty)))
            }
            Some(Type::DictionaryType(dictionary)) => {
                self.within(format_args!(".key"), |walk| walk.ty(&dictionary.key))?;
                self.within(format_args!(".value"), |walk| walk.ty(&dictionary.value))
            }
            None => Ok(()),
        }
    }

    fn value(&mut self, value: &proto::Value) -> Result<(), Fault> {
        self.ty(&value.r#type)?;
        match &value.value {
            Some(Stored::BlobFileValue(blob)) => self.blob(&value.r#type, blob),
            Some(Stored::ImmediateValue(immediate)) => match &immediate.value {
                Some(Immediate::Tuple(list) | Immediate::List(list)) => {
                    let mut values = list.values.iter().enumerate();
                    values
                        .try_for_each(|(index, value)| self.within(format_args!(".{index}"), |walk| walk.value(value)))
                }
                Some(Immediate::Dictionary(dictionary)) => {
                    for (index, pair) in dictionary.values.iter().enumerate() {
                        self.within(format_args!(".{index}.key"), |walk| walk.value(&pair.key))?;
                        self.within(format_args!(".{index}.value"), |walk| walk.value(&pair.value))?;
                    }
                    Ok(())
                }
                Some(Immediate::Tensor(_)) | None => Ok(()),
            },
            None => Ok(()),
        }
    }

    fn blob(&mut self, ty: &proto::ValueType, blob: &proto::BlobFileValue) -> Result<(), Fault> {
        self.names += self.name.len();
        if self.names > NAMES {
            return Err(Fault::new(0, format!("the tensors' names come to more than {} MiB", NAMES >> 20)));
        }
        let (dtype, shape) = dtype_and_shape(ty).map_err(|what| {
            let name: String = self.name.chars().take(200).collect();
            Fault::new(0, format!("the value {name:?}, which is in a weight file, {what}"))
        })?;
        let (name, file) = (self.name.clone(), blob.file_name.clone());
        self.found.push(Reference { name, dtype, shape, file, offset: blob.offset });
        Ok(())
    }
}

fn dtype_and_shape(ty: &proto::ValueType) -> Result<(Dtype, Vec<u64>), String> {
    let Some(Type::TensorType(tensor)) = &ty.r#type else {
        return Err("is no tensor".into());
    };
    if tensor.rank < 0 {
        return Err("has an unknown number of dimensions".into());
    }
    let code = tensor.data_type;
    let (_, dtype) = DTYPES
        .iter()
        .find(|(known, _)| i64::try_from(*known) == Ok(code.into()))
        .ok_or_else(|| format!("has the data type {code}, which no weight file holds"))?;
    let dimensions = tensor.dimensions.iter().map(|dimension| match &dimension.dimension {
        Some(Dimension::Constant(constant)) => Ok(constant.size),
        Some(Dimension::Unknown(_)) | None => Err("has a dimension that is not known".to_string()),
    });
    Ok((*dtype, dimensions.collect::<Result<_, _>>()?))
}
