//! Whether a store's directories lie together and are of this store alone, which who writes or removes depends on.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{MANIFESTS, Store, children};
use crate::error::{AtPath, Error, Result};

impl Store {
    /// Checks that what is in `.wmount/` can be given a name in the store's other directories, and the reverse, and that
    /// no other store has the same blobs.
    pub(super) fn check_place(&self) -> Result<()> {
        let own = place(&self.own_path("")?)?;
        let blobs = self.root.join("blobs");
        for dir in [&blobs, &self.manifests_dir()] {
            if place(dir)? != own {
                let (dir, root) = (dir.display(), self.root.display());
                return Err(Error::Invalid(format!(
                    "{dir}: is on another file system than {root}: such a store is read and not written to; move all of it \
                     there, and let {root} be the link"
                )));
            }
        }
        let real = fs::canonicalize(&blobs).at(&blobs)?;
        let above = real.parent().unwrap_or(&real);
        let identity = |dir: &Path| fs::metadata(dir).map(|found| (found.dev(), found.ino()));
        match identity(&above.join(MANIFESTS)) {
            Ok(theirs) if theirs != identity(&self.manifests_dir()).at(self.manifests_dir())? => {
                let (blobs, above) = (blobs.display(), above.display());
                Err(Error::Invalid(format!(
                    "{blobs}: are the blobs of the store {above}, whose models need them, too: this one is read and not \
                     written to; let all of it be a link to {above}"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Checks that nothing beside `manifests/`, or in its place, may name blobs that no manifest here does.
    ///
    /// # Errors
    /// `manifests` is a link to what holds no model, such as the mountpoint of a disk, or there are manifests of a kind that
    /// is yet to come.
    pub(super) fn check_manifests(&self, is_without_models: bool) -> Result<()> {
        let manifests = self.manifests_dir();
        let is_link = fs::symlink_metadata(&manifests).at(&manifests)?.is_symlink();
        if is_without_models && is_link {
            let manifests = manifests.display();
            return Err(Error::Invalid(format!(
                "{manifests}: is a link to a directory without models, so nothing is removed: is its disk mounted?"
            )));
        }
        for name in children(&self.root)? {
            let path = self.root.join(&name);
            if name.starts_with("manifest") && name != MANIFESTS && path.is_dir() {
                let path = path.display();
                return Err(Error::Invalid(format!(
                    "{path}: may hold models that this version of wmount does not know, so nothing is removed: take it away \
                     if it does not"
                )));
            }
        }
        Ok(())
    }
}

/// Files can be moved between directories of one file system that are seen through one mount.
fn place(dir: &Path) -> Result<(u64, u64)> {
    let device = fs::metadata(dir).at(dir)?.dev();
    #[cfg(target_os = "linux")]
    let mount = {
        use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
        // Kernels before 5.8 do not tell it, and leave it zero.
        statx(CWD, dir, AtFlags::empty(), StatxFlags::MNT_ID).map_err(std::io::Error::from).at(dir)?.stx_mnt_id
    };
    #[cfg(not(target_os = "linux"))]
    let mount = 0;
    Ok((device, mount))
}
