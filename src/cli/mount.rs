//! `wmount STORE MOUNTPOINT`.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{AtPath, Result};
use crate::front::daemon::{self, Listener};
use crate::front::readpath::Mode;
use crate::front::session::{MountOptions, Session};
use crate::front::sys;
use crate::vfs::Vfs;

/// Mount a store; returns when the mount is ready
#[derive(Debug, clap::Args)]
pub struct MountArgs {
    /// The store: an ollama model directory, or what `wmount import` made
    pub store: PathBuf,
    /// An empty directory
    pub mountpoint: PathBuf,
    /// Stay in the foreground and log to the terminal
    #[arg(short, long)]
    pub foreground: bool,
    /// Let other users read the mount
    #[arg(long)]
    pub allow_other: bool,
    /// Show fp16 variants also of models that have values beyond its range; these become infinite
    #[arg(long)]
    pub allow_overflow: bool,
    /// Let files be opened for writing and mapped writable, as mlx does with .gguf files; every write is refused
    ///
    /// Files show as writable, and none is read by the kernel itself any more. A stray store into a writable map reaches
    /// no blob; other readers see it until it is unmapped or, at the latest, the kernel writes it out.
    #[arg(long)]
    pub tolerate_rw: bool,
    /// Check the sha256 of each blob when it is first used; who reads one that is wrong gets an I/O error
    #[arg(long)]
    pub verify_on_read: bool,
    /// Take in what ollama writes: `pull`, `create`, `cp` and `rm` with OLLAMA_MODELS=MOUNTPOINT/ollama work on the store
    ///
    /// Blobs are checked against their names, a model appears in every layout when its manifest is whole, and one that
    /// is removed goes as with `wmount rm`. Everything but `ollama/` stays read only. This also writes into a store that
    /// another program made. One mount of a store at a time can do this.
    #[arg(long)]
    pub ingest: bool,
    /// Threads that serve requests [default: one for each core, at least four]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// How files are read: auto (whole blobs by the kernel itself, others through the page cache), cache, direct (past it)
    /// [env: WMOUNT_READ=] [default: auto]
    // The variable is not clap's: one that is set would make every subcommand a mount.
    #[arg(long, value_name = "HOW")]
    pub read: Option<Mode>,
    /// List this variant, such as int4-128, in every directory of a model that has it; `all` lists all of them
    ///
    /// A variant that is not listed is there all the same: open MODEL@VARIANT.
    #[arg(long = "variant", value_name = "VARIANT", value_parser = super::variant::words())]
    pub variants: Vec<String>,
    /// Options with commas, as /etc/fstab has them: `allow_other,read=direct`; those of every file system are passed over
    // They are spread out before clap sees them.
    #[arg(short, value_name = "OPTION,...")]
    pub options: Option<String>,
    /// Log file; WMOUNT_LOG=debug has more told in it
    ///
    /// [default: $XDG_STATE_HOME/wmount/MOUNTPOINT.log; in /var/log/wmount if that directory is another user's]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
}

impl MountArgs {
    /// How files are read, by the option or the variable, or why it cannot be.
    pub fn read_mode(&self) -> Result<Mode, String> {
        if let Some(mode) = self.read {
            return Ok(mode);
        }
        let word = std::env::var("WMOUNT_READ").unwrap_or_else(|_| "auto".into());
        word.parse().map_err(|why| format!("invalid value '{word}' for WMOUNT_READ: {why}"))
    }
}

/// Mounts what `open` makes of the store.
pub fn run(args: &MountArgs, read: Mode, open: impl FnOnce(&Path) -> Result<Arc<Vfs>>) -> Result<()> {
    let Some(listener) = Listener::of_this_process(args.foreground)? else {
        return daemon::launch();
    };
    sys::return_memory();
    sys::allow_many_files();
    let mounted = listener.begin(args.log.as_deref(), &args.mountpoint).and_then(|()| mount(args, read, open));
    let session = mounted.and_then(|session| listener.ready().map(|()| session));
    let session = session.inspect_err(|error| listener.failed(error))?;
    drop(listener);
    session.run()
}

fn mount(args: &MountArgs, read: Mode, open: impl FnOnce(&Path) -> Result<Arc<Vfs>>) -> Result<Session> {
    let vfs = open(&args.store)?;
    let store = args.store.canonicalize().at(&args.store)?;
    let options = MountOptions {
        mountpoint: args.mountpoint.clone(),
        store,
        allow_other: args.allow_other,
        tolerate_rw: args.tolerate_rw,
        threads: args.threads.map(NonZeroUsize::get),
        ingest: args.ingest,
        read,
    };
    Session::mount(vfs, &options)
}
