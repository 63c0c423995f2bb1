//! Unmounting by the setuid helper of the package fuse3, as anyone but root.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program that lets an ordinary user mount and unmount, if it is installed.
pub fn helper() -> Option<PathBuf> {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/bin", "/usr/bin", "/sbin", "/usr/local/bin"].map(PathBuf::from);
    let places: Vec<PathBuf> = std::env::split_paths(&places).chain(usual).collect();
    ["fusermount3", "fusermount"]
        .iter()
        .flat_map(|name| places.iter().map(move |place| place.join(name)))
        .find(|program| program.is_file())
}

/// Unmounts `mountpoint`, which must be canonical, by the helper. A mount in use is [`io::ErrorKind::ResourceBusy`] unless
/// `lazy`.
pub fn by_helper(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let helper = helper().ok_or_else(|| io::Error::other("fusermount3 is missing; install the package fuse3"))?;
    let mut command = Command::new(helper);
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(mountpoint).stdin(Stdio::null()).stdout(Stdio::null());
    // The helper's own words, in a language that can be matched.
    let output = command.env("LC_ALL", "C").output()?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let kind = if words.contains("busy") { io::ErrorKind::ResourceBusy } else { io::ErrorKind::Other };
    Err(io::Error::new(kind, words))
}
