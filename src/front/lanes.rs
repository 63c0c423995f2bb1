//! Who serves a request: one of the threads that take them from the kernel, or, when these are all at work, another.
//!
//! A store can stop answering, as a whole or in part: a thread that reads from it then waits for as long as that takes.
//! Were all of the kernel's threads caught so, the whole mount would hang. So one of them always stays free: what it
//! takes while all others are at work, it hands over to a pool that grows when it must. In the pool each file or
//! directory has a few threads and no more. What needs a blob that is known not to answer waits without a thread, and is
//! refused when the blob has not answered for a long time.
//!
//! As long as a thread is free this costs two additions. It takes no lock and allocates nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Threads of the pool.
const THREADS: usize = 64;
/// Of these, those that may serve one file or directory.
pub const THREADS_OF_ONE: usize = 4;
/// Requests that wait for a thread; further ones are refused.
const WAITING: usize = 4096;
/// A thread of the pool with nothing to do for this long ends.
const IDLE: Duration = Duration::from_secs(10);

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
    ///
    /// It is about the inode `ino`, and reads these blobs.
    pub fn hand_over(&self, ino: u64, blobs: Vec<u64>, work: impl FnOnce() + Send + 'static) {
        Pool::add(&self.pool, Job { ino, blobs, work: Box::new(work) });
    }

    /// Whether some blobs do not answer: a request is then asked what it reads before it is served.
    pub fn are_some_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Whether one of these blobs does not answer.
    pub fn is_stuck(&self, blobs: &[u64]) -> bool {
        self.pool.lock().is_stuck(blobs)
    }

    /// Says which blobs do not answer, and of which of them no more is to be waited for.
    pub fn set_stuck(&self, stuck: HashMap<u64, bool>) {
        self.stuck.store(!stuck.is_empty(), Ordering::Relaxed);
        let mut state = self.pool.lock();
        state.stuck = stuck;
        let hopeless = state.take_hopeless();
        Pool::grow(&self.pool, &mut state);
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
    ino: u64,
    blobs: Vec<u64>,
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
    /// Threads at work for each inode.
    at_work: HashMap<u64, usize>,
    /// Blobs that do not answer; `true` if nothing more is to wait for them.
    stuck: HashMap<u64, bool>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        f.debug_struct("Pool").field("threads", &state.threads).field("waiting", &state.queue.len()).finish()
    }
}

impl State {
    fn is_stuck(&self, blobs: &[u64]) -> bool {
        !self.stuck.is_empty() && blobs.iter().any(|blob| self.stuck.contains_key(blob))
    }

    /// A thread waits for each blob that does not answer, so that its answer is noticed: no other is needed.
    fn may_run(&self, job: &Job) -> bool {
        self.at_work.get(&job.ino).is_none_or(|&threads| threads < THREADS_OF_ONE) && !self.is_stuck(&job.blobs)
    }

    fn is_hopeless(&self, job: &Job) -> bool {
        job.blobs.iter().any(|blob| self.stuck.get(blob) == Some(&true))
    }

    fn take_hopeless(&mut self) -> Vec<Job> {
        let queue = std::mem::take(&mut self.queue);
        let (hopeless, queue): (Vec<Job>, Vec<Job>) = queue.into_iter().partition(|job| self.is_hopeless(job));
        self.queue = queue.into();
        hopeless
    }

    /// Whether more requests than this could be served at once.
    fn has_more_than(&self, number: usize) -> bool {
        self.queue.iter().filter(|job| self.may_run(job)).nth(number).is_some()
    }

    fn next(&mut self) -> Option<Job> {
        let at = self.queue.iter().position(|job| self.may_run(job))?;
        let job = self.queue.remove(at)?;
        *self.at_work.entry(job.ino).or_default() += 1;
        Some(job)
    }

    fn done(&mut self, ino: u64) {
        if let Some(threads) = self.at_work.get_mut(&ino) {
            *threads -= 1;
            if *threads == 0 {
                self.at_work.remove(&ino);
            }
        }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(pool: &Arc<Pool>, job: Job) {
        let mut state = pool.lock();
        if state.queue.len() >= WAITING || state.is_hopeless(&job) {
            drop(state);
            return;
        }
        state.queue.push_back(job);
        Pool::grow(pool, &mut state);
        drop(state);
        pool.wake.notify_one();
    }

    /// Begins a thread if there is more to do than idle threads. One that was woken counts as idle until it runs, so that
    /// being idle is not enough: the work that woke it may never end.
    fn grow(pool: &Arc<Pool>, state: &mut State) {
        if state.threads >= THREADS || !state.has_more_than(state.idle) {
            return;
        }
        let mine = Arc::clone(pool);
        match thread::Builder::new().name("lane".into()).spawn(move || Pool::work(&mine)) {
            Ok(_) => state.threads += 1,
            Err(error) => tracing::warn!("no further thread to serve requests with: {error}"),
        }
    }

    fn work(self: &Arc<Pool>) {
        let mut state = self.lock();
        loop {
            if let Some(Job { ino, work, .. }) = state.next() {
                // What this work and its like have kept waiting may be ready to run by now.
                Pool::grow(self, &mut state);
                drop(state);
                // A panic was answered where it was; the thread goes on.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                state = self.lock();
                state.done(ino);
                continue;
            }
            state.idle += 1;
            let (woken, timeout) = self.wake.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && !state.has_more_than(0) {
                state.threads -= 1;
                return;
            }
        }
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
    fn blocking(lanes: &Lanes, ino: u64, blobs: &[u64], began: &Sender<u64>) -> Sender<()> {
        let (end, ended) = channel::<()>();
        let began = began.clone();
        lanes.hand_over(ino, blobs.to_vec(), move || {
            began.send(ino).unwrap();
            let _ = ended.recv();
        });
        end
    }

    #[test]
    fn one_file_has_a_few_threads_and_what_does_not_answer_none() {
        let (lanes, (began, beginning)) = (Lanes::new(0), channel());
        let hung: Vec<_> = (0..20).map(|_| blocking(&lanes, 7, &[70, 71], &began)).collect();
        let first: Vec<u64> = (0..THREADS_OF_ONE).map(|_| beginning.recv().unwrap()).collect();
        assert_eq!(first, [7; THREADS_OF_ONE]);
        // Other files go on, those with the same blobs, too, until they are known not to answer.
        let other = blocking(&lanes, 8, &[70], &began);
        assert_eq!(beginning.recv().unwrap(), 8);
        lanes.set_stuck(HashMap::from([(70, false)]));
        assert!(lanes.are_some_stuck() && lanes.is_stuck(&[1, 70]) && !lanes.is_stuck(&[71]));
        let waiting = blocking(&lanes, 9, &[70], &began);
        let whole = blocking(&lanes, 10, &[71], &began);
        assert_eq!(beginning.recv().unwrap(), 10);
        assert_eq!(lanes.waiting(), 20 - THREADS_OF_ONE + 1);
        // Of what does not answer for a long time nothing more is waited for.
        lanes.set_stuck(HashMap::from([(70, true)]));
        assert_eq!(lanes.waiting(), 0);
        let refused = blocking(&lanes, 9, &[70], &began);
        assert_eq!(lanes.waiting(), 0);
        lanes.set_stuck(HashMap::new());
        drop((hung, other, waiting, whole, refused));
        let again = blocking(&lanes, 7, &[70], &began);
        assert_eq!(beginning.recv().unwrap(), 7);
        drop(again);
    }

    #[test]
    fn work_behind_work_that_never_ends_is_done() {
        let lanes = Lanes::new(0);
        for turn in 0..30 {
            let (began, beginning) = channel();
            // An idle thread is woken for the first, and counts as idle when the second comes.
            let (first, second) = (blocking(&lanes, 1, &[], &began), blocking(&lanes, 2 + turn, &[], &began));
            assert_eq!(beginning.recv().unwrap() + beginning.recv().unwrap(), 3 + turn);
            drop((first, second));
        }
    }
}
