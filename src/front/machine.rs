//! What this machine lets a mount do.

use std::fs;
use std::path::Path;

/// The number of CAP_SYS_ADMIN in a set of capabilities.
const CAP_SYS_ADMIN: u32 = 21;

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
    fn capabilities_are_hexadecimal() {
        assert_eq!(effective("Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n") >> CAP_SYS_ADMIN & 1, 1);
        assert_eq!(effective("CapEff:\t00000000a80425fb\n") >> CAP_SYS_ADMIN & 1, 0);
        assert_eq!(effective("nothing"), 0);
    }
}
