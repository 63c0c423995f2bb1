//! Work that is shared out to all cores.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::Result;

/// How many cores there are to work on.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Does a piece of work for each number below `count`, each of which is worth a thread; the results in order.
pub fn on_all_cores<T: Send>(count: usize, work: &(dyn Fn(usize) -> T + Sync)) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            match next.fetch_add(1, Ordering::Relaxed) {
                index if index < count => done.push((index, work(index))),
                _ => return done,
            }
        }
    };
    let threads = cores().min(count);
    let mut done: Vec<(usize, T)> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(worker)).collect();
        let mut done = worker();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// The same for work that can fail: the first error ends it.
pub fn try_on_all_cores<T: Send>(count: usize, work: &(dyn Fn(usize) -> Result<T> + Sync)) -> Result<Vec<T>> {
    let failed = AtomicBool::new(false);
    let unless_failed = |index: usize| {
        let go_on = !failed.load(Ordering::Relaxed);
        go_on.then(|| work(index).inspect_err(|_| failed.store(true, Ordering::Relaxed)))
    };
    // What was left out because of an error comes with that error.
    on_all_cores(count, &unless_failed).into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn results_are_in_order_and_an_error_ends_the_work() {
        for count in [0, 1, 7, 1000] {
            let squares = on_all_cores(count, &|index| index * index);
            assert!(squares.into_iter().eq((0..count).map(|index| index * index)), "{count}");
            assert_eq!(try_on_all_cores(count, &Ok).unwrap().len(), count);
        }
        let done = AtomicUsize::new(0);
        let refused = try_on_all_cores(1_000_000, &|index| match index {
            10 => Err(Error::NotDir),
            _ => {
                done.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        });
        assert!(matches!(refused, Err(Error::NotDir)));
        assert!(done.into_inner() < 1_000_000);
    }
}
