//! One source as it is planned: its files, and what each is cut into.

use std::path::PathBuf;

use super::piece::Piece;
use super::scan::Scan;
use crate::format::gguf::Run;
use crate::model::SourceKind;

/// One source to import.
#[derive(Debug)]
pub(super) struct SourcePlan {
    /// Where it is; of what is split, where its parts are.
    pub places: Vec<PathBuf>,
    /// Its name: the last component of the path; of what is split, what its parts have in common.
    pub name: String,
    pub kind: SourceKind,
    pub scan: Scan,
    /// The pieces of each file of the scan, in its order; they follow each other from byte 0.
    pub pieces: Vec<Vec<Piece>>,
    /// What the files are merged to, if that is what is stored of them.
    pub merged: Option<Merged>,
}

/// A file of weights that is made of the files of a source.
#[derive(Debug)]
pub(super) struct Merged {
    /// All of it.
    pub piece: Piece,
    /// What follows each other in it; its parts are the files of the scan.
    pub runs: Vec<Run>,
}
