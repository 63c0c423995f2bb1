//! Opening files of the store without leaving it.
//!
//! Who may write to a store must not make the process that mounts it, which may be root's, show other files. So a blob
//! or manifest that is a link is followed only within `blobs/` or `manifests/`. The store itself may be a link, and so
//! may these two directories, as when they were moved to another disk, if root or the user of this process made it.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat, readlinkat};

/// A directory of the store, open to look names up in it.
#[derive(Debug)]
pub(super) struct Dir(OwnedFd);

#[cfg(target_os = "linux")]
const LOOK: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);
#[cfg(not(target_os = "linux"))]
const LOOK: OFlags = OFlags::CLOEXEC.union(OFlags::NONBLOCK);
/// Opening a FIFO to read would wait for a writer.
const READ: OFlags = OFlags::CLOEXEC.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

impl Dir {
    /// Opens `blobs/` or `manifests/`.
    pub fn open(path: &Path) -> io::Result<Dir> {
        match openat(CWD, path, LOOK | OFlags::DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(dir) => Ok(Dir(dir)),
            Err(_) if fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) => Dir::linked(path),
            Err(error) => Err(error.into()),
        }
    }

    #[cfg(target_os = "linux")]
    fn linked(path: &Path) -> io::Result<Dir> {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;

        // The link is held, so that the one whose maker is asked for is the one that is followed.
        let link = File::from(openat(CWD, path, LOOK | OFlags::NOFOLLOW, Mode::empty())?);
        let maker = link.metadata()?.uid();
        if maker != 0 && maker != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other(format!("is a link of another user (uid {maker}), which is not followed")));
        }
        let target = readlinkat(&link, c"", Vec::new())?;
        let target = path.parent().unwrap_or(path).join(OsStr::from_bytes(target.as_bytes()));
        Ok(Dir(openat(CWD, &target, LOOK | OFlags::DIRECTORY, Mode::empty())?))
    }

    #[cfg(not(target_os = "linux"))]
    fn linked(path: &Path) -> io::Result<Dir> {
        let maker = fs::symlink_metadata(path)?.uid();
        if maker != 0 && maker != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other(format!("is a link of another user (uid {maker}), which is not followed")));
        }
        Ok(Dir(openat(CWD, path, LOOK | OFlags::DIRECTORY, Mode::empty())?))
    }

    /// What a path below the directory leads to.
    pub fn metadata(&self, inside: &str) -> io::Result<Metadata> {
        File::from(self.at(inside, LOOK)?).metadata()
    }

    /// Opens a regular file below the directory.
    pub fn file(&self, inside: &str) -> io::Result<File> {
        // Opening a device may act, so the type is looked at first, and again on what was opened.
        let regular = |found: Metadata| match found.is_file() {
            true => Ok(()),
            false => Err(io::Error::other("is no regular file")),
        };
        regular(self.metadata(inside)?)?;
        let file = File::from(self.at(inside, READ)?);
        regular(file.metadata()?)?;
        Ok(file)
    }

    #[cfg(target_os = "linux")]
    fn at(&self, inside: &str, flags: OFlags) -> io::Result<OwnedFd> {
        use rustix::fs::{ResolveFlags, openat2};
        use rustix::io::Errno;

        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        loop {
            match openat2(&self.0, inside, flags, Mode::empty(), resolve) {
                // The kernel could not rule out that a rename beside it led out.
                Err(Errno::AGAIN) => {}
                Err(Errno::XDEV) => return Err(io::Error::other("is a link that leads out of the store")),
                // Linux before 5.6, or a filter of system calls that does not know it.
                Err(Errno::NOSYS | Errno::PERM) => return self.without_links(inside, flags),
                outcome => return Ok(outcome?),
            }
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn at(&self, inside: &str, flags: OFlags) -> io::Result<OwnedFd> {
        self.without_links(inside, flags)
    }

    fn without_links(&self, inside: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let mut parts = inside.split('/').peekable();
        let mut dir = None;
        while let Some(part) = parts.next() {
            let at = dir.as_ref().unwrap_or(&self.0);
            let kind = if parts.peek().is_some() { LOOK | OFlags::DIRECTORY } else { flags };
            dir = Some(openat(at, part, kind | OFlags::NOFOLLOW, Mode::empty())?);
        }
        dir.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_are_followed_within_and_not_out() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("blobs");
        fs::create_dir_all(dir.join("below")).unwrap();
        fs::write(place.path().join("secret"), "secret").unwrap();
        fs::write(dir.join("below/a"), "a").unwrap();
        symlink("below/a", dir.join("within")).unwrap();
        symlink("../secret", dir.join("out")).unwrap();
        symlink(place.path().join("secret"), dir.join("absolute")).unwrap();
        symlink("/proc/self/exe", dir.join("magic")).unwrap();
        symlink("loop", dir.join("loop")).unwrap();
        symlink("..", dir.join("up")).unwrap();
        symlink("blobs", place.path().join("moved")).unwrap();
        for path in [dir.clone(), place.path().join("moved")] {
            let open = Dir::open(&path).unwrap();
            for inside in ["within", "below/a"] {
                let mut text = String::new();
                open.file(inside).unwrap().read_to_string(&mut text).unwrap();
                assert_eq!(text, "a");
            }
            for inside in ["out", "absolute", "magic", "loop", "up/secret", "../secret", "below", "none"] {
                assert!(open.file(inside).is_err(), "{inside}");
            }
            assert!(open.without_links("below/a", READ).is_ok());
            assert!(open.without_links("within", READ).is_err());
        }
    }
}
