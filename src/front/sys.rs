//! The system calls that std does not offer.

use std::fs::File;
use std::io;
use std::path::Path;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
use crate::cores::cores;

/// Whether this process may mount and unmount without a helper program.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// User and group of this process.
pub fn owner() -> (u32, u32) {
    (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
}

/// Has memory that is let go of return to the system.
///
/// glibc keeps an arena for each of many threads, and learns from a large list that grows to keep large lists in them:
/// after a store of a million tensors was listed, a quarter of the memory would be of use to nobody.
pub fn return_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: both calls set a number in the allocator. If one is refused, all is as without it.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, i32::try_from(cores()).unwrap_or(i32::MAX));
            libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        }
    }
}

/// Lets this process have as many files open as it may: a shell's usual 1,024 are few for who serves many readers.
pub fn allow_many_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let most = getrlimit(Resource::Nofile).maximum;
    // If it is refused, all is as without it.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}

/// How many files this process may have open.
pub fn files_allowed() -> usize {
    let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    allowed.map_or(usize::MAX, |allowed| usize::try_from(allowed).unwrap_or(usize::MAX))
}

/// Leaves the terminal's session, so that its end and its Ctrl-C do not reach this process.
pub fn leave_terminal() -> io::Result<()> {
    Ok(rustix::process::setsid().map(drop)?)
}

/// Has no program that this process starts inherit its files, but for stdin, stdout and stderr.
pub fn keep_files() {
    close_fds::set_fds_cloexec(3, &[]);
}

/// Makes stdout a copy of `file`.
pub fn redirect_stdout(file: &File) -> io::Result<()> {
    Ok(rustix::stdio::dup2_stdout(file)?)
}

/// Makes stderr a copy of `file`.
pub fn redirect_stderr(file: &File) -> io::Result<()> {
    Ok(rustix::stdio::dup2_stderr(file)?)
}

/// Unmounts `path`; with `lazy`, takes it out of the name space now and ends it when the last open file is closed.
#[cfg(target_os = "linux")]
pub fn unmount(path: &Path, lazy: bool) -> io::Result<()> {
    use rustix::mount::UnmountFlags;
    let lazy = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW | lazy)?)
}

/// Unmounts `path`; with `lazy`, even if files are open.
#[cfg(not(target_os = "linux"))]
pub fn unmount(path: &Path, lazy: bool) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let flags = if lazy { libc::MNT_FORCE } else { 0 };
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is a string that ends in NUL and lives over the call.
    match unsafe { libc::unmount(path.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether changes below `path` can be made without this kernel seeing them: a network or guest file system.
#[cfg(target_os = "linux")]
pub fn is_remote(path: &Path) -> io::Result<bool> {
    const NFS: u32 = 0x6969;
    const SMB2: u32 = 0xfe53_4d42;
    const CIFS: u32 = 0xff53_4d42;
    const CEPH: u32 = 0x00c3_6400;
    const V9FS: u32 = 0x0102_1997;
    const FUSE: u32 = 0x6573_5546; // virtiofs too

    // 32 bits wide, though the field is wider on most machines, and comes sign-extended on some.
    let kind = rustix::fs::statfs(path)?.f_type as u32;
    Ok([NFS, SMB2, CIFS, CEPH, V9FS, FUSE].contains(&kind))
}

/// Whether changes below `path` can be made without this kernel seeing them.
#[cfg(not(target_os = "linux"))]
pub fn is_remote(_path: &Path) -> io::Result<bool> {
    Ok(false)
}
