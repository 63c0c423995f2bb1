//! Values that fp16 cannot hold: a variant in which they would become infinite is refused.

use super::Files;
use crate::error::{Error, Result};
use crate::extent::Computed;
use crate::transform::Transform;

/// The tensors of which values would become infinite by these casts, with their number, in words, and what to do about it.
pub(super) fn overflow<'a>(
    casts: impl Iterator<Item = (&'a str, Computed)>,
    files: Files<'_>,
) -> Result<Option<String>> {
    /// Tensors that are named; of more than these only the number is told.
    const NAMED: usize = 8;
    let mut hurt = Vec::new();
    for (name, computed) in casts.filter(|(_, computed)| matches!(computed.transform, Transform::F16(_))) {
        let survey = computed.survey(files.0)?;
        let count = survey[..].try_into().map(u64::from_le_bytes).ok();
        // No more values than bytes.
        let count = count.filter(|count| *count <= computed.input_len);
        let count = count.ok_or_else(|| Error::Invalid(format!("the count for {name:?} is damaged")))?;
        if count > 0 {
            hurt.push((count, name));
        }
    }
    if hurt.is_empty() {
        return Ok(None);
    }
    let total: u128 = hurt.iter().map(|(count, _)| u128::from(*count)).sum();
    let named: Vec<String> = hurt.iter().take(NAMED).map(|(count, name)| format!("{count} in {name:?}")).collect();
    let more = hurt.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and others in {more} more tensors") } else { String::new() };
    let verb = if total == 1 { "value would become" } else { "values would become" };
    let remedy = "a mount, cat or export with --allow-overflow has it all the same";
    Ok(Some(format!("{total} {verb} infinite: {}{more}; {remedy}", named.join(", "))))
}
