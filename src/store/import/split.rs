//! GGUF files in several parts, as name-00001-of-00003.gguf: which they are, and how they are merged to one blob.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::bounds::{Bounds, directory};
use super::gguf::{ENDING, weights};
use super::piece::{Content, FileBytes, Piece};
use super::scan::{FoundFile, Scan, scan};
use super::shard::{Set, Shard, has_no, missing};
use super::source::{Merged, SourcePlan};
use crate::error::{AtPath, Error, Result};
use crate::format::gguf;
use crate::model::check_path;

/// The most parts: their number is one of 16 bits in each.
const MOST: u64 = u16::MAX as u64;

/// What is to be imported.
#[derive(Debug, Default)]
pub(super) struct Given {
    /// The parts of each split file, in order: what was named, and what lies beside it.
    pub split: Vec<Vec<PathBuf>>,
    /// All that is no part.
    pub others: Vec<PathBuf>,
}

/// Paths by name.
type Names = BTreeMap<OsString, PathBuf>;

impl Given {
    /// Finds the other parts of those among the paths that are parts by their names and by their content.
    pub fn of(paths: &[PathBuf]) -> Given {
        let mut given = Given::default();
        let mut sets: Vec<Names> = Vec::new();
        let mut known: HashMap<(PathBuf, Set), usize> = HashMap::new();
        let mut listed: HashMap<PathBuf, HashMap<Set, Names>> = HashMap::new();
        for path in paths {
            let Some(shard) = part(path).filter(|_| is_part(path)) else {
                given.others.push(path.clone());
                continue;
            };
            let dir = directory(path).canonicalize().unwrap_or_else(|_| directory(path).to_owned());
            let set = shard.set();
            let index = *known.entry((dir.clone(), set.clone())).or_insert_with(|| {
                let beside = listed.entry(dir).or_insert_with(|| parts_in(directory(path)));
                sets.push(beside.remove(&set).unwrap_or_default());
                sets.len() - 1
            });
            sets[index].entry(path.file_name().unwrap_or_default().to_owned()).or_insert_with(|| path.clone());
        }
        given.split = sets.into_iter().map(|names| names.into_values().collect()).collect();
        given
    }
}

/// A path that is one of a part by its name.
fn part(path: &Path) -> Option<Shard<'_>> {
    let shard = Shard::of(path.file_name()?.to_str()?, ENDING)?;
    let (number, total) = (shard.number()?, shard.total()?);
    (shard.is_padded() && (2..=MOST).contains(&total) && (1..=total).contains(&number)).then_some(shard)
}

/// Whether a file says that it is one of several.
fn is_part(path: &Path) -> bool {
    let header = || -> Result<gguf::Header> {
        let found = scan(path, &Bounds::none())?;
        let file = found.files.first().ok_or_else(|| Error::NotFound(path.display().to_string()))?;
        gguf::parse(&FileBytes::open(file)?).at(path)
    };
    path.is_file() && header().is_ok_and(|header| header.parts > 1)
}

/// What in a directory is a part by its name, by what it has in common with the others. None where it cannot be listed: who
/// may only enter it names all of them.
fn parts_in(dir: &Path) -> HashMap<Set, Names> {
    let mut sets: HashMap<Set, Names> = HashMap::new();
    for entry in dir.read_dir().into_iter().flatten().flatten() {
        let name = entry.file_name();
        let path = if dir == Path::new(".") { PathBuf::from(&name) } else { dir.join(&name) };
        if let Some(shard) = part(&path)
            && !path.is_dir()
        {
            sets.entry(shard.set()).or_default().insert(name, path.clone());
        }
    }
    sets
}

/// What a split file is called, without its ending, by the names of its parts; `None` if one is not named as a part of it.
pub fn name_of_split(paths: &[PathBuf]) -> Option<String> {
    let first = part(paths.first()?)?;
    let is_other = |path: &PathBuf| part(path).is_some_and(|shard| shard.set() == first.set());
    paths.iter().all(is_other).then(|| stem(&first))
}

fn stem(part: &Shard<'_>) -> String {
    let plain = part.plain();
    plain.strip_suffix(ENDING).unwrap_or(&plain).to_owned()
}

/// Plans a split file, of which these are the parts in order.
pub(super) fn plan(places: &[PathBuf], bounds: &Bounds) -> Result<SourcePlan> {
    let shards: Vec<Shard<'_>> = places.iter().filter_map(|path| part(path)).collect();
    if let Some(missing) = missing(&shards) {
        return Err(has_no(directory(&places[0]), &missing));
    }
    let name = stem(&shards[0]);
    check_path(&name).map_err(|what| {
        let place = places[0].display();
        Error::Invalid(format!("{place}: its name {what} before the numbers: rename all parts"))
    })?;
    let mut all = Scan::default();
    for path in places {
        all.files.append(&mut scan(path, bounds)?.files);
    }
    let open = all.files.iter().map(FileBytes::open_container).collect::<Result<Vec<_>>>()?;
    let merged = gguf::merge(&open.iter().collect::<Vec<_>>())
        .map_err(|(index, fault)| Error::format(&all.files[index].place, fault))?;
    let (kind, weights) = weights(merged.header);
    Ok(SourcePlan {
        places: places.to_vec(),
        name,
        kind,
        pieces: cut(&all.files, &merged.runs),
        scan: all,
        merged: Some(Merged {
            piece: Piece { offset: 0, len: merged.len, content: Content::Weights(weights) },
            runs: merged.runs,
        }),
    })
}

/// The pieces of each part: what is in the merged file, and what lies between.
fn cut(files: &[FoundFile], runs: &[gguf::Run]) -> Vec<Vec<Piece>> {
    let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); files.len()];
    let end = |pieces: &[Piece]| pieces.last().map_or(0, |last| last.offset + last.len);
    let between = |pieces: &mut Vec<Piece>, to: u64| {
        let offset = end(pieces);
        if to > offset {
            pieces.push(Piece { offset, len: to - offset, content: Content::Between });
        }
    };
    let mut at = 0;
    for run in runs {
        if let gguf::Run::Part { part, offset, len } = run {
            between(&mut pieces[*part], *offset);
            pieces[*part].push(Piece { offset: *offset, len: *len, content: Content::Merged(at) });
        }
        at += run.len();
    }
    pieces.iter_mut().zip(files).for_each(|(pieces, file)| between(pieces, file.len));
    pieces
}
