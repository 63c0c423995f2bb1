//! Pages that are given to the kernel before it asks for them, where it reads ahead too little.
//!
//! An ordinary user's mount is read ahead by 128 KiB, which a server cannot change. Most readers go well with that. But in
//! a map that was advised MADV_SEQUENTIAL, the kernel reads nothing around the page that is touched, and copies of large
//! pieces touch their pages from the last to the first (glibc's memcpy): each page is then a request of its own. Whoever
//! reads so is noticed by small requests next to each other. What is around them, and what follows, is then pushed into the
//! page cache (FUSE_NOTIFY_STORE), further each time.
//!
//! In a thread of its own: the kernel waits for pages that are asked for at that moment, which others here must answer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{io, thread};

use fuser::{INodeNo, Notifier};
use quick_cache::sync::Cache;

use crate::vfs::Vfs;

/// Requests up to this length are small: nothing was read ahead in them.
const SMALL: u32 = 16 << 10;
/// So many small requests in a row are a reader who goes through the file.
const ROW: u32 = 4;
/// What is pushed at once, first and at the most. Pieces that are copied at once begin at multiples of the first.
const FIRST: u64 = 1 << 20;
const MOST: u64 = 16 << 20;
/// A push is given this long before the same place is pushed again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Files whose readers are remembered.
const FILES: usize = 256;
/// Pushes that wait; further ones are not made.
const WAITING: usize = 4;

/// What is to be pushed: an inode, and a range of its file that may end after it.
type Wanted = (u64, Range<u64>);

/// Who is noticed, and what is pushed for them.
#[derive(Debug)]
pub struct Push {
    readers: Cache<u64, Reader>,
    wanted: OnceLock<SyncSender<Wanted>>,
    /// How often pages were taken from the kernel because they may be wrong.
    dropped: AtomicU64,
}

/// The last small requests for a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Reader {
    last: Range<u64>,
    row: u32,
    pushed: Range<u64>,
    since: Option<Instant>,
}

impl Reader {
    /// Takes note of a small request, and returns what is to be pushed now.
    fn saw(&mut self, request: Range<u64>, now: Instant) -> Option<Range<u64>> {
        let is_next = request.start == self.last.end || request.end == self.last.start;
        self.row = if is_next { self.row + 1 } else { 1 };
        self.last = request;
        let is_under_way = self.since.is_some_and(|since| now.duration_since(since) < PATIENCE);
        if self.row < ROW || is_under_way && self.pushed.contains(&self.last.start) {
            return None;
        }
        let start = self.last.start / FIRST * FIRST;
        let len = match self.pushed.end == start {
            true => (2 * (self.pushed.end - self.pushed.start)).clamp(FIRST, MOST),
            false => FIRST,
        };
        self.pushed = start..start.saturating_add(len);
        self.since = Some(now);
        Some(self.pushed.clone())
    }
}

impl Default for Push {
    fn default() -> Push {
        Push { readers: Cache::new(FILES), wanted: OnceLock::new(), dropped: AtomicU64::new(0) }
    }
}

impl Push {
    /// Takes note of a request that the kernel made to fill its page cache.
    pub fn saw(&self, ino: INodeNo, offset: u64, size: u32) {
        let Some(wanted) = self.wanted.get() else { return };
        if size > SMALL {
            return;
        }
        let mut reader = self.readers.get(&ino.0).unwrap_or_default();
        if let Some(range) = reader.saw(offset..offset.saturating_add(size.into()), Instant::now()) {
            let _ = wanted.try_send((ino.0, range));
        }
        self.readers.insert(ino.0, reader);
    }

    /// Says that pages are taken from the kernel, so that what was read before is not given to it afterwards.
    pub fn pages_are_dropped(&self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }

    /// Begins to push.
    pub fn begin(self: &Arc<Push>, vfs: Arc<Vfs>, notifier: Notifier) -> io::Result<()> {
        let (sender, wanted) = sync_channel(WAITING);
        let push = Arc::downgrade(self);
        let dropped = move || push.upgrade().map(|push| push.dropped.load(Ordering::SeqCst));
        thread::Builder::new().name("push".into()).spawn(move || serve(&wanted, &vfs, &notifier, dropped))?;
        let _ = self.wanted.set(sender);
        Ok(())
    }
}

fn serve(wanted: &Receiver<Wanted>, vfs: &Vfs, notifier: &Notifier, dropped: impl Fn() -> Option<u64>) {
    let mut piece = vec![0; FIRST as usize];
    for (ino, range) in wanted {
        // Waiting for a variant to be prepared would take too long; and the kernel takes a file that is pushed past its
        // end for a longer one.
        let Ok(attr) = vfs.attr(ino) else { continue };
        for start in range.clone().step_by(piece.len()) {
            let before = dropped();
            let len = range.end.min(attr.size).saturating_sub(start).min(piece.len() as u64) as usize;
            if len == 0
                || vfs.is_slow(ino, start, len as u64)
                || vfs.read(ino, start, &mut piece[..len]).ok() != Some(len)
            {
                break;
            }
            let stored = notifier.store(INodeNo(ino), start, &piece[..len]);
            if dropped() != before {
                let _ = notifier.inval_inode(INodeNo(ino), start.cast_signed(), len as i64);
            }
            // The kernel may know the file no longer.
            if stored.is_err() {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// Begin and end of what is pushed for a reader of these pages, in units of the first push.
    fn pushes(pages: impl IntoIterator<Item = u64>) -> Vec<(u64, u64)> {
        let (mut reader, now) = (Reader::default(), Instant::now());
        let pushed = pages.into_iter().filter_map(|page| reader.saw(page * PAGE..(page + 1) * PAGE, now));
        pushed.map(|range| (range.start / FIRST, range.end / FIRST)).collect()
    }

    #[test]
    fn who_reads_in_order_is_pushed_ahead_and_ever_further() {
        let pages = FIRST / PAGE;
        assert_eq!(pushes(0..pages), [(0, 1)]);
        assert_eq!(pushes((0..pages).rev()), [(0, 1)]);
        // What was pushed is not asked for.
        let next = (pages..pages + 4).chain(3 * pages..3 * pages + 4).chain(7 * pages..7 * pages + 4);
        assert_eq!(pushes((0..4).chain(next)), [(0, 1), (1, 3), (3, 7), (7, 15)]);
    }

    #[test]
    fn who_reads_here_and_there_is_not() {
        assert_eq!(pushes((0..1000).map(|at| at * 7919 % 1000)), []);
        assert_eq!(pushes([5, 5, 5, 5, 5, 5]), []);
        assert_eq!(pushes((0..300).flat_map(|at| [at, at + 1, at + 2, at + 1000])), []);
    }

    #[test]
    fn a_place_is_pushed_again_later() {
        let (mut reader, now) = (Reader::default(), Instant::now());
        let mut read = |now| (0..8).filter_map(|page| reader.saw(page * PAGE..(page + 1) * PAGE, now)).count();
        assert_eq!((read(now), read(now), read(now + PATIENCE)), (1, 0, 1));
    }
}
