//! How the kernel reads the files that it does not read past us ([`super::passthrough`]), and why so.
//!
//! The kernel has two ways to read a file of ours, and the answer to an open chooses, before anybody knows how the
//! reader will read:
//!
//! - through the page cache: bytes are copied into pages, and from there to the reader, ahead of it;
//! - past it (`FOPEN_DIRECT_IO`): each `read` is a request that fills the reader's own memory. From Linux 6.6 on the
//!   file can be mapped all the same, through the page cache; before, `mmap` fails and loaders break, so that then
//!   no file is opened so.
//!
//! CPU seconds for each GB (reader and server together) say more on a busy machine than rates. A file of a few large
//! tensors, blobs cached, Linux 6.18 on two shared cores, read for the first and the second time:
//!
//! | reader | page cache | past it | plain file |
//! |---|---|---|---|
//! | 4 KiB in order | 0.8, 0.35 | 3 - 9 | 0.3 |
//! | 32 KiB in order | 0.55, 0.23 | 0.5 | 0.12 |
//! | 1 MiB in order | 0.55, 0.23 | 0.2 | 0.06 |
//! | 4 threads of 32 MiB preads (mlx) | 0.6, 0.23 | 0.25 | 0.08 |
//! | mmap | 0.8, 0.27 | 0.75, then 1.2 | 0.06 |
//!
//! So large reads want to go past the page cache, which also spares the second copy of every byte in memory, and
//! small and mapped ones want to go through it. A map of a file that is open for direct I/O drops the pages that
//! others have of it (the kernel's `invalidate_inode_pages2`), so that it must not happen again and again: nine
//! processes with one `weight.bin` would take each other's pages away. Kept is this:
//!
//! - The first open of a file is direct. If it is then mapped, or read in many small pieces, later opens go through
//!   the page cache. The kernel tells: a read past the page cache has a lock owner, one for a page has none.
//! - `st_blksize` of large files is 1 MiB, which stdio, Python and coreutils take as the size of their reads, so
//!   that what reads small pieces through them makes large requests.
//! - Small files always go through the page cache: they are read in one request, and again soon. So do files with
//!   computed bytes, which are then computed once.
//! - Root sets how far the kernel reads ahead in our own mount ([`READ_AHEAD_KIB`]); INIT can ask for 128 KiB at the
//!   most. It is what mapped files live by, and those that were advised `MADV_SEQUENTIAL` most of all.
//!
//! What was tried and not kept, because it gave nothing here: telling the disk of the blobs to come
//! (`posix_fadvise`, 8 MiB ahead at every 8 MiB that a reader passes; the disk reads ahead 8 MiB by itself), and
//! requests of more than 1 MiB (`fs.fuse.max_pages_limit` of 1024: large reads the same, mapped ones a third slower).
//! What was not measured: a mapping of the blob instead of `pread`, which spares one copy; `clone_fd`; pushing pages
//! ahead with `Notifier::store`, for mapped files of users who cannot set the read-ahead.
//!
//! The price: the first reader of a large file that makes raw reads of 4 KiB in order (no stdio, no Python) waits
//! for each, at a tenth of the page cache's speed. `--read cache` is for who has such a reader.

use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use dashmap::DashMap;
use fuser::FopenFlags;

use super::machine;
use crate::vfs::Vfs;

/// How far ahead of a reader the kernel is to read, in KiB.
pub const READ_AHEAD_KIB: u32 = 4096;
/// Files below this length go through the page cache.
const LARGE: u64 = 4 << 20;
/// What readers of large files are told is a good size for a read.
const LARGE_BLOCK: u32 = 1 << 20;
const BLOCK: u32 = 4096;
/// Direct reads up to this length cost more than those through the page cache.
const SMALL_READ: u32 = 32 << 10;
/// A loader may read a header in small pieces; one that goes on so is better served by the page cache.
const SMALL_READS: u32 = 64;

/// How files are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// As is best for each file.
    #[default]
    Auto,
    /// All through the page cache.
    Cache,
    /// All but mapped pages past the page cache.
    Direct,
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(word: &str) -> Result<Mode, String> {
        match word {
            "auto" => Ok(Mode::Auto),
            "cache" => Ok(Mode::Cache),
            "direct" => Ok(Mode::Direct),
            _ => Err("it is one of auto, cache, direct".into()),
        }
    }
}

/// The choice for each open, made of what was seen of the file before.
#[derive(Debug, Default)]
pub struct ReadPath {
    mode: Mode,
    direct_maps: AtomicBool,
    /// Small direct reads of each large file so far; [`MAPPED`] for one that was mapped.
    seen: DashMap<u64, AtomicU32>,
}

const MAPPED: u32 = 1 << 31;

impl ReadPath {
    /// A choice of this mode.
    pub fn new(mode: Mode) -> ReadPath {
        ReadPath { mode, ..ReadPath::default() }
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Says that files opened for direct I/O can be mapped, without which none is opened so.
    pub fn direct_can_be_mapped(&self) {
        self.direct_maps.store(true, Ordering::Relaxed);
    }

    /// Whether to open the file `ino` of this size for direct I/O.
    pub fn is_direct(&self, ino: u64, size: u64, is_computed: impl FnOnce() -> bool) -> bool {
        let can = self.direct_maps.load(Ordering::Relaxed);
        match self.mode {
            Mode::Cache => false,
            Mode::Direct => can,
            Mode::Auto => can && size >= LARGE && !self.wants_pages(ino) && !is_computed(),
        }
    }

    fn wants_pages(&self, ino: u64) -> bool {
        self.seen.get(&ino).is_some_and(|seen| seen.load(Ordering::Relaxed) >= SMALL_READS)
    }

    /// Takes note of a read through an open file that is direct: `for_page` if the kernel reads for a map.
    pub fn saw_read(&self, ino: u64, len: u32, for_page: bool) {
        let weight = if for_page { MAPPED } else { u32::from(len <= SMALL_READ) };
        if weight > 0 && !self.wants_pages(ino) {
            self.seen.entry(ino).or_default().fetch_add(weight, Ordering::Relaxed);
        }
    }
}

/// The flags of an open.
pub fn flags(direct: bool) -> FopenFlags {
    let how = if direct { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::FOPEN_KEEP_CACHE };
    how | FopenFlags::FOPEN_NOFLUSH
}

/// `st_blksize` of a file of this size.
pub fn block_size(size: u64) -> u32 {
    if size >= LARGE { LARGE_BLOCK } else { BLOCK }
}

/// Has the kernel read ahead further in the mount at `mountpoint`, and says in the status how far it does.
///
/// The setting is the mount's own and ends with it. Only root may change it, and not in most containers.
pub fn read_ahead(vfs: &Vfs, mountpoint: &Path) {
    let Ok(file) = machine::read_ahead_file(mountpoint) else { return };
    if let Err(error) = fs::write(&file, READ_AHEAD_KIB.to_string()) {
        tracing::debug!("{} stays as it is: {error}", file.display());
    }
    vfs.describe("read_ahead_kib", machine::number(&file).into());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auto() -> ReadPath {
        let path = ReadPath::new(Mode::Auto);
        path.direct_can_be_mapped();
        path
    }

    #[test]
    fn a_mapped_file_goes_through_the_page_cache() {
        let path = auto();
        assert!(path.is_direct(7, LARGE, || false));
        path.saw_read(7, 1 << 20, true);
        path.saw_read(7, 1 << 20, true);
        assert!(!path.is_direct(7, LARGE, || false));
        assert!(path.is_direct(8, LARGE, || false));
    }

    #[test]
    fn so_does_one_that_is_read_in_small_pieces() {
        let path = auto();
        (1..SMALL_READS).for_each(|_| path.saw_read(7, 4096, false));
        (0..SMALL_READS).for_each(|_| path.saw_read(7, SMALL_READ + 1, false));
        assert!(path.is_direct(7, LARGE, || false));
        path.saw_read(7, 4096, false);
        assert!(!path.is_direct(7, LARGE, || false));
    }

    #[test]
    fn no_file_is_direct_that_could_then_not_be_mapped() {
        for mode in [Mode::Auto, Mode::Direct] {
            assert!(!ReadPath::new(mode).is_direct(7, LARGE, || false));
        }
        assert!(!auto().is_direct(7, LARGE - 1, || false) || auto().is_direct(7, LARGE, || true));
    }
}
