//! Cutting a gds_export directory into tensors.

use super::piece::{Content, FileBytes, Piece, TensorName, read_small, whole};
use super::scan::{FoundFile, Scan};
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::gds::{self, Entry};

/// The manifest of an export: at the top, or in `gds_export/` of a model's directory that has no weights beside it.
pub(super) fn manifest_in(scan: &Scan) -> Option<&FoundFile> {
    scan.file(gds::MANIFEST).or_else(|| scan.file(&format!("gds_export/{}", gds::MANIFEST)))
}

/// Plans every file of the directory: those that the manifest names are tensors.
pub(super) fn plan(scan: &Scan, manifest: &FoundFile) -> Result<Vec<Vec<Piece>>> {
    let entries = gds::parse(&read_small(manifest, gds::MAX_MANIFEST)?).at(&manifest.place)?;
    if entries.is_empty() {
        return Err(Error::format(&manifest.place, Fault::new(0, "names no tensor")));
    }
    let root = manifest.path.strip_suffix(gds::MANIFEST).unwrap_or_default();
    let mut by_path: std::collections::HashMap<String, Entry> = std::collections::HashMap::new();
    for entry in entries {
        let path = format!("{root}{}", entry.path);
        let file = scan.file(&path);
        let missing = || Fault::new(0, format!("tensor {:?}: its file {:?} is missing", entry.name, entry.path));
        entry.check_len(file.ok_or_else(missing).at(&manifest.place)?.len).at(&manifest.place)?;
        by_path.insert(path, entry);
    }
    let pieces = scan.files.iter().map(|file| {
        let content = match by_path.remove(&file.path) {
            Some(entry) => {
                let names = vec![TensorName { name: entry.name, own: true }];
                Content::Tensor { dtype: entry.dtype, shape: entry.shape, names }
            }
            // The layouts make their own.
            None if file.path == manifest.path => Content::Between,
            None => return Ok(whole(file)),
        };
        FileBytes::open(file).map(|_| vec![Piece { offset: 0, len: file.len, content }])
    });
    pieces.collect()
}
