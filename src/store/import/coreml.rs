//! Core ML's models: packages, bare `.mlmodel` files and compiled `.mlmodelc` directories.
//!
//! Weight files are taken apart blob by blob, and so are the inline tensors of a program that are large enough.

use std::collections::BTreeMap;
use std::path::Path;

use super::piece::{Content, FileBytes, Piece, TensorName, read_small, whole};
use super::scan::{FoundFile, Scan};
use crate::budget::Budget;
use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::mlprogram::{Outline, Reference, outline, weight_file};
use crate::format::{milblob, milprogram, mlpackage};
use crate::model::SourceKind;

/// What kind of Core ML model it is, if it is one.
pub(super) fn kind(path: &Path, name: &str, scan: &Scan) -> Option<SourceKind> {
    if !path.is_dir() {
        return name.ends_with(".mlmodel").then_some(SourceKind::Mlmodel);
    }
    if scan.file("Manifest.json").is_some() || name.ends_with(".mlpackage") {
        return Some(SourceKind::Mlpackage);
    }
    let compiled = name.ends_with(".mlmodelc") || scan.file("coremldata.bin").is_some();
    compiled.then_some(SourceKind::Mlmodelc)
}

/// The pieces of each file of the scan.
pub(super) fn plan(
    path: &Path,
    kind: SourceKind,
    scan: &Scan,
    blob_threshold: u64,
    budget: &Budget,
) -> Result<Vec<Vec<Piece>>> {
    match kind {
        SourceKind::Mlmodel => scan.files.iter().map(|file| plan_bare(file, blob_threshold, budget)).collect(),
        SourceKind::Mlmodelc => plan_compiled(scan, budget),
        _ => plan_package(path, scan, blob_threshold, budget),
    }
}

/// A bare `.mlmodel`.
fn plan_bare(file: &FoundFile, blob_threshold: u64, budget: &Budget) -> Result<Vec<Piece>> {
    let outline = read_outline(file, blob_threshold, budget)?;
    match outline.references.first() {
        None => {
            let parts = plan_program(file, &outline);
            budget.file(parts.len()).at(&file.place)?;
            Ok(parts)
        }
        Some(Reference { name, file: weights, .. }) => {
            let what = format!("{name:?} is in {weights:?}, which only an .mlpackage has: import the whole package");
            Err(Error::format(&file.place, Fault::new(0, what)))
        }
    }
}

/// The outline of a program, with its inline tensors from so many bytes on.
fn read_outline(file: &FoundFile, blob_threshold: u64, budget: &Budget) -> Result<Outline> {
    /// Protobuf's own limit for a message.
    const MAX: u64 = (1 << 31) - 1;
    if file.len > MAX {
        let what = format!("{} bytes are too many for a Core ML model, which is one message", file.len);
        return Err(Error::format(&file.place, Fault::new(0, what)));
    }
    let bytes = FileBytes::open_container(file)?;
    let outline = outline(&bytes, &|range| range.end - range.start >= blob_threshold).at(&file.place)?;
    let inline = outline.inline.iter().map(|it| held(&it.name, &it.shape));
    let all = outline.references.iter().map(|it| held(&it.name, &it.shape)).chain(inline);
    budget.text(all.sum()).at(&file.place)?;
    Ok(outline)
}

/// Bytes that are held of a tensor until the end: packages may all have the same large program.
fn held(name: &str, shape: &[u64]) -> u64 {
    /// Of what is held of each, whatever its name.
    const LEAST: u64 = 64;
    LEAST + name.len() as u64 + size_of_val(shape) as u64
}

/// A program: its inline tensors and what is between them.
fn plan_program(file: &FoundFile, outline: &Outline) -> Vec<Piece> {
    if outline.inline.is_empty() {
        return whole(file);
    }
    let mut inline: Vec<_> = outline.inline.iter().collect();
    inline.sort_by_key(|tensor| tensor.range.start);
    let (mut parts, mut end) = (Vec::new(), 0);
    let between = |from: u64, to: u64| Piece { offset: from, len: to - from, content: Content::Between };
    for tensor in inline {
        if tensor.range.start > end {
            parts.push(between(end, tensor.range.start));
        }
        let names = vec![TensorName { name: tensor.name.clone(), own: false, other_type: None }];
        let content = Content::Tensor { dtype: tensor.dtype, shape: tensor.shape.clone(), names };
        parts.push(Piece { offset: tensor.range.start, len: tensor.range.end - tensor.range.start, content });
        end = tensor.range.end;
    }
    if end < file.len {
        parts.push(between(end, file.len));
    }
    parts
}

/// A compiled model: every file as it is, the weight files blob by blob.
fn plan_compiled(scan: &Scan, budget: &Budget) -> Result<Vec<Vec<Piece>>> {
    let mut by_file = references_of_texts(scan, budget)?;
    let mut pieces = Vec::with_capacity(scan.files.len());
    for file in &scan.files {
        let (dir, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
        let is_weights = (dir == "weights" || dir.ends_with("/weights")) && name.ends_with(".bin");
        let parts = match is_weights {
            true => plan_weights(file, None, by_file.remove(&file.path).unwrap_or_default())?,
            false => whole(file),
        };
        budget.file(parts.len()).at(&file.place)?;
        pieces.push(parts);
    }
    Ok(pieces)
}

/// What the texts of compiled programs say of the weight files beside them, by the paths of those.
///
/// The text is Core ML's own and may change; what it does not say is only lost for the names.
fn references_of_texts(scan: &Scan, budget: &Budget) -> Result<BTreeMap<String, Vec<Reference>>> {
    let mut by_file: BTreeMap<String, Vec<Reference>> = BTreeMap::new();
    for program in &scan.files {
        let Some(model) = program.path.strip_suffix("model.mil") else { continue };
        if !scan.has_dir(&format!("{model}weights")) {
            continue;
        }
        for reference in milprogram::references(&read_small(program, milprogram::MAX_TEXT)?) {
            if let Ok(name) = weight_file(&reference.file) {
                budget.text(held(&reference.name, &reference.shape)).at(&program.place)?;
                by_file.entry(format!("{model}weights/{name}")).or_default().push(reference);
            }
        }
    }
    Ok(by_file)
}

/// An `.mlpackage`.
fn plan_package(path: &Path, scan: &Scan, blob_threshold: u64, budget: &Budget) -> Result<Vec<Vec<Piece>>> {
    let manifest = scan.file("Manifest.json").ok_or_else(|| {
        Error::Invalid(format!("{}: has no Manifest.json: it is no whole .mlpackage", path.display()))
    })?;
    let parsed = mlpackage::parse(&read_small(manifest, mlpackage::MAX_MANIFEST)?).at(&manifest.place)?;
    for item in parsed.items.values() {
        let item = format!("Data/{}", item.path);
        if scan.file(&item).is_none() && !scan.has_dir(&item) {
            let what = format!("names {item:?}, which is missing");
            return Err(Error::format(&manifest.place, Fault::new(0, what)));
        }
    }
    let root = parsed.model_path();
    let root = root.ok_or_else(|| Error::format(&manifest.place, Fault::new(0, "names no root model")))?;
    let program = format!("Data/{root}");
    let program = scan.file(&program).ok_or_else(|| {
        Error::format(&manifest.place, Fault::new(0, format!("the model {program:?} is missing or no file")))
    })?;
    let outline = read_outline(program, blob_threshold, budget)?;
    let weights_dir = program.path.rsplit_once('/').map_or("weights".into(), |(dir, _)| format!("{dir}/weights"));
    let mut by_file: BTreeMap<String, Vec<Reference>> = BTreeMap::new();
    for reference in &outline.references {
        let file = format!("{weights_dir}/{}", weight_file(&reference.file).at(&program.place)?);
        if scan.file(&file).is_none() {
            let what = format!("{:?} is in {file:?}, which is missing", reference.name);
            return Err(Error::format(&program.place, Fault::new(0, what)));
        }
        by_file.entry(file).or_default().push(reference.clone());
    }
    let mut pieces = Vec::with_capacity(scan.files.len());
    for file in &scan.files {
        let references = by_file.remove(&file.path).unwrap_or_default();
        let in_weights = file.path.strip_prefix(&weights_dir).is_some_and(|rest| rest.starts_with('/'));
        let is_weights = !references.is_empty() || in_weights && file.path.ends_with(".bin");
        let parts = match is_weights {
            true => plan_weights(file, Some(&program.place), references)?,
            false if file.path == program.path => plan_program(file, &outline),
            false => whole(file),
        };
        budget.file(parts.len()).at(&file.place)?;
        pieces.push(parts);
    }
    Ok(pieces)
}

/// A weight file: the blobs that the program names and those that a walk finds.
///
/// What a program says must be so; without one, references that are not so are left aside.
fn plan_weights(file: &FoundFile, program: Option<&Path>, references: Vec<Reference>) -> Result<Vec<Piece>> {
    let bytes = FileBytes::open_container(file)?;
    let mut blobs: BTreeMap<u64, (milblob::Blob, Vec<Reference>)> = BTreeMap::new();
    for blob in milblob::parse(&bytes).at(&file.place)? {
        blobs.insert(blob.metadata, (blob, Vec::new()));
    }
    for reference in references {
        // A walk misses what lies behind bytes that no blob accounts for; readers go where a program says.
        let walked = blobs.get(&reference.offset).map(|(blob, _)| *blob);
        let found = walked.map_or_else(|| unwalked(&bytes, &reference), Ok);
        match (found.and_then(|blob| check_reference(&reference, &blob).map(|()| blob)), program) {
            (Ok(blob), _) => blobs.entry(reference.offset).or_insert((blob, Vec::new())).1.push(reference),
            (Err(fault), Some(program)) => return Err(Error::format(program, fault)),
            (Err(_), None) => {}
        }
    }
    let mut parts = Vec::new();
    let mut end = 0;
    let mut by_data: Vec<(milblob::Blob, Vec<Reference>)> = blobs.into_values().collect();
    by_data.sort_by_key(|(blob, _)| (blob.offset, blob.size));
    for (blob, references) in by_data {
        // Several blobs may lie over the same bytes: one piece, all the names.
        if let Some(Piece { offset, len, content: Content::Tensor { dtype, shape, names } }) = parts.last_mut()
            && (*offset, *len) == (blob.offset, blob.size)
            && blob.size > 0
        {
            names.extend(names_of(references, *dtype, shape));
            continue;
        }
        let (dtype, shape) = match references.first() {
            Some(reference) => (reference.dtype, reference.shape.clone()),
            None => (Dtype::U8, vec![blob.size]),
        };
        let names = names_of(references, dtype, &shape);
        if blob.offset < end && blob.size > 0 {
            let what = format!("the blob at {} overlaps the one before it", blob.metadata);
            return Err(Error::format(&file.place, Fault::new(blob.offset, what)));
        }
        if blob.offset > end {
            parts.push(Piece { offset: end, len: blob.offset - end, content: Content::Between });
        }
        end = end.max(blob.offset + blob.size);
        let content = Content::Tensor { dtype, shape, names };
        parts.push(Piece { offset: blob.offset, len: blob.size, content });
    }
    if end < file.len {
        parts.push(Piece { offset: end, len: file.len - end, content: Content::Between });
    }
    Ok(parts)
}

/// The names of a piece of this dtype and shape.
fn names_of(references: Vec<Reference>, dtype: Dtype, shape: &[u64]) -> Vec<TensorName> {
    let name = |Reference { name, dtype: own_dtype, shape: own_shape, .. }: Reference| {
        let is_other = (own_dtype, &own_shape[..]) != (dtype, shape);
        TensorName { name, own: false, other_type: is_other.then_some((own_dtype, own_shape)) }
    };
    references.into_iter().map(name).collect()
}

/// The blob of a reference that leads to none of those that the walk found.
fn unwalked(bytes: &FileBytes, reference: &Reference) -> Result<milblob::Blob, Fault> {
    milblob::parse_blob(bytes, reference.offset).map_err(|fault| {
        let (name, file, why) = (&reference.name, &reference.file, fault.what);
        Fault::new(reference.offset, format!("{name:?} is in {file:?}, where it cites no blob: {why}"))
    })
}

fn check_reference(reference: &Reference, blob: &milblob::Blob) -> Result<(), Fault> {
    let fault = |what: String| Err(Fault::new(reference.offset, format!("{:?}: {what}", reference.name)));
    // BOOL has no blob code: writers store it as uint8.
    let dtype = if reference.dtype == Dtype::Bool { Dtype::U8 } else { reference.dtype };
    if blob.dtype != dtype {
        return fault(format!("its type is {} but the blob holds {}", reference.dtype, blob.dtype));
    }
    match dtype.bytes(&reference.shape) {
        Some(len) if len == blob.size => Ok(()),
        _ => fault(format!("{dtype} {:?} does not fill the {} bytes of the blob", reference.shape, blob.size)),
    }
}
