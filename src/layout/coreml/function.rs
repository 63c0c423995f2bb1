//! The function of one package.

use std::ops::Range;

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
    /// The function of a package, patched; `None` if it has not one called `main`.
    pub fn new(
        outline: &Outline,
        patches: &Patches,
        map: &ExtentMap,
        bytes: &(impl Bytes + ?Sized),
    ) -> Result<Option<Function>, Fault> {
        let description: Range<u64> = outline.description.clone().unwrap_or(0..0);
        match &outline.functions[..] {
            [main] if outline.kind == Kind::MlProgram && main.name == "main" => Ok(Some(Function {
                body: patches.apply(map, main.range.clone()),
                description: described(bytes, description)?,
                specification_version: outline.specification_version,
            })),
            _ => Ok(None),
        }
    }
}
