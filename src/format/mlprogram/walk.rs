//! The walk through a model that finds and names every value that is in a weight file, or could be.
//!
//! It reads the messages where they lie and keeps the lengths that enclose each value, so that [`super::Patches`] can
//! change them and copy all the rest. Of map entries with the same key the last one counts, as for every reader. Fields
//! that can occur once must occur once: readers would merge the pieces, so no piece could be changed alone.
//!
//! Here is the way from the model down to its operations; what is below them is in `values.rs`.

use std::fmt::{self, Write};
use std::ops::Range;

use super::outline::{Frame, FunctionRange, Outline};
use super::wire::{Field, Wire};
use super::{Kind, NESTING};
use crate::error::Fault;
use crate::format::{Bytes, MAX_TENSORS, too_many_tensors};

/// Bytes of all names together. Each name repeats those of the function and model around it, so without a limit
/// they could grow with the square of the file.
const NAMES: usize = 64 << 20;

/// Bytes of the names of weight files and of the dimensions of all tensors together. A message can be made of the same
/// bytes again and again, so that these are more than there are in any file.
const KEPT: usize = 256 << 20;

/// Messages around tensors; in real programs one has four of its own.
const FRAMES: usize = 8 << 20;

/// Fields that are looked at again, of all messages around the one that the walk is in: each takes some 200 bytes.
const HELD: usize = 1 << 20;

/// Walks through a model. `wanted` says which inline tensors are to be found, by the place of their bytes.
///
/// References come in the order of the program's operations; functions, inputs and attributes by name.
pub fn outline(bytes: &(impl Bytes + ?Sized), wanted: &dyn Fn(&Range<u64>) -> bool) -> Result<Outline, Fault> {
    walk(bytes, wanted, false)
}

/// The same without a look into the program: no references and no inline tensors, in no time.
pub fn surface(bytes: &(impl Bytes + ?Sized)) -> Result<Outline, Fault> {
    walk(bytes, &|_| false, true)
}

fn walk(bytes: &(impl Bytes + ?Sized), wanted: &dyn Fn(&Range<u64>) -> bool, shallow: bool) -> Result<Outline, Fault> {
    let found = Outline {
        kind: Kind::Other,
        specification_version: 0,
        description: None,
        functions: Vec::new(),
        references: Vec::new(),
        inline: Vec::new(),
        frames: Vec::new(),
        spots: Vec::new(),
        records: Vec::new(),
    };
    let mut walk = Walk::new(bytes, wanted, found);
    walk.shallow = shallow;
    walk.model(0..bytes.len())?;
    if walk.found.specification_version < 1 {
        return Err(Fault::new(0, "no Core ML model: it has no specification version"));
    }
    Ok(walk.found)
}

pub(super) struct Walk<'a, B: ?Sized> {
    pub wire: Wire<'a, B>,
    pub wanted: &'a dyn Fn(&Range<u64>) -> bool,
    pub found: Outline,
    /// The messages that the walk is in, and the index of each among the frames, if it has one already.
    pub within: Vec<(Field, Option<usize>)>,
    /// Name of the part of the model that the walk is in.
    pub name: String,
    /// Bytes of all names found.
    names: usize,
    /// Bytes of what else is kept of them.
    kept: usize,
    pub held: usize,
    /// Whether the functions are only listed.
    pub shallow: bool,
}

/// An entry of a map: key, entry and value.
type Entry = (String, Field, Option<Field>);

impl<'a, B: Bytes + ?Sized> Walk<'a, B> {
    pub fn new(bytes: &'a B, wanted: &'a dyn Fn(&Range<u64>) -> bool, found: Outline) -> Self {
        Walk {
            wire: Wire::new(bytes),
            wanted,
            found,
            within: Vec::new(),
            name: String::new(),
            names: 0,
            kept: 0,
            held: 0,
            shallow: false,
        }
    }

    pub(super) fn each(
        &mut self,
        range: Range<u64>,
        mut visit: impl FnMut(&mut Self, Field) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut at = range.start;
        while at < range.end {
            let field = self.wire.field(at, range.end)?;
            at = field.end;
            visit(self, field)?;
        }
        Ok(())
    }

    /// Visits the message that a field carries.
    pub(super) fn inside<T>(
        &mut self,
        field: Field,
        visit: impl FnOnce(&mut Self, Range<u64>) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let field = field.bytes()?;
        if self.within.len() >= NESTING as usize {
            let what = format!("no Core ML model: messages are nested more than {NESTING} deep");
            return Err(Fault::new(field.record, what));
        }
        self.within.push((field, None));
        let result = visit(self, field.range());
        self.within.pop();
        result
    }

    /// Calls `visit` with all fields of these numbers in the message that `field` carries, each number once.
    pub(super) fn parts<const N: usize>(
        &mut self,
        field: Field,
        numbers: [u32; N],
    ) -> Result<[Option<Field>; N], Fault> {
        self.inside(field, |walk, range| walk.parts_of(range, numbers))
    }

    pub(super) fn parts_of<const N: usize>(
        &mut self,
        range: Range<u64>,
        numbers: [u32; N],
    ) -> Result<[Option<Field>; N], Fault> {
        let mut found = [None; N];
        self.each(range, |_, field| {
            let place = found.iter_mut().zip(numbers).find(|(_, number)| *number == field.number);
            place.map_or(Ok(()), |(place, _)| once(place, field))
        })?;
        Ok(found)
    }

    /// Keeps a field to look at it again.
    pub(super) fn hold(&mut self, fields: &mut Vec<Field>, field: Field) -> Result<(), Fault> {
        self.held = self.held.saturating_add(1);
        if self.held > HELD {
            return Err(Fault::new(field.record, format!("no Core ML model: it has more than {HELD} fields in a row")));
        }
        fields.push(field);
        Ok(())
    }

    /// Visits a part of the model whose name has `part` at its end.
    pub(super) fn named<T>(
        &mut self,
        part: fmt::Arguments<'_>,
        visit: impl FnOnce(&mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let len = self.name.len();
        self.name.write_fmt(part).expect("writing to a string cannot fail");
        if self.name.len() > NAMES {
            return Err(too_many_names());
        }
        let result = visit(self)?;
        self.name.truncate(len);
        Ok(result)
    }

    pub(super) fn text(&mut self, field: Option<Field>) -> Result<String, Fault> {
        field.map_or(Ok(String::new()), |field| self.wire.text(field, NAMES))
    }

    /// The entries of a map in order of key.
    pub(super) fn entries(&mut self, fields: Vec<Field>) -> Result<Vec<Entry>, Fault> {
        let (mut entries, mut names) = (Vec::with_capacity(fields.len()), 0usize);
        for field in fields {
            let [key, value] = self.parts(field, [1, 2])?;
            let key = self.text(key)?;
            names = names.saturating_add(key.len());
            if names > NAMES {
                return Err(too_many_names());
            }
            entries.push((key, field, value));
        }
        // The last entry of a key comes first and stays.
        entries.sort_by(|(a, at_a, _), (b, at_b, _)| a.cmp(b).then(at_b.record.cmp(&at_a.record)));
        entries.dedup_by(|(a, ..), (b, ..)| a == b);
        Ok(entries)
    }

    pub(super) fn model(&mut self, range: Range<u64>) -> Result<(), Fault> {
        let (mut version, mut description, mut model) = (None, None, None);
        self.each(range, |_, field| match field.number {
            1 => once(&mut version, field),
            2 => once(&mut description, field),
            200..=202 | 303 | 403 | 500 | 502 => once(&mut model, field),
            _ => Ok(()),
        })?;
        let kind = match model.map(|field: Field| field.number) {
            Some(502) => Kind::MlProgram,
            Some(200..=202) => Kind::Pipeline,
            Some(_) => Kind::NeuralNetwork,
            None => Kind::Other,
        };
        let is_whole = self.within.is_empty();
        if is_whole {
            self.found.kind = kind;
            self.found.specification_version = version.map_or(Ok(0), |field: Field| field.varint())?;
            self.found.description = description.map(|field: Field| field.bytes()).transpose()?.map(|it| it.range());
        }
        let Some(model) = model else { return Ok(()) };
        match (kind, model.number) {
            (Kind::MlProgram, _) => self.inside(model, |walk, range| walk.program(range, is_whole)),
            (Kind::Pipeline, 202) => self.inside(model, Self::pipeline),
            (Kind::Pipeline, _) => self.inside(model, |walk, range| {
                let [pipeline] = walk.parts_of(range, [1])?;
                pipeline.map_or(Ok(()), |pipeline| walk.inside(pipeline, Self::pipeline))
            }),
            _ => model.bytes().map(|_| ()),
        }
    }

    pub(super) fn pipeline(&mut self, range: Range<u64>) -> Result<(), Fault> {
        let held = self.held;
        let (mut models, mut names) = (Vec::new(), Vec::new());
        self.each(range, |walk, field| match field.number {
            1 => walk.hold(&mut models, field),
            2 => walk.hold(&mut names, field),
            _ => Ok(()),
        })?;
        for (index, model) in models.into_iter().enumerate() {
            let name = self.text(names.get(index).copied())?;
            let visit = |walk: &mut Self| walk.inside(model, Self::model);
            match name.as_str() {
                "" => self.named(format_args!("{index}/"), visit)?,
                name => self.named(format_args!("{name}/"), visit)?,
            }
        }
        self.held = held;
        Ok(())
    }

    pub(super) fn program(&mut self, range: Range<u64>, is_whole: bool) -> Result<(), Fault> {
        let held = self.held;
        let (mut functions, mut attributes) = (Vec::new(), Vec::new());
        self.each(range, |walk, field| match field.number {
            2 => walk.hold(&mut functions, field),
            4 => walk.hold(&mut attributes, field),
            _ => Ok(()),
        })?;
        for (name, entry, value) in self.entries(functions)? {
            let Some(function) = value else { continue };
            if is_whole {
                let range = function.bytes()?.range();
                self.found.functions.push(FunctionRange { name: name.clone(), range });
            }
            if self.shallow {
                continue;
            }
            let visit = |walk: &mut Self| {
                walk.inside(entry, |walk, _| walk.inside(function, |walk, range| walk.function(range)))
            };
            match name.as_str() {
                "main" => visit(self)?,
                name => self.named(format_args!("{name}/"), visit)?,
            }
        }
        if !self.shallow {
            self.attributes("", attributes, false)?;
        }
        self.held = held;
        Ok(())
    }

    pub(super) fn function(&mut self, range: Range<u64>) -> Result<(), Fault> {
        let held = self.held;
        let (mut blocks, mut attributes) = (Vec::new(), Vec::new());
        self.each(range, |walk, field| match field.number {
            1 => walk.named_type(field),
            3 => walk.hold(&mut blocks, field),
            4 => walk.hold(&mut attributes, field),
            _ => Ok(()),
        })?;
        let blocks = self.entries(blocks)?;
        let several = blocks.len() > 1;
        for (name, entry, value) in blocks {
            let Some(block) = value else { continue };
            let visit = |walk: &mut Self| walk.inside(entry, |walk, _| walk.inside(block, Self::block));
            if several { self.named(format_args!("{name}/"), visit)? } else { visit(self)? }
        }
        self.attributes("", attributes, false)?;
        self.held = held;
        Ok(())
    }

    pub(super) fn block(&mut self, range: Range<u64>) -> Result<(), Fault> {
        let held = self.held;
        let mut attributes = Vec::new();
        self.each(range, |walk, field| match field.number {
            1 => walk.named_type(field),
            3 => walk.inside(field, Self::operation),
            4 => walk.hold(&mut attributes, field),
            _ => Ok(()),
        })?;
        self.attributes("", attributes, false)?;
        self.held = held;
        Ok(())
    }

    pub(super) fn operation(&mut self, range: Range<u64>) -> Result<(), Fault> {
        let held = self.held;
        let (mut ty, mut first) = (None, None);
        let (mut inputs, mut attributes) = (Vec::new(), Vec::new());
        self.each(range.clone(), |walk, field| match field.number {
            1 => once(&mut ty, field),
            2 => walk.hold(&mut inputs, field),
            3 => {
                first.get_or_insert(field);
                Ok(())
            }
            5 => walk.hold(&mut attributes, field),
            _ => Ok(()),
        })?;
        let ty = self.text(ty)?;
        // Operations that only have an effect, like writing a state, have no output to be named by.
        let name = match first {
            Some(output) => {
                let [name] = self.parts(output, [1])?;
                self.text(name)?
            }
            None => ty.clone(),
        };
        self.named(format_args!("{name}"), |walk| {
            for (key, entry, value) in walk.entries(inputs)? {
                let Some(argument) = value else { continue };
                walk.named(format_args!(".{key}"), |walk| {
                    walk.inside(entry, |walk, _| walk.inside(argument, Self::argument))
                })?;
            }
            for (key, entry, value) in walk.entries(attributes)? {
                let Some(value) = value else { continue };
                let visit = |walk: &mut Self| {
                    walk.inside(entry, |walk, _| walk.inside(value, |walk, range| walk.value(range, true)))
                };
                if ty == "const" && key == "val" { visit(walk)? } else { walk.named(format_args!(".{key}"), visit)? }
            }
            Ok(())
        })?;
        self.held = held;
        self.each(range, |walk, field| match field.number {
            3 => walk.named_type(field),
            4 => walk.inside(field, Self::block),
            _ => Ok(()),
        })
    }

    pub(super) fn found_name(&mut self) -> Result<String, Fault> {
        if self.found.references.len() + self.found.inline.len() >= MAX_TENSORS {
            return Err(too_many_tensors(0));
        }
        if self.found.frames.len() > FRAMES {
            return Err(Fault::new(0, format!("its tensors lie in more than {FRAMES} messages")));
        }
        self.names = self.names.saturating_add(self.name.len());
        if self.names > NAMES {
            return Err(too_many_names());
        }
        Ok(self.name.clone())
    }

    /// Keeps the weight file and the shape of a tensor.
    pub(super) fn keep(&mut self, file: &str, shape: &[u64]) -> Result<(), Fault> {
        self.kept = self.kept.saturating_add(file.len()).saturating_add(size_of_val(shape));
        if self.kept > KEPT {
            let what = format!("the tensors' weight files and shapes come to more than {} MiB", KEPT >> 20);
            return Err(Fault::new(0, what));
        }
        Ok(())
    }

    /// The frame of the message that the walk is in.
    pub(super) fn frame(&mut self) -> usize {
        self.frame_at(self.within.len()).unwrap_or(0)
    }

    /// The frame of the `depth`-th message around the place that the walk is at, made with all around it as needed.
    pub(super) fn frame_at(&mut self, depth: usize) -> Option<usize> {
        let mut parent = None;
        for (field, frame) in self.within.iter_mut().take(depth) {
            let made = frame.unwrap_or_else(|| {
                let len_at = field.after_tag..field.start;
                self.found.frames.push(Frame { parent, len_at, len: field.len() });
                self.found.frames.len().saturating_sub(1)
            });
            *frame = Some(made);
            parent = Some(made);
        }
        parent
    }
}

pub(super) fn once(place: &mut Option<Field>, field: Field) -> Result<(), Fault> {
    match place.replace(field) {
        None => Ok(()),
        Some(_) => Err(twice(field)),
    }
}

pub(super) fn twice(field: Field) -> Fault {
    let what = format!("no Core ML model that can be taken apart: field {} says again what was said", field.number);
    Fault::new(field.record, what)
}

fn too_many_names() -> Fault {
    Fault::new(0, format!("the tensors' names come to more than {} MiB", NAMES >> 20))
}
