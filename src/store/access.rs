//! Who may read the files of a model where they lie: what a mount for all users must not widen.
//!
//! What belongs to the user who mounts is shown to all, as asked. What belongs to others is shown to those who could read
//! it in the store: by the modes of blobs and manifest, and of the directories that lead to them. Lists of access
//! rights (ACLs) beyond modes are not looked at. A blob that is not there, as on a disk that is yet to be mounted, may
//! turn out to be the owner's alone, and counts as that.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{Found, Store};

/// Owner, group and mode of a file that is shown; `None` is the user who mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The user.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// Reading bits.
    pub mode: u16,
}

impl Access {
    /// For everybody.
    pub const ALL: Access = Access { uid: None, gid: None, mode: 0o444 };

    /// Takes away what `file`, in directories with these rights, does not allow.
    fn narrow(&mut self, file: Rights, dirs: &[Rights]) {
        if file.mode & 0o004 != 0 && dirs.iter().all(|dir| dir.mode & 0o001 != 0) {
            return;
        }
        let group = |dir: &Rights| dir.mode & 0o001 != 0 || (dir.gid == file.gid && dir.mode & 0o010 != 0);
        let user = |dir: &Rights| group(dir) || (dir.uid == file.uid && dir.mode & 0o100 != 0);
        self.mode &= !0o004;
        if *self.gid.get_or_insert(file.gid) != file.gid || file.mode & 0o040 == 0 || !dirs.iter().all(group) {
            self.mode &= !0o040;
        }
        if *self.uid.get_or_insert(file.uid) != file.uid || file.mode & 0o400 == 0 || !dirs.iter().all(user) {
            self.mode &= !0o400;
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Rights {
    uid: u32,
    gid: u32,
    mode: u32,
}

impl Rights {
    fn of(found: &Metadata) -> Rights {
        Rights { uid: found.uid(), gid: found.gid(), mode: found.mode() }
    }

    fn at(path: &Path) -> Option<Rights> {
        fs::metadata(path).ok().map(|found| Rights::of(&found))
    }
}

/// The rights of a directory and of all above it. Where it is a link, its target counts.
fn above(dir: &Path) -> Vec<Rights> {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    dir.ancestors().filter_map(Rights::at).collect()
}

/// Who may read a file in a directory, if it is shown by the user `mine`.
pub(super) fn file_access(file: &Metadata, dir: &Path, mine: u32) -> Access {
    let mut access = Access::ALL;
    if file.uid() != mine {
        access.narrow(Rights::of(file), &above(dir));
    }
    access
}

impl Store {
    /// Who may read the files of a model, if they are shown by the user `mine`.
    pub fn access(&self, found: &Found, mine: u32) -> Access {
        let mut access = Access::ALL;
        let path = self.manifest_path(&found.name);
        let manifest = Rights::at(&path).filter(|it| it.uid != mine);
        if let Some(manifest) = manifest {
            access.narrow(manifest, &above(path.parent().unwrap_or(&path)));
        }
        // Of a manifest that cannot be read no file is shown.
        let Ok(read) = self.manifest(found) else { return access };
        let owner = Rights::at(&self.root).unwrap_or(Rights { uid: mine, gid: mine, mode: 0 });
        let absent = Rights { mode: 0o400, ..owner };
        let blobs = read.blobs().map(|layer| Rights::at(&self.blob_path(&layer.digest)).unwrap_or(absent));
        let foreign: Vec<Rights> = blobs.filter(|it| it.uid != mine).collect();
        if !foreign.is_empty() {
            let dirs = above(&self.root.join("blobs"));
            foreign.into_iter().for_each(|blob| access.narrow(blob, &dirs));
        }
        access
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrowest_file_and_directory_decide() {
        let rights = |uid, mode| Rights { uid, gid: uid, mode };
        let narrowed = |files: &[Rights], dirs: &[Rights]| {
            let mut access = Access::ALL;
            files.iter().for_each(|file| access.narrow(*file, dirs));
            (access.uid, access.mode)
        };
        let open = [rights(0, 0o755)];
        assert_eq!(narrowed(&[rights(7, 0o644), rights(8, 0o444)], &open), (None, 0o444));
        assert_eq!(narrowed(&[rights(7, 0o600)], &open), (Some(7), 0o400));
        assert_eq!(narrowed(&[rights(7, 0o640), rights(8, 0o444)], &open), (Some(7), 0o440));
        assert_eq!(narrowed(&[rights(7, 0o640), rights(8, 0o640)], &open).1, 0);
        assert_eq!(narrowed(&[rights(7, 0o644)], &[rights(7, 0o700)]), (Some(7), 0o400));
        assert_eq!(narrowed(&[rights(7, 0o644)], &[rights(7, 0o750)]), (Some(7), 0o440));
        assert_eq!(narrowed(&[rights(7, 0o644)], &[rights(0, 0o700)]).1, 0);
    }
}
