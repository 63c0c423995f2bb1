//! The directory that the blobs of all models share, in few bytes for each.
//!
//! Which digest a blob has that is put together when it is read, and how long a stored one is, a manifest says. One that lies
//! must not show its own bytes to those who want another model's.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::number;
use crate::digest::Digest;

/// The blobs of all models in a shared directory, which holds nothing else. There may be millions.
#[derive(Debug, Default)]
pub struct Union {
    /// In order of digest, which is that of the names.
    rows: Vec<Row>,
    /// Those that models have with unlike content.
    contests: HashMap<Digest, Contest>,
}

/// A blob of which it is not known yet whose is right: finding out may take long, and only who asks for it is to wait.
#[derive(Debug)]
struct Contest {
    claims: Vec<Claim>,
    /// The claim that is right, if one is.
    right: OnceLock<Option<usize>>,
}

/// One blob.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub digest: Digest,
    pub ino: u64,
    /// Index of the model among those that share the directory.
    pub model: u32,
}

/// That nobody knows whose content of a blob is right.
pub(super) struct Unsettled;

/// What a model shows as a blob.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub row: Row,
    /// The same for the same content, and nobody can choose another that has it, too.
    pub print: u64,
    /// Length in bytes.
    pub len: u64,
    /// Whether it is the stored blob of this digest, if there is one of this length.
    pub is_stored: bool,
}

impl Union {
    /// Of several models that have a blob, the first shows it, if what they have is the same.
    pub(super) fn of(mut claims: Vec<Claim>) -> Union {
        claims.sort_unstable_by_key(|claim| (claim.row.digest, claim.row.model));
        let is_same = |a: &Claim, b: &Claim| a.row.digest == b.row.digest;
        // A million of them: a list that grows would take their memory once more.
        let mut rows = Vec::with_capacity(claims.chunk_by(is_same).count());
        rows.extend(claims.chunk_by(is_same).map(|claims| claims[0].row));
        let unlike = claims.chunk_by(is_same).filter(|same| same.iter().any(|claim| claim.print != same[0].print));
        let contest = |claims: &[Claim]| Contest { claims: claims.to_vec(), right: OnceLock::new() };
        let contests = unlike.map(|claims| (claims[0].row.digest, contest(claims))).collect();
        Union { rows, contests }
    }

    /// The model that shows a blob, by its index among those that share the directory. If what several have is not the
    /// same, `believe` says whose is right, once; `None` of it is that nobody knows.
    pub(super) fn model(
        &self,
        digest: &Digest,
        believe: impl FnOnce(&[Claim]) -> Option<usize>,
    ) -> Option<Result<usize, Unsettled>> {
        let row = self.rows[self.rows.binary_search_by(|row| row.digest.cmp(digest)).ok()?];
        let Some(contest) = self.contests.get(digest) else { return Some(Ok(row.model as usize)) };
        let right = contest.right.get_or_init(|| believe(&contest.claims));
        Some(right.map(|index| contest.claims[index].row.model as usize).ok_or(Unsettled))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Name and inode number of one of them.
    pub fn get(&self, index: usize) -> Option<(String, u64)> {
        let Row { digest, ino, .. } = *self.rows.get(index)?;
        let ino = match self.contests.get(&digest).map(|contest| (contest, contest.right.get().copied().flatten())) {
            None => ino,
            Some((contest, Some(right))) => contest.claims[right].row.ino,
            Some((_, None)) => number(&["contested", &digest.file_name()], &[]),
        };
        Some((digest.file_name(), ino))
    }
}
