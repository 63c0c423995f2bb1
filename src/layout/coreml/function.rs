//! The function of one package.

use std::cell::Cell;

use crate::error::Fault;
use crate::extent::ExtentMap;
use crate::format::Bytes;
use crate::format::mlprogram::{Described, Kind, Outline, Patches, described};

/// A package's only function.
pub(super) struct Function {
    pub body: ExtentMap,
    pub description: Described,
    pub specification_version: u64,
}

impl Function {
    /// The function of a package, patched; `None` if it has not one called `main`, or if its description takes more than
    /// there is `room` for.
    pub fn new(
        outline: &Outline,
        patches: &Patches,
        map: &ExtentMap,
        bytes: &(impl Bytes + ?Sized),
        room: &Cell<u64>,
    ) -> Result<Option<Function>, Fault> {
        let main = match &outline.functions[..] {
            [main] if outline.kind == Kind::MlProgram && main.name == "main" => main.range.clone(),
            _ => return Ok(None),
        };
        let description = described(bytes, outline.description.clone().unwrap_or(0..0))?;
        let Some(rest) = room.get().checked_sub(description.size()) else { return Ok(None) };
        room.set(rest);
        let body = patches.apply(map, main);
        Ok(Some(Function { body, description, specification_version: outline.specification_version }))
    }
}
