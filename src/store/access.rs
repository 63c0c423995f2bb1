//! Who may read the files of a model where they lie: what a mount for all users must not widen.
//!
//! What belongs to the user who mounts is shown to all, as asked, if nobody but him and root can change what is at its path.
//! All else is shown to those who could read it in the store: by the modes of blobs and manifest, and of the directories
//! that lead to them. Lists of access rights (ACLs) beyond modes are not looked at. A blob that is not there, as on a disk
//! that is yet to be mounted, may turn out to be the owner's alone, and counts as that.
//!
//! This is found out when a model is first read, from the bytes that are read. Whoever can change directories can put
//! another file in the place of a blob later: it is opened only if it may be read by all who were shown the first.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use dashmap::DashMap;

use super::beneath::Dir;
use super::{Found, Store};
use crate::digest::Digest;
use crate::error::{AtPath, Error, Result};
use crate::format::ollama::Manifest;

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
        let Some(closed) = dirs.iter().find(|dir| dir.mode & 0o001 == 0) else {
            if file.mode & 0o004 != 0 {
                return;
            }
            return self.narrow_to(file, dirs);
        };
        // Of a file that is open to all, the directories alone say whose it is.
        let is_open = file.mode & 0o004 != 0;
        self.narrow_to(if is_open { Rights { mode: 0o444, ..*closed } } else { file }, dirs);
    }

    fn narrow_to(&mut self, file: Rights, dirs: &[Rights]) {
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

    /// Whether all who may read this may read the other.
    pub(super) fn is_within(&self, other: &Access) -> bool {
        let may = |access: &Access, bits: u16| access.mode & bits != 0;
        let group = || !may(self, 0o040) || (may(other, 0o040) && self.gid == other.gid);
        let user = || !may(self, 0o400) || (may(other, 0o400) && self.uid == other.uid);
        may(other, 0o004) || (!may(self, 0o004) && group() && user())
    }

    /// Of a file of the store that was opened in a directory.
    pub(super) fn of(file: &Metadata, dirs: &[Metadata]) -> Access {
        let mut access = Access::ALL;
        access.narrow(Rights::of(file), &dirs.iter().map(Rights::of).collect::<Vec<_>>());
        access
    }

    /// Takes away what another does not allow.
    fn meet(&mut self, other: &Access) {
        if other.mode & 0o004 == 0 {
            let both = |mine: Option<u32>, its: Option<u32>| mine.is_none() || mine == its;
            let group = other.mode & 0o040 != 0 && both(self.gid, other.gid);
            let user = other.mode & 0o400 != 0 && both(self.uid, other.uid);
            self.mode &= if group { 0o040 } else { 0 } | if user { 0o400 } else { 0 };
            (self.uid, self.gid) = (self.uid.or(other.uid), self.gid.or(other.gid));
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
}

/// What a mount for all users has found out.
#[derive(Debug)]
pub(super) struct Guard {
    /// The user who shows the store.
    mine: u32,
    /// Whether nobody else can change what is at the paths of blobs.
    sole: bool,
    /// With whom a blob was counted when a model was first read, at most.
    blobs: DashMap<Digest, Access>,
    /// The digest of a model's manifest, and who may read the model.
    models: DashMap<Found, (Digest, Access)>,
}

impl Guard {
    /// Whether blobs need no look when they are opened.
    pub fn is_sole(&self) -> bool {
        self.sole
    }

    /// Whether a file that these may read can be shown to all to whom the blob was.
    pub fn allows(&self, digest: &Digest, now: &Access) -> bool {
        self.sole || self.blobs.get(digest).is_none_or(|shown| shown.is_within(now))
    }

    /// With whom a blob counts that these may read now.
    fn count(&self, digest: &Digest, now: Access) -> Access {
        let mut shown = self.blobs.entry(*digest).or_insert(now);
        if shown.is_within(&now) {
            *shown = now;
            return now;
        }
        let mut both = now;
        both.meet(&shown);
        both
    }

    fn of_blob(&self, digest: &Digest, found: io::Result<Metadata>, dirs: &[Metadata], absent: Access) -> Access {
        match found {
            Ok(found) if self.sole && found.uid() == self.mine => Access::ALL,
            Ok(found) => self.count(digest, Access::of(&found, dirs)),
            Err(_) => self.count(digest, absent),
        }
    }
}

impl Store {
    /// Says that the user `mine` shows the store to all others.
    pub fn guard(&self, mine: u32) {
        let sole = is_sole(&self.asked.join("blobs"), mine);
        self.blobs.guard(Guard { mine, sole, blobs: DashMap::new(), models: DashMap::new() });
    }

    /// Who may read the files of a model. One that was not read yet has none.
    pub fn access(&self, found: &Found) -> Access {
        let Some(guard) = self.blobs.guarded() else { return Access::ALL };
        if let Some(known) = guard.models.get(found) {
            return known.1;
        }
        // It is found out in reading.
        let _unreadable = self.manifest_bytes(found);
        guard.models.get(found).map_or(Access::ALL, |known| known.1)
    }

    /// Who may read a blob that is shown by itself, if it was looked at.
    pub fn blob_access(&self, digest: &Digest) -> Option<Access> {
        Some(*self.blobs.guarded()?.blobs.get(digest)?)
    }

    /// Who may read a blob of the store that no model needs to have.
    pub(super) fn stored_access(&self, digest: &Digest) -> Access {
        let Some(guard) = self.blobs.guarded() else { return Access::ALL };
        let Ok(dir) = Dir::open(&self.root.join("blobs")) else { return Access { mode: 0, ..Access::ALL } };
        guard.of_blob(digest, dir.regular(&digest.file_name()), &dir.above(), Access { mode: 0, ..Access::ALL })
    }

    /// Who may read a file in a directory of ours.
    pub(super) fn own_access(&self, file: &Metadata, dir: &Dir, path: &Path) -> Access {
        match self.blobs.guarded() {
            Some(guard) if file.uid() != guard.mine || !is_sole(path, guard.mine) => Access::of(file, &dir.above()),
            _ => Access::ALL,
        }
    }

    /// Finds out who may read a model with this manifest, which was opened as `file`.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it was another when that was first found out.
    pub(super) fn admit(&self, found: &Found, file: &Metadata, bytes: &[u8]) -> Result<()> {
        let Some(guard) = self.blobs.guarded() else { return Ok(()) };
        let digest = Digest::of(bytes);
        if let Some(known) = guard.models.get(found) {
            let gone = || Error::NotFound(format!("the manifest of {} as it was", found.name));
            return if known.0 == digest { Ok(()) } else { Err(gone()) };
        }
        // One that is none shows nothing.
        let Ok(manifest) = Manifest::parse(bytes) else { return Ok(()) };
        let (root, path) = (self.manifests_dir(), self.manifest_path(&found.name));
        let place = path.parent().unwrap_or(&root);
        let mut access = Access::ALL;
        if file.uid() != guard.mine || !is_sole(&self.asked.join("manifests"), guard.mine) {
            let dir = Dir::open(&root).at(&root)?;
            let inside = place.strip_prefix(&root).unwrap_or(place).ancestors().filter_map(Path::to_str);
            let mut dirs = dir.above();
            for inside in inside.filter(|inside| !inside.is_empty()) {
                dirs.push(dir.metadata(inside).at(place)?);
            }
            access = Access::of(file, &dirs);
        }
        let dir = Dir::open(&self.root.join("blobs")).at(self.root.join("blobs"))?;
        let dirs = dir.above();
        let owner = fs::metadata(&self.root).at(&self.root)?;
        let absent = Access { uid: Some(owner.uid()), gid: Some(owner.gid()), mode: 0o400 };
        for layer in manifest.blobs() {
            let blob = dir.regular(&layer.digest.file_name());
            access.meet(&guard.of_blob(&layer.digest, blob, &dirs, absent));
        }
        if access != Access::ALL {
            let (name, mode) = (&found.name, access.mode);
            tracing::info!("model {name} is shown to those who may read it in the store, mode {mode:03o}");
        }
        guard.models.insert(found.clone(), (digest, access));
        Ok(())
    }
}

/// Whether nobody but root and the user `mine`, with his group, can change where a path leads.
pub(crate) fn is_sole(path: &Path, mine: u32) -> bool {
    /// As many links as Linux follows.
    const LINKS: u32 = 40;
    const STICKY: u32 = 0o1000;
    let group = rustix::process::getegid().as_raw();
    let (mut at, mut links) = (PathBuf::new(), 0);
    let mut rest: Vec<OsString> = parts(path);
    while let Some(part) = rest.pop() {
        match Path::new(&part).components().next() {
            Some(Component::RootDir) => at = "/".into(),
            Some(Component::ParentDir) => _ = at.pop(),
            _ => at.push(&part),
        }
        let Ok(found) = fs::symlink_metadata(&at) else { return false };
        if found.uid() != 0 && found.uid() != mine {
            return false;
        }
        if found.is_symlink() {
            let Ok(target) = fs::read_link(&at) else { return false };
            links += 1;
            if links > LINKS {
                return false;
            }
            at.pop();
            rest.extend(parts(&target));
            continue;
        }
        // In a sticky directory everybody has his own files.
        let is_kept = found.mode() & STICKY != 0 && !rest.is_empty();
        let by_group = found.mode() & 0o020 != 0 && found.gid() != 0 && found.gid() != group;
        if !is_kept && (found.mode() & 0o002 != 0 || by_group) {
            return false;
        }
    }
    true
}

/// The components of a path, the last first.
fn parts(path: &Path) -> Vec<OsString> {
    path.components().rev().map(|part| part.as_os_str().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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
        assert_eq!(narrowed(&[rights(7, 0o644)], &[rights(0, 0o700)]), (Some(0), 0o400));
        assert_eq!(narrowed(&[rights(7, 0o644)], &[rights(0, 0o700), rights(8, 0o700)]).1, 0);
        assert_eq!(narrowed(&[rights(7, 0o600)], &[rights(0, 0o700)]).1, 0);
    }

    #[test]
    fn who_may_read_more_is_beyond_who_may_read_less() {
        let rights = |uid, mode| Rights { uid, gid: uid, mode };
        let of = |file| {
            let mut access = Access::ALL;
            access.narrow(file, &[rights(0, 0o755)]);
            access
        };
        let (all, group, one, other) = (Access::ALL, of(rights(7, 0o640)), of(rights(7, 0o600)), of(rights(8, 0o600)));
        for (less, more) in [(one, group), (group, all), (one, all), (one, one), (all, all)] {
            assert!(less.is_within(&more) && (less == more || !more.is_within(&less)), "{less:?} {more:?}");
            let mut both = more;
            both.meet(&less);
            assert_eq!(both, less);
        }
        assert!(!one.is_within(&other) && !other.is_within(&one));
        let mut both = one;
        both.meet(&other);
        assert_eq!(both.mode, 0);
    }

    /// A store that is shown to all users, of one model, whose manifest names a blob.
    fn shown() -> (tempfile::TempDir, Store, Found) {
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let store = Store::create(place.path()).unwrap();
        // Others can put files there.
        fs::set_permissions(place.path().join("blobs"), fs::Permissions::from_mode(0o777)).unwrap();
        let blob = Digest::of(b"blob");
        fs::write(store.blob_path(&blob), "blob").unwrap();
        let layer = format!(r#"{{"mediaType":"x","digest":"{blob}","size":4}}"#);
        let name = "tiny".parse().unwrap();
        let manifest = store.manifest_path(&name);
        fs::create_dir_all(manifest.parent().unwrap()).unwrap();
        fs::write(manifest, format!(r#"{{"schemaVersion":2,"config":{layer},"layers":[{layer}]}}"#)).unwrap();
        store.guard(rustix::process::geteuid().as_raw());
        let found = store.find_one(&name).unwrap();
        (place, store, found)
    }

    #[test]
    fn a_model_is_made_of_the_manifest_that_tells_who_may_read_it() {
        let (_place, store, found) = shown();
        let bytes = store.manifest_bytes(&found).unwrap();
        assert_eq!(store.manifest_bytes(&found).unwrap(), bytes);
        let other = String::from_utf8(bytes.clone()).unwrap().replace("\"x\"", "\"y\"");
        fs::write(store.manifest_path(&found.name), other).unwrap();
        assert!(matches!(store.manifest_bytes(&found), Err(Error::NotFound(_))));
        fs::write(store.manifest_path(&found.name), &bytes).unwrap();
        assert_eq!(store.manifest_bytes(&found).unwrap(), bytes);
    }

    #[test]
    fn a_blob_that_fewer_may_read_by_now_is_not_opened() {
        let (_place, store, found) = shown();
        let blob = Digest::of(b"blob");
        let set_mode = |mode| fs::set_permissions(store.blob_path(&blob), fs::Permissions::from_mode(mode)).unwrap();
        // It was opened before it was counted: that is looked at, too.
        set_mode(0o600);
        store.blob_file(&blob).unwrap();
        set_mode(0o644);
        assert_eq!(store.access(&found).mode, 0o444);
        set_mode(0o600);
        assert!(matches!(store.blob_file(&blob), Err(Error::Damaged { .. })));
        set_mode(0o644);
        store.blob_file(&blob).unwrap();
    }
}
