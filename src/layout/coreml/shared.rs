//! One weight file for all packages of a model.
//!
//! The weight file of the package that was imported first is taken as it is, so its program needs no change. Every blob
//! of later packages that is not in it yet is appended, in the order of the imports and of the program's references: blobs
//! that have a place keep it when another package joins. Equal blobs are found by their extents, so no weight is read.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use super::super::{Files, MapBytes};
use super::function::Function;
use super::package::{Changes, Package};
use crate::budget::{Budget, Counted};
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::Fault;
use crate::extent::{ExtentBytes, ExtentMap};
use crate::format::milblob::{self, Blob, UNIT};
use crate::format::mlprogram::{Inline, Outline, Patches, Place, outline, surface, weight_file};

/// Packages with so small a part of their bytes in common, one in this many, keep files of their own: whoever copies or
/// compiles one of them would have to carry the other's weights too.
const COMMON: u64 = 10;

/// Groups that are tried for a blob that more of them have: packages may all share a constant and no more.
const HOMES: usize = 64;

/// Pieces in which all constants of a program lie, at the most: references can name the same many again and again.
const PIECES: usize = 1 << 20;

/// Bytes of what all functions of a model say of their inputs and outputs: they are in memory.
const DESCRIPTIONS: u64 = 16 << 20;

/// The file for tensors of packages that have none.
const WEIGHT_FILE: &str = "weight.bin";

/// What makes two blobs the same: type, size, padding bits and where the data is stored.
pub(super) type Key = (Dtype, u64, u64, Digest);

/// A blob that a program needs.
pub(super) struct Needed {
    pub key: Key,
    data: ExtentMap,
    /// The file and offset where the program has it, if that is in a file.
    at: Option<(String, u64)>,
}

impl Needed {
    fn new(dtype: Dtype, padding_bits: u64, data: ExtentMap, at: Option<(String, u64)>) -> Needed {
        Needed { key: (dtype, data.size(), padding_bits, data.fingerprint()), data, at }
    }
}

/// A program and the blobs that it needs: those of its references and then those of its inline tensors.
pub(super) struct Program {
    pub outline: Outline,
    pub needed: Vec<Option<Needed>>,
}

/// A weight file as it grows.
struct File {
    name: String,
    map: ExtentMap,
    count: u32,
    /// Where a walk over `count` blobs comes to its end.
    walked: u64,
    appended: bool,
    mtime: SystemTime,
}

/// Packages that share their weight files.
#[derive(Default)]
struct Group<'a> {
    files: Vec<File>,
    /// The first place of each blob: index of the file and offset.
    places: HashMap<Key, (usize, u64)>,
    /// What is at each place.
    blobs: HashMap<(usize, u64), Key>,
    members: Vec<(&'a Package<'a>, Changes, HashSet<usize>)>,
}

/// Whether any package cannot be shown as it was imported: its weight files are not those of the others, or it has
/// tensors in its program.
fn differ(packages: &[Package<'_>]) -> bool {
    let mut seen: HashMap<&str, &Arc<ExtentMap>> = HashMap::new();
    packages.iter().any(|package| {
        let is_cut = package.program.content.extents().nth(1).is_some();
        is_cut || package.weights.iter().any(|(name, file)| *seen.entry(name).or_insert(&file.content) != &file.content)
    })
}

/// What of each package changes, by the source's name. A package that cannot be read is as it was imported, and so are
/// those for which the budget is too small.
pub(super) fn plan(packages: &[Package<'_>], files: Files<'_>, budget: &Budget) -> HashMap<String, Changes> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    // The groups that have a blob.
    let mut homes: HashMap<Key, Vec<usize>> = HashMap::new();
    let (mut all, room) = (HashMap::new(), Cell::new(DESCRIPTIONS));
    let differ = differ(packages);
    for package in packages {
        if budget.over().is_some() {
            break;
        }
        let read = if differ { Program::read } else { Program::read_alone };
        let program = read(package, files, budget);
        match program {
            Err(fault) => tracing::warn!("{}: {fault}", package.source.name),
            Ok(program) if program.needed.iter().flatten().next().is_none() => {
                let function = program.function(package, &Patches::default(), files, &room, budget).unwrap_or_default();
                all.insert(package.source.name.clone(), Changes { function, ..Changes::default() });
            }
            Ok(program) => {
                let keys: HashSet<Key> = program.needed.iter().flatten().map(|needed| needed.key).collect();
                let index = suitable(&keys, &homes);
                let index = index.unwrap_or_else(|| {
                    groups.push(Group::default());
                    groups.len() - 1
                });
                if let Err(fault) = groups[index].join(package, program, files, &room, budget) {
                    tracing::warn!("{}: {fault}", package.source.name);
                    groups.pop_if(|group| group.members.is_empty());
                    continue;
                }
                let group = &groups[index];
                // What a group took over with its first package is in no program's list.
                let adopted = if group.members.len() == 1 { Some(group.places.keys().copied()) } else { None };
                for key in keys.into_iter().chain(adopted.into_iter().flatten()) {
                    let homes = homes.entry(key).or_default();
                    if homes.len() < HOMES && !homes.contains(&index) {
                        homes.push(index);
                    }
                }
            }
        }
    }
    all.extend(groups.into_iter().enumerate().flat_map(|(index, group)| group.finish(index)));
    all
}

/// The first group that has enough of what a program needs.
fn suitable(keys: &HashSet<Key>, homes: &HashMap<Key, Vec<usize>>) -> Option<usize> {
    let mut common: BTreeMap<usize, u64> = BTreeMap::new();
    let mut all = 0u64;
    for key in keys {
        all = all.saturating_add(key.1);
        for index in homes.get(key).into_iter().flatten() {
            let common = common.entry(*index).or_default();
            *common = common.saturating_add(key.1);
        }
    }
    common.into_iter().find(|(_, common)| *common > 0 && *common >= all / COMMON).map(|(index, _)| index)
}

impl Program {
    /// The program of a package whose weights need no look at.
    fn read_alone(package: &Package<'_>, files: Files<'_>, budget: &Budget) -> Result<Program, Fault> {
        let bytes = MapBytes { map: &package.program.content, blobs: files.0 };
        Ok(Program { outline: surface(&Counted(bytes, budget))?, needed: Vec::new() })
    }

    fn function(
        &self,
        package: &Package<'_>,
        patches: &Patches,
        files: Files<'_>,
        room: &Cell<u64>,
        budget: &Budget,
    ) -> Result<Option<Function>, Fault> {
        let map = &package.program.content;
        let bytes = Counted(MapBytes { map, blobs: files.0 }, budget);
        let function = Function::new(&self.outline, patches, map, &bytes, room)?;
        // The package of all functions has each once more.
        function.as_ref().map_or(Ok(()), |function| budget.memory(2 * function.body.memory()))?;
        Ok(function)
    }

    pub fn read(package: &Package<'_>, files: Files<'_>, budget: &Budget) -> Result<Program, Fault> {
        let map = &package.program.content;
        let blobs: HashSet<(u64, u64)> = map
            .extents()
            .filter(|extent| matches!(extent.bytes, ExtentBytes::Blob { .. }))
            .map(|extent| (extent.start, extent.start + extent.len))
            .collect();
        // What the import made a blob of its own is one extent.
        let wanted = |range: &std::ops::Range<u64>| blobs.contains(&(range.start, range.end));
        let outline = outline(&Counted(MapBytes { map, blobs: files.0 }, budget), &wanted)?;
        budget.tensors(outline.references.len() + outline.inline.len())?;
        let mut needed = Vec::with_capacity(outline.references.len() + outline.inline.len());
        let mut pieces = 0;
        for reference in &outline.references {
            let name = weight_file(&reference.file)?;
            let missing = || Fault::new(0, format!("{:?} is in {name:?}, which is missing", reference.name));
            let file = &package.weights.get(name).ok_or_else(missing)?.content;
            let blob = milblob::parse_blob(&Counted(MapBytes { map: file, blobs: files.0 }, budget), reference.offset)?;
            let (data, at) = (data(file, &blob), Some((name.to_owned(), reference.offset)));
            pieces += data.count();
            if pieces > PIECES {
                return Err(Fault::new(0, format!("its constants lie in more than {PIECES} pieces")));
            }
            budget.tensors(data.count().saturating_sub(1))?;
            needed.push(Some(Needed::new(blob.dtype, blob.padding_bits, data, at)));
        }
        for tensor in &outline.inline {
            needed.push(movable(tensor, outline.specification_version).then(|| {
                let mut data = ExtentMap::new();
                data.push_range(map, tensor.range.clone());
                let bits = Dtype::elements(&tensor.shape).unwrap_or(0).wrapping_mul(tensor.dtype.bits().into());
                Needed::new(tensor.dtype, (8 - bits % 8) % 8, data, None)
            }));
        }
        Ok(Program { outline, needed })
    }
}

/// Whether readers of this version take such a tensor from a weight file: before iOS 18 only the first four types are
/// put there by coremltools.
fn movable(tensor: &Inline, specification_version: u64) -> bool {
    match tensor.dtype {
        Dtype::F16 | Dtype::F32 | Dtype::U8 | Dtype::I8 => true,
        dtype => specification_version >= 9 && dtype.mil_blob_code().is_some(),
    }
}

fn data(file: &ExtentMap, blob: &Blob) -> ExtentMap {
    let mut data = ExtentMap::new();
    data.push_range(file, blob.offset..blob.end());
    data
}

impl<'a> Group<'a> {
    fn join(
        &mut self,
        package: &'a Package<'a>,
        mut program: Program,
        files: Files<'_>,
        room: &Cell<u64>,
        budget: &Budget,
    ) -> Result<(), Fault> {
        if self.members.is_empty() {
            for (name, file) in &package.weights {
                self.adopt(name, &file.content, file.mtime, files, budget)?;
            }
            // What a walk misses is there, too, if the program says so.
            for needed in program.needed.iter().flatten() {
                let Some((name, offset)) = &needed.at else { continue };
                if let Some(index) = self.files.iter().position(|file| file.name == *name) {
                    self.places.entry(needed.key).or_insert((index, *offset));
                    self.blobs.entry((index, *offset)).or_insert(needed.key);
                }
            }
        }
        let (mut places, mut used) = (Vec::with_capacity(program.needed.len()), HashSet::new());
        for needed in std::mem::take(&mut program.needed) {
            let Some(needed) = needed else {
                places.push(None);
                continue;
            };
            let own = needed.at.as_ref().and_then(|(name, offset)| {
                let index = self.files.iter().position(|file| file.name == *name)?;
                (self.blobs.get(&(index, *offset)) == Some(&needed.key)).then_some(index)
            });
            if let Some(index) = own {
                used.insert(index);
                places.push(None);
                continue;
            }
            let (index, offset) = match self.places.get(&needed.key) {
                Some(place) => *place,
                None => {
                    budget.file(needed.data.count())?;
                    self.append(&needed, package.program.mtime)?
                }
            };
            used.insert(index);
            places.push(Some(Place { file: self.files[index].name.clone(), offset }));
        }
        let inline = places.split_off(program.outline.references.len());
        let patches = Patches::new(&program.outline, &places, &inline);
        let map = &package.program.content;
        let function = program.function(package, &patches, files, room, budget)?;
        let program = (!patches.is_empty()).then(|| patches.apply(map, 0..map.size()));
        program.as_ref().map_or(Ok(()), |program| budget.memory(program.memory()))?;
        self.members.push((package, Changes { program, function, ..Changes::default() }, used));
        Ok(())
    }

    /// Takes a weight file as it is.
    fn adopt(
        &mut self,
        name: &str,
        map: &ExtentMap,
        mtime: SystemTime,
        files: Files<'_>,
        budget: &Budget,
    ) -> Result<(), Fault> {
        let blobs = milblob::parse(&Counted(MapBytes { map, blobs: files.0 }, budget))?;
        let index = self.files.len();
        for blob in &blobs {
            let data = data(map, blob);
            budget.file(data.count())?;
            let key = (blob.dtype, blob.size, blob.padding_bits, data.fingerprint());
            self.places.entry(key).or_insert((index, blob.metadata));
            self.blobs.insert((index, blob.metadata), key);
        }
        let walked = blobs.last().map_or(UNIT, Blob::end).next_multiple_of(UNIT);
        let (count, map) = (blobs.len() as u32, map.clone());
        self.files.push(File { name: name.into(), map, count, walked, appended: false, mtime });
        Ok(())
    }

    /// Puts a blob at the end of a file.
    fn append(&mut self, needed: &Needed, mtime: SystemTime) -> Result<(usize, u64), Fault> {
        let same_name = |file: &File| needed.at.as_ref().is_some_and(|(name, _)| file.name == *name);
        let index = self.files.iter().position(same_name).unwrap_or(0);
        if self.files.is_empty() {
            let map = ExtentMap::from_bytes(milblob::header(0).to_vec());
            let name = WEIGHT_FILE.to_owned();
            self.files.push(File { name, map, count: 0, walked: UNIT, appended: false, mtime });
        }
        let file = &mut self.files[index];
        let full = || Fault::new(0, "the shared weight file becomes too large");
        let metadata = file.map.size().max(UNIT).checked_next_multiple_of(UNIT).ok_or_else(full)?;
        let (dtype, size, padding_bits, _) = needed.key;
        let offset = metadata.checked_add(UNIT).ok_or_else(full)?;
        let end = offset.checked_add(size).filter(|&end| end < 1 << 62).ok_or_else(full)?;
        file.map.push_zeros(metadata - file.map.size());
        file.map.push_inline(&milblob::metadata(&Blob { metadata, dtype, offset, size, padding_bits }));
        file.map.append(&needed.data);
        // Behind bytes that no blob accounts for a walk does not come here, and the count is only for walks: readers go
        // where the program says.
        if file.walked == metadata {
            file.count = file.count.checked_add(1).ok_or_else(full)?;
            file.walked = end.next_multiple_of(UNIT);
        }
        file.mtime = file.mtime.max(mtime);
        file.appended = true;
        self.places.insert(needed.key, (index, metadata));
        self.blobs.insert((index, metadata), needed.key);
        Ok((index, metadata))
    }

    fn finish(self, group: usize) -> Vec<(String, Changes)> {
        let files: Vec<(String, Arc<ExtentMap>, SystemTime)> = self
            .files
            .into_iter()
            .map(|file| {
                let mut map = file.map;
                if file.appended {
                    let mut counted = ExtentMap::from_bytes(file.count.to_le_bytes().to_vec());
                    // An imported header keeps its other bytes; one that was cut short is filled up.
                    counted.push_range(&map, 4..map.size());
                    map = counted;
                }
                (file.name, Arc::new(map), file.mtime)
            })
            .collect();
        let mut all = Vec::with_capacity(self.members.len());
        for (package, mut changes, used) in self.members {
            for name in package.weights.keys() {
                let shared = files.iter().position(|(other, ..)| other == name);
                // Its blobs are all in other files now.
                changes
                    .weights
                    .insert((*name).to_owned(), shared.map(|index| (files[index].1.clone(), files[index].2)));
            }
            for index in used {
                let (name, content, mtime) = &files[index];
                changes.weights.insert(name.clone(), Some((content.clone(), *mtime)));
            }
            changes.group = Some(group);
            all.push((package.source.name.clone(), changes));
        }
        all
    }
}
