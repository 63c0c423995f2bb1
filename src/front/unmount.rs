//! Unmounting: by system call as root, by the setuid helper of the package fuse3 as anyone else.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use super::sys;

/// Unmounts `mountpoint`, which must be canonical. A mount in use is [`io::ErrorKind::ResourceBusy`] unless `lazy`.
pub fn unmount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    if needs_helper() { unmount_by_helper(mountpoint, lazy) } else { sys::unmount(mountpoint, lazy) }
}

fn needs_helper() -> bool {
    cfg!(target_os = "linux") && !sys::is_root()
}

/// Unmounts for threads that may not start programs.
#[derive(Clone, Debug)]
pub struct Unmounter {
    /// A thread that may, where it takes one.
    asked: Option<Sender<Wish>>,
}

#[derive(Debug)]
struct Wish {
    mountpoint: PathBuf,
    lazy: bool,
    done: Sender<io::Result<()>>,
}

impl Unmounter {
    /// Starts a thread with the rights that this one still has, if unmounting takes a program.
    pub fn start() -> io::Result<Unmounter> {
        if !needs_helper() {
            return Ok(Unmounter { asked: None });
        }
        let (asked, wishes) = channel::<Wish>();
        let work = move || {
            for Wish { mountpoint, lazy, done } in wishes {
                // Fails if nobody waits for it any more.
                let _ = done.send(unmount_by_helper(&mountpoint, lazy));
            }
        };
        thread::Builder::new().name("unmount".into()).spawn(work)?;
        Ok(Unmounter { asked: Some(asked) })
    }

    /// As [`unmount`].
    pub fn unmount(&self, mountpoint: &Path, lazy: bool) -> io::Result<()> {
        let Some(asked) = &self.asked else { return unmount(mountpoint, lazy) };
        let (done, outcome) = channel();
        let gone = |_| io::Error::other("the thread that unmounts has failed");
        asked.send(Wish { mountpoint: mountpoint.to_owned(), lazy, done }).map_err(|error| gone(error.to_string()))?;
        outcome.recv().map_err(|error| gone(error.to_string()))?
    }
}

/// The program that lets an ordinary user mount and unmount, if it is installed.
pub fn helper() -> Option<PathBuf> {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/bin", "/usr/bin", "/sbin", "/usr/local/bin"].map(PathBuf::from);
    let places: Vec<PathBuf> = std::env::split_paths(&places).chain(usual).collect();
    ["fusermount3", "fusermount"]
        .iter()
        .flat_map(|name| places.iter().map(move |place| place.join(name)))
        .find(|program| program.is_file())
}

fn unmount_by_helper(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let helper = helper().ok_or_else(|| io::Error::other("fusermount3 is missing; install the package fuse3"))?;
    let mut command = Command::new(helper);
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(mountpoint).stdin(Stdio::null()).stdout(Stdio::null());
    // The helper's own words, in a language that can be matched.
    let output = command.env("LC_ALL", "C").output()?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let kind = if words.contains("busy") { io::ErrorKind::ResourceBusy } else { io::ErrorKind::Other };
    Err(io::Error::new(kind, words))
}
