//! Core ML's programs: what an outline names is there, and patches change that and nothing else.

use std::ops::Range;

use wmount::digest::Digest;
use wmount::error::{Fault, Result};
use wmount::extent::{Blobs, ExtentMap};
use wmount::format::milprogram;
use wmount::format::mlprogram::{
    Outline, Patches, Place, described, features, multifunction, outline, surface, weight_file, weight_file_reference,
};

/// No blobs: maps of programs hold their bytes.
struct NoBlobs;

impl Blobs for NoBlobs {
    fn read_exact(&self, _: &Digest, _: u64, _: &mut [u8]) -> Result<()> {
        unreachable!("a program is inline")
    }
}

fn all(input: &[u8]) -> Result<Outline, Fault> {
    outline(input, &|_| true)
}

/// A `model.mlmodel`.
pub fn mlmodel(input: &[u8]) {
    let found = match all(input) {
        Ok(found) => found,
        Err(fault) => return super::check_line(&fault.to_string()),
    };
    let none = outline(input, &|_| false).unwrap();
    assert!(none.inline.is_empty() && none.references == found.references);
    let top = surface(input).unwrap();
    assert_eq!((top.kind, &top.functions, &top.description), (found.kind, &found.functions, &found.description));
    assert!(top.references.is_empty());
    let is_inside = |range: &Range<u64>| range.start <= range.end && range.end <= input.len() as u64;
    assert!(found.functions.iter().all(|function| is_inside(&function.range)));
    for tensor in &found.inline {
        assert!(is_inside(&tensor.range));
        assert_eq!(tensor.dtype.bytes(&tensor.shape), Some(tensor.range.end - tensor.range.start));
    }
    for reference in &found.references {
        if let Ok(name) = weight_file(&reference.file) {
            assert!(!name.contains('/') && weight_file_reference(name) == reference.file);
        }
    }
    let records = found.description.clone().and_then(|range| {
        let _ = features(input, range.clone());
        described(input, range).ok()
    });
    moved(input, &found);
    let Some(records) = records else { return };
    let model = ExtentMap::from_bytes(input.to_vec());
    let bodies: Vec<(String, ExtentMap)> = found
        .functions
        .iter()
        .enumerate()
        .map(|(index, function)| {
            let mut body = ExtentMap::new();
            body.push_range(&model, function.range.clone());
            (format!("f{index}"), body)
        })
        .collect();
    if !bodies.is_empty() {
        let functions = bodies.iter().map(|(name, body)| (name.as_str(), &records, body));
        let whole = multifunction(found.specification_version, functions).read_all(&NoBlobs).unwrap();
        let whole = all(&whole).unwrap();
        assert_eq!(whole.functions.len(), bodies.len());
        assert!(whole.references.len() <= found.references.len());
    }
}

/// Moves every reference and every inline tensor, and looks at the result.
fn moved(input: &[u8], found: &Outline) {
    let model = ExtentMap::from_bytes(input.to_vec());
    let whole = 0..input.len() as u64;
    let (no_references, no_inline) = (vec![None; found.references.len()], vec![None; found.inline.len()]);
    let same = Patches::new(found, &no_references, &no_inline);
    assert!(same.is_empty());
    // Messages grow or shrink by as much as these numbers take.
    for offset in [0, 1 << 40] {
        let place = |index: usize| Some(Place { file: "moved.bin".into(), offset: offset + index as u64 });
        let references: Vec<_> = (0..found.references.len()).map(place).collect();
        let inline: Vec<_> = (0..found.inline.len()).map(|index| place(index + references.len())).collect();
        let patches = Patches::new(found, &references, &inline);
        let bytes = patches.apply(&model, whole.clone()).read_all(&NoBlobs).unwrap();
        let again = all(&bytes).unwrap();
        assert!(again.inline.is_empty());
        let mut found_now: Vec<_> =
            again.references.iter().map(|it| (it.offset, &it.name, it.dtype, &it.shape)).collect();
        let old = found.references.iter().map(|it| (&it.name, it.dtype, &it.shape));
        let old = old.chain(found.inline.iter().map(|it| (&it.name, it.dtype, &it.shape)));
        let expected: Vec<_> =
            old.enumerate().map(|(index, (name, dtype, shape))| (offset + index as u64, name, dtype, shape)).collect();
        found_now.sort_by_key(|(offset, ..)| *offset);
        assert_eq!(found_now, expected);
        assert!(again.references.iter().all(|it| weight_file(&it.file) == Ok("moved.bin")));
    }
}

/// The text of a compiled program.
pub fn mil_text(input: &[u8]) {
    for reference in milprogram::references(input) {
        let _ = weight_file(&reference.file);
        let _ = reference.dtype.bytes(&reference.shape);
    }
}
