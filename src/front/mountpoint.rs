//! The directory that is mounted on, held from the first look at it to the end.
//!
//! A path below a directory that another user can change may lead elsewhere between two looks. So the directory above the
//! mountpoint is held open, and root looks, mounts and unmounts by it. For an ordinary user the helper `fusermount3` mounts and
//! unmounts, by the path, and only where that user may write.

use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, fstat, open, openat};
use rustix::io::Errno;
use rustix::mount::MountFlags;

use super::mounts::{self, Mounted};
use super::{checks, sys, unmount};

/// A directory to mount on, or what is mounted on it.
#[derive(Clone, Debug)]
pub struct Mountpoint {
    path: PathBuf,
    above: Arc<OwnedFd>,
    name: OsString,
}

/// Names a place, and neither reads it nor follows a link to another.
const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Mountpoint {
    /// Holds what a canonical path leads to.
    ///
    /// # Errors
    /// A path that is canonical no longer, or that of the root directory.
    pub fn hold(path: PathBuf) -> io::Result<Mountpoint> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "nothing can be mounted on the root directory"));
        };
        let held = open(above, PLACE | OFlags::DIRECTORY, Mode::empty())?;
        if fs::read_link(path_of(&held))? != above {
            return Err(io::Error::other("the path leads elsewhere than a moment ago: somebody changes it"));
        }
        let name = name.to_owned();
        Ok(Mountpoint { path, above: Arc::new(held), name })
    }

    /// Its canonical path when it was looked at first.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The mount that is on it.
    pub fn mounted(&self) -> io::Result<Option<Mounted>> {
        let (here, above) = (mount_of(&self.place()?)?, mount_of(&self.above)?);
        Ok(if here == above { None } else { mounts::all()?.into_iter().find(|mount| mount.id == here) })
    }

    /// Whether it is a directory with nothing in it.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotADirectory`], and what keeps it from being read.
    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(fs::read_dir(path_of(&self.place()?))?.next().is_none())
    }

    /// Mounts what is answered through the returned device, nodev, nosuid and noexec. `options` are those of the kernel's
    /// FUSE. `None` if it takes another to mount: this process may not, and has done nothing.
    pub fn mount(&self, source: &str, writable: bool, options: &[String]) -> io::Result<Option<OwnedFd>> {
        if !sys::is_root() {
            return Ok(None);
        }
        let (place, device) = (self.place()?, fs::File::options().read(true).write(true).open(checks::DEVICE)?);
        let (user, group) = sys::owner();
        let (number, mode) = (device.as_raw_fd(), fstat(&place)?.st_mode);
        let own = format!("fd={number},rootmode={mode:o},user_id={user},group_id={group}");
        let data = CString::new([&[own], options].concat().join(","))?;
        let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
        let flags = if writable { flags } else { flags | MountFlags::RDONLY };
        match rustix::mount::mount(source, path_of(&place), "fuse", flags, data.as_c_str()) {
            Ok(()) => Ok(Some(device.into())),
            // Root of a container; what mounts for it may be outside.
            Err(Errno::PERM) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Unmounts what is on it. A mount in use is [`io::ErrorKind::ResourceBusy`] unless `lazy`.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        if sys::is_root() {
            // By its own descriptor it would be in use. Its last name is not followed.
            sys::unmount(&path_of(&self.above).join(&self.name), lazy)
        } else {
            unmount::by_helper(&self.path, lazy)
        }
    }

    fn place(&self) -> io::Result<OwnedFd> {
        Ok(openat(&*self.above, &self.name, PLACE, Mode::empty())?)
    }
}

/// The kernel's number of the mount that an open file is on.
fn mount_of(file: &OwnedFd) -> io::Result<u64> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let number = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    number.ok_or_else(|| io::Error::other("/proc/self/fdinfo does not say on which mount a file is"))
}

/// A path that leads to an open file, whatever its own path leads to by now.
fn path_of(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_a_path_leads_to_later_is_not_looked_at_or_mounted_on() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        let (above, moved, elsewhere) = (root.join("above"), root.join("moved"), root.join("elsewhere"));
        fs::create_dir_all(above.join("mnt")).unwrap();
        fs::create_dir_all(elsewhere.join("mnt/used")).unwrap();
        let held = Mountpoint::hold(above.join("mnt")).unwrap();
        fs::rename(&above, &moved).unwrap();
        symlink(&elsewhere, &above).unwrap();

        assert!(held.is_empty().unwrap() && held.mounted().unwrap().is_none());
        if let Some(_device) = held.mount("store", false, &["subtype=wmount".into()]).unwrap() {
            let mount = held.mounted().unwrap().unwrap();
            assert_eq!((mount.mountpoint.clone(), mount.is_wmount()), (moved.join("mnt"), true));
            assert!(mounts::at(&elsewhere.join("mnt")).unwrap().is_none());
            held.unmount(true).unwrap();
            assert!(held.mounted().unwrap().is_none());
        }
        assert!(Mountpoint::hold(above.join("mnt")).is_err(), "a link is above it");
        let error = Mountpoint::hold(above.join("mnt/used")).unwrap_err().to_string();
        assert!(error.contains("leads elsewhere"), "{error}");
    }
}
