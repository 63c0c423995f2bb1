//! The part of the walk that is in arguments, attributes, types and values.

use std::ops::Range;

use super::Reference;
use super::outline::{DTYPES, Inline, Spot};
use super::walk::{Walk, once, twice};
use super::wire::Field;
use crate::dtype::Dtype;
use crate::error::Fault;
use crate::format::Bytes;

/// Dimensions of a tensor at the most: far more than Core ML's five.
const DIMENSIONS: usize = 1 << 16;

/// The type of a value, as far as it is a tensor's.
#[derive(Default)]
pub(super) struct TensorType {
    is_tensor: bool,
    code: u64,
    rank: u64,
    /// `None` for a dimension that is not known.
    dimensions: Vec<Option<u64>>,
}

impl<B: Bytes + ?Sized> Walk<'_, B> {
    pub(super) fn argument(&mut self, range: Range<u64>) -> Result<(), Fault> {
        let held = self.held;
        let mut bindings = Vec::new();
        self.each(range, |walk, field| if field.number == 1 { walk.hold(&mut bindings, field) } else { Ok(()) })?;
        let several = bindings.len() > 1;
        for (index, binding) in bindings.into_iter().enumerate() {
            let visit = |walk: &mut Self| {
                walk.inside(binding, |walk, range| {
                    let [name, value] = walk.parts_of(range, [1, 2])?;
                    match (name, value) {
                        (Some(_), Some(value)) => Err(twice(value)),
                        (None, Some(value)) => walk.inside(value, |walk, range| walk.value(range, true)),
                        _ => Ok(()),
                    }
                })
            };
            if several { self.named(format_args!(".{index}"), visit)? } else { visit(self)? }
        }
        self.held = held;
        Ok(())
    }

    /// The attributes of anything; those of operations can be moved to a weight file, those of types cannot.
    pub(super) fn attributes(&mut self, before: &str, attributes: Vec<Field>, movable: bool) -> Result<(), Fault> {
        for (key, entry, value) in self.entries(attributes)? {
            let Some(value) = value else { continue };
            self.named(format_args!("{before}{key}"), |walk| {
                walk.inside(entry, |walk, _| walk.inside(value, |walk, range| walk.value(range, movable)))
            })?;
        }
        Ok(())
    }

    pub(super) fn named_type(&mut self, field: Field) -> Result<(), Fault> {
        self.inside(field, |walk, range| {
            let [name, ty] = walk.parts_of(range, [1, 2])?;
            let Some(ty) = ty else { return Ok(()) };
            let name = walk.text(name)?;
            walk.named(format_args!("{name}"), |walk| walk.inside(ty, Self::ty)).map(|_| ())
        })
    }

    /// A type; it can carry values too, as the attributes of tensor types.
    pub(super) fn ty(&mut self, range: Range<u64>) -> Result<TensorType, Fault> {
        let mut ty = None;
        self.each(range, |_, field| if (1..=5).contains(&field.number) { once(&mut ty, field) } else { Ok(()) })?;
        let Some(ty) = ty else { return Ok(TensorType::default()) };
        self.inside(ty, |walk, range| match ty.number {
            1 => walk.tensor_type(range),
            // A list has one type, a tuple many, a dictionary two, a state one.
            number => {
                let mut index = 0u64;
                walk.each(range, |walk, field| {
                    let visit = |walk: &mut Self| walk.inside(field, Self::ty);
                    match (number, field.number) {
                        (2 | 5, 1) => visit(walk)?,
                        (3, 1) => walk.named(format_args!(".{index}"), visit)?,
                        (4, 1) => walk.named(format_args!(".key"), visit)?,
                        (4, 2) => walk.named(format_args!(".value"), visit)?,
                        _ => return Ok(()),
                    };
                    index = index.saturating_add(1);
                    Ok(())
                })?;
                Ok(TensorType::default())
            }
        })
    }

    pub(super) fn tensor_type(&mut self, range: Range<u64>) -> Result<TensorType, Fault> {
        let held = self.held;
        let mut ty = TensorType { is_tensor: true, ..TensorType::default() };
        let (mut code, mut rank, mut attributes) = (None, None, Vec::new());
        self.each(range, |walk, field| match field.number {
            1 => once(&mut code, field),
            2 => once(&mut rank, field),
            3 => {
                let [constant, unknown] = walk.parts(field, [1, 2])?;
                let size = match (constant, unknown) {
                    (Some(constant), None) => {
                        let [size] = walk.parts(constant, [1])?;
                        Some(size.map_or(Ok(0), |size| size.varint())?)
                    }
                    _ => None,
                };
                if ty.dimensions.len() == DIMENSIONS {
                    return Err(Fault::new(field.record, format!("a tensor has more than {DIMENSIONS} dimensions")));
                }
                ty.dimensions.push(size);
                Ok(())
            }
            4 => walk.hold(&mut attributes, field),
            _ => Ok(()),
        })?;
        self.attributes(".type.", attributes, false)?;
        self.held = held;
        ty.code = code.map_or(Ok(0), |field: Field| field.varint())?;
        ty.rank = rank.map_or(Ok(0), |field: Field| field.varint())?;
        Ok(ty)
    }

    pub(super) fn value(&mut self, range: Range<u64>, movable: bool) -> Result<(), Fault> {
        let [ty, immediate, blob] = self.parts_of(range, [2, 3, 5])?;
        let ty = ty.map_or(Ok(TensorType::default()), |ty| self.inside(ty, Self::ty))?;
        match (immediate, blob) {
            (Some(_), Some(blob)) => Err(twice(blob)),
            (None, Some(blob)) => self.inside(blob, |walk, range| walk.blob(range, ty)),
            (Some(immediate), None) => self.inside(immediate, |walk, range| {
                let mut value = None;
                walk.each(
                    range,
                    |_, field| {
                        if (1..=4).contains(&field.number) { once(&mut value, field) } else { Ok(()) }
                    },
                )?;
                match value {
                    Some(tensor) if tensor.number == 1 && movable => {
                        walk.inside(tensor, |walk, range| walk.tensor(range, ty, immediate))
                    }
                    Some(values) if values.number > 1 => walk.inside(values, |walk, range| walk.values(range, values)),
                    _ => Ok(()),
                }
            }),
            (None, None) => Ok(()),
        }
    }

    /// The values of a tuple, a list or a dictionary.
    pub(super) fn values(&mut self, range: Range<u64>, values: Field) -> Result<(), Fault> {
        let mut index = 0u64;
        self.each(range, |walk, field| {
            if field.number != 1 {
                return Ok(());
            }
            walk.named(format_args!(".{index}"), |walk| {
                walk.inside(field, |walk, range| match values.number {
                    4 => {
                        let pair = walk.parts_of(range, [1, 2])?;
                        for (half, value) in ["key", "value"].iter().zip(pair) {
                            let Some(value) = value else { continue };
                            walk.named(format_args!(".{half}"), |walk| {
                                walk.inside(value, |walk, range| walk.value(range, false))
                            })?;
                        }
                        Ok(())
                    }
                    _ => walk.value(range, false),
                })
            })?;
            index = index.saturating_add(1);
            Ok(())
        })
    }

    pub(super) fn blob(&mut self, range: Range<u64>, ty: TensorType) -> Result<(), Fault> {
        let [file, offset] = self.parts_of(range.clone(), [1, 2])?;
        let at = range.start;
        let (dtype, shape) = dtype_and_shape(ty).map_err(|what| {
            let name: String = self.name.chars().take(200).collect();
            Fault::new(at, format!("the value {name:?}, which is in a weight file, {what}"))
        })?;
        let name = self.found_name()?;
        let frame = self.frame();
        let record = |field: Option<Field>| field.map(|field| field.record..field.end);
        self.found.spots.push(Spot { frame, file: record(file), offset: record(offset), end: range.end });
        let (file, offset) = (self.text(file)?, offset.map_or(Ok(0), |offset| offset.varint())?);
        self.keep(&file, &shape)?;
        self.found.references.push(Reference { name, dtype, shape, file, offset });
        Ok(())
    }

    /// An inline tensor, if its bytes are those of a weight file: raw or packed, and in one piece.
    pub(super) fn tensor(&mut self, range: Range<u64>, ty: TensorType, immediate: Field) -> Result<(), Fault> {
        let mut kinds = Vec::new();
        self.each(range, |_, field| {
            // One more than a tensor can have is enough to know that it is none.
            if kinds.len() < 2 {
                kinds.push(field);
            }
            Ok(())
        })?;
        let [elements] = kinds[..] else { return Ok(()) };
        let Ok((dtype, shape)) = dtype_and_shape(ty) else { return Ok(()) };
        match (elements.number, dtype) {
            (1, Dtype::F32) | (6, Dtype::F64) => {}
            (7, dtype) if dtype != Dtype::Bool => {}
            _ => return Ok(()),
        }
        let range = self.inside(elements, |walk, range| {
            let [values] = walk.parts_of(range.clone(), [1]).unwrap_or([None]);
            let whole = values.filter(|values| values.record == range.start && values.end == range.end);
            Ok(whole.and_then(|values| values.bytes().ok()).map(|values| values.range()))
        })?;
        let Some(range) = range else { return Ok(()) };
        let len = range.end.saturating_sub(range.start);
        if len == 0 || dtype.bytes(&shape) != Some(len) || !(self.wanted)(&range) {
            return Ok(());
        }
        self.keep("", &shape)?;
        let name = self.found_name()?;
        // The value is the message around the field with the immediate value, which is around the tensor.
        let depth = self.within.len().saturating_sub(2);
        let frame = self.frame_at(depth).unwrap_or(0);
        self.found.records.push((frame, immediate.record..immediate.end));
        self.found.inline.push(Inline { name, dtype, shape, range });
        Ok(())
    }
}

fn dtype_and_shape(ty: TensorType) -> Result<(Dtype, Vec<u64>), String> {
    if !ty.is_tensor {
        return Err("is no tensor".into());
    }
    if ty.rank > i64::MAX as u64 {
        return Err("has an unknown number of dimensions".into());
    }
    let (_, dtype) = DTYPES
        .iter()
        .find(|(known, _)| *known == ty.code)
        .ok_or_else(|| format!("has the data type {}, which no weight file holds", ty.code))?;
    let shape: Option<Vec<u64>> = ty.dimensions.into_iter().collect();
    Ok((*dtype, shape.ok_or("has a dimension that is not known")?))
}
