#![doc = include_str!("amb.md")]

mod parse;
mod plan;
mod variant;

#[cfg(test)]
mod tests;

pub use parse::{File, Record, is_amb, json_section, parse};
pub use plan::{Sections, dtypes, plan, refusal};
pub use variant::Variant;
