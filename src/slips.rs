//! Words that were mistyped.

/// How many slips of the fingers make `typed` of `meant`; `None` if they are too many for a word of that length.
pub(crate) fn slips(typed: &str, meant: &str) -> Option<usize> {
    let most = if typed.len() < 6 { 1 } else { 2 };
    Some(strsim::damerau_levenshtein(typed, meant)).filter(|slips| *slips <= most)
}
