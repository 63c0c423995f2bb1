#![doc = include_str!("amb.md")]

mod parse;
mod plan;
mod variant;

pub use parse::{File, Record, is_amb, json_section, parse};
pub use plan::{Sections, dtypes, plan, refusal};
pub use variant::Variant;
