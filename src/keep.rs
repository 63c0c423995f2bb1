//! Things that can be made again, kept as long as there is room: models and their plans.
//!
//! A [`Cell`] finds a thing as long as anybody has it; a [`Keep`] has the youngest ones, up to a weight. Planning is
//! deterministic, so a plan that is made again is the same.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};

use crate::error::Result;

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
pub struct Cell<T>(Mutex<Weak<T>>);

impl<T> Default for Cell<T> {
    fn default() -> Self {
        Cell(Mutex::new(Weak::new()))
    }
}

impl<T: Send + Sync + 'static> Cell<T> {
    /// The thing, made if it is not there, and then kept; `make` says also its weight in bytes.
    pub fn get(&self, keep: &Keep, make: impl FnOnce() -> Result<(T, u64)>) -> Result<Arc<T>> {
        let mut cell = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thing) = cell.upgrade() {
            return Ok(thing);
        }
        let (thing, weight) = make()?;
        let thing = Arc::new(thing);
        *cell = Arc::downgrade(&thing);
        keep.add(thing.clone(), weight);
        Ok(thing)
    }

    /// The thing, if it is there. This waits for nobody who makes it.
    pub fn at_hand(&self) -> Option<Arc<T>> {
        match self.0.try_lock() {
            Ok(cell) => cell.upgrade(),
            Err(TryLockError::Poisoned(cell)) => cell.into_inner().upgrade(),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_made_again() {
        let (keep, cells) = (Keep::default(), [Cell::default(), Cell::default()]);
        let get = |index: usize, made: u32| *cells[index].get(&keep, || Ok((made, LIMIT))).expect("made");
        assert_eq!((get(0, 1), get(0, 2), get(1, 3), get(0, 4), get(1, 5)), (1, 1, 3, 4, 5));
        let held = cells[1].get(&keep, || Ok((6, 1))).expect("made");
        assert_eq!((get(0, 7), get(1, 8), *held), (7, 5, 5));
    }
}
