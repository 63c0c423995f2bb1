//! `wmount demo`: two made-up models, imported and mounted in a directory that vanishes with the process.

mod figures;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::output::{Bar, print, size};
use crate::digest::Digest;
use crate::error::{AtPath, Error, Result};
use crate::front::checks;
use crate::front::readpath::Mode;
use crate::front::session::{MountOptions, Session};
use crate::sample::{LanguageModel, write_package};
use crate::store::Store;
use crate::store::import::{Options, import};
use crate::vfs::Vfs;

/// Input lengths of the first model's packages.
const LENGTHS: [u32; 3] = [1, 16, 128];
/// How often the end is looked for.
const PULSE: Duration = Duration::from_millis(50);

/// Make two small models that share tensors, mount them, and show what that saves
///
/// Everything is in a temporary directory, which is removed at the end; no network is used.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// End when everything was shown, instead of at Ctrl-C
    #[arg(long)]
    once: bool,
}

pub(super) fn run(args: &DemoArgs) -> Result<()> {
    checks::machine(false)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).at("signals")?;
    }
    let temporary = std::env::temp_dir();
    let dir = tempfile::Builder::new().prefix("wmount-demo-").tempdir().at(&temporary)?;
    // A link on the way would have the mount listed under another path.
    let path = dir.path().canonicalize().at(dir.path())?;
    let outcome = Demo { store: path.join("store"), mountpoint: path.join("mnt"), dir: path, stop }.run(args);
    outcome.and(dir.close().at(&temporary))
}

struct Demo {
    dir: PathBuf,
    store: PathBuf,
    mountpoint: PathBuf,
    /// Set by a signal.
    stop: Arc<AtomicBool>,
}

impl Demo {
    fn run(&self, args: &DemoArgs) -> Result<()> {
        let began = Instant::now();
        let source = self.make_and_import()?;
        let made = began.elapsed();
        let (session, mounted) = self.mount()?;
        let vfs = session.vfs();
        let copies = figures::table_of(&vfs)?;
        let head = format!(
            "Two language models that differ in one layer, the first with three CoreML shapes: made and imported in\n\
             {:.1} s, mounted in {:.0} ms at {}\n\n",
            made.as_secs_f64(),
            mounted.as_secs_f64() * 1e3,
            self.mountpoint.display(),
        );
        print(&(head + &figures::tree_of(&vfs)? + "\n" + &copies + "\n"))?;
        self.prove(&source)?;
        if args.once {
            return Ok(());
        }
        print(&self.invitation())?;
        let watch = session.watch()?;
        while !self.is_stopped() && !session.is_over() {
            thread::sleep(PULSE);
        }
        drop(watch);
        print("\nUnmounted and removed.\n")
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Ends what is under way if a signal has come.
    fn go_on(&self) -> Result<()> {
        if self.is_stopped() { Err(Error::Invalid("interrupted; nothing is left behind".into())) } else { Ok(()) }
    }

    /// Fills the store and removes what it was filled from; the digest of the first model's weights.
    fn make_and_import(&self) -> Result<Digest> {
        let sources = self.dir.join("sources");
        let (chat, code) = (sources.join("llama-chat"), sources.join("llama-code"));
        let model = LanguageModel::new(1, 384, 4, 1024);
        model.write(&chat)?;
        let mut first = vec![chat.clone()];
        for length in LENGTHS {
            self.go_on()?;
            let package = sources.join(format!("tokens-{length}.mlpackage"));
            write_package(&package, length, &model.feed_forward())?;
            first.push(package);
        }
        self.go_on()?;
        model.tune(3).write(&code)?;
        for (name, paths) in [("llama:chat", first), ("llama:code", vec![code])] {
            self.go_on()?;
            let options = Options { name: Some(name.parse()?), ..Options::default() };
            let bar = Bar::new("importing");
            let report = import(&self.store, &paths, &options, &bar);
            bar.finish();
            report?;
        }
        self.go_on()?;
        let digest = digest_of(&chat.join("model.safetensors"))?;
        fs::remove_dir_all(&sources).at(&sources)?;
        Ok(digest)
    }

    fn mount(&self) -> Result<(Session, Duration)> {
        self.go_on()?;
        fs::create_dir(&self.mountpoint).at(&self.mountpoint)?;
        let began = Instant::now();
        let vfs = Arc::new(Vfs::new(Arc::new(Store::open(&self.store)?))?);
        let (mountpoint, store) = (self.mountpoint.clone(), self.store.clone());
        let options = MountOptions {
            mountpoint,
            store,
            allow_other: false,
            threads: None,
            read: Mode::Auto,
            tolerate_rw: false,
            ingest: false,
        };
        // The thread that mounts may remove nothing afterwards.
        let mounting = thread::spawn(move || Session::mount(vfs, &options));
        let session = mounting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((session, began.elapsed()))
    }

    /// Reads through the mount and says what came of it.
    fn prove(&self, source: &Digest) -> Result<()> {
        let mut text = String::from("Read back through the mount, the source being deleted:\n");
        for path in ["original/llama/chat/llama-chat/model.safetensors", "safetensors/llama/chat/model.safetensors"] {
            self.go_on()?;
            self.check(path, source)?;
            text += &format!("  {path:<49}  sha256 of the source\n");
        }
        let blobs = self.mountpoint.join("ollama/blobs");
        let mut checked = 0;
        for blob in fs::read_dir(&blobs).at(&blobs)? {
            self.go_on()?;
            let name = blob.at(&blobs)?.file_name().to_string_lossy().into_owned();
            let digest = Digest::from_file_name(&name);
            let digest = digest.ok_or_else(|| Error::Invalid(format!("{}: {name} is no blob", blobs.display())))?;
            self.check(&format!("ollama/blobs/{name}"), &digest)?;
            checked += 1;
        }
        text += &format!("  {:<49}  the sha256 in its name, each of {checked}\n", "ollama/blobs/sha256-*");
        print(&text)
    }

    fn check(&self, path: &str, digest: &Digest) -> Result<()> {
        let path = self.mountpoint.join(path);
        match digest_of(&path)? {
            found if found == *digest => Ok(()),
            found => Err(Error::Invalid(format!("{}: has {found}, not {digest}; please report", path.display()))),
        }
    }

    fn invitation(&self) -> String {
        let (mnt, store) = (self.mountpoint.display(), self.store.display());
        // As it was called: it may not be on the search path.
        let program = std::env::args().next().unwrap_or_else(|| "wmount".into());
        format!(
            "\n\
             Try it from another terminal:\n  \
             M={mnt}\n  \
             ls -li $M/coreml/llama/chat/*/Data/com.apple.CoreML/weights\n  \
             head -c 400 $M/safetensors/llama/code/model.safetensors | tail -c 392\n  \
             python3 -c 'import sys, mlx.core as mx; print(*mx.load(sys.argv[1]))' \
             $M/safetensors/llama/code/model.safetensors\n  \
             {program} show -s {store} llama:chat\n  \
             {program} status\n\n\
             Ctrl-C ends it and removes everything.\n"
        )
    }
}

fn digest_of(path: &Path) -> Result<Digest> {
    let file = File::open(path).at(path)?;
    Digest::of_all(|at, buf| file.read_at(buf, at).at(path))
}
