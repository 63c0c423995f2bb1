//! Which blobs the threads of this process wait for, and since when.
//!
//! A thread that reads a blob says so in a slot of its own, with a few stores and no lock; whoever wants to know looks
//! through the slots from time to time. A slot that shows the same reading in two looks is a thread that waits.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::digest::Digest;

/// What a thread is doing.
#[derive(Debug, Default)]
struct Slot {
    /// Odd while it reads, one more at each beginning and end.
    count: AtomicU64,
    blob: [AtomicU64; 4],
}

static SLOTS: Mutex<Vec<Weak<Slot>>> = Mutex::new(Vec::new());

thread_local! {
    static SLOT: OnceCell<Arc<Slot>> = const { OnceCell::new() };
}

/// While it lives, this thread reads a blob.
#[derive(Debug)]
pub(crate) struct Reading(Arc<Slot>);

impl Reading {
    /// Says that this thread begins to read a blob.
    pub fn begin(digest: &Digest) -> Reading {
        let slot = SLOT.with(|slot| slot.get_or_init(enlist).clone());
        for (word, bytes) in slot.blob.iter().zip(digest.as_bytes().as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        slot.count.fetch_add(1, Ordering::Release);
        Reading(slot)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.count.fetch_add(1, Ordering::Release);
    }
}

fn enlist() -> Arc<Slot> {
    let slot = Arc::new(Slot::default());
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&slot));
    slot
}

/// A blob that threads wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The blob.
    pub digest: Digest,
    /// For how long the first of them does, as far as that was seen.
    pub time: Duration,
    /// How many they are.
    pub threads: usize,
}

/// Looks at the slots, and remembers what it saw.
#[derive(Debug, Default)]
pub struct Looks {
    /// By address of the slot: the reading it was in, and since when.
    seen: BTreeMap<usize, (u64, Instant)>,
}

impl Looks {
    /// The blobs of readings that were under way in the look before, too.
    pub fn look(&mut self) -> Vec<Wait> {
        let mut slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        slots.retain(|slot| slot.strong_count() > 0);
        let slots: Vec<Arc<Slot>> = slots.iter().filter_map(Weak::upgrade).collect();
        let (mut seen, mut waits) = (BTreeMap::new(), BTreeMap::<Digest, Wait>::new());
        for slot in slots {
            let count = slot.count.load(Ordering::Acquire);
            if count % 2 == 0 {
                continue;
            }
            let address = Arc::as_ptr(&slot) as usize;
            let before = self.seen.get(&address).filter(|(seen, _)| *seen == count).map(|(_, since)| *since);
            seen.insert(address, (count, before.unwrap_or_else(Instant::now)));
            let Some(since) = before else { continue };
            let mut bytes = [0; 32];
            for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(&slot.blob) {
                *bytes = word.load(Ordering::Relaxed).to_le_bytes();
            }
            let digest = Digest::from_bytes(bytes);
            let wait = waits.entry(digest).or_insert(Wait { digest, time: Duration::ZERO, threads: 0 });
            wait.threads += 1;
            wait.time = wait.time.max(since.elapsed());
        }
        self.seen = seen;
        waits.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_reading_that_lasts_is_seen_in_the_second_look() {
        let (digest, mut looks) = (Digest::of(b"slow"), Looks::default());
        let (end, ended) = channel::<()>();
        let (begun, beginning) = channel();
        let thread = std::thread::spawn(move || {
            let _reading = Reading::begin(&digest);
            begun.send(()).unwrap();
            let _ = ended.recv();
        });
        beginning.recv().unwrap();
        let of_this = |waits: Vec<Wait>| waits.into_iter().find(|wait| wait.digest == digest);
        assert_eq!(of_this(looks.look()), None);
        assert_eq!(of_this(looks.look()).map(|wait| wait.threads), Some(1));
        drop(end);
        thread.join().unwrap();
        assert_eq!(of_this(looks.look()), None);
    }
}
