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
//! A file of 400 MB composed of eight tensors, blobs cached, Linux 6.18 on two idle cores, GB/s of the first and the
//! second read, medians of five interleaved rounds:
//!
//! | reader | page cache | past it |
//! |---|---|---|
//! | 32 KiB in order | 2.0, 4.0 | 1.3, 1.2 |
//! | 128 KiB in order | 3.0, 4.5 | 3.4, 3.5 |
//! | 1 MiB in order | 2.3, 4.5 | 5.8, 5.0 |
//! | 4 threads of 32 MiB preads (mlx) | 3.3, 7.6 | 6.8, 6.7 |
//!
//! Past the page cache the first large reads are twice as fast, and small ones slower, raw reads of 4 KiB ten times; a map
//! of a file that is open so drops the pages that others have of it (`invalidate_inode_pages2`), so that nine processes
//! with one `weight.bin` would take each other's pages away. So files go through the page cache, and `--read direct` is for
//! who loads large files once, or files that are larger than memory: it also spares the second copy of every byte. How a
//! file will be read is not known when it is opened. To begin direct and to change over at the next open, once a file was
//! mapped or read in small pieces, was tried: whoever reads in small pieces then reads the whole file slowly, the first time.
//!
//! Kept besides:
//!
//! - `st_blksize` of large files is 1 MiB, which stdio, Python and coreutils take as the size of their reads.
//! - Large replies are made of the blobs' own pages ([`super::splice`]), not of a copy of them: reads through the page
//!   cache take a fifth less processor time (0.57 s for 0.72 s a GB), those past it two fifths less (0.27 s for 0.46 s).
//! - Root sets how far the kernel reads ahead in our own mount ([`READ_AHEAD_KIB`]); INIT can ask for 128 KiB at the
//!   most. It is what mapped files live by, and those that were advised `MADV_SEQUENTIAL` most of all.
//!
//! So read, warm files are at the ceiling of FUSE: a server whose bytes cost nothing (`examples/ceiling.rs`), asked for the
//! same requests, is no faster (`contrib/bench/read.md`). Cold ones come as fast as the disk gives them up to 1 GB/s; of a
//! faster one two cores take 1.2 to 1.6.
//!
//! What was tried and not kept:
//!
//! - telling the disk of the bytes to come (`posix_fadvise`): 4, 8 or 16 MiB ahead of each request, or in steps of 4 to 16 MiB,
//!   cold files of 50 MB tensors are read a tenth to a third slower, since the disk gets more and smaller requests; it is busy
//!   nine tenths of the time without. Only the beginnings of blobs: nothing or a little less. Whole blobs of up to 4 MiB: from
//!   nothing to a quarter more for tensors of 0.1 to 1 MB, and cached ones past the page cache an eighth slower;
//! - blobs opened with `POSIX_FADV_RANDOM`, so that each request is one of the disk: a quarter slower, cold; with
//!   `POSIX_FADV_SEQUENTIAL`, or one request at a time, which makes half as many and larger requests of the disk: no difference;
//! - 8 or 16 threads on two cores: cold files of 4 KiB tensors an eighth or a quarter faster, cold large ones a tenth slower;
//! - a thread that reads, in order and 8 or 32 MiB ahead, what serving threads will be asked for out of order: a quarter
//!   more processor time, and nothing won from a cold disk;
//! - read-ahead of 1 MiB instead of 4: cached files up to a tenth faster, cold ones read in order or mapped a tenth to a fifth
//!   slower; of 512 KiB: maps half as fast, and a twentieth as fast if advised `MADV_SEQUENTIAL`; of 128 KiB, as other servers
//!   have it: `cat` half as fast, maps a fifth;
//! - requests of more than 1 MiB (`fs.fuse.max_pages_limit` of 1024): large reads the same, mapped ones a third slower;
//! - a file descriptor of its own for each serving thread (`clone_fd`): no difference, two cores have no queue to share;
//! - blobs read past their own page cache, which spares the second copy in memory: by `RWF_DONTCACHE` a cold read took half
//!   as much processor time again (0.85 s for 0.55 s a GB) and was slower; by `O_DIRECT` it took as much and was as fast, but
//!   what the page cache had already came from the disk all the same, and the next layout of the model again;
//! - the blob mapped, and the reply written from there, which spares the same copy as moving its pages does
//!   ([`super::splice`]) and takes a little longer. The mapped pages count as the daemon's memory, and letting go of them
//!   after each reply takes as long as the copy.
//!
//! Where the read-ahead cannot be set, pages are pushed ahead of maps that need it ([`super::push`]).

use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use fuser::FopenFlags;

use super::machine;
use crate::vfs::Vfs;

/// How far ahead of a reader the kernel is to read, in KiB.
pub const READ_AHEAD_KIB: u32 = 4096;
/// Files from this length on are large.
const LARGE: u64 = 4 << 20;
/// What readers of large files are told is a good size for a read.
const LARGE_BLOCK: u32 = 1 << 20;
const BLOCK: u32 = 4096;

/// How files are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// Whole blobs by the kernel itself, the others through the page cache.
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

/// The choice for each open.
#[derive(Debug, Default)]
pub struct ReadPath {
    mode: Mode,
    direct_maps: AtomicBool,
}

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

    /// Whether a file that is opened for direct I/O can be mapped.
    pub fn is_direct_mappable(&self) -> bool {
        self.direct_maps.load(Ordering::Relaxed)
    }

    /// The flags of an open.
    pub fn flags(&self) -> FopenFlags {
        let direct = self.mode == Mode::Direct && self.direct_maps.load(Ordering::Relaxed);
        let how = if direct { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::FOPEN_KEEP_CACHE };
        how | FopenFlags::FOPEN_NOFLUSH
    }
}

/// `st_blksize` of a file of this size.
pub fn block_size(size: u64) -> u32 {
    if size >= LARGE { LARGE_BLOCK } else { BLOCK }
}

/// Has the kernel read ahead further, by the mount's own `file` for that, and says whether it does.
///
/// The setting ends with the mount. Only root may change it, and not in most containers.
pub fn read_ahead(vfs: &Vfs, file: &Path) -> bool {
    if let Err(error) = fs::write(file, READ_AHEAD_KIB.to_string()) {
        tracing::debug!("{} stays as it is: {error}", file.display());
    }
    describe_read_ahead(vfs, file).is_some_and(|far| far >= READ_AHEAD_KIB.into())
}

/// Says in the status how far the kernel reads ahead, which others may change.
pub fn describe_read_ahead(vfs: &Vfs, file: &Path) -> Option<u64> {
    let far = machine::number(file);
    vfs.describe("read_ahead_kib", far.into());
    far
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_file_is_direct_unasked_or_if_it_could_then_not_be_mapped() {
        let direct = |path: &ReadPath| path.flags().contains(FopenFlags::FOPEN_DIRECT_IO);
        for (mode, asked) in [(Mode::Auto, false), (Mode::Cache, false), (Mode::Direct, true)] {
            let path = ReadPath::new(mode);
            assert!(!direct(&path));
            path.direct_can_be_mapped();
            assert_eq!(direct(&path), asked);
        }
    }
}
