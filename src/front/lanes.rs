//! Who serves a request: one of the threads that take them from the kernel, or, when these are all at work, another.
//!
//! A store can stop answering, as a whole or in part: a thread that reads from it then waits for as long as that takes.
//! Were all of the kernel's threads caught so, the whole mount would hang. So one of them always stays free: what it
//! takes while all others are at work, it hands over to a pool that grows when it must. In the pool each blob (or
//! directory) has a few threads and no more, so that a blob that does not answer leaves room for those that do. What
//! waits for it behind them waits without a thread, and is refused when the blob has not answered for a long time.
//!
//! As long as a thread is free this costs two additions. It takes no lock and allocates nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Threads of the pool.
const THREADS: usize = 64;
/// Of these, those that may serve one blob or directory.
const THREADS_OF_ONE: usize = 4;
/// Requests that wait for a thread; further ones are refused.
const WAITING: usize = 4096;
/// A thread of the pool with nothing to do for this long ends.
const IDLE: Duration = Duration::from_secs(10);

/// What a request will read, as far as that is known: numbers of blobs, or of the inode it is about.
pub type Keys = Vec<u64>;

/// The choice for each request.
#[derive(Debug)]
pub struct Lanes {
    at_work: AtomicUsize,
    most: usize,
    /// Whether there are blobs that do not answer.
    stuck: AtomicBool,
    pool: Arc<Pool>,
}

/// A thread of the kernel's that is at work.
#[derive(Debug)]
pub struct Lane<'a>(&'a AtomicUsize);

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Lanes {
    /// Lanes where so many of the threads that take requests from the kernel may be at work.
    pub fn new(most: usize) -> Lanes {
        Lanes { at_work: AtomicUsize::new(0), most, stuck: AtomicBool::new(false), pool: Arc::default() }
    }

    /// Leave to serve a request in this thread; `None` if it is the last that is free.
    pub fn enter(&self) -> Option<Lane<'_>> {
        let before = self.at_work.fetch_add(1, Ordering::Relaxed);
        let lane = Lane(&self.at_work);
        (before < self.most).then_some(lane)
    }

    /// Has a request served by another thread. One that is refused goes down with its reply, which is an I/O error.
    pub fn hand_over(&self, keys: Keys, work: impl FnOnce() + Send + 'static) {
        Pool::add(&self.pool, keys, Box::new(work));
    }

    /// Whether some blobs do not answer: a request is then asked what it reads before it is served.
    pub fn are_some_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Whether one of these does not answer.
    pub fn is_stuck(&self, keys: &[u64]) -> bool {
        let state = self.pool.lock();
        keys.iter().any(|key| state.stuck.contains_key(key))
    }

    /// Says which blobs do not answer, and of which of them no more is to be waited for.
    pub fn set_stuck(&self, stuck: HashMap<u64, bool>) {
        self.stuck.store(!stuck.is_empty(), Ordering::Relaxed);
        let mut state = self.pool.lock();
        state.stuck = stuck;
        let hopeless: Vec<Job> = state.take_hopeless();
        drop(state);
        drop(hopeless);
        self.pool.wake.notify_all();
    }

    /// Requests that wait for a thread.
    pub fn waiting(&self) -> usize {
        self.pool.lock().queue.len()
    }
}

struct Job {
    keys: Keys,
    work: Box<dyn FnOnce() + Send>,
}

#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Threads at work for each key.
    at_work: HashMap<u64, usize>,
    /// Keys that do not answer; `true` if nothing more is to wait for them.
    stuck: HashMap<u64, bool>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        f.debug_struct("Pool").field("threads", &state.threads).field("waiting", &state.queue.len()).finish()
    }
}

impl State {
    fn may_run(&self, job: &Job) -> bool {
        job.keys.iter().all(|key| self.at_work.get(key).is_none_or(|&threads| threads < THREADS_OF_ONE))
    }

    fn is_hopeless(&self, job: &Job) -> bool {
        !self.may_run(job) && job.keys.iter().any(|key| self.stuck.get(key) == Some(&true))
    }

    fn take_hopeless(&mut self) -> Vec<Job> {
        let queue = std::mem::take(&mut self.queue);
        let (hopeless, queue): (Vec<Job>, VecDeque<Job>) = {
            let (mut hopeless, mut rest) = (Vec::new(), VecDeque::new());
            for job in queue {
                if self.is_hopeless(&job) { hopeless.push(job) } else { rest.push_back(job) }
            }
            (hopeless, rest)
        };
        self.queue = queue;
        hopeless
    }

    fn next(&mut self) -> Option<Job> {
        let at = self.queue.iter().position(|job| self.may_run(job))?;
        let job = self.queue.remove(at)?;
        job.keys.iter().for_each(|key| *self.at_work.entry(*key).or_default() += 1);
        Some(job)
    }

    fn done(&mut self, keys: &[u64]) {
        for key in keys {
            if let Some(threads) = self.at_work.get_mut(key) {
                *threads -= 1;
                if *threads == 0 {
                    self.at_work.remove(key);
                }
            }
        }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(pool: &Arc<Pool>, mut keys: Keys, work: Box<dyn FnOnce() + Send>) {
        keys.sort_unstable();
        keys.dedup();
        let job = Job { keys, work };
        let mut state = pool.lock();
        if state.queue.len() >= WAITING || state.is_hopeless(&job) {
            drop(state);
            return;
        }
        let grow = state.idle == 0 && state.threads < THREADS && state.may_run(&job);
        state.queue.push_back(job);
        if grow {
            state.threads += 1;
        }
        drop(state);
        pool.wake.notify_one();
        if grow {
            let mine = Arc::clone(pool);
            if let Err(error) = thread::Builder::new().name("lane".into()).spawn(move || mine.work()) {
                tracing::warn!("no further thread to serve requests with: {error}");
                pool.lock().threads -= 1;
            }
        }
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(Job { keys, work }) = state.next() {
                drop(state);
                // A panic was answered where it was; the thread goes on.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                state = self.lock();
                state.done(&keys);
                continue;
            }
            state.idle += 1;
            let (woken, timeout) = self.wake.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.next_is_none() {
                state.threads -= 1;
                return;
            }
        }
    }
}

impl State {
    fn next_is_none(&self) -> bool {
        !self.queue.iter().any(|job| self.may_run(job))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    #[test]
    fn the_last_thread_stays_free() {
        let lanes = Lanes::new(2);
        let (first, second) = (lanes.enter().unwrap(), lanes.enter().unwrap());
        assert!(lanes.enter().is_none());
        drop(first);
        let third = lanes.enter();
        assert!(third.is_some() && lanes.enter().is_none());
        drop((second, third));
        assert!(Lanes::new(0).enter().is_none());
    }

    /// Work that says when it began and ends when it is told to.
    fn blocking(lanes: &Lanes, keys: Keys, began: &Sender<u64>) -> Sender<()> {
        let (end, ended) = channel::<()>();
        let (began, key) = (began.clone(), keys[0]);
        lanes.hand_over(keys, move || {
            began.send(key).unwrap();
            let _ = ended.recv();
        });
        end
    }

    #[test]
    fn one_key_has_a_few_threads_and_others_go_on() {
        let (lanes, (began, beginning)) = (Lanes::new(0), channel());
        let stuck: Vec<_> = (0..20).map(|_| blocking(&lanes, vec![7], &began)).collect();
        let first: Vec<u64> = (0..THREADS_OF_ONE).map(|_| beginning.recv().unwrap()).collect();
        assert_eq!(first, [7; THREADS_OF_ONE]);
        // Another key, and one that needs both.
        let (both, other) = (blocking(&lanes, vec![8, 7], &began), blocking(&lanes, vec![8], &began));
        assert_eq!(beginning.recv().unwrap(), 8);
        assert_eq!(lanes.waiting(), 20 - THREADS_OF_ONE + 1);
        // Of what does not answer nothing more is waited for, in the end.
        lanes.set_stuck(HashMap::from([(7, false)]));
        assert!(lanes.are_some_stuck() && lanes.is_stuck(&[1, 7]) && !lanes.is_stuck(&[8]));
        assert_eq!(lanes.waiting(), 20 - THREADS_OF_ONE + 1);
        lanes.set_stuck(HashMap::from([(7, true)]));
        assert_eq!(lanes.waiting(), 0);
        lanes.set_stuck(HashMap::new());
        drop((stuck, both, other));
        let again = blocking(&lanes, vec![7], &began);
        assert_eq!(beginning.recv().unwrap(), 7);
        drop(again);
    }
}
