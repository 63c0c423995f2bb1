//! Cutting a gds_export directory into tensors.

use std::collections::HashMap;

use super::piece::{Content, FileBytes, Piece, TensorName, read_small, whole};
use super::scan::{FoundFile, Scan};
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::gds::{self, Entry};

/// The manifest of an export: at the top, or in `gds_export/` of a model's directory that has no weights beside it.
pub(super) fn manifest_in(scan: &Scan) -> Option<&FoundFile> {
    scan.file(gds::MANIFEST).or_else(|| scan.file(&format!("gds_export/{}", gds::MANIFEST)))
}

/// The tensors of an export that lies in the directory of a model with weights, by path: the same once more, or others.
///
/// One that is not as its format says is no reason to refuse the model: its files are then kept as they are.
pub(super) fn beside_weights(scan: &Scan) -> HashMap<String, Entry> {
    let manifest = scan.file(&format!("gds_export/{}", gds::MANIFEST));
    manifest.and_then(|manifest| entries(scan, manifest).ok()).unwrap_or_default()
}

/// Plans every file of the directory: those that the manifest names are tensors.
pub(super) fn plan(scan: &Scan, manifest: &FoundFile) -> Result<Vec<Vec<Piece>>> {
    let mut by_path = entries(scan, manifest)?;
    let pieces = scan.files.iter().map(|file| match by_path.remove(&file.path) {
        Some(entry) => tensor(file, entry.name.clone(), true, entry),
        // The layouts make their own.
        None if file.path == manifest.path => Ok(vec![Piece { offset: 0, len: file.len, content: Content::Between }]),
        None => Ok(whole(file)),
    });
    pieces.collect()
}

/// The one piece of a file that is a tensor.
pub(super) fn tensor(file: &FoundFile, name: String, own: bool, entry: Entry) -> Result<Vec<Piece>> {
    FileBytes::open(file)?;
    let names = vec![TensorName { name, own, other_type: None }];
    let content = Content::Tensor { dtype: entry.dtype, shape: entry.shape, names };
    Ok(vec![Piece { offset: 0, len: file.len, content }])
}

/// The tensors that a manifest names, by path.
fn entries(scan: &Scan, manifest: &FoundFile) -> Result<HashMap<String, Entry>> {
    let entries = gds::parse(&read_small(manifest, gds::MAX_MANIFEST)?).at(&manifest.place)?;
    if entries.is_empty() {
        return Err(Error::format(&manifest.place, Fault::new(0, "names no tensor")));
    }
    let root = manifest.path.strip_suffix(gds::MANIFEST).unwrap_or_default();
    let mut by_path = HashMap::new();
    for entry in entries {
        let path = format!("{root}{}", entry.path);
        let file = scan.file(&path);
        let missing = || Fault::new(0, format!("tensor {:?}: its file {:?} is missing", entry.name, entry.path));
        entry.check_len(file.ok_or_else(missing).at(&manifest.place)?.len).at(&manifest.place)?;
        by_path.insert(path, entry);
    }
    Ok(by_path)
}
