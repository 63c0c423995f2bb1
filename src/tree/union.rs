//! The directory that the blobs of all models share, in few bytes for each; and work on all cores.

use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Does a piece of work for each number below `count`; the results in order. Each thread has a room of its own for it.
pub(super) fn on_all_cores<T: Send, R: Default>(count: usize, work: &(dyn Fn(usize, &mut R) -> T + Sync)) -> Vec<T> {
    /// For fewer, starting threads costs more than they save.
    const FEW: usize = 8;
    if count < FEW {
        let mut room = R::default();
        return (0..count).map(|index| work(index, &mut room)).collect();
    }
    let next = AtomicUsize::new(0);
    let worker = || {
        let (mut done, mut room) = (Vec::new(), R::default());
        loop {
            match next.fetch_add(1, Ordering::Relaxed) {
                index if index < count => done.push((index, work(index, &mut room))),
                _ => return done,
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut done: Vec<(usize, T)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}
