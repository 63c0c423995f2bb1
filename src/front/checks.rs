//! What must hold before mounting, and the one line that says what to do where it does not.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::mountpoint::Mountpoint;
use super::{mounts, sys, unmount};
use crate::error::{AtPath, Error, Result, quoted};

/// What a FUSE server talks to the kernel through.
pub const DEVICE: &str = "/dev/fuse";
/// What ordinary users may do with it.
pub const FUSE_CONF: &str = "/etc/fuse.conf";

/// Checks this machine and the mountpoint for this store, and clears a dead wmount away from it.
pub fn ready_to_mount(mountpoint: &Path, store: &Path, allow_other: bool) -> Result<Mountpoint> {
    machine(allow_other)?;
    let found = Mountpoint::hold(existing(mountpoint)?).at(mountpoint)?;
    clear(&found)?;
    outside_of(found.path(), store)?;
    empty_directory(&found)?;
    Ok(found)
}

/// Checks that this user can mount on this machine.
pub fn machine(allow_other: bool) -> Result<()> {
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    if !Path::new(DEVICE).exists() {
        return refuse(format!(
            "{DEVICE} is missing; run `modprobe fuse`, or give the container `--device {DEVICE} --cap-add SYS_ADMIN`"
        ));
    }
    if let Err(error) = OpenOptions::new().read(true).write(true).open(DEVICE) {
        return refuse(format!("{DEVICE} cannot be opened: {error}; as root: chmod 666 {DEVICE}"));
    }
    if sys::is_root() {
        return Ok(());
    }
    if unmount::helper().is_none() {
        return refuse("fusermount3 is missing, and only root can mount without it; install the package fuse3");
    }
    if allow_other && !allows_other(&fs::read_to_string(FUSE_CONF).unwrap_or_default()) {
        return refuse(format!(
            "--allow-other needs a line `user_allow_other` in {FUSE_CONF}; ask root to add it, or mount as root"
        ));
    }
    Ok(())
}

/// Whether this configuration lets ordinary users show their mounts to others.
pub fn allows_other(fuse_conf: &str) -> bool {
    fuse_conf.lines().any(|line| line.trim() == "user_allow_other")
}

fn existing(mountpoint: &Path) -> Result<PathBuf> {
    match mounts::canonical(mountpoint) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let shown = mountpoint.display();
            refuse(format!("{shown} does not exist; make the directory first: mkdir -p {}", quoted(mountpoint)))
        }
        outcome => outcome.at(mountpoint),
    }
}

/// Refuses a mountpoint that is in use; detaches a wmount whose process is gone.
fn clear(mountpoint: &Mountpoint) -> Result<()> {
    let path = mountpoint.path();
    let shown = path.display();
    while let Some(mount) = mountpoint.mounted().at(path)? {
        let source = mount.source.display();
        if !mount.is_wmount() {
            return refuse(format!("{shown} already is a mountpoint ({} of {source}); take another", mount.kind));
        }
        if !mount.is_dead() {
            let quoted = quoted(path);
            return refuse(format!("{shown} already shows {source}; end that mount first: wmount umount {quoted}"));
        }
        tracing::warn!("detaching a wmount of {source} from {shown}: its process is gone");
        mountpoint.unmount(true).at(path)?;
    }
    Ok(())
}

fn empty_directory(mountpoint: &Mountpoint) -> Result<()> {
    let shown = mountpoint.path().display();
    match mountpoint.is_empty() {
        Ok(true) => Ok(()),
        Ok(false) => refuse(format!("{shown} is not empty; mount on an empty directory, which the mount would hide")),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            refuse(format!("{shown} is not a directory; a mountpoint is an empty directory"))
        }
        Err(error) => Err(error).at(mountpoint.path()),
    }
}

/// Refuses a mountpoint inside of the store: who looks through the store would come into the mount, and the process that
/// serves it would wait for itself. The directories of a store may be links to elsewhere.
fn outside_of(path: &Path, store: &Path) -> Result<()> {
    let inside = [store.to_owned(), store.join("blobs"), store.join("manifests")]
        .into_iter()
        .filter_map(|part| part.canonicalize().ok())
        .find(|part| path.starts_with(part));
    match inside {
        None => Ok(()),
        Some(part) => {
            let (shown, part) = (path.display(), part.display());
            refuse(format!("{shown} is in the store ({part}), which would then show itself; mount elsewhere"))
        }
    }
}

fn refuse<T>(why: impl Into<String>) -> Result<T> {
    Err(Error::Invalid(why.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuse_conf_counts_only_the_bare_word() {
        assert!(allows_other("# comment\n user_allow_other \n"));
        assert!(!allows_other("#user_allow_other\nmount_max = 1000\n"));
    }

    #[test]
    fn mountpoints_that_cannot_be_used() {
        let place = tempfile::tempdir().unwrap();
        let hold = |path: &Path| Mountpoint::hold(existing(path)?).at(path);
        let said =
            |path: &Path| hold(path).and_then(|found| empty_directory(&found)).err().map(|error| error.to_string());
        assert_eq!(said(place.path()), None);
        assert!(said(&place.path().join("none")).unwrap().contains("mkdir -p"));
        fs::write(place.path().join("file"), "").unwrap();
        assert!(said(&place.path().join("file")).unwrap().contains("not a directory"));
        assert!(said(place.path()).unwrap().contains("not empty"));
    }

    #[test]
    fn a_store_is_not_mounted_in_itself() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        let (store, far) = (root.join("store"), root.join("far"));
        for dir in [store.join("manifests/mnt"), far.join("mnt"), root.join("store-mnt")] {
            fs::create_dir_all(dir).unwrap();
        }
        std::os::unix::fs::symlink(&far, store.join("blobs")).unwrap();
        for inside in [store.clone(), store.join("manifests/mnt"), far.join("mnt")] {
            let error = outside_of(&inside, &store).unwrap_err().to_string();
            assert!(error.contains("is in the store"), "{error}");
        }
        outside_of(&root.join("store-mnt"), &store).unwrap();
        outside_of(&root, &store).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_foreign_mount_is_left_alone() {
        let proc = Mountpoint::hold("/proc".into()).unwrap();
        assert!(clear(&proc).unwrap_err().to_string().contains("already is a mountpoint"));
    }
}
