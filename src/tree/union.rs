//! The directory that the blobs of all models share, in few bytes for each.
//!
//! Which digest a blob has that is put together when it is read, and how long a stored one is, a manifest says. One that lies
//! must not show its own bytes to those who want another model's.

use crate::digest::Digest;

/// The blobs of all models in a shared directory, which holds nothing else. There may be millions.
#[derive(Debug, Default)]
pub struct Union {
    /// In order of digest, which is that of the names.
    rows: Vec<Row>,
}

/// One blob.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub digest: Digest,
    pub ino: u64,
    /// Index of the model among those that share the directory.
    pub model: u32,
}

/// What a model shows as a blob.
#[derive(Debug)]
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
    /// Of several models that have a blob, the first shows it. If what they have is not the same, `believe` says whose is
    /// right.
    pub(super) fn of(mut claims: Vec<Claim>, believe: impl Fn(&[Claim]) -> usize) -> Union {
        claims.sort_unstable_by_key(|claim| (claim.row.digest, claim.row.model));
        let is_same = |a: &Claim, b: &Claim| a.row.digest == b.row.digest;
        // A million of them: a list that grows would take their memory once more.
        let mut rows = Vec::with_capacity(claims.chunk_by(is_same).count());
        rows.extend(claims.chunk_by(is_same).map(|claims| {
            let are_same = claims.iter().all(|claim| claim.print == claims[0].print);
            claims[if are_same { 0 } else { believe(claims) }].row
        }));
        Union { rows }
    }

    /// The model that shows a blob, by its index among those that share the directory.
    pub(super) fn model(&self, digest: &Digest) -> Option<usize> {
        let found = self.rows.binary_search_by(|row| row.digest.cmp(digest));
        found.ok().map(|index| self.rows[index].model as usize)
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
        self.rows.get(index).map(|row| (row.digest.file_name(), row.ino))
    }
}
