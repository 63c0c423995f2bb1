//! Opening, reading and writing unfinished files.

use std::fs::{File, FileTimes};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use super::{
    BLOBS, Form, Handle, Ingest, MANIFESTS, Name, Pending, PendingState, Stat, State, blob_at, is_resumable, model_at,
    refused,
};
use crate::error::{AtPath, Error, Result};
use crate::store::ingest::{IngestDir, Place, Progress};

/// Handles begin here: those of other files are small.
const HANDLES: u64 = 1 << 48;

/// Whether a handle is one of an unfinished file.
pub(super) fn is_handle(handle: u64) -> bool {
    handle >= HANDLES
}

impl PendingState {
    /// Opens the file. One that has gone since its name was looked up is looked for again.
    fn open(&self, dir: &IngestDir, ino: u64, write: bool) -> Result<File> {
        let place = self.place.as_ref().ok_or(Error::Stale(ino))?;
        dir.file(place, write).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::Stale(ino),
            _ => Error::io(&self.path, error),
        })
    }
}

impl Ingest {
    /// Whether a handle is one of ours.
    pub fn opened(&self, handle: u64) -> bool {
        is_handle(handle)
    }

    fn handle(&self, handle: u64) -> Result<Handle> {
        self.state().handles.get(&handle).cloned().ok_or(Error::Stale(handle))
    }

    fn hand_out(&self, state: &mut State, pending: &Arc<Pending>, write: bool, shown: u64) -> Result<u64> {
        let mut inner = pending.state();
        let file = Arc::new(inner.open(&self.dir, pending.ino, write)?);
        inner.opens += 1;
        let handle = HANDLES + self.next.fetch_add(1, Ordering::Relaxed);
        state.handles.insert(handle, Handle { pending: pending.clone(), file, write, shown });
        Ok(handle)
    }

    /// What a file at this path is called in the store.
    fn stored_as(&self, path: &str) -> String {
        // A blob's own name is for what was hashed.
        let name = path.strip_prefix(BLOBS).and_then(|path| path.strip_prefix('/'));
        match name.filter(|name| is_resumable(name) && blob_at(path).is_none()) {
            Some(name) => name.to_owned(),
            None => format!("new-{:016x}", self.new_ino()),
        }
    }

    /// Makes a file and opens it; with `exclusive`, there must be none.
    pub fn create(&self, dir: &str, name: &str, exclusive: bool) -> Result<(Stat, u64)> {
        let path = format!("{dir}/{name}");
        let found = self.stat(&mut *self.state_at(&path)?, &path);
        if let Ok(found) = found {
            if exclusive {
                return Err(refused(&path, io::ErrorKind::AlreadyExists));
            }
            let opened = self.open(found.ino, true)?;
            let handle = opened.ok_or_else(|| refused(&path, io::ErrorKind::PermissionDenied))?;
            return Ok((found, handle));
        }
        if path.starts_with(MANIFESTS) && model_at(&path).is_none() {
            // What is no model's name could never become a model.
            return Err(Error::Invalid(format!("{path} is no place for a manifest")));
        }
        let mut state = self.state();
        let stored_as = self.stored_as(&path);
        self.dir.create(&stored_as)?;
        let pending = self.add(&mut state, path, Place::Here(stored_as), false);
        let handle = self.hand_out(&mut state, &pending, true, pending.ino)?;
        Ok((self.stat_of(&state, &pending)?, handle))
    }

    /// Opens a file; `None` if it is one that the tree shows and is opened for reading.
    pub fn open(&self, ino: u64, write: bool) -> Result<Option<u64>> {
        let path = self.state().manifests.get(&ino).cloned().filter(|_| write);
        let mut state = path.as_ref().map_or_else(|| Ok(self.state()), |path| self.state_at(path))?;
        if let Some(pending) = state.files.get(&ino).cloned() {
            let inner = pending.state();
            if write && inner.sealed {
                return Err(refused(&inner.path, io::ErrorKind::PermissionDenied));
            }
            drop(inner);
            return self.hand_out(&mut state, &pending, write, ino).map(Some);
        }
        if !write {
            return Ok(None);
        }
        let Some(path) = path else {
            return Err(refused(&format!("inode {ino}"), io::ErrorKind::PermissionDenied));
        };
        if let Some(pending) = state.pending_at(&path) {
            return self.hand_out(&mut state, &pending, true, ino).map(Some);
        }
        // ollama writes a manifest over the old one. Until it is whole, the model stays what it was.
        let stored_as = self.stored_as(&path);
        let file = self.dir.create(&stored_as)?;
        let (mut offset, mut buf) = (0, vec![0; 1 << 16]);
        loop {
            match self.vfs.read(ino, offset, &mut buf)? {
                0 => break,
                len => file.write_all_at(&buf[..len], offset).at(&path)?,
            }
            offset = file.metadata().at(&path)?.len();
        }
        let pending = self.add(&mut state, path, Place::Here(stored_as), false);
        self.hand_out(&mut state, &pending, true, ino).map(Some)
    }

    /// Whether a file can be opened for writing.
    pub fn may_write(&self, ino: u64) -> bool {
        let state = self.state();
        state.files.contains_key(&ino) || state.manifests.contains_key(&ino)
    }

    /// Whether the bytes of a manifest are read afresh: it may be replaced under its name.
    pub fn is_manifest(&self, ino: u64) -> bool {
        self.state().manifests.contains_key(&ino)
    }

    /// Reads from an open file.
    pub fn read(&self, handle: u64, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let handle = self.handle(handle)?;
        let mut len = 0;
        while len < buf.len() {
            match handle.file.read_at(&mut buf[len..], offset + len as u64).at(&handle.pending.state().path)? {
                0 => break,
                more => len += more,
            }
        }
        Ok(len)
    }

    /// Writes to an open file. A manifest that is whole with these bytes becomes a model.
    pub fn write(&self, handle: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        let handle = self.handle(handle)?;
        let pending = &handle.pending;
        self.change(&handle, |file, progress| progress.write(file, offset, bytes))?;
        // Programs do not look at what closing a file says.
        if self.is_to_be_published(pending) { self.publish(pending, &handle.file, false) } else { Ok(()) }
    }

    /// Whether writing to a file can take long: it is a manifest, of which a model is made.
    pub fn is_slow(&self, handle: u64) -> bool {
        self.handle(handle).is_ok_and(|handle| self.is_to_be_published(&handle.pending))
    }

    fn is_to_be_published(&self, pending: &Pending) -> bool {
        let state = pending.state();
        (state.names > 0 || state.published) && model_at(&state.path).is_some()
    }

    fn change(&self, handle: &Handle, work: impl FnOnce(&File, &mut Progress) -> io::Result<()>) -> Result<()> {
        // Whoever checks the content waits for this, and nothing is written after it.
        let mut progress = handle.pending.progress();
        let mut state = handle.pending.state();
        if !handle.write || state.sealed {
            return Err(refused(&state.path, io::ErrorKind::PermissionDenied));
        }
        state.dirty = true;
        let path = state.path.clone();
        drop(state);
        work(&handle.file, &mut progress).at(path)
    }

    /// Changes size and time. What is finished takes no other size, and keeps its time.
    pub fn set(
        &self,
        ino: u64,
        handle: Option<u64>,
        size: Option<u64>,
        mtime: Option<SystemTime>,
    ) -> Result<Option<Stat>> {
        let opened = handle.filter(|handle| is_handle(*handle)).map(|handle| self.handle(handle)).transpose()?;
        // The kernel truncates what it opens by the inode alone.
        let opened = match opened {
            Some(opened) => Some(opened),
            None => {
                let state = self.state();
                let by_inode = |handle: &&Handle| handle.shown == ino && handle.write;
                match (state.handles.values().find(by_inode), state.files.get(&ino)) {
                    (Some(handle), _) => Some(handle.clone()),
                    (None, Some(pending)) => Some(self.held(pending)?),
                    (None, None) => None,
                }
            }
        };
        let Some(opened) = opened else {
            return match size {
                Some(_) => Err(refused(&format!("inode {ino}"), io::ErrorKind::PermissionDenied)),
                None => self.attr(ino),
            };
        };
        if let Some(size) = size {
            self.change(&opened, |file, progress| {
                progress.cut(size);
                file.set_len(size)
            })?;
        }
        if let Some(mtime) = mtime.filter(|_| !opened.pending.state().sealed) {
            let times = FileTimes::new().set_modified(mtime);
            opened.file.set_times(times).at(&opened.pending.state().path)?;
        }
        self.stat_of(&self.state(), &opened.pending).map(|stat| Some(Stat { ino, ..stat }))
    }

    /// A file that is not open, for one change.
    fn held(&self, pending: &Arc<Pending>) -> Result<Handle> {
        let inner = pending.state();
        let file = Arc::new(inner.open(&self.dir, pending.ino, !inner.sealed)?);
        Ok(Handle { pending: pending.clone(), file, write: true, shown: pending.ino })
    }

    /// Makes what was written durable.
    pub fn sync(&self, handle: u64) -> Result<()> {
        let handle = self.handle(handle)?;
        handle.file.sync_all().at(&handle.pending.state().path)
    }

    /// What closing a file brings about: a whole manifest becomes a model, and what was written under a blob's name a
    /// blob.
    pub fn flush(&self, handle: u64) -> Result<()> {
        let Handle { pending, file, write, .. } = self.handle(handle)?;
        let (path, is_dirty) = {
            let state = pending.state();
            (state.path.clone(), write && state.dirty && !state.sealed && (state.names > 0 || state.published))
        };
        match blob_at(&path) {
            _ if !is_dirty => Ok(()),
            Some(digest) => self.seal(&pending, &digest),
            None if model_at(&path).is_some() => self.publish(&pending, &file, true),
            None => Ok(()),
        }
    }

    /// Closes an open file.
    pub fn release(&self, handle: u64) {
        let mut state = self.state();
        let Some(Handle { pending, .. }) = state.handles.remove(&handle) else { return };
        let mut inner = pending.state();
        inner.opens -= 1;
        if inner.opens > 0 {
            return;
        }
        let (path, is_dirty, is_gone) = (inner.path.clone(), inner.dirty, inner.names == 0);
        drop(inner);
        if is_gone {
            state.files.remove(&pending.ino);
        } else if model_at(&path).is_some() && is_name_of(&state, &path, &pending) {
            if is_dirty {
                tracing::warn!("{path} was not written to its end: it is dropped");
            }
            self.drop_name(&mut state, &path);
        }
    }

    /// Takes a name from a file, which goes with its last one; open files stay readable.
    pub(super) fn drop_name(&self, state: &mut State, path: &str) {
        let Some(Name::File(ino)) = state.names.remove(path) else { return };
        let Some(pending) = state.files.get(&ino).cloned() else { return };
        let mut inner = pending.state();
        inner.names -= 1;
        if inner.names == 0 {
            if let Some(place) = inner.place.take() {
                self.dir.remove(&place);
            }
            if inner.opens == 0 {
                state.files.remove(&ino);
            }
        }
    }

    /// Gives a file another name. Under a blob's name it must have that blob's content.
    pub fn rename(&self, from: (&str, &str), to: (&str, &str), replace: bool) -> Result<()> {
        let (old, new) = (format!("{}/{}", from.0, from.1), format!("{}/{}", to.0, to.1));
        let (pending, target) = {
            drop(self.state_at(&old)?);
            let mut state = self.state_at(&new)?;
            let Some(pending) = state.pending_at(&old) else {
                self.stat(&mut state, &old)?;
                return Err(refused(&old, io::ErrorKind::PermissionDenied));
            };
            (pending, self.stat(&mut state, &new).ok())
        };
        if old == new {
            return Ok(());
        }
        if target.is_some() && !replace {
            return Err(refused(&new, io::ErrorKind::AlreadyExists));
        }
        if target.is_some_and(|target| target.form == Form::Dir) {
            return Err(Error::IsDir);
        }
        if new.starts_with(MANIFESTS) && model_at(&new).is_none() {
            return Err(Error::Invalid(format!("{new} is no place for a manifest")));
        }
        let digest = blob_at(&new);
        match &digest {
            Some(digest) => self.check(&pending, digest)?,
            None if pending.state().sealed => return Err(refused(&old, io::ErrorKind::PermissionDenied)),
            None => {}
        }
        if let Some(name) = model_at(&new)
            && self.publish_renamed(&pending, &self.held(&pending)?.file, &name, [&old, &new])?
        {
            return Ok(());
        }
        let mut state = self.state_at(&new)?;
        if !is_name_of(&state, &old, &pending) {
            return Err(Error::NotFound(old));
        }
        if digest.is_some() && self.stat(&mut state, &new).is_ok() {
            // The blob is there already.
            self.drop_name(&mut state, &old);
            return Ok(());
        }
        self.drop_name(&mut state, &new);
        let stored_as = digest.map_or_else(|| self.stored_as(&new), |digest| digest.file_name());
        let mut inner = pending.state();
        let place = inner.place.clone().ok_or_else(|| Error::NotFound(old.clone()))?;
        inner.place = Some(self.dir.rename(&place, &stored_as)?);
        inner.path.clone_from(&new);
        inner.dirty = true;
        drop(inner);
        state.names.remove(&old);
        state.names.insert(new, Name::File(pending.ino));
        Ok(())
    }

    /// Removes a name: an unfinished file, a model by its manifest, a blob that no model needs.
    pub fn unlink(&self, dir: &str, name: &str) -> Result<()> {
        let path = format!("{dir}/{name}");
        let mut state = self.state_at(&path)?;
        let own = state.names.get(&path).cloned();
        match &own {
            Some(Name::Dir(_)) => return Err(Error::IsDir),
            Some(Name::File(_)) => self.drop_name(&mut state, &path),
            Some(Name::Link(..) | Name::Alias(_)) => _ = state.names.remove(&path),
            None => {}
        }
        let seen = self.stat(&mut state, &path);
        drop(state);
        if let (Some(model), Ok(_)) = (model_at(&path), &seen) {
            return self.remove_model(&model);
        }
        match (blob_at(&path), seen) {
            (Some(digest), Err(Error::NotFound(_))) => {
                let is_removed = self.remove_blob(&digest);
                if is_removed || own.is_some() { Ok(()) } else { Err(Error::NotFound(path)) }
            }
            _ if own.is_some() => Ok(()),
            // A model needs it, perhaps one that came this moment. Whoever removes it goes on as if it were gone.
            (Some(_), Ok(_)) => Ok(()),
            (_, Err(error)) => Err(error),
            (None, Ok(_)) => Err(refused(&path, io::ErrorKind::PermissionDenied)),
        }
    }
}

pub(super) fn is_name_of(state: &State, path: &str, pending: &Pending) -> bool {
    matches!(state.names.get(path), Some(Name::File(ino)) if *ino == pending.ino)
}
