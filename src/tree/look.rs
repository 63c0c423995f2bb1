//! The first look at the models of a snapshot, in a store that may not answer for all of them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::{Entry, WORTH};
use crate::cores::cores;

/// When no model was done for so long, another thread goes on with the next one.
const STEP: Duration = Duration::from_secs(1);
/// After so many steps the models that are left are not waited for any more.
const STEPS: u32 = 5;
/// Models that may hold up a thread before the others are not waited for either.
const THREADS: usize = 16;

struct Look {
    entries: Vec<Arc<Entry>>,
    next: AtomicUsize,
    progress: Mutex<Progress>,
    all_are_done: Condvar,
}

struct Progress {
    done: Vec<bool>,
    left: usize,
}

/// Has these models find out which layouts show them, on all cores. Those for which the store has not answered in time
/// are late, and returned; threads of their own go on waiting for them.
pub(super) fn look(entries: Vec<Arc<Entry>>) -> Vec<Arc<Entry>> {
    let count = entries.len();
    if count == 0 {
        return Vec::new();
    }
    let progress = Mutex::new(Progress { done: vec![false; count], left: count });
    let look = Arc::new(Look { entries, next: AtomicUsize::new(0), progress, all_are_done: Condvar::new() });
    let mut threads = cores().min(count.div_ceil(WORTH));
    (0..threads).for_each(|_| look.start());
    let (mut left, mut quiet) = (count, 0);
    loop {
        let waiting = look.all_are_done.wait_timeout_while(look.progress(), STEP, |progress| progress.left > 0);
        let progress = waiting.unwrap_or_else(PoisonError::into_inner).0;
        quiet = if progress.left < left { 0 } else { quiet + 1 };
        left = progress.left;
        if left == 0 || quiet == STEPS {
            let late = look.entries.iter().zip(&progress.done).filter(|(_, done)| !**done);
            return late.map(|(entry, _)| entry.clone()).inspect(|entry| entry.set_late(true)).collect();
        }
        drop(progress);
        if quiet > 0 && threads < THREADS {
            look.start();
            threads += 1;
        }
    }
}

impl Look {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: &Arc<Look>) {
        let look = self.clone();
        if thread::Builder::new().name("look".into()).spawn(move || look.work()).is_err() {
            self.work();
        }
    }

    fn work(&self) {
        let mut room = Vec::new();
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(entry) = self.entries.get(index) else { return };
            // Also after a panic.
            let _done = Done(self, index);
            entry.look(&mut room);
        }
    }
}

struct Done<'a>(&'a Look, usize);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let Done(look, index) = *self;
        let mut progress = look.progress();
        progress.done[index] = true;
        progress.left -= 1;
        look.entries[index].set_late(false);
        if progress.left == 0 {
            look.all_are_done.notify_all();
        }
    }
}
