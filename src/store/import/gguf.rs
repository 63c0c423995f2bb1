//! A GGUF file: one blob, in a layer as ollama's own.

use super::piece::{Content, FileBytes, Piece, Weights};
use super::scan::FoundFile;
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::{Bytes, gguf, ollama};
use crate::model::SourceKind;

/// Whether a file is GGUF by its content, or says so by its name and is to be refused as such.
pub(super) fn is_gguf(file: &FoundFile) -> Result<bool> {
    let head = FileBytes::open(file)?.get(0, file.len.min(4) as usize).at(&file.place)?.into_owned();
    Ok(gguf::check_magic(&head[..]).at(&file.place)?.is_none() || file.path.ends_with(".gguf"))
}

/// What the file is to a model, and the piece that it is.
pub(super) fn plan(file: &FoundFile) -> Result<(SourceKind, Piece)> {
    let header = gguf::parse(&FileBytes::open_container(file)?).at(&file.place)?;
    if header.parts > 1 {
        let what = format!("is one of {} parts: join them first with llama-gguf-split --merge", header.parts);
        return Err(Error::format(&file.place, Fault::new(0, what)));
    }
    // As ollama tells them apart; files of older writers have no type, and a projector's architecture is clip.
    let (kind, media_type) = match (&*header.kind, &*header.architecture) {
        ("adapter", _) => (SourceKind::GgufAdapter, ollama::ADAPTER),
        ("mmproj" | "projector", _) | ("", "clip") => (SourceKind::GgufProjector, ollama::PROJECTOR),
        _ => (SourceKind::Gguf, ollama::MODEL),
    };
    Ok((kind, Piece { offset: 0, len: file.len, content: Content::Weights(Weights { media_type, header }) }))
}
