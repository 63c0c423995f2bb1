//! Things that can be made again, kept as long as there is room: models and their plans.
//!
//! A [`Cell`] finds a thing as long as anybody has it; a [`Keep`] has the youngest ones, up to a weight. Planning is
//! deterministic, so a plan that is made again is the same.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::error::{Error, Result};

/// Bytes up to which things are kept.
const LIMIT: u64 = 16 << 20;

/// The youngest things.
#[derive(Default)]
pub struct Keep(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    things: VecDeque<(u64, Arc<dyn Any + Send + Sync>)>,
    weight: u64,
}

impl Keep {
    fn add(&self, thing: Arc<dyn Any + Send + Sync>, weight: u64) {
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        queue.things.push_back((weight, thing));
        queue.weight += weight;
        let mut old = Vec::new();
        // The one that was just made is wanted, whatever its weight.
        while queue.weight > LIMIT && queue.things.len() > 1 {
            let Some((weight, thing)) = queue.things.pop_front() else { break };
            queue.weight -= weight;
            old.push(thing);
        }
        drop(queue);
        drop(old);
    }
}

impl fmt::Debug for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_struct("Keep").field("things", &queue.things.len()).field("weight", &queue.weight).finish()
    }
}

/// A place for one thing. Errors are not kept: damage that is mended is gone.
#[derive(Debug)]
pub struct Cell<T> {
    state: Mutex<State<T>>,
    made: Condvar,
}

#[derive(Debug)]
struct State<T> {
    thing: Weak<T>,
    is_being_made: bool,
}

impl<T> Default for Cell<T> {
    fn default() -> Self {
        Cell { state: Mutex::new(State { thing: Weak::new(), is_being_made: false }), made: Condvar::new() }
    }
}

impl<T: Send + Sync + 'static> Cell<T> {
    /// The thing, made if it is not there, and then kept; `make` says also its weight in bytes. Who finds another making it
    /// waits for no longer than `patience`.
    pub fn get(&self, keep: &Keep, patience: Duration, make: impl FnOnce() -> Result<(T, u64)>) -> Result<Arc<T>> {
        let mut state = self.lock();
        loop {
            if let Some(thing) = state.thing.upgrade() {
                return Ok(thing);
            }
            if !state.is_being_made {
                break;
            }
            let waited = self.made.wait_timeout_while(state, patience, |state| state.is_being_made);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.is_being_made {
                return Err(Error::Unanswered);
            }
        }
        state.is_being_made = true;
        drop(state);
        let _making = Making(self);
        let (thing, weight) = make()?;
        let thing = Arc::new(thing);
        self.lock().thing = Arc::downgrade(&thing);
        keep.add(thing.clone(), weight);
        Ok(thing)
    }

    /// The thing, if it is there.
    pub fn at_hand(&self) -> Option<Arc<T>> {
        self.lock().thing.upgrade()
    }
}

impl<T> Cell<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While it lives, a thing is made.
struct Making<'a, T>(&'a Cell<T>);

impl<T> Drop for Making<'_, T> {
    fn drop(&mut self) {
        self.0.lock().is_being_made = false;
        self.0.made.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_made_again() {
        let (keep, cells) = (Keep::default(), [Cell::default(), Cell::default()]);
        let get =
            |index: usize, made: u32| *cells[index].get(&keep, Duration::MAX, || Ok((made, LIMIT))).expect("made");
        assert_eq!((get(0, 1), get(0, 2), get(1, 3), get(0, 4), get(1, 5)), (1, 1, 3, 4, 5));
        let held = cells[1].get(&keep, Duration::MAX, || Ok((6, 1))).expect("made");
        assert_eq!((get(0, 7), get(1, 8), *held), (7, 5, 5));
    }

    #[test]
    fn what_another_makes_is_waited_for_as_long_as_one_likes() {
        let (keep, cell) = (Keep::default(), Cell::default());
        let get = |patience, made: u32| cell.get(&keep, patience, || Ok((made, 1))).map(|thing| *thing);
        std::thread::scope(|scope| {
            let (begun, beginning) = std::sync::mpsc::channel();
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let make = move || {
                begun.send(()).expect("somebody waits for this");
                let _ = ended.recv();
                Ok((1, 1))
            };
            let maker = scope.spawn(|| cell.get(&keep, Duration::MAX, make).map(|thing| *thing));
            beginning.recv().expect("it begins");
            assert_eq!(cell.at_hand(), None);
            assert!(get(Duration::ZERO, 2).is_err_and(|error| error.is_unanswered()));
            let waiter = scope.spawn(|| get(Duration::MAX, 3));
            drop(end);
            assert_eq!(maker.join().expect("no panic").expect("made"), 1);
            assert_eq!(waiter.join().expect("no panic").expect("there"), 1);
        });
        assert_eq!((cell.at_hand().as_deref(), get(Duration::ZERO, 4).expect("there")), (Some(&1), 1));
    }

    #[test]
    fn what_could_not_be_made_is_made_by_the_next() {
        let (keep, cell) = (Keep::default(), Cell::<u32>::default());
        assert!(cell.get(&keep, Duration::MAX, || Err(Error::NotDir)).is_err());
        let panics = || cell.get(&keep, Duration::MAX, || panic!("a fault"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(*cell.get(&keep, Duration::ZERO, || Ok((5, 1))).expect("made"), 5);
    }
}
