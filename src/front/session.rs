//! One mount, from the checks before it to the process's last moment.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fuser::{BackgroundSession, Config, Filesystem, INodeNo, MountOption, Notifier, SessionACL};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::deputy::Deputy;
use super::fuse::Fuse;
use super::lookout::Lookout;
use super::mountpoint::Mountpoint;
use super::mounts::Mounted;
use super::push::Push;
use super::readpath::Mode;
use super::served::Served;
use super::splice::Splicing;
use super::tolerate::Tolerance;
use super::watch::Watch;
use super::writes::Writes;
use super::{checks, fence, filter, privileges, readpath, sys};
use crate::cores::cores;
use crate::error::{AtPath, Error, Result};
use crate::ingest::Ingest;
use crate::vfs::Vfs;

/// What to mount where. Every mount is nodev, nosuid, noexec, and its modes are checked by the kernel.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// An empty directory.
    pub mountpoint: PathBuf,
    /// The store that is shown, watched for changes, and named in the list of mounts.
    pub store: PathBuf,
    /// Whether other users see the mount.
    pub allow_other: bool,
    /// Threads that serve requests; `None` is one for each core and at least four.
    pub threads: Option<usize>,
    /// How files are read.
    pub read: Mode,
    /// Whether files can be opened for writing, which is then refused.
    pub tolerate_rw: bool,
    /// Whether `ollama/` can be written to. With neither the mount is read-only.
    pub ingest: bool,
}

/// A mount that answers. Dropping it unmounts.
pub struct Session {
    place: Place,
    vfs: Arc<Vfs>,
    store: PathBuf,
    signals: Option<Signals>,
    serving: Option<Serving>,
    notifier: Notifier,
    push: Arc<Push>,
    _lookout: Lookout,
}

type Serving = JoinHandle<io::Result<()>>;

impl Session {
    /// Mounts `vfs` and serves it from threads of its own. This thread, too, gives up the rights that serving does not
    /// need, such as starting programs and writing outside of the store: who has more to do calls it on another.
    pub fn mount(vfs: Arc<Vfs>, options: &MountOptions) -> Result<Session> {
        let place = checks::ready_to_mount(&options.mountpoint, &options.store, options.allow_other)?;
        let mountpoint = place.path().to_owned();
        let store = options.store.canonicalize().at(&options.store)?;
        let options = &MountOptions { store: store.clone(), ..options.clone() };
        // Caught from before the mount on, so that no signal leaves a mount without its server.
        let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).at(&mountpoint)?;
        if options.allow_other {
            vfs.guard(sys::owner().0);
        }
        let tolerance = Arc::new(Tolerance::new(options.tolerate_rw, options.allow_other));
        let fuse = Fuse::new(Arc::clone(&vfs), options.read, tolerance, at_work(options));
        let push = Arc::clone(&fuse.push);
        let deputy = Deputy::start().at(&mountpoint)?;
        let (serving, notifier) = if options.ingest {
            // What this process may write afterwards is what it must be able to write now.
            privileges::give_up().at(&mountpoint)?;
            let ingest = Arc::new(Ingest::new(Arc::clone(&vfs))?);
            serve(Writes::new(fuse.clone(), ingest), &fuse, options, &place, &deputy)?
        } else {
            serve(fuse.clone(), &fuse, options, &place, &deputy)?
        };
        let place = Place::of(place, deputy)?;
        // A look at the mountpoint itself would keep it in use for a moment.
        let setting = place.mount.as_ref().map(Mounted::read_ahead_file).unwrap_or_default();
        // Pages that are mapped writable are the tolerance's, and reads past the page cache leave it as it is.
        let (shown, file) = (Arc::clone(&vfs), setting.clone());
        let read_ahead = place.deputy.run(move || readpath::read_ahead(&shown, &file)).at(&mountpoint)?;
        if !read_ahead && !options.tolerate_rw && options.read != Mode::Direct {
            push.begin(Arc::clone(&vfs), notifier.clone()).at(&mountpoint)?;
        }
        let lookout =
            Lookout::start(Arc::clone(&vfs), Arc::clone(&fuse.passthrough), Arc::clone(&fuse.lanes), setting)?;
        tracing::info!("{} shows {}", mountpoint.display(), store.display());
        Ok(Session {
            place,
            vfs,
            store,
            signals: Some(signals),
            serving: Some(serving),
            notifier,
            push,
            _lookout: lookout,
        })
    }

    /// Serves until it is unmounted, by a signal or from outside. A second signal ends the process at once.
    pub fn run(mut self) -> Result<()> {
        let (watch, looked) = (self.watch()?, self.look()?);
        if let Some(signals) = self.signals.take() {
            let place = self.place.clone();
            thread::Builder::new().name("signals".into()).spawn(move || obey(signals, &place)).at(&self.store)?;
        }
        let ended = self.join();
        drop(watch);
        // It may be about to write down what it saw, or never end.
        let _ = looked.recv_timeout(Duration::from_secs(1));
        tracing::info!("{} is unmounted", self.place.mountpoint.path().display());
        ended
    }

    /// Begins what the first look at a layout waits for; who gets this hears when it is done.
    fn look(&self) -> Result<Receiver<()>> {
        let (done, looked) = channel();
        let vfs = Arc::clone(&self.vfs);
        let work = move || {
            vfs.tree().look();
            drop(done);
        };
        thread::Builder::new().name("look".into()).spawn(work).at(&self.store)?;
        Ok(looked)
    }

    /// Keeps what is shown up to date with the store until it is dropped.
    pub fn watch(&self) -> Result<Watch> {
        let notifier = self.notifier.clone();
        // Fails if the kernel knows the file no longer, and then it keeps nothing of it.
        let push = Arc::clone(&self.push);
        let drop_pages = move |ino| {
            push.pages_are_dropped();
            let _ = notifier.inval_inode(INodeNo(ino), 0, 0);
        };
        Watch::start(Arc::clone(&self.vfs), &self.store, drop_pages)
    }

    /// What is mounted.
    pub fn vfs(&self) -> Arc<Vfs> {
        Arc::clone(&self.vfs)
    }

    /// Whether it was unmounted from outside.
    pub fn is_over(&self) -> bool {
        self.serving.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Unmounts; if files are open, they stay readable until they are closed.
    pub fn unmount(&self) {
        self.place.leave();
    }

    fn join(&mut self) -> Result<()> {
        let Some(serving) = self.serving.take() else { return Ok(()) };
        let ended = serving.join().unwrap_or_else(|_| Err(io::Error::other("a serving thread failed")));
        if ended.is_err() {
            // Nobody answers any more: whoever asks must get an error instead of waiting.
            self.place.leave();
        }
        match ended {
            // What the kernel says to a thread that takes a request in the moment in which the mount ends.
            Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => Ok(()),
            ended => ended.at(self.place.mountpoint.path()),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.serving.is_some() {
            self.place.leave();
        }
    }
}

/// A mountpoint and the mount on it, which another mount may replace.
#[derive(Clone)]
struct Place {
    mountpoint: Mountpoint,
    mount: Option<Mounted>,
    deputy: Deputy,
}

impl Place {
    fn of(mountpoint: Mountpoint, deputy: Deputy) -> Result<Place> {
        let mount = mountpoint.mounted().at(mountpoint.path())?;
        Ok(Place { mountpoint, mount, deputy })
    }

    /// Unmounts what was mounted here, and nothing else that is here by now; lazily if it is in use.
    fn leave(&self) {
        let shown = self.mountpoint.path().display();
        let number = |mount: &Mounted| (mount.id, mount.device.clone());
        if self.mountpoint.mounted().ok().flatten().as_ref().map(number) != self.mount.as_ref().map(number) {
            return;
        }
        match self.unmount(false) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                tracing::warn!("{shown} is in use: it is detached, and served until the last file is closed");
                if let Err(error) = self.unmount(true) {
                    tracing::error!("{shown} cannot be unmounted: {error}");
                }
            }
            Err(error) => tracing::error!("{shown} cannot be unmounted: {error}"),
            Ok(()) => {}
        }
    }

    fn unmount(&self, lazy: bool) -> io::Result<()> {
        let mountpoint = self.mountpoint.clone();
        self.deputy.run(move || mountpoint.unmount(lazy))?
    }
}

fn obey(mut signals: Signals, place: &Place) {
    for (earlier, signal) in signals.forever().enumerate() {
        if earlier > 0 {
            std::process::exit(128 + signal);
        }
        // Beside this loop, because unmounting can take its time and a second signal must be heard.
        let leaving = place.clone();
        thread::spawn(move || leaving.leave());
        tracing::info!(signal, "unmounting {}", place.mountpoint.path().display());
    }
}

/// Mounts, starts the serving threads, and takes unmounting from fuser.
///
/// fuser unmounts by path when it ends, whatever is mounted there by then: after a lazy unmount that can be the next
/// server's mount. [`Place`] knows its own.
fn serve<F: Filesystem + Send + Sync + 'static>(
    filesystem: F,
    served: &Served,
    options: &MountOptions,
    mountpoint: &Mountpoint,
    deputy: &Deputy,
) -> Result<(Serving, Notifier)> {
    let session = session(filesystem, mountpoint, options, &served.splicing)
        .map_err(|error| refused(mountpoint.path(), &error))?;
    let mounted = mountpoint.clone();
    // What this thread may do no longer, the deputy may.
    let leave = |_: &_| _ = deputy.run(move || mounted.unmount(true));
    begin(session, served, options).at(mountpoint.path()).inspect_err(leave)
}

fn begin<F: Filesystem + Send + Sync + 'static>(
    session: fuser::Session<F>,
    served: &Served,
    options: &MountOptions,
) -> io::Result<(Serving, Notifier)> {
    privileges::give_up()?;
    let vfs = &served.vfs;
    vfs.describe(fence::FACT, fence::begin(vfs.store().root(), options.ingest).into());
    vfs.describe(filter::FACT, filter::begin().into());
    served.splicing.begin(session.as_fd().try_clone_to_owned()?);
    let notifier = session.notifier();
    served.tolerance.begin(notifier.clone())?;
    let nobody = thread::Builder::new().spawn(|| Ok(()))?;
    let mut background: BackgroundSession = session.spawn()?;
    let serving = std::mem::replace(&mut background.guard, nobody);
    std::mem::forget(background);
    Ok((serving, notifier))
}

/// Mounts: as root by what is held of the mountpoint, and where that is not allowed as fuser does, by its path.
fn session<F: Filesystem>(
    filesystem: F,
    mountpoint: &Mountpoint,
    options: &MountOptions,
    splicing: &Splicing,
) -> io::Result<fuser::Session<F>> {
    let store = options.store.to_string_lossy();
    let writable = options.tolerate_rw || options.ingest;
    let mut kernel = vec!["subtype=wmount".to_owned(), "default_permissions".to_owned()];
    kernel.extend(splicing.longest_request().map(|bytes| format!("max_read={bytes}")));
    let mut config = Config::default();
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    if cfg!(target_os = "linux") {
        // One stays free when all others are at work.
        config.n_threads = Some(at_work(options) + 1);
    }
    let others = options.allow_other.then(|| "allow_other".to_owned());
    let as_root: Vec<String> = kernel.iter().cloned().chain(others).collect();
    if let Some(device) = mountpoint.mount(&store, writable, &as_root)? {
        let session = fuser::Session::from_fd(filesystem, device, config.acl, config);
        return session.inspect_err(|_| _ = mountpoint.unmount(true));
    }
    // The helper takes options apart at commas.
    let source = store.replace('\\', "\\\\").replace(',', "\\,");
    config.mount_options = vec![
        MountOption::FSName(source),
        if writable { MountOption::RW } else { MountOption::RO },
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoExec,
    ];
    config.mount_options.extend(kernel.into_iter().map(MountOption::CUSTOM));
    fuser::Session::new(filesystem, mountpoint.path(), &config)
}

/// How many of the kernel's threads may be at work at a time.
fn at_work(options: &MountOptions) -> usize {
    if !cfg!(target_os = "linux") {
        // There is one, and nobody to stay free.
        return usize::MAX;
    }
    // More than cores, if those are few: a thread that waits for the disk serves nobody else.
    options.threads.unwrap_or_else(|| cores().max(4)).max(1)
}

fn refused(mountpoint: &Path, error: &io::Error) -> Error {
    let shown = mountpoint.display();
    let reason = match error.kind() {
        // Not allowed to mount, and no helper that is.
        io::ErrorKind::NotFound if sys::is_root() => {
            "the system does not let this process mount; in a container, add --cap-add SYS_ADMIN".into()
        }
        _ => error.to_string().trim().replace('\n', "; "),
    };
    Error::Invalid(format!("{shown} cannot be mounted: {reason}"))
}
