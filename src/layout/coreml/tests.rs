//! Weight files of sizes that no test should write.

#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use super::super::{MapBytes, VirtualFile};
use super::*;
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::Error;
use crate::extent::{Blobs, ExtentBytes};
use crate::format::milblob;
use crate::format::mlpackage::Manifest;
use crate::format::mlprogram::{Patches, Place, Reference, outline, weight_file_reference};
use crate::model::{SourceDir, SourceFile};

/// Small files in memory; every other blob is endless zeros that may not be read.
#[derive(Default)]
struct Sparse(HashMap<Digest, Vec<u8>>);

impl Sparse {
    fn put(&mut self, bytes: Vec<u8>) -> ExtentMap {
        let (digest, len) = (Digest::of(&bytes), bytes.len() as u64);
        self.0.insert(digest, bytes);
        ExtentMap::from_blob(digest, len)
    }
}

impl Blobs for Sparse {
    fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
        let bytes = self.0.get(digest).and_then(|bytes| bytes.get(offset as usize..)?.get(..buf.len()));
        let weights = || Error::Damaged { digest: *digest, fault: "a weight was read".into() };
        buf.copy_from_slice(bytes.ok_or_else(weights)?);
        Ok(())
    }
}

fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    [varint(number << 3 | 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

fn number(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A program with one FP16 constant at each offset, of so many elements, and as many bytes of text in each.
fn program(constants: &[(u64, u64)], text: usize) -> Vec<u8> {
    let mut operations = Vec::new();
    for (index, (offset, elements)) in constants.iter().enumerate() {
        let dimension = field(3, &field(1, &number(1, *elements)));
        let ty = field(1, &[number(1, 10), number(2, 1), dimension].concat());
        let file = [field(1, weight_file_reference("weight.bin").as_bytes()), number(2, *offset)].concat();
        let value = [field(2, &ty), field(5, &file)].concat();
        let attribute = [field(1, b"val"), field(2, &value)].concat();
        let output = field(1, format!("w{index}").as_bytes());
        let operation = [field(1, b"const"), field(3, &output), field(5, &attribute), field(99, &vec![b'x'; text])];
        operations.extend(field(3, &operation.concat()));
    }
    let block = [field(1, b"CoreML6"), field(2, &operations)].concat();
    let function = [field(1, b"main"), field(2, &field(3, &block))].concat();
    [number(1, 7), field(502, &[number(1, 1), field(2, &function)].concat())].concat()
}

/// A package with constants of these sizes in a weight file of their order; equal numbers are equal blobs.
fn package(name: &str, sizes: &[(u64, u64)], blobs: &mut Sparse) -> Source {
    let plan = milblob::plan(sizes.iter().map(|(_, size)| (Dtype::F16, *size, 0))).unwrap();
    let mut weights = ExtentMap::from_bytes(plan.header.to_vec());
    for (blob, (number, size)) in plan.blobs.iter().zip(sizes) {
        weights.align(64);
        weights.push_inline(&milblob::metadata(blob));
        weights.push_blob(Digest::of(&number.to_le_bytes()), *size, 0, *size).unwrap();
    }
    let constants: Vec<(u64, u64)> = plan.blobs.iter().map(|blob| (blob.metadata, blob.size / 2)).collect();
    let manifest = Manifest::new(&Digest::of(name.as_bytes()), true).render();
    let mtime = SystemTime::UNIX_EPOCH + Duration::from_secs(sizes.len() as u64);
    let file = |path: &str, content| SourceFile { path: path.into(), mtime, content: Arc::new(content) };
    let files = vec![
        file("Data/com.apple.CoreML/model.mlmodel", blobs.put(program(&constants, 0))),
        file("Data/com.apple.CoreML/weights/weight.bin", weights),
        file("Manifest.json", blobs.put(manifest)),
    ];
    let dirs = ["Data", "Data/com.apple.CoreML", "Data/com.apple.CoreML/weights"];
    let dirs = dirs.map(|path| SourceDir { path: path.into(), mtime }).into();
    Source { name: format!("{name}.mlpackage"), kind: SourceKind::Mlpackage, files, dirs }
}

fn shown(sources: &[Source], blobs: &Sparse) -> BTreeMap<String, (VirtualFile, VirtualFile)> {
    shown_of(sources, blobs, &Budget::of(LIMITS))
}

fn shown_of(sources: &[Source], blobs: &Sparse, budget: &Budget) -> BTreeMap<String, (VirtualFile, VirtualFile)> {
    let packages: Vec<Package<'_>> =
        sources.iter().map(|source| Package::find(source, Files(blobs), budget).unwrap()).collect();
    let mut planned = shared::plan(&packages, Files(blobs), budget);
    let mut all = BTreeMap::new();
    for package in &packages {
        let mut branch = package.branch(&planned.remove(&package.source.name).unwrap_or_default());
        link_weights(&mut branch, false, &mut Times::default());
        let mut file = |path: &str| match branch.place(path) {
            Some(Branch::File(file)) => file.clone(),
            _ => panic!("{path} is no file"),
        };
        let program = file("Data/com.apple.CoreML/model.mlmodel");
        let weights = file("Data/com.apple.CoreML/weights/weight.bin");
        all.insert(package.source.name.clone(), (program, weights));
    }
    all
}

/// The number of the blob that each constant of a shown package leads to.
fn bound(program: &VirtualFile, weights: &VirtualFile, blobs: &Sparse) -> Vec<Digest> {
    let bytes = |map| MapBytes { map, blobs };
    let outline = outline(&bytes(&program.content), &|_| false).unwrap();
    let at = |offset: u64| {
        let blob = milblob::parse_blob(&bytes(&weights.content), offset).unwrap();
        let data = weights.content.extents().find(|extent| extent.start == blob.offset).unwrap();
        match data.bytes {
            ExtentBytes::Blob { digest, offset: 0 } if data.len == blob.size => digest,
            other => panic!("{other:?}"),
        }
    };
    outline.references.iter().map(|reference| at(reference.offset)).collect()
}

#[test]
fn weight_files_over_4_gib_are_shared_without_reading_a_weight() {
    let gib = 1u64 << 30;
    let mut blobs = Sparse::default();
    let orders: [&[(u64, u64)]; 4] = [
        &[(1, 3 * gib), (2, 2 * gib), (3, 128), (4, 6 * gib)],
        &[(4, 6 * gib), (3, 128), (1, 3 * gib), (2, 2 * gib)],
        &[(2, 2 * gib), (5, 5 * gib + 2), (1, 3 * gib), (4, 6 * gib)],
        &[(9, 6 * gib), (3, 128)],
    ];
    let sources: Vec<Source> =
        orders.iter().enumerate().map(|(index, sizes)| package(&format!("p{index}"), sizes, &mut blobs)).collect();
    let all = shown(&sources, &blobs);
    for (index, sizes) in orders.iter().enumerate() {
        let (program, weights) = &all[&format!("p{index}.mlpackage")];
        let expected: Vec<Digest> = sizes.iter().map(|(number, _)| Digest::of(&number.to_le_bytes())).collect();
        assert_eq!(bound(program, weights, &blobs), expected, "p{index}");
        assert_eq!(
            milblob::parse(&MapBytes { map: &weights.content, blobs: &blobs }).unwrap().len(),
            [5, 5, 5, 2][index]
        );
    }
    let fingerprint = |index: usize| all[&format!("p{index}.mlpackage")].1.content.fingerprint();
    assert_eq!((fingerprint(0), fingerprint(0)), (fingerprint(1), fingerprint(2)));
    assert!(all["p0.mlpackage"].1.content.size() > 16 * gib);
    // What has no more than a small constant in common keeps its own file.
    assert_eq!(fingerprint(3), sources[3].files[1].content.fingerprint());

    // Joining later moves nothing.
    for count in 1..3 {
        let fewer = shown(&sources[..count], &blobs);
        for (name, (program, weights)) in &fewer {
            assert_eq!(program.content, all[name].0.content);
            let size = weights.content.size();
            let mut start = ExtentMap::new();
            start.push_range(&all[name].1.content, 64..size);
            let mut before = ExtentMap::new();
            before.push_range(&weights.content, 64..size);
            assert_eq!(start, before);
        }
    }
}

#[test]
fn a_program_of_100_mb_is_rewritten_whole() {
    let constants: Vec<(u64, u64)> = (0..20_000).map(|index| (64 + 192 * index, 32)).collect();
    let model = program(&constants, 5_000);
    assert!(model.len() > 100_000_000);
    let mut blobs = Sparse::default();
    let map = blobs.put(model);
    let outline = outline(&MapBytes { map: &map, blobs: &blobs }, &|_| false).unwrap();
    let place = |reference: &Reference| Some(Place { file: "weight.bin".into(), offset: reference.offset << 20 });
    let places: Vec<Option<Place>> = outline.references.iter().map(place).collect();
    let patches = Patches::new(&outline, &places, &[]);
    let patched = patches.apply(&map, 0..map.size());
    assert!(patched.size() > map.size());
}

#[test]
fn constants_that_name_the_same_pieces_again_and_again_are_not_held() {
    const PIECES: u64 = 10_000;
    let mut blobs = Sparse::default();
    let mut read = |references: usize| {
        let plan = milblob::plan([(Dtype::F16, 2 * PIECES, 0)]).unwrap();
        let mut weights = ExtentMap::from_bytes(plan.header.to_vec());
        weights.push_inline(&milblob::metadata(&plan.blobs[0]));
        for index in 0..PIECES {
            weights.push_blob(Digest::of(b"some"), 4, 2 * (index % 2), 2).unwrap();
        }
        let mut source = package("p", &[(1, 64)], &mut blobs);
        source.files[0].content = blobs.put(program(&vec![(64, PIECES); references], 0)).into();
        source.files[1].content = weights.into();
        let budget = Budget::of(LIMITS);
        let package = Package::find(&source, Files(&blobs), &budget).unwrap();
        shared::Program::read(&package, Files(&blobs), &budget).map(|program| program.needed.len())
    };
    assert_eq!(read(100), Ok(100));
    assert!(read(110).unwrap_err().what.contains("in more than 1048576 pieces"));
}

#[test]
fn a_program_of_more_than_can_be_read_is_none() {
    let mut blobs = Sparse::default();
    let mut source = package("p", &[(1, 64)], &mut blobs);
    let waste = blobs.put(field(99, &[b'x'; 2000]).repeat(100));
    let mut long = (*source.files[0].content).clone();
    while long.size() <= 5 << 30 {
        long.append(&waste);
    }
    source.files[0].content = long.into();
    let budget = Budget::of(LIMITS);
    let packages = [Package::find(&source, Files(&blobs), &budget).unwrap()];
    assert!(shared::plan(&packages, Files(&blobs), &budget).is_empty());
}

#[test]
fn descriptions_of_more_than_fit_into_memory_are_of_no_function() {
    let mut blobs = Sparse::default();
    let input = field(1, &field(1, &vec![b'x'; 3 << 20]));
    let described = blobs.put([program(&[(64, 32)], 0), field(2, &input)].concat());
    let sources: Vec<Source> = (0..20)
        .map(|index| {
            let mut source = package(&format!("p{index}"), &[(index % 2, 64)], &mut blobs);
            source.files[0].content = described.clone().into();
            source
        })
        .collect();
    let budget = Budget::of(LIMITS);
    let packages: Vec<Package<'_>> =
        sources.iter().map(|source| Package::find(source, Files(&blobs), &budget).unwrap()).collect();
    let planned = shared::plan(&packages, Files(&blobs), &budget);
    let is_of_one = |source: &&Source| planned[&source.name].function.is_some();
    let of_one: Vec<&str> = sources.iter().filter(is_of_one).map(|source| &*source.name).collect();
    assert_eq!(of_one, ["p0.mlpackage", "p1.mlpackage", "p2.mlpackage", "p3.mlpackage", "p4.mlpackage"]);
    assert!(sources.iter().all(|source| !planned[&source.name].weights.is_empty()));
}

#[test]
fn packages_that_share_a_small_constant_alone_keep_their_files() {
    let mut blobs = Sparse::default();
    let mut make = |index: u64| package(&format!("p{index}"), &[(1, 64), (index + 2, 1 << 20)], &mut blobs);
    let mut sources: Vec<Source> = (0..100).map(&mut make).collect();
    sources.push(package("late", &[(1, 64), (50, 1 << 20), (200, 64)], &mut blobs));
    let all = shown(&sources, &blobs);
    let weights = |name: &str| all[&format!("{name}.mlpackage")].1.content.fingerprint();
    let own: HashSet<Digest> = (0..100).map(|index| weights(&format!("p{index}"))).collect();
    assert_eq!(own.len(), 100);
    assert_eq!(weights("late"), weights("p48"));
}

#[test]
fn packages_that_are_more_than_the_budget_is_for_are_as_they_were_imported() {
    let mut blobs = Sparse::default();
    let sizes: Vec<(u64, u64)> = (1..200).map(|number| (number, 64)).collect();
    let turned: Vec<(u64, u64)> = sizes.iter().rev().copied().collect();
    let orders = [&sizes, &turned, &turned, &turned];
    let sources: Vec<Source> =
        orders.iter().enumerate().map(|(index, sizes)| package(&format!("p{index}"), sizes, &mut blobs)).collect();
    // How many are pointed at the file of the first, and why no more.
    let changed = |limits: Limits| {
        let budget = Budget::of(limits);
        let all = shown_of(&sources, &blobs, &budget);
        let is_changed = |source: &&Source| all[&source.name].0.content != source.files[0].content;
        let others = sources.iter().filter(|source| !is_changed(source));
        others.for_each(|source| assert_eq!(all[&source.name].1.content, source.files[1].content));
        (sources.iter().filter(is_changed).count(), budget.over().map_or(String::new(), |fault| fault.what))
    };
    assert_eq!(changed(LIMITS), (3, String::new()));
    for (limits, what) in [
        (Limits { text: 300_000, ..LIMITS }, "programs, recipes, maps and headers have more than 300000 bytes"),
        (Limits { tensors: 500, ..LIMITS }, "programs and blobs have more than 500 tensors"),
        (Limits { extents: 9_000, ..LIMITS }, "files are more than 1125, or cut into more than 9000 pieces"),
    ] {
        let (count, told) = changed(limits);
        assert_eq!(told, format!("the model is too large: its {what}: make several models of it"));
        assert!((1..3).contains(&count), "{count}: {what}");
    }
}
