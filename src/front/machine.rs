//! What this machine lets a mount do. Nothing here changes a setting.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::checks::{DEVICE, FUSE_CONF, allows_other};
use super::mounts::{self, Mounted};
use super::{sys, unmount};

/// The number of CAP_SYS_ADMIN in a set of capabilities.
const CAP_SYS_ADMIN: u32 = 21;

/// The facts that decide what mounts can do and how fast they are read.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Version of the kernel, such as (6, 18).
    pub kernel: (u32, u32),
    /// Whether this user is root.
    pub root: bool,
    /// Whether this process may register files with the kernel.
    pub administers: bool,
    /// What keeps this user from opening /dev/fuse.
    pub device: Result<(), io::ErrorKind>,
    /// Whether the program is there that mounts for ordinary users.
    pub helper: bool,
    /// Whether ordinary users may let others see their mounts.
    pub allow_other: bool,
    /// Pages that one request may have, where that is a setting.
    pub max_pages: Option<u64>,
    /// What wmount has mounted.
    pub mounts: Vec<MountFacts>,
}

/// The facts of one mount.
#[derive(Debug, Clone)]
pub struct MountFacts {
    /// Where it is.
    pub mountpoint: PathBuf,
    /// The file that holds how far the kernel reads ahead.
    pub read_ahead_file: PathBuf,
    /// How far that is, in KiB; `None` if this user cannot see it.
    pub read_ahead: Option<u64>,
    /// What the mount says of passthrough.
    pub passthrough: Option<String>,
    /// What it says of the system calls that it is denied.
    pub filter: Option<String>,
    /// What it says of the places that it may write to.
    pub fence: Option<String>,
}

/// Looks at this machine.
pub fn look() -> Machine {
    let ours = mounts::all().unwrap_or_default().into_iter().filter(Mounted::is_wmount);
    Machine {
        kernel: kernel(),
        root: sys::is_root(),
        administers: may_administer(),
        device: OpenOptions::new().read(true).write(true).open(DEVICE).map(|_| ()).map_err(|error| error.kind()),
        helper: unmount::helper().is_some(),
        allow_other: allows_other(&fs::read_to_string(FUSE_CONF).unwrap_or_default()),
        max_pages: number(Path::new("/proc/sys/fs/fuse/max_pages_limit")),
        mounts: ours.map(|mount| facts(&mount)).collect(),
    }
}

fn facts(mount: &Mounted) -> MountFacts {
    let (mountpoint, read_ahead_file) = (mount.mountpoint.clone(), mount.read_ahead_file());
    let status = fs::read(mountpoint.join(".wmount/status.json")).unwrap_or_default();
    let status: serde_json::Value = serde_json::from_slice(&status).unwrap_or_default();
    let fact = |key: &str| status.get(key).and_then(|fact| fact.as_str()).map(str::to_owned);
    let passthrough = fact(super::passthrough::FACT);
    let (filter, fence) = (fact(super::filter::FACT), fact(super::fence::FACT));
    let read_ahead = number(&read_ahead_file);
    MountFacts { mountpoint, read_ahead_file, read_ahead, passthrough, filter, fence }
}

/// Version of the running kernel, such as (6, 18); (0, 0) if it does not say.
pub fn kernel() -> (u32, u32) {
    version(&fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default())
}

/// The number that a file of /proc or /sys holds.
pub fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Whether this process has CAP_SYS_ADMIN, at least in its own user namespace.
pub fn may_administer() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| effective(&status) >> CAP_SYS_ADMIN & 1 == 1)
}

/// The effective capabilities in a /proc/.../status.
fn effective(status: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    set.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

/// Whether a file is opened with O_DIRECT.
pub fn asks_for_direct(flags: i32) -> bool {
    cfg!(target_os = "linux") && rustix::fs::OFlags::from_bits_retain(flags.cast_unsigned()).contains(DIRECT)
}

#[cfg(target_os = "linux")]
const DIRECT: rustix::fs::OFlags = rustix::fs::OFlags::DIRECT;
#[cfg(not(target_os = "linux"))]
const DIRECT: rustix::fs::OFlags = rustix::fs::OFlags::empty();

/// Whether files below `path` lie on a file system that itself lies on another.
#[cfg(target_os = "linux")]
pub fn is_stacked(path: &Path) -> bool {
    const OVERLAY: u32 = 0x794c_7630;
    const ECRYPTFS: u32 = 0xf15f;
    rustix::fs::statfs(path).is_ok_and(|found| [OVERLAY, ECRYPTFS].contains(&(found.f_type as u32)))
}

/// Whether files below `path` lie on a file system that itself lies on another.
#[cfg(not(target_os = "linux"))]
pub fn is_stacked(_path: &Path) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_kernels() {
        for (release, expected) in [("6.18.44-fc-v669\n", (6, 18)), ("5.10-rc1", (5, 10)), ("", (0, 0))] {
            assert_eq!(version(release), expected);
        }
    }

    #[test]
    fn capabilities_are_hexadecimal() {
        assert_eq!(effective("Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n") >> CAP_SYS_ADMIN & 1, 1);
        assert_eq!(effective("CapEff:\t00000000a80425fb\n") >> CAP_SYS_ADMIN & 1, 0);
        assert_eq!(effective("nothing"), 0);
    }
}
