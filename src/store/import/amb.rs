//! An AMB file: plain tensors become blobs of their own; quantised ones and all else is kept as it is.

use super::piece::{Content, FileBytes, Piece, TensorName};
use super::scan::FoundFile;
use crate::error::{AtPath, Result};
use crate::format::{Bytes, amb};

/// Whether a file is AMB by its content, or says so by its name and is to be refused as such.
pub(super) fn is_amb(file: &FoundFile) -> Result<bool> {
    let head = FileBytes::open(file)?.get(0, file.len.min(5) as usize).at(&file.place)?.into_owned();
    Ok(amb::is_amb(&head) || file.path.ends_with(".amb"))
}

/// The pieces of the file.
pub(super) fn plan(file: &FoundFile) -> Result<Vec<Piece>> {
    let parsed = amb::parse(&FileBytes::open_container(file)?).at(&file.place)?;
    // A model of which only some tensors can be read is none to other layouts: its tensors are blobs without names.
    let whole = parsed.records.iter().all(|record| record.dtype.is_some());
    let mut pieces = Vec::new();
    let mut end = 0;
    let mut push = |offset: u64, len: u64, content: Content| {
        if offset > end {
            pieces.push(Piece { offset: end, len: offset - end, content: Content::Between });
        }
        end = offset + len;
        pieces.push(Piece { offset, len, content });
    };
    for section in [&parsed.metadata, &parsed.config, &parsed.tokenizer].into_iter().filter(|range| !range.is_empty()) {
        push(section.start, section.end - section.start, Content::Between);
    }
    for record in &parsed.records {
        let content = match record.dtype {
            None if record.len == 0 => continue,
            None => Content::Between,
            Some(dtype) => {
                let name = TensorName { name: record.name.clone(), own: true, other_type: None };
                Content::Tensor { dtype, shape: record.dims(), names: if whole { vec![name] } else { Vec::new() } }
            }
        };
        push(record.offset, record.len, content);
    }
    if end < file.len {
        pieces.push(Piece { offset: end, len: file.len - end, content: Content::Between });
    }
    Ok(pieces)
}
