//! `--tolerate-rw`: files can be opened for writing and mapped writable, and no byte of them changes.
//!
//! mlx opens a `.gguf` file with O_RDWR and maps it shared and writable, only to read it. A mount that is read only
//! refuses that, so this one is writable for the kernel, and every write is refused here.
//!
//! The kernel's passthrough opens the blob with the flags of the user's open: with O_RDWR, writes would go into the store
//! and never come here. It also wants that all open files of an inode are passed through, or none. So with this option
//! nothing is passed through.
//!
//! What a program stores into a writable map is in the page cache at once, for all readers of the file, and comes here
//! when the kernel writes it out: at `munmap`, `msync` and `close`, or after its usual half a minute. It then holds the
//! pages for clean, so they are taken away from it, and the next look at them reads the true bytes.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use fuser::{FopenFlags, INodeNo, Notifier, OpenAccMode, OpenFlags};

use super::readpath::ReadPath;

/// Pages of an inode that are not what the file has: inode number, first byte, length.
type Pages = (INodeNo, u64, usize);

/// Whether opens for writing are let through, and what is to be forgotten.
#[derive(Debug, Default)]
pub struct Tolerance {
    on: bool,
    others: bool,
    refused: OnceLock<Sender<Pages>>,
}

impl Tolerance {
    /// With `on`, what mlx does works; with `others`, also for users who do not own the mount.
    pub fn new(on: bool, others: bool) -> Tolerance {
        Tolerance { on, others, ..Tolerance::default() }
    }

    /// Whether opens for writing are let through.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Whether an open that asks for writing may have it.
    pub fn admits(&self, flags: OpenFlags) -> bool {
        self.on && flags.acc_mode() == OpenAccMode::O_RDWR && flags.0 & libc::O_TRUNC == 0
    }

    /// The mode of files: the kernel lets nobody but root open for writing what is not writable.
    pub fn mode(&self) -> u16 {
        match (self.on, self.others) {
            (false, _) => 0o444,
            (true, false) => 0o644,
            (true, true) => 0o666,
        }
    }

    /// How a file is opened that asks for writing.
    ///
    /// Past the page cache, where that leaves it mappable: `write` then touches no page before it is refused. And with a
    /// flush at the end, which is when stray stores are written out and refused.
    pub fn flags(path: &ReadPath) -> FopenFlags {
        let flags = path.flags() & !FopenFlags::FOPEN_NOFLUSH;
        if path.is_direct_mappable() { flags | FopenFlags::FOPEN_DIRECT_IO } else { flags }
    }

    /// Has the kernel forget what a refused write left in its pages.
    pub fn refuse(&self, ino: INodeNo, offset: u64, len: usize) {
        tracing::warn!("a write of {len} bytes at {offset} to inode {ino} is refused: the mount tolerates none");
        if let Some(refused) = self.refused.get() {
            // Nobody listens when the mount is ending, and its pages with it.
            let _ = refused.send((ino, offset, len));
        }
    }

    /// Begins to take pages away from the kernel.
    ///
    /// In a thread of its own: the kernel waits for pages that are being written out, which others here must answer.
    pub fn begin(&self, notifier: Notifier) -> io::Result<()> {
        if !self.on {
            return Ok(());
        }
        let (refused, pages): (_, Receiver<Pages>) = channel();
        thread::Builder::new().name("forget".into()).spawn(move || {
            for (ino, offset, len) in pages {
                let forgotten = notifier.inval_inode(ino, offset.cast_signed(), len.cast_signed() as i64);
                if let Err(error) = forgotten {
                    tracing::warn!("pages of inode {ino} are not forgotten: {error}");
                }
            }
        })?;
        let _ = self.refused.set(refused);
        Ok(())
    }
}
