//! A thread for what serving threads may not do themselves, once they have mounted: unmount, and set how far the kernel
//! reads ahead.
//!
//! A process under Landlock may not unmount, whoever it is, and a program that is started under `no_new_privs` has no rights,
//! such as that by which ordinary users unmount. Both are a thread's own. So this one is started before the others give up
//! their rights. Root's gives up what it does not need, too, and runs no program.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use super::{filter, privileges, sys};

/// Does work on its thread, one at a time, until it and its clones are dropped.
#[derive(Clone, Debug)]
pub struct Deputy {
    asked: Sender<Box<dyn FnOnce() + Send>>,
}

/// The name of its thread.
const NAME: &str = "deputy";

impl Deputy {
    /// Starts the thread with the rights that this one still has.
    pub fn start() -> io::Result<Deputy> {
        let (asked, wishes) = channel::<Box<dyn FnOnce() + Send>>();
        let (ready, begun) = channel();
        let work = move || {
            let restricted = if sys::is_root() { privileges::give_up().map(|()| _ = filter::begin()) } else { Ok(()) };
            // Fails if nobody waits for it any more.
            let _ = ready.send(restricted);
            wishes.into_iter().for_each(|wish| wish());
        };
        thread::Builder::new().name(NAME.into()).spawn(work)?;
        begun.recv().map_err(gone)??;
        Ok(Deputy { asked })
    }

    /// What `work` returns on that thread.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let (done, outcome) = channel();
        let wish = move || _ = done.send(work());
        self.asked.send(Box::new(wish)).map_err(gone)?;
        outcome.recv().map_err(gone)
    }
}

fn gone<E>(_: E) -> io::Error {
    io::Error::other("the thread that may do this has failed")
}
