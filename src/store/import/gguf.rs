//! A GGUF file: one blob, in a layer as ollama's own.

use super::piece::{Content, FileBytes, Piece, Weights};
use super::scan::FoundFile;
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::{Bytes, gguf, ollama};
use crate::model::SourceKind;

/// How the names of such files end.
pub(super) const ENDING: &str = ".gguf";

/// Whether a file is GGUF by its content, or says so by its name and is to be refused as such.
pub(super) fn is_gguf(file: &FoundFile) -> Result<bool> {
    let head = FileBytes::open(file)?.get(0, file.len.min(4) as usize).at(&file.place)?.into_owned();
    Ok(gguf::check_magic(&head[..]).at(&file.place)?.is_none() || file.path.ends_with(ENDING))
}

/// What the file is to a model, and the piece that it is.
pub(super) fn plan(file: &FoundFile) -> Result<(SourceKind, Piece)> {
    let header = gguf::parse(&FileBytes::open_container(file)?).at(&file.place)?;
    if header.parts > 1 {
        let what = format!(
            "is one of {} parts, and its name is not that of one: call it as it was, such as name-00001-of-{:05}.gguf",
            header.parts, header.parts
        );
        return Err(Error::format(&file.place, Fault::new(0, what)));
    }
    let (kind, weights) = weights(header);
    Ok((kind, Piece { offset: 0, len: file.len, content: Content::Weights(weights) }))
}

/// What a file of this header is to a model.
pub(super) fn weights(header: gguf::Header) -> (SourceKind, Weights) {
    // As ollama tells them apart; files of older writers have no type, and a projector's architecture is clip.
    let (kind, media_type) = match (&*header.kind, &*header.architecture) {
        ("adapter", _) => (SourceKind::GgufAdapter, ollama::ADAPTER),
        ("mmproj" | "projector", _) | ("", "clip") => (SourceKind::GgufProjector, ollama::PROJECTOR),
        _ => (SourceKind::Gguf, ollama::MODEL),
    };
    (kind, Weights { media_type, header })
}
