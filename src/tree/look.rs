//! Looks at many models in a store that may not answer for all of them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::entry::Anchored;
use super::view::View;
use super::{Entry, Node};
use crate::cores::cores;
use crate::error::Result;

/// For fewer models, starting a thread costs more than it saves.
const WORTH: usize = 4;
/// When no model was done for so long, another thread goes on with the next one.
const STEP: Duration = Duration::from_secs(1);
/// After so many steps the models that are left are not waited for any more.
const STEPS: u32 = 5;
/// Models that may hold up a thread before the others are not waited for either.
const THREADS: usize = 16;

/// A model, and which of the anchors that it has in a layout or variant.
pub(super) type Stand = (Arc<Entry>, View, usize);

/// What is done, by its number; each thread has a room of its own for it.
type Work<T> = dyn Fn(usize, &mut Vec<u8>) -> T + Send + Sync;

struct Look<T> {
    count: usize,
    work: Box<Work<T>>,
    set_late: Box<dyn Fn(usize, bool) + Send + Sync>,
    next: AtomicUsize,
    progress: Mutex<Progress<T>>,
    all_are_done: Condvar,
}

struct Progress<T> {
    /// Whether each is done, also where that came to nothing because of a panic.
    done: Vec<bool>,
    results: Vec<Option<T>>,
    left: usize,
}

/// Has these models find out which layouts show them. Those for which the store has not answered in time are late, and
/// returned.
pub(super) fn look(entries: Vec<Arc<Entry>>) -> Vec<Arc<Entry>> {
    let (all, of_all) = (entries.clone(), entries.clone());
    in_time(entries.len(), move |at, room| _ = all[at].look(room), move |at, late| of_all[at].set_late(late));
    entries.into_iter().filter(|entry| entry.is_late()).collect()
}

/// What `take` makes of the nodes at these anchors, in order; `None` where the store does not answer in time. What a variant
/// computes takes as long as it takes.
pub(super) fn planned<T: Send + 'static>(
    stands: &[Stand],
    take: impl Fn(usize, Result<&Node>) -> T + Send + Sync + 'static,
) -> Vec<Option<T>> {
    let take = move |index, plan: Result<Arc<Anchored>>, anchor: usize| match plan {
        Ok(nodes) => take(index, Ok(&nodes[anchor])),
        Err(error) => take(index, Err(error)),
    };
    let (mut taken, mut asked) = (Vec::new(), Vec::new());
    for (index, (entry, view, anchor)) in stands.iter().enumerate() {
        let plan = match entry.at_hand(*view) {
            Some(nodes) => Some(Ok(nodes)),
            None if entry.is_awaited(*view) => None,
            None if view.variant.is_some() => Some(entry.planned(*view)),
            None => {
                asked.push((index, (entry.clone(), *view, *anchor)));
                None
            }
        };
        taken.push(plan.map(|plan| take(index, plan, *anchor)));
    }
    if asked.is_empty() {
        return taken;
    }
    let asked = Arc::new(asked);
    let (all, of_all) = (asked.clone(), asked.clone());
    let work = move |at: usize, _: &mut Vec<u8>| {
        let (index, (entry, view, anchor)) = &all[at];
        take(*index, entry.planned_at_last(*view), *anchor)
    };
    let set_late = move |at: usize, late| {
        let (_, (entry, view, _)) = &of_all[at];
        entry.set_awaited(*view, late);
    };
    for ((index, _), answer) in asked.iter().zip(in_time(asked.len(), work, set_late)) {
        taken[*index] = answer;
    }
    taken
}

/// Does this for each number below `count`, on all cores; the results in order, `None` for what is not done in time because
/// the store does not answer. Threads of its own go on waiting for that, and `set_late` says from when to when.
fn in_time<T: Send + 'static>(
    count: usize,
    work: impl Fn(usize, &mut Vec<u8>) -> T + Send + Sync + 'static,
    set_late: impl Fn(usize, bool) + Send + Sync + 'static,
) -> Vec<Option<T>> {
    let results = std::iter::repeat_with(|| None).take(count).collect();
    let progress = Mutex::new(Progress { done: vec![false; count], results, left: count });
    let (work, set_late) = (Box::new(work), Box::new(set_late));
    let look =
        Arc::new(Look { count, work, set_late, next: AtomicUsize::new(0), progress, all_are_done: Condvar::new() });
    let mut threads = cores().min(count.div_ceil(WORTH));
    (0..threads).for_each(|_| look.start());
    let (mut left, mut quiet) = (count, 0);
    loop {
        let waiting = look.all_are_done.wait_timeout_while(look.progress(), STEP, |progress| progress.left > 0);
        let mut progress = waiting.unwrap_or_else(PoisonError::into_inner).0;
        quiet = if progress.left < left { 0 } else { quiet + 1 };
        left = progress.left;
        if left == 0 || quiet == STEPS {
            (0..count).filter(|&index| !progress.done[index]).for_each(|index| (look.set_late)(index, true));
            return std::mem::take(&mut progress.results);
        }
        drop(progress);
        if quiet > 0 && threads < THREADS {
            look.start();
            threads += 1;
        }
    }
}

impl<T: Send + 'static> Look<T> {
    fn progress(&self) -> MutexGuard<'_, Progress<T>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: &Arc<Look<T>>) {
        let look = self.clone();
        if thread::Builder::new().name("look".into()).spawn(move || look.work()).is_err() {
            self.work();
        }
    }

    fn work(&self) {
        let mut room = Vec::new();
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.count {
                return;
            }
            // Also after a panic.
            let _done = Done(self, index);
            let result = (self.work)(index, &mut room);
            // Nobody waits for it any more where the results were taken.
            if let Some(place) = self.progress().results.get_mut(index) {
                *place = Some(result);
            }
        }
    }
}

struct Done<'a, T: Send + 'static>(&'a Look<T>, usize);

impl<T: Send + 'static> Drop for Done<'_, T> {
    fn drop(&mut self) {
        let Done(look, index) = *self;
        let mut progress = look.progress();
        progress.done[index] = true;
        progress.left -= 1;
        (look.set_late)(index, false);
        if progress.left == 0 {
            look.all_are_done.notify_all();
        }
    }
}
