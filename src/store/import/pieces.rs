//! Hashing and writing pieces on all cores.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::piece::{Content, FileBytes, Input, Piece};
use super::scan::FoundFile;
use super::source::SourcePlan;
use super::{Counts, Progress};
use crate::chunks::{self, CHUNK};
use crate::cores::cores;
use crate::digest::{Digest, Hasher, PairHasher};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::format::Form;
use crate::format::gguf::Run;
use crate::store::stage::Stage;

/// Bytes between tensors up to which the recipe holds them itself.
const INLINE: u64 = 512;

/// What makes it likely that content is stored already: name, dtype and shape of a tensor, or path and length of a file.
pub(super) type Likeness = (String, Option<Dtype>, Vec<u64>);

/// Where the bytes of a piece are now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// In a blob of this length, from `offset` on; `named` is the digest of the tensor's ollama blob.
    Blob { digest: Digest, len: u64, offset: u64, named: Option<Digest> },
    /// In the recipe.
    Inline(Vec<u8>),
    /// Nowhere: they are zeros.
    Zeros,
}

/// What became of all pieces.
#[derive(Debug)]
pub(super) struct Stored {
    /// By source, file and piece, as in the plans.
    pub places: Vec<Vec<Vec<Place>>>,
    /// By source, what its files were merged to.
    pub merged: Vec<Option<Place>>,
    pub added: Counts,
    pub present: Counts,
}

/// A piece to be done, and where its result goes.
struct Job<'a> {
    source: usize,
    /// File and piece; `None` for what all files are merged to.
    index: Option<(usize, usize)>,
    from: From<'a>,
    piece: &'a Piece,
    /// Whether to hash before writing anything.
    hash_first: bool,
}

/// What a piece is cut from.
#[derive(Clone, Copy)]
enum From<'a> {
    File(&'a FoundFile),
    Merged(&'a [FoundFile], &'a [Run]),
}

/// Hashes every piece and writes those that the store does not have.
pub(super) fn store_all(
    stage: &Stage,
    plans: &[SourcePlan],
    mut expected: HashSet<Likeness>,
    progress: &dyn Progress,
) -> Result<Stored> {
    let mut jobs = Vec::new();
    for (source, plan) in plans.iter().enumerate() {
        let mut add = |index, from, piece, path: &str| {
            let likely = likeness(piece, path).is_some_and(|likeness| !expected.insert(likeness));
            let hash_first = likely || stage.is_choosy();
            jobs.push(Job { source, index, from, piece, hash_first });
        };
        for (file, (found, pieces)) in plan.scan.files.iter().zip(&plan.pieces).enumerate() {
            for (at, piece) in pieces.iter().enumerate() {
                if !matches!(piece.content, Content::Merged(_)) {
                    add(Some((file, at)), From::File(found), piece, &found.path);
                }
            }
        }
        if let Some(merged) = &plan.merged {
            add(None, From::Merged(&plan.scan.files, &merged.runs), &merged.piece, &plan.name);
        }
    }
    // What is likely a repetition comes when the original is done; large pieces first, so that none is left at the end.
    jobs.sort_by_key(|job| (job.hash_first, std::cmp::Reverse(job.piece.len)));
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results = Mutex::new(Vec::with_capacity(jobs.len()));
    let worker = || {
        let mut buf = vec![0; CHUNK];
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if failed.load(Ordering::Relaxed) {
                break;
            }
            let result = job.run(stage, &mut buf, progress);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            results.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((job, result));
        }
    };
    std::thread::scope(|scope| (0..cores()).for_each(|_| _ = scope.spawn(worker)));

    let empty = |plan: &SourcePlan| plan.pieces.iter().map(|pieces| vec![Place::Zeros; pieces.len()]).collect();
    let mut stored = Stored {
        places: plans.iter().map(empty).collect(),
        merged: vec![None; plans.len()],
        added: Counts::default(),
        present: Counts::default(),
    };
    for (job, result) in results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        let (place, added) = result?;
        if let Place::Blob { .. } = place {
            let counts = if added { &mut stored.added } else { &mut stored.present };
            match job.piece.content {
                Content::Tensor { .. } => counts.tensors += 1,
                Content::File | Content::Weights(_) => counts.files += 1,
                Content::Between | Content::Merged(_) => {}
            }
            counts.bytes += job.piece.len;
        }
        match job.index {
            Some((file, at)) => stored.places[job.source][file][at] = place,
            None => {
                spread(&place, &plans[job.source], &mut stored.places[job.source]);
                stored.merged[job.source] = Some(place);
            }
        }
    }
    Ok(stored)
}

/// Gives all that the files of a source have of what they are merged to its place in that.
fn spread(merged: &Place, plan: &SourcePlan, places: &mut [Vec<Place>]) {
    let Place::Blob { digest, len, offset, named } = *merged else { return };
    for (piece, place) in plan.pieces.iter().flatten().zip(places.iter_mut().flatten()) {
        if let Content::Merged(at) = &piece.content {
            *place = Place::Blob { digest, len, offset: offset + at, named };
        }
    }
}

fn likeness(piece: &Piece, path: &str) -> Option<Likeness> {
    match &piece.content {
        Content::Tensor { dtype, shape, names } => Some((names.first()?.name.clone(), Some(*dtype), shape.clone())),
        Content::File | Content::Weights(_) => Some((path.into(), None, vec![piece.len])),
        Content::Between | Content::Merged(_) => None,
    }
}

/// What a piece becomes: a blob behind a header, and the header that ollama's blob would have.
struct Headers {
    header: Vec<u8>,
    named: Option<Vec<u8>>,
}

impl Headers {
    /// A blob without a header.
    const NONE: Headers = Headers { header: Vec::new(), named: None };

    fn hashers(&self) -> Hashers {
        match &self.named {
            Some(named) => Hashers::Both(PairHasher::new(&self.header, named)),
            None => {
                let mut hasher = Hasher::new();
                hasher.update(&self.header);
                Hashers::One(hasher)
            }
        }
    }

    /// The place in a blob of the first of these digests, for a piece of `len` bytes.
    fn place(&self, (digest, named): (Digest, Option<Digest>), len: u64) -> Place {
        let offset = self.header.len() as u64;
        Place::Blob { digest, len: offset + len, offset, named }
    }
}

/// The digests of a piece in the making.
enum Hashers {
    /// That of the blob.
    One(Hasher),
    /// That of the blob, and that of ollama's.
    Both(PairHasher),
}

impl Hashers {
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hashers::One(hasher) => hasher.update(bytes),
            Hashers::Both(pair) => pair.update(bytes),
        }
    }

    fn finish(self) -> (Digest, Option<Digest>) {
        match self {
            Hashers::One(hasher) => (hasher.finish(), None),
            Hashers::Both(pair) => {
                let [digest, named] = pair.finish();
                (digest, Some(named))
            }
        }
    }
}

impl Job<'_> {
    /// Stores the piece; also says whether it is new.
    fn run(&self, stage: &Stage, buf: &mut [u8], progress: &dyn Progress) -> Result<(Place, bool)> {
        let len = self.piece.len;
        let headers = match &self.piece.content {
            Content::Between => return self.between(stage, buf, progress),
            Content::File | Content::Weights(_) | Content::Merged(_) => Headers::NONE,
            Content::Tensor { dtype, shape, names } => Headers {
                header: Form::Seed.header("", *dtype, shape, len),
                named: names.iter().find(|name| name.own).map(|own| Form::Today.header(&own.name, *dtype, shape, len)),
            },
        };
        self.blob(stage, &headers, buf, &|bytes| progress.advance(bytes))
    }

    /// Reads the piece chunk by chunk.
    fn for_each_chunk(&self, buf: &mut [u8], each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let input = match self.from {
            From::File(found) => Input::File(FileBytes::open(found)?),
            From::Merged(files, runs) => Input::Merged(files.iter().map(FileBytes::open).collect::<Result<_>>()?, runs),
        };
        let range = self.piece.offset..self.piece.offset + self.piece.len;
        let read = |at, part: &mut [u8]| input.read(at, part).map_err(|(index, error)| self.read_error(index, error));
        chunks::for_each_chunk(range, buf, read, each)
    }

    fn read_error(&self, index: usize, error: std::io::Error) -> Error {
        let place = match self.from {
            From::File(found) => &found.place,
            From::Merged(files, _) => &files[index].place,
        };
        match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                Error::Invalid(format!("{}: became shorter while it was imported", place.display()))
            }
            _ => Error::io(place, error),
        }
    }

    /// Makes the piece a blob.
    fn blob(&self, stage: &Stage, headers: &Headers, buf: &mut [u8], advance: &dyn Fn(u64)) -> Result<(Place, bool)> {
        let len = self.piece.len;
        let in_one_chunk = len <= buf.len() as u64;
        if in_one_chunk || self.hash_first {
            let mut hashers = headers.hashers();
            self.for_each_chunk(buf, |chunk| {
                hashers.update(chunk);
                advance(chunk.len() as u64);
                Ok(())
            })?;
            let digests = hashers.finish();
            if stage.has(&digests.0, headers.header.len() as u64 + len) {
                return Ok((headers.place(digests, len), false));
            }
            if in_one_chunk {
                let added = stage.add_parts(digests.0, &[&headers.header, &buf[..len as usize]])?;
                return Ok((headers.place(digests, len), added));
            }
        }
        let mut hashers = headers.hashers();
        let mut draft = stage.draft()?;
        draft.write_unhashed(&headers.header)?;
        self.for_each_chunk(buf, |chunk| {
            hashers.update(chunk);
            if !self.hash_first {
                advance(chunk.len() as u64);
            }
            draft.write_unhashed(chunk)
        })?;
        let digests = hashers.finish();
        let added = stage.add_as(draft, digests.0)?;
        Ok((headers.place(digests, len), added))
    }

    /// Bytes between tensors: zeros, a few in the recipe, or a blob.
    fn between(&self, stage: &Stage, buf: &mut [u8], progress: &dyn Progress) -> Result<(Place, bool)> {
        let mut zeros = true;
        self.for_each_chunk(buf, |chunk| {
            zeros &= chunk.iter().all(|&byte| byte == 0);
            progress.advance(chunk.len() as u64);
            Ok(())
        })?;
        match self.piece.len {
            _ if zeros => Ok((Place::Zeros, false)),
            // One chunk holds it, so the buffer still does.
            len if len <= INLINE => Ok((Place::Inline(buf[..len as usize].to_vec()), false)),
            _ => self.blob(stage, &Headers::NONE, buf, &|_| ()),
        }
    }
}
