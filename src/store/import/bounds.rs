//! Where links in what is imported may lead.
//!
//! A model's directory comes from strangers, or belongs to another user than the one who imports it. A link in it to a key
//! would bring the key into the store, whose blobs everybody may read. So links are followed within what the command
//! names, and from a snapshot of a hub cache to the blobs beside it.

use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The directories and files that links may lead to.
#[derive(Debug)]
pub(super) struct Bounds {
    /// `None` if they may lead anywhere.
    roots: Option<Vec<PathBuf>>,
    /// Files that were not named and may be read where they are.
    files: HashSet<PathBuf>,
}

impl Bounds {
    /// Links may lead anywhere.
    pub fn none() -> Bounds {
        Bounds { roots: None, files: HashSet::new() }
    }

    /// Links may lead to these paths and to what is below them.
    pub fn of(paths: &[PathBuf]) -> Bounds {
        // One that is not there is told of when it is looked at.
        let named: Vec<PathBuf> = paths.iter().filter_map(|path| path.canonicalize().ok()).collect();
        let beside: Vec<PathBuf> = named.iter().filter_map(|path| blobs_beside(path)).collect();
        Bounds { roots: Some([named, beside].concat()), files: HashSet::new() }
    }

    /// And to these files, each set of one directory, but not to where they lead themselves, since nobody has named them;
    /// those of a hub cache lead to its blobs.
    pub fn and_files(mut self, sets: &[Vec<PathBuf>]) -> Bounds {
        for set in sets {
            let Some(dir) = set.first().and_then(|file| directory(file).canonicalize().ok()) else { continue };
            self.files.extend(set.iter().filter_map(|file| Some(dir.join(file.file_name()?))));
            self.roots.iter_mut().for_each(|roots| roots.extend(blobs_beside(&dir)));
        }
        self
    }

    /// Refuses what lies elsewhere: `real` is where the path `shown` leads.
    pub fn check(&self, shown: &Path, real: &Path) -> Result<()> {
        match &self.roots {
            Some(roots) if !self.files.contains(real) && !roots.iter().any(|root| real.starts_with(root)) => {
                Err(Error::Invalid(format!(
                    "{}: is a link that leads out of what is imported, to {}; --follow-links follows such links",
                    shown.display(),
                    real.display()
                )))
            }
            _ => Ok(()),
        }
    }
}

/// The directory that a file is in.
pub(super) fn directory(file: &Path) -> &Path {
    file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Where the links of a hub cache's snapshot lead: models--<owner>--<name>/blobs, itself no link.
fn blobs_beside(real: &Path) -> Option<PathBuf> {
    let snapshots = real.ancestors().find(|above| above.file_name().is_some_and(|name| name == "snapshots"))?;
    Some(snapshots.parent()?.join("blobs"))
}

/// What a path leads to, links followed, and where that is: both of one file, whatever is put in its place meanwhile.
#[cfg(target_os = "linux")]
pub(super) fn look(path: &Path) -> io::Result<(Metadata, PathBuf)> {
    use rustix::fs::{CWD, Mode, OFlags, openat};

    let found = File::from(openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    Ok((found.metadata()?, real_path(&found, path)?))
}

/// Where a file is that was opened at `path`.
#[cfg(target_os = "linux")]
pub(super) fn real_path(file: &File, path: &Path) -> io::Result<PathBuf> {
    use std::os::fd::AsRawFd;

    // Without /proc it takes a second look at the path.
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).or_else(|_| path.canonicalize())
}

/// What a path leads to, links followed, and where that is.
#[cfg(not(target_os = "linux"))]
pub(super) fn look(path: &Path) -> io::Result<(Metadata, PathBuf)> {
    Ok((path.metadata()?, path.canonicalize()?))
}

/// Where a file is that was opened at `path`.
#[cfg(not(target_os = "linux"))]
pub(super) fn real_path(_file: &File, path: &Path) -> io::Result<PathBuf> {
    path.canonicalize()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_of_a_snapshot_lead_to_the_blobs_beside_it_and_no_further() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path().canonicalize().unwrap();
        let snapshot = top.join("models--a--b/snapshots/123");
        fs::create_dir_all(snapshot.join("unet")).unwrap();
        fs::create_dir_all(top.join("models--a--b/blobs")).unwrap();
        fs::write(top.join("models--a--b/blobs/x"), "x").unwrap();
        fs::write(top.join("secret"), "x").unwrap();
        let may_be_read = |source: &Path, link: &Path| {
            let (metadata, real) = look(link).unwrap();
            assert!(metadata.is_file());
            Bounds::of(&[source.to_owned()]).check(link, &real).is_ok()
        };
        let link = snapshot.join("unet/x");
        symlink("../../../blobs/x", &link).unwrap();
        assert!(may_be_read(&snapshot, &link) && may_be_read(&snapshot.join("unet"), &link));
        symlink("../../../../secret", snapshot.join("unet/y")).unwrap();
        assert!(!may_be_read(&snapshot, &snapshot.join("unet/y")));
        // Blobs that are themselves a link to elsewhere are not those of a hub cache.
        fs::rename(top.join("models--a--b/blobs"), top.join("elsewhere")).unwrap();
        symlink(top.join("elsewhere"), top.join("models--a--b/blobs")).unwrap();
        assert!(!may_be_read(&snapshot, &link));
        assert!(Bounds::none().check(&link, &top.join("secret")).is_ok());
    }
}
