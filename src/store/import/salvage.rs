//! What an import would store, of which only blobs that are waited for are kept.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::bounds::Bounds;
use super::piece::{Content, FileBytes};
use super::pieces::{Place, store_all};
use super::plan::plan_all;
use super::scan::{FoundFile, scan};
use super::source::SourcePlan;
use super::split::Given;
use super::{BLOB_THRESHOLD, Progress, assemble};
use crate::budget::Budget;
use crate::chunks::{buffer, for_each_chunk};
use crate::digest::{Digest, Hasher};
use crate::error::{AtPath, Result};
use crate::format::Form;
use crate::model::ModelName;
use crate::store::stage::{Draft, Stage};

/// Names of what is imported as a whole, wherever it lies.
const PACKAGES: [&str; 4] = [".mlpackage", ".mlmodelc", ".mlmodel", ".amb"];

/// What was found below a path.
#[derive(Debug, Default)]
pub(in crate::store) struct Salvage {
    /// Where the bytes of each blob were.
    pub places: HashMap<Digest, PathBuf>,
    /// What could not be read, and why.
    pub notes: Vec<String>,
}

/// Stages those of the blobs `waited` for that are, or come of, files below `path`.
pub(in crate::store) fn salvage(
    stage: &Stage,
    path: &Path,
    waited: &HashSet<Digest>,
    progress: &dyn Progress,
) -> Result<Salvage> {
    let mut found = Salvage::default();
    // Only bytes that the store had are taken, wherever they are.
    let bounds = Bounds::none();
    let whole = scan(path, &bounds)?;
    let dirs = whole.dirs.iter().map(|dir| path.join(&dir.path));
    let files = whole.files.iter().map(|file| file.place.clone());
    let is_package = |place: &PathBuf| {
        let name = place.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        PACKAGES.iter().any(|end| name.ends_with(end))
    };
    let mut units: Vec<PathBuf> = dirs.chain(files).filter(is_package).filter(|place| place != path).collect();
    units.insert(0, path.to_owned());
    let units = units.into_iter().map(|unit| Given { others: vec![unit], ..Given::default() });
    let files: Vec<PathBuf> = whole.files.iter().map(|file| file.place.clone()).collect();
    let split = Given::of(&files).split.into_iter().map(|parts| Given { split: vec![parts], ..Given::default() });
    for unit in units.chain(split) {
        // What is planned whole can hold parts that are planned better by themselves, and the reverse.
        let plans = plan_all(&unit, &bounds, BLOB_THRESHOLD, &Budget::default());
        let done = plans.and_then(|plans| found.import(stage, plans, waited, progress));
        found.note(done);
    }
    for file in &whole.files {
        let done = found.whole_file(stage, file, waited);
        found.note(done);
    }
    Ok(found)
}

impl Salvage {
    /// Keeps why a part of it failed: what is sought may be in the others.
    fn note(&mut self, done: Result<()>) {
        self.notes.extend(done.err().map(|error| error.to_string()));
    }

    fn import(
        &mut self,
        stage: &Stage,
        plans: Vec<SourcePlan>,
        waited: &HashSet<Digest>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let stored = store_all(stage, &plans, HashSet::new(), progress)?;
        for (plan, places) in plans.iter().zip(&stored.places) {
            for ((file, pieces), places) in plan.scan.files.iter().zip(&plan.pieces).zip(places) {
                for (piece, place) in pieces.iter().zip(places) {
                    let Place::Blob { digest, named, .. } = place else { continue };
                    if waited.contains(digest) {
                        self.places.entry(*digest).or_insert_with(|| file.place.clone());
                    }
                    if let (Some(named), Content::Tensor { dtype, shape, names }) = (named, &piece.content)
                        && waited.contains(named)
                        && let Some(own) = names.iter().find(|name| name.own)
                    {
                        let header = Form::Today.header(&own.name, *dtype, shape, piece.len);
                        let draft = copy(stage, &header, file, piece.offset, piece.len)?;
                        self.take(stage, draft, named, file)?;
                    }
                }
            }
        }
        // The recipes, which are the same if the times of the files are.
        let name = ModelName::from_any("salvage")?;
        let sources = plans.iter().map(|plan| plan.scan.files.first().map(|file| file.place.clone())).next().flatten();
        let before = stage.staged();
        assemble::manifest(stage, &name, plans, &stored, None, &[])?;
        for digest in stage.staged().difference(&before) {
            self.places.entry(*digest).or_insert_with(|| sources.clone().unwrap_or_default());
        }
        Ok(())
    }

    /// A file that is a blob as it is.
    fn whole_file(&mut self, stage: &Stage, file: &FoundFile, waited: &HashSet<Digest>) -> Result<()> {
        if !stage.waits_for(file.len) {
            return Ok(());
        }
        let mut hasher = Hasher::new();
        each_chunk(file, 0, file.len, |chunk| {
            hasher.update(chunk);
            Ok(())
        })?;
        let digest = hasher.finish();
        if !waited.contains(&digest) || self.places.contains_key(&digest) {
            return Ok(());
        }
        let draft = copy(stage, &[], file, 0, file.len)?;
        self.take(stage, draft, &digest, file)
    }

    fn take(&mut self, stage: &Stage, draft: Draft, expected: &Digest, file: &FoundFile) -> Result<()> {
        // The file can have changed since it was hashed.
        if draft.digest() == *expected && stage.add(draft)?.1 {
            self.places.insert(*expected, file.place.clone());
        }
        Ok(())
    }
}

fn copy(stage: &Stage, header: &[u8], file: &FoundFile, offset: u64, len: u64) -> Result<Draft> {
    let mut draft = stage.draft()?;
    draft.write(header)?;
    each_chunk(file, offset, len, |chunk| draft.write(chunk))?;
    Ok(draft)
}

fn each_chunk(file: &FoundFile, offset: u64, len: u64, each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let bytes = FileBytes::open(file)?;
    let read = |at, part: &mut [u8]| bytes.read(at, part).at(&file.place);
    for_each_chunk(offset..offset + len, &mut buffer(len), read, each)
}
