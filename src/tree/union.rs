//! The directory that the blobs of all models share, in few bytes for each.

use crate::digest::Digest;

/// The blobs of all models in a shared directory, which holds nothing else. There may be millions.
#[derive(Debug, Default)]
pub struct Union {
    /// In order of digest, which is that of the names.
    rows: Vec<Row>,
}

/// One blob.
#[derive(Debug)]
pub(super) struct Row {
    pub digest: Digest,
    pub ino: u64,
    /// Index of the model among those that share the directory.
    pub model: u32,
}

impl Union {
    /// Of several models that have a blob, the first shows it.
    pub(super) fn of(mut rows: Vec<Row>) -> Union {
        rows.sort_unstable_by(|a, b| (&a.digest, a.model).cmp(&(&b.digest, b.model)));
        rows.dedup_by(|next, first| next.digest == first.digest);
        rows.shrink_to_fit();
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
