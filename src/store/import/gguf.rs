//! A GGUF file: one blob, in a layer as ollama's own. The parts of a split one are merged to such a blob.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::bounds::{Bounds, directory};
use super::piece::{Content, FileBytes, Piece, Weights};
use super::scan::{FoundFile, Scan, scan};
use super::shard::{Shard, has_no, missing};
use super::source::{Merged, SourcePlan};
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::{Bytes, gguf, ollama};
use crate::model::SourceKind;

const ENDING: &str = ".gguf";

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
            "is one of {} parts, and its name does not say so: call it as it was, such as name-00001-of-{:05}.gguf",
            header.parts, header.parts
        );
        return Err(Error::format(&file.place, Fault::new(0, what)));
    }
    let (kind, weights) = weights(header);
    Ok((kind, Piece { offset: 0, len: file.len, content: Content::Weights(weights) }))
}

fn weights(header: gguf::Header) -> (SourceKind, Weights) {
    // As ollama tells them apart; files of older writers have no type, and a projector's architecture is clip.
    let (kind, media_type) = match (&*header.kind, &*header.architecture) {
        ("adapter", _) => (SourceKind::GgufAdapter, ollama::ADAPTER),
        ("mmproj" | "projector", _) | ("", "clip") => (SourceKind::GgufProjector, ollama::PROJECTOR),
        _ => (SourceKind::Gguf, ollama::MODEL),
    };
    (kind, Weights { media_type, header })
}

/// A path's directory and its name, if that is the name of a part.
fn part(path: &Path) -> Option<(&Path, Shard<'_>)> {
    let shard = Shard::of(path.file_name()?.to_str()?, ENDING)?;
    let is_part = shard.is_padded() && shard.total.parse().is_ok_and(|total: u64| total > 1);
    is_part.then_some((path.parent()?, shard))
}

/// What a split GGUF file is called, without its ending, by the names of its parts; `None` if a path is none of them.
pub fn name_of_split(paths: &[PathBuf]) -> Option<String> {
    let (_, first) = part(paths.first()?)?;
    let is_part = |path: &PathBuf| part(path).is_some_and(|(_, shard)| shard.set() == first.set());
    let plain = first.plain();
    paths.iter().all(is_part).then(|| plain.strip_suffix(ENDING).unwrap_or(&plain).to_owned())
}

/// Whether the path is that of a split file's first part.
pub(super) fn is_first_part(path: &Path) -> bool {
    part(path).is_some_and(|(_, shard)| shard.number() == Some(1))
}

/// The paths with, after one that is a part by its name, all parts beside it.
pub(super) fn with_other_parts(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let (mut all, mut parts) = (Vec::new(), HashSet::new());
    for path in paths {
        let Some((dir, shard)) = part(path).filter(|_| path.is_file()) else {
            all.push(path.clone());
            continue;
        };
        if parts.contains(path) {
            continue;
        }
        let place = directory(path);
        let names = place.read_dir().at(place)?.map(|entry| Ok(dir.join(entry.at(place)?.file_name())));
        let names = names.collect::<Result<Vec<_>>>()?;
        let is_other = |other: &PathBuf| part(other).is_some_and(|(_, other)| other.set() == shard.set());
        let mut set: Vec<PathBuf> = names.into_iter().filter(is_other).collect();
        set.sort();
        all.extend(set.into_iter().filter(|path| parts.insert(path.clone())));
    }
    Ok(all)
}

/// Plans the split files of which all parts are among the paths, and leaves the other paths.
pub(super) fn plan_split(paths: &mut Vec<PathBuf>, bounds: &Bounds) -> Result<Vec<SourcePlan>> {
    let mut sets: BTreeMap<_, Vec<PathBuf>> = BTreeMap::new();
    let mut others = Vec::new();
    for path in paths.iter() {
        match part(path).filter(|_| path.is_file()) {
            Some((dir, shard)) => sets.entry((dir, shard.set())).or_default().push(path.clone()),
            None => others.push(path.clone()),
        }
    }
    let plans = sets.into_values().map(|set| plan_set(set, bounds)).collect::<Result<_>>()?;
    *paths = others;
    Ok(plans)
}

fn plan_set(mut places: Vec<PathBuf>, bounds: &Bounds) -> Result<SourcePlan> {
    places.sort();
    let name = name_of_split(&places).unwrap_or_default();
    let shards: Vec<Shard<'_>> = places.iter().filter_map(|path| Some(part(path)?.1)).collect();
    if let Some(missing) = missing(&shards) {
        return Err(has_no(directory(&places[0]), &missing));
    }
    let mut all = Scan::default();
    for path in &places {
        all.files.append(&mut scan(path, bounds)?.files);
    }
    let open = all.files.iter().map(FileBytes::open_container).collect::<Result<Vec<_>>>()?;
    let merged = gguf::merge(&open.iter().collect::<Vec<_>>())
        .map_err(|(index, fault)| Error::format(&all.files[index].place, fault))?;
    let (kind, weights) = weights(merged.header);
    Ok(SourcePlan {
        name,
        places,
        kind,
        pieces: cut(&all.files, &merged.runs, &weights),
        scan: all,
        merged: Some(Merged {
            piece: Piece { offset: 0, len: merged.len, content: Content::Weights(weights) },
            runs: merged.runs,
        }),
    })
}

/// The pieces of each part: what is in the merged file, and what lies between.
fn cut(files: &[FoundFile], runs: &[gguf::Run], weights: &Weights) -> Vec<Vec<Piece>> {
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
            pieces[*part].push(Piece { offset: *offset, len: *len, content: Content::Merged(at, weights.clone()) });
        }
        at += run.len();
    }
    pieces.iter_mut().zip(files).for_each(|(pieces, file)| between(pieces, file.len));
    pieces
}
