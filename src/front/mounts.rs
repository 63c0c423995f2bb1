//! The mounts of this machine, as the kernel lists them.

use std::io;
use std::path::{Path, PathBuf};

/// The type under which the kernel lists our mounts.
pub const KIND: &str = "fuse.wmount";

/// One mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mounted {
    /// The kernel's number of the mount: unique among the mounts that exist at a time.
    pub id: u64,
    /// The kernel's number of the device, `major:minor`.
    pub device: String,
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Type of the file system.
    pub kind: String,
    /// What is mounted; of a wmount, the store.
    pub source: PathBuf,
    /// Whether all of it is there, and not a part that was bound to another place.
    pub whole: bool,
    /// The user who made a FUSE mount.
    pub user: Option<u32>,
}

impl Mounted {
    /// Whether it is one of ours; a part of one that was bound to another place is none.
    pub fn is_wmount(&self) -> bool {
        self.kind == KIND && self.whole
    }

    /// Where the kernel keeps how far it reads ahead in the files of the mount.
    pub fn read_ahead_file(&self) -> PathBuf {
        format!("/sys/class/bdi/{}/read_ahead_kb", self.device).into()
    }

    /// Whether the process that served it is gone.
    pub fn is_dead(&self) -> bool {
        // A name that is never cached, so the kernel has to ask.
        let asked = std::fs::symlink_metadata(self.mountpoint.join(".wmount/alive"));
        asked.is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
    }
}

/// All mounts, in the order in which they were made.
#[cfg(target_os = "linux")]
pub fn all() -> io::Result<Vec<Mounted>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse).collect())
}

/// All mounts; this system offers no list of them yet.
#[cfg(not(target_os = "linux"))]
pub fn all() -> io::Result<Vec<Mounted>> {
    Ok(Vec::new())
}

/// The mount that is seen at `path`, which must be canonical.
pub fn at(path: &Path) -> io::Result<Option<Mounted>> {
    Ok(all()?.into_iter().rfind(|mount| mount.mountpoint == path))
}

/// The mount of ours that has what is at `path`.
pub fn ours_with(path: &Path) -> io::Result<Option<Mounted>> {
    use std::os::unix::fs::MetadataExt;

    let device = std::fs::metadata(path)?.dev();
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    Ok(all()?.into_iter().find(|mount| mount.is_wmount() && mount.device == device))
}

/// The canonical form of a path that may be a mountpoint whose server is gone, or that is another user's.
pub fn canonical(path: &Path) -> io::Result<PathBuf> {
    let is_mute = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::EACCES));
    match (path.canonicalize(), path.parent(), path.file_name()) {
        (Err(error), Some(parent), Some(name)) if is_mute(&error) => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            Ok(parent.canonicalize()?.join(name))
        }
        (outcome, ..) => outcome,
    }
}

/// One line of mountinfo: `36 35 98:0 /root /mnt/point rw,noatime shared:1 - type source options`.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let device = String::from_utf8_lossy(fields.nth(1)?).into_owned();
    let whole = fields.next()? == b"/";
    let mountpoint = path_of(fields.next()?);
    let mut fields = fields.skip_while(|&field| field != b"-").skip(1);
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = path_of(fields.next()?);
    let mut options = fields.next().unwrap_or_default().split(|&byte| byte == b',');
    let user = options.find_map(|option| std::str::from_utf8(option.strip_prefix(b"user_id=")?).ok()?.parse().ok());
    Some(Mounted { id, device, mountpoint, kind, source, whole, user })
}

/// Undoes the kernel's `\040` for space, and the like.
fn path_of(field: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;

    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo() {
        let line =
            br"42 27 0:51 / /mnt/my\040models\134 ro,nosuid shared:3 master:1 - fuse.wmount /srv/a\011b ro,user_id=0";
        let mount = parse(line).unwrap();
        assert_eq!(mount.id, 42);
        assert_eq!(mount.mountpoint, Path::new("/mnt/my models\\"));
        assert_eq!(mount.source, Path::new("/srv/a\tb"));
        assert!(mount.is_wmount());
        assert_eq!(mount.read_ahead_file(), Path::new("/sys/class/bdi/0:51/read_ahead_kb"));
        assert_eq!(mount.user, Some(0));
        let part = br"43 27 0:51 /amb /mnt/amb ro,nosuid - fuse.wmount /srv/a ro,user_id=0";
        assert!(!parse(part).unwrap().is_wmount());
    }

    #[test]
    fn lines_that_are_none() {
        for line in [&b""[..], b"1 2 3", b"x 27 0:51 / /mnt ro - fuse src", b"42 27 0:51 / /mnt ro fuse src"] {
            assert_eq!(parse(line), None);
        }
    }

    #[test]
    fn a_backslash_without_digits_stays() {
        assert_eq!(path_of(br"a\9zz\04"), Path::new(r"a\9zz\04"));
    }
}
