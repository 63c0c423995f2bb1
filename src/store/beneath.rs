//! Opening files of the store without leaving it.
//!
//! Who may write to a store must not make the process that mounts it, which may be root's, show other files. So a blob
//! or manifest that is a link is followed only within `blobs/` or `manifests/`. The store itself may be a link, and so
//! may these two directories, as when they were moved to another disk, if root or the user of this process made it.
//! `.wmount/`, and what is below it, may not.
//!
//! Nor may whoever owns one of these directories put a file into it that he cannot read himself, such as one of root's that lay
//! in a directory of his: this process may be able to read it.
//!
//! Opening a device may act, so a file's type is looked at before it is opened, and again on what was opened.

use std::fs::{self, File, Metadata, Permissions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, mkdirat, openat, readlinkat, renameat, statat, unlinkat};
use rustix::io::Errno;

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
        check_maker(&link.metadata()?)?;
        let target = readlinkat(&link, c"", Vec::new())?;
        let target = path.parent().unwrap_or(path).join(OsStr::from_bytes(target.as_bytes()));
        Ok(Dir(openat(CWD, &target, LOOK | OFlags::DIRECTORY, Mode::empty())?))
    }

    #[cfg(not(target_os = "linux"))]
    fn linked(path: &Path) -> io::Result<Dir> {
        check_maker(&fs::symlink_metadata(path)?)?;
        Ok(Dir(openat(CWD, path, LOOK | OFlags::DIRECTORY, Mode::empty())?))
    }

    /// Opens a directory that is no link.
    pub fn plain(path: &Path) -> io::Result<Dir> {
        Ok(Dir(openat(CWD, path, LOOK | OFlags::DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?))
    }

    /// Opens a directory in this one that is no link, and makes it if it is missing.
    pub fn make_dir(&self, name: &str) -> io::Result<Dir> {
        match mkdirat(&self.0, name, Mode::RWXU | Mode::RWXG | Mode::RWXO) {
            Err(error) if error != Errno::EXIST => return Err(error.into()),
            _ => {}
        }
        Ok(Dir(openat(&self.0, name, LOOK | OFlags::DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?))
    }

    /// The bytes of a regular file below the directory, if they are not more than `most`.
    pub fn read(&self, inside: &str, most: u64) -> io::Result<Vec<u8>> {
        let file = self.file(inside)?;
        let too_long = || io::Error::new(io::ErrorKind::FileTooLarge, format!("has more than {most} bytes"));
        if file.metadata()?.len() > most {
            return Err(too_long());
        }
        let mut bytes = Vec::new();
        // It may have grown.
        file.take(most + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > most { Err(too_long()) } else { Ok(bytes) }
    }

    /// Writes a file in the directory, which everybody may read; it is there with all of its bytes, or as it was.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = format!(".{:016x}", RandomState::new().build_hasher().finish());
        let new = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.0, &unfinished, new, Mode::RUSR | Mode::WUSR)?);
        let written = file
            .write_all(bytes)
            .and_then(|()| file.set_permissions(Permissions::from_mode(0o644)))
            .and_then(|()| Ok(renameat(&self.0, &unfinished, &self.0, name)?));
        if written.is_err() {
            let _ = unlinkat(&self.0, &unfinished, AtFlags::empty());
        }
        written
    }

    /// What the directory is, and those above it, as far as can be told, where it is now.
    pub fn above(&self) -> Vec<Metadata> {
        let mut all: Vec<Metadata> = Vec::new();
        let mut dir = self.0.try_clone().ok();
        while let Some(found) = dir.take().map(File::from) {
            let Ok(metadata) = found.metadata() else { break };
            // The root is above itself.
            if all.last().is_some_and(|below| (below.dev(), below.ino()) == (metadata.dev(), metadata.ino())) {
                break;
            }
            dir = openat(&found, "..", LOOK | OFlags::DIRECTORY, Mode::empty()).ok();
            all.push(metadata);
        }
        all
    }

    /// What a path below the directory leads to.
    pub fn metadata(&self, inside: &str) -> io::Result<Metadata> {
        File::from(self.at(inside, LOOK)?).metadata()
    }

    /// The same if it is a regular file.
    pub fn regular(&self, inside: &str) -> io::Result<Metadata> {
        let found = self.metadata(inside)?;
        check_regular(found.is_file()).map(|()| found)
    }

    /// Opens a regular file below the directory.
    pub fn file(&self, inside: &str) -> io::Result<File> {
        let found = type_at(&self.0, Path::new(inside))?;
        let regular = if found.is_symlink() { self.metadata(inside)?.is_file() } else { found.is_file() };
        check_regular(regular)?;
        let file = File::from(self.at(inside, READ)?);
        check_regular(file.metadata()?.is_file())?;
        self.check_owner(inside, &file)?;
        Ok(file)
    }

    /// Checks that whoever owns the directory that a file was opened in may read it.
    fn check_owner(&self, inside: &str, file: &File) -> io::Result<()> {
        let opened = file.metadata()?;
        if all_may_read(&opened) {
            return Ok(());
        }
        let dir = match inside.rsplit_once('/') {
            Some((dir, _)) => self.metadata(dir)?,
            None => File::from(self.0.try_clone()?).metadata()?,
        };
        check_owner(&opened, &dir)
    }

    /// Opens a regular file in the directory that is no link, with `write` to write to it, too.
    pub fn plain_file(&self, name: &str, write: bool) -> io::Result<File> {
        check_regular(type_at(&self.0, Path::new(name))?.is_file())?;
        let flags = READ | OFlags::NOFOLLOW | if write { OFlags::RDWR } else { OFlags::RDONLY };
        let file = File::from(openat(&self.0, name, flags, Mode::empty())?);
        check_regular(file.metadata()?.is_file())?;
        self.check_owner(name, &file)?;
        Ok(file)
    }

    /// What a regular file in the directory is that is no link.
    pub fn plain_metadata(&self, name: &str) -> io::Result<Metadata> {
        let found = File::from(openat(&self.0, name, LOOK | OFlags::NOFOLLOW, Mode::empty())?).metadata()?;
        check_regular(found.is_file()).map(|()| found)
    }

    /// Makes a file in the directory, in the place of one that is there.
    pub fn new_file(&self, name: &str) -> io::Result<File> {
        let _missing = self.remove(name);
        let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(openat(&self.0, name, new, Mode::from_raw_mode(0o666))?))
    }

    /// Gives a file in the directory another name there.
    pub fn rename(&self, name: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.0, name, &self.0, to)?)
    }

    /// Removes a file of the directory.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.0, name, AtFlags::empty())?)
    }

    #[cfg(target_os = "linux")]
    fn at(&self, inside: &str, flags: OFlags) -> io::Result<OwnedFd> {
        use rustix::fs::{ResolveFlags, openat2};

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

/// Opens a regular file below `blobs/` or `manifests/`.
pub(super) fn file(dir: &Path, inside: &str) -> io::Result<File> {
    let is_below = Path::new(inside).components().all(|part| matches!(part, Component::Normal(_)));
    if is_below && let Ok(file) = without_any_link(&dir.join(inside)) {
        return Ok(file);
    }
    Dir::open(dir)?.file(inside)
}

/// Opens a regular file with as few system calls as that takes: where no part of a path is a link, none leads out.
#[cfg(target_os = "linux")]
fn without_any_link(path: &Path) -> io::Result<File> {
    use rustix::fs::{ResolveFlags, openat2};

    check_regular(type_at(CWD, path)?.is_file())?;
    let file = File::from(openat2(CWD, path, READ, Mode::empty(), ResolveFlags::NO_SYMLINKS)?);
    let opened = file.metadata()?;
    check_regular(opened.is_file())?;
    // Whose directory it is in is to be seen where that is held open.
    if all_may_read(&opened) { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

#[cfg(not(target_os = "linux"))]
fn without_any_link(_: &Path) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// What is at a path, before it is opened. Links in the directories on the way are followed, which the opening refuses.
fn type_at(dir: impl AsFd, path: &Path) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(statat(dir, path, AtFlags::SYMLINK_NOFOLLOW)?.st_mode))
}

fn check_regular(regular: bool) -> io::Result<()> {
    if regular { Ok(()) } else { Err(io::Error::other("is no regular file")) }
}

fn all_may_read(file: &Metadata) -> bool {
    file.mode() & 0o004 != 0
}

/// Whether a file that not all may read is one of the user whose directory it is in, or that user one to be trusted.
fn check_owner(file: &Metadata, dir: &Metadata) -> io::Result<()> {
    if is_trusted(dir.uid()) || file.uid() == dir.uid() {
        return Ok(());
    }
    let (owner, other) = (dir.uid(), file.uid());
    Err(io::Error::other(format!("belongs to uid {other} and lies in a directory of uid {owner}, who may not read it")))
}

/// Root, and the user of this process.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Whether a link was made by root or by the user of this process.
fn check_maker(link: &Metadata) -> io::Result<()> {
    match link.uid() {
        maker if is_trusted(maker) => Ok(()),
        maker => Err(io::Error::other(format!("is a link of another user (uid {maker}), which is not followed"))),
    }
}

#[cfg(test)]
mod tests {
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
                file(&path, inside).unwrap().read_to_string(&mut text).unwrap();
                assert_eq!(text, "aa");
            }
            for inside in ["out", "absolute", "magic", "loop", "up/secret", "../secret", "below", "none"] {
                assert!(open.file(inside).is_err(), "{inside}");
                assert!(file(&path, inside).is_err(), "{inside}");
            }
            assert!(open.without_links("below/a", READ).is_ok());
            assert!(open.without_links("within", READ).is_err());
        }
    }

    #[test]
    fn what_is_at_a_path_now_is_opened_and_only_regular_files_are() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().canonicalize().unwrap().join("blobs");
        let text = || file(&dir, "a").map(|file| io::read_to_string(file).unwrap());
        for bytes in ["first", "second"] {
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("a"), bytes).unwrap();
            assert!(without_any_link(&dir.join("a")).is_ok() || cfg!(not(target_os = "linux")));
            assert_eq!(text().unwrap(), bytes);
            fs::rename(&dir, place.path().join(bytes)).unwrap();
            assert_eq!(text().unwrap_err().kind(), io::ErrorKind::NotFound);
        }
        symlink("first", &dir).unwrap();
        assert!(without_any_link(&dir.join("a")).is_err());
        assert_eq!(text().unwrap(), "first");
        // Opening it would not wait, and let a writer go on.
        rustix::fs::mknodat(CWD, dir.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        symlink("fifo", dir.join("to-fifo")).unwrap();
        for name in ["fifo", "to-fifo", "."] {
            assert!(file(&dir, name).is_err(), "{name}");
        }
    }

    #[test]
    fn own_files_are_regular_bounded_and_whole() {
        let place = tempfile::tempdir().unwrap();
        let own = place.path().join("own");
        fs::create_dir(&own).unwrap();
        symlink("own", place.path().join("link")).unwrap();
        assert!(Dir::plain(&place.path().join("link")).is_err());
        let dir = Dir::plain(&own).unwrap();
        symlink("/", own.join("out")).unwrap();
        assert!(dir.make_dir("out").is_err());
        let memo = dir.make_dir("memo").unwrap();
        dir.make_dir("memo").unwrap();
        for bytes in [&b"first"[..], b"second"] {
            memo.write("a", bytes).unwrap();
            assert_eq!(dir.read("memo/a", 6).unwrap(), bytes);
        }
        assert_eq!(memo.read("a", 5).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        symlink("/dev/zero", own.join("zeros")).unwrap();
        rustix::fs::mknodat(CWD, own.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        for name in ["zeros", "fifo", "memo", "none"] {
            assert!(dir.read(name, 10).is_err(), "{name}");
        }
        // A link is replaced, not followed.
        symlink("a", own.join("memo/b")).unwrap();
        memo.write("b", b"third").unwrap();
        assert_eq!(memo.read("a", 10).unwrap(), b"second");
        assert!(memo.write("none/c", b"").is_err());
        assert_eq!(fs::read_dir(own.join("memo")).unwrap().count(), 2);
    }
}
