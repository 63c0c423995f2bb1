//! One at a time, as long as whoever has the turn goes forward: a store that stops answering holds up nobody for long.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// For how long whoever has the turn may stand still before others go on beside it.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many have the turn: one, and those that went on beside who stood still.
type Held<'a> = MutexGuard<'a, usize>;

/// What is done by one at a time.
pub(super) struct Turns {
    held: Mutex<usize>,
    ended: Condvar,
    /// How many steps they made.
    steps: AtomicU64,
}

/// While it lives, nobody else has the turn unless no [`step`](Turn::step) is made.
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    pub const fn new() -> Turns {
        Turns { held: Mutex::new(0), ended: Condvar::new(), steps: AtomicU64::new(0) }
    }

    /// Waits for the turn, or until nobody who has it makes a step.
    pub fn take(&self) -> Turn<'_> {
        self.take_by(|held| {
            let waited = self.ended.wait_timeout_while(held, PATIENCE, |held| *held > 0);
            waited.unwrap_or_else(PoisonError::into_inner).0
        })
    }

    fn take_by<'a>(&'a self, mut wait: impl FnMut(Held<'a>) -> Held<'a>) -> Turn<'a> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let mut steps = None;
        while *held > 0 && steps != Some(self.steps.load(Ordering::Relaxed)) {
            steps = Some(self.steps.load(Ordering::Relaxed));
            held = wait(held);
        }
        *held += 1;
        let turn = Turn(self);
        // Others who waited as long are not let in at once, too.
        turn.step();
        turn
    }

    #[cfg(test)]
    pub fn is_taken(&self) -> bool {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) > 0
    }
}

impl Turn<'_> {
    /// Says that it goes forward.
    pub fn step(&self) {
        self.0.steps.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.held.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stands_still_is_passed_and_nobody_else() {
        let turns = Turns::new();
        let stuck = turns.take();
        let mut waits = 0;
        let passing = turns.take_by(|held| {
            waits += 1;
            if waits < 4 {
                stuck.step();
            }
            held
        });
        assert_eq!((waits, *turns.held.lock().expect("no panic")), (4, 2));
        drop((stuck, passing));
        assert!(!turns.is_taken());
    }

    #[test]
    fn the_turn_is_had_when_it_is_free() {
        let turns = Turns::new();
        let first = turns.take();
        std::thread::scope(|scope| {
            let (waits, waiting) = std::sync::mpsc::channel();
            let turns = &turns;
            scope.spawn(move || {
                drop(turns.take_by(|held| {
                    waits.send(()).expect("somebody waits for this");
                    turns.ended.wait_while(held, |held| *held > 0).expect("no panic")
                }));
            });
            waiting.recv().expect("it waits");
            drop(first);
        });
        assert!(!turns.is_taken());
    }
}
