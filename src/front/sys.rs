//! The system calls that std does not offer, each behind a safe function. All `unsafe` of the front is here.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Whether this process may mount and unmount without a helper program.
pub fn is_root() -> bool {
    // SAFETY: takes no arguments and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// User and group of this process.
pub fn owner() -> (u32, u32) {
    // SAFETY: take no arguments and cannot fail.
    unsafe { (libc::getuid(), libc::getgid()) }
}

/// Leaves the terminal's session, so that its end and its Ctrl-C do not reach this process.
pub fn leave_terminal() -> io::Result<()> {
    // SAFETY: takes no arguments.
    checked(unsafe { libc::setsid() })
}

/// Makes the descriptor number `target` a copy of `file`.
pub fn redirect(file: &File, target: RawFd) -> io::Result<()> {
    // SAFETY: both are plain numbers to the kernel; `file` is open.
    checked(unsafe { libc::dup2(file.as_raw_fd(), target) })
}

/// Unmounts `path`; with `lazy`, takes it out of the name space now and ends it when the last open file is closed.
#[cfg(target_os = "linux")]
pub fn unmount(path: &Path, lazy: bool) -> io::Result<()> {
    let flags = libc::UMOUNT_NOFOLLOW | if lazy { libc::MNT_DETACH } else { 0 };
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is a string that ends in NUL and lives over the call.
    checked(unsafe { libc::umount2(path.as_ptr(), flags) })
}

/// Unmounts `path`; with `lazy`, even if files are open.
#[cfg(not(target_os = "linux"))]
pub fn unmount(path: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy { libc::MNT_FORCE } else { 0 };
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is a string that ends in NUL and lives over the call.
    checked(unsafe { libc::unmount(path.as_ptr(), flags) })
}

/// Whether changes below `path` can be made without this kernel seeing them: a network or guest file system.
#[cfg(target_os = "linux")]
pub fn is_remote(path: &Path) -> io::Result<bool> {
    const NFS: i64 = 0x6969;
    const SMB2: i64 = 0xfe53_4d42;
    const CIFS: i64 = 0xff53_4d42;
    const CEPH: i64 = 0x00c3_6400;
    const V9FS: i64 = 0x0102_1997;
    const FUSE: i64 = 0x6573_5546; // virtiofs too
    const REMOTE: [i64; 6] = [NFS, SMB2, CIFS, CEPH, V9FS, FUSE];

    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `path` ends in NUL, and the kernel fills `found` when it answers 0.
    let kind = unsafe {
        checked(libc::statfs(path.as_ptr(), found.as_mut_ptr()))?;
        found.assume_init().f_type
    };
    // The constants are 32 bits wide and come sign-extended on some machines.
    Ok(REMOTE.contains(&(kind as i64 & 0xffff_ffff)))
}

/// Whether changes below `path` can be made without this kernel seeing them.
#[cfg(not(target_os = "linux"))]
pub fn is_remote(_path: &Path) -> io::Result<bool> {
    Ok(false)
}

fn checked(answer: libc::c_int) -> io::Result<()> {
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
