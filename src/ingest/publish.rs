//! From what was written to blobs and models, and back.

use std::collections::HashSet;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

use super::files::is_name_of;
use super::{BLOBS, Ingest, MANIFESTS, Name, Pending, model_at};
use crate::digest::Digest;
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::ollama::{Layer, MAX_MANIFEST, Manifest, OWN_RECIPE};
use crate::model::ModelName;
use crate::store::Found;
use crate::store::ingest::{Place, Progress};

impl Ingest {
    /// Checks that a file has the content of a blob, and lets nobody write to it any more.
    pub(super) fn check(&self, pending: &Pending, digest: &Digest) -> Result<()> {
        let place = {
            let mut state = pending.state();
            if std::mem::replace(&mut state.sealed, true) {
                // It is one already; two blobs with one content there are not.
                let path = format!("{BLOBS}/{}", digest.file_name());
                return if state.path == path {
                    Ok(())
                } else {
                    Err(Error::Invalid(format!("{path} has other content")))
                };
            }
            state.place.clone()
        };
        let gone = || Error::NotFound(pending.state().path.clone());
        let checked = place.ok_or_else(gone).and_then(|place| self.dir.finish(&place, &pending.progress(), digest));
        checked.inspect_err(|_| pending.state().sealed = false)
    }

    /// Makes a finished blob of a file that has a blob's name already.
    pub(super) fn seal(&self, pending: &Pending, digest: &Digest) -> Result<()> {
        self.check(pending, digest)?;
        let _state = self.state();
        let mut inner = pending.state();
        if let Some(place) = &inner.place {
            inner.place = Some(self.dir.rename(place, &digest.file_name())?);
        }
        Ok(())
    }

    /// Makes a model of a manifest that was written; nothing if it is not whole yet, which is an error at the `last`
    /// moment.
    pub(super) fn publish(&self, pending: &Pending, file: &File, last: bool) -> Result<()> {
        let _one = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let path = pending.state().path.clone();
        let (true, Some(name)) = (pending.state().dirty, model_at(&path)) else { return Ok(()) };
        let Some((manifest, bytes)) = written(&path, file, last)? else { return Ok(()) };
        pending.state().dirty = false;
        let made = self.make_model(&name, &manifest, &bytes);
        pending.state().published = made.is_ok();
        let mut state = self.state();
        if is_name_of(&state, &path, pending) {
            // The tree has it, or nothing has.
            self.drop_name(&mut state, &path);
        }
        made
    }

    /// Makes a model of a manifest that gets its name by being renamed; `false` if it is empty. After an error it is where
    /// it was.
    pub(super) fn publish_renamed(
        &self,
        pending: &Pending,
        file: &File,
        name: &ModelName,
        [old, new]: [&str; 2],
    ) -> Result<bool> {
        let _one = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        // What is written from here on makes it dirty again.
        pending.state().dirty = false;
        let made = written(new, file, true)
            .and_then(|written| written.map(|(manifest, bytes)| self.make_model(name, &manifest, &bytes)).transpose());
        if !matches!(made, Ok(Some(()))) {
            pending.state().dirty = true;
            return made.map(|_| false);
        }
        let mut state = self.state();
        let mut inner = pending.state();
        (inner.path, inner.published) = (new.into(), true);
        drop(inner);
        if is_name_of(&state, old, pending) {
            self.drop_name(&mut state, old);
        }
        self.drop_name(&mut state, new);
        Ok(true)
    }

    fn make_model(&self, name: &ModelName, manifest: &Manifest, bytes: &[u8]) -> Result<()> {
        let same = self.same_model(manifest, bytes);
        let old = self.manifest_of(name);
        self.check_replaced(name, old.as_ref(), same.as_deref())?;
        let held = self.hold(old);
        let mut made = HashSet::new();
        let done = match same {
            // What `ollama/` shows of a model is less than the store has of it.
            Some(own) => self.dir.publish(name, &own),
            None => manifest
                .blobs()
                .try_for_each(|layer| self.provide(layer, &mut made))
                .and_then(|()| self.dir.publish(name, bytes)),
        };
        let done = done.and_then(|published| self.vfs.refresh().map(|_| published));
        self.let_go(held);
        let mut state = self.state();
        for digest in &made {
            self.dir.remove(&Place::Here(digest.file_name()));
        }
        for layer in done?.blobs() {
            self.drop_name(&mut state, &format!("{BLOBS}/{}", layer.digest.file_name()));
        }
        for dir in dirs_above(name) {
            state.names.remove(&dir);
        }
        Ok(())
    }

    /// Checks that the model whose place a manifest takes, unless it is the same, has no files that `ollama/` does not show:
    /// they would be lost, and nobody has asked for that.
    fn check_replaced(&self, name: &ModelName, old: Option<&Manifest>, by: Option<&[u8]>) -> Result<()> {
        let is_imported = |old: &&Manifest| old.layers.iter().any(|layer| layer.media_type == OWN_RECIPE);
        let Some(old) = old.filter(is_imported) else { return Ok(()) };
        if by.is_some_and(|by| Manifest::parse(by).is_ok_and(|by| by == *old)) {
            return Ok(());
        }
        let what =
            "wmount imported this model from files that ollama does not know: give another name, or remove it first";
        Err(std::io::Error::new(ErrorKind::AlreadyExists, what)).at(self.vfs.store().manifest_path(name))
    }

    fn manifest_of(&self, name: &ModelName) -> Option<Manifest> {
        let store = self.vfs.store();
        store.manifest(&store.find_one(name).ok()?).ok()
    }

    /// Gives names of their own to the blobs that ollama sees of a model which is about to go: at no moment are they not
    /// there, since ollama touches what it has just seen.
    fn hold(&self, old: Option<Manifest>) -> Vec<(String, Arc<Pending>)> {
        let layers = old.iter().filter(|old| old.is_foreign()).flat_map(Manifest::blobs);
        let stored = layers.filter(|layer| !layer.is_ours()).filter_map(|layer| {
            Some((format!("{BLOBS}/{}", layer.digest.file_name()), self.dir.stored(&layer.digest)?))
        });
        let stored: Vec<(String, Place)> = stored.collect();
        let mut state = self.state();
        let mut held = Vec::new();
        for (path, place) in stored {
            if !state.names.contains_key(&path) {
                let pending = self.add(&mut state, path.clone(), place, true);
                held.push((path, pending));
            }
        }
        held
    }

    /// Takes these names back from what the tree shows; ollama removes the others itself.
    fn let_go(&self, mut held: Vec<(String, Arc<Pending>)>) {
        held.retain(|(path, _)| !matches!(self.vfs.resolve(path), Err(Error::NotFound(_))));
        let mut state = self.state();
        for (path, pending) in held {
            if is_name_of(&state, &path, &pending) {
                self.drop_name(&mut state, &path);
            }
        }
    }

    /// The stored manifest of a model that `ollama/` shows with this manifest, if the two differ.
    fn same_model(&self, manifest: &Manifest, bytes: &[u8]) -> Option<Vec<u8>> {
        let (store, first) = (self.vfs.store(), manifest.layers.first()?.digest);
        let is_same = |found: &Found| {
            let own = store.manifest(found).ok()?;
            let has_first = own.layers.iter().any(|layer| layer.digest == first || layer.named == Some(first));
            // What is shown of a model is planned for this: not of all of them.
            if !has_first || own.is_foreign() && !own.has_ours() {
                return None;
            }
            let shown = self.vfs.resolve(&format!("{MANIFESTS}/{}", found.name.manifest_path())).ok()?;
            let mut text = vec![0; bytes.len()];
            let is_same = shown.size == bytes.len() as u64
                && self.vfs.read(shown.ino, 0, &mut text).is_ok_and(|len| len == bytes.len())
                && text == bytes;
            if is_same { store.manifest_bytes(found).ok() } else { None }
        };
        self.vfs.tree().entries().iter().find_map(|entry| is_same(&entry.found))
    }

    /// Sees to it that a blob which a manifest names is one of the store or finished here: what is put together when
    /// it is read becomes a blob of its own.
    fn provide(&self, layer: &Layer, made: &mut HashSet<Digest>) -> Result<()> {
        if self.dir.has(&layer.digest, layer.size) {
            return Ok(());
        }
        let name = layer.digest.file_name();
        let shown = self.vfs.resolve(&format!("{BLOBS}/{name}")).ok().filter(|attr| attr.size == layer.size);
        let shown =
            shown.ok_or_else(|| Error::Invalid(format!("the manifest names {}, which is not there", layer.digest)))?;
        let stored_as = format!("new-{:016x}", self.new_ino());
        let place = Place::Here(stored_as.clone());
        let copy = || {
            let file = self.dir.create(&stored_as)?;
            let (mut progress, mut buf, mut offset) = (Progress::default(), vec![0; 1 << 20], 0);
            while offset < shown.size {
                let len = self.vfs.read(shown.ino, offset, &mut buf)?;
                if len == 0 {
                    return Err(Error::Damaged { digest: layer.digest, fault: "it is shorter than it seems".into() });
                }
                progress.write(&file, offset, &buf[..len]).at(&name)?;
                offset += len as u64;
            }
            self.dir.finish(&place, &progress, &layer.digest)?;
            self.dir.rename(&place, &name).map(drop)
        };
        // Whoever has the model open keeps its blobs from gc.
        self.vfs.open(shown.ino)?;
        let copied = copy();
        self.vfs.release(shown.ino);
        copied.inspect_err(|_| self.dir.remove(&place))?;
        made.insert(layer.digest);
        Ok(())
    }

    /// Removes a model whose manifest was removed. The directories above it stay until they are removed, too.
    pub(super) fn remove_model(&self, name: &ModelName) -> Result<()> {
        let _one = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let (held, now) = (self.hold(self.manifest_of(name)), SystemTime::now());
        self.state().names.extend(dirs_above(name).map(|dir| (dir, Name::Dir(now))));
        let removed = self.dir.remove_model(name).and_then(|()| self.vfs.refresh());
        self.let_go(held);
        let mut state = self.state();
        for dir in dirs_above(name).filter(|dir| self.vfs.resolve(dir).is_ok()) {
            state.names.remove(&dir);
        }
        removed.map(drop)
    }

    /// Removes a blob that the tree does not show, if the store has it and no manifest names it.
    pub(super) fn remove_blob(&self, digest: &Digest) -> bool {
        self.dir.remove_blob(digest).unwrap_or_else(|error| {
            tracing::debug!("{digest} stays until wmount gc: {error}");
            false
        })
    }
}

/// The manifest that a file holds and its bytes; `None` if it is not whole yet, which is an error at the `last` moment unless
/// nothing was written.
fn written(path: &str, file: &File, last: bool) -> Result<Option<(Manifest, Vec<u8>)>> {
    let len = file.metadata().at(path)?.len();
    if len > MAX_MANIFEST {
        return Err(Error::format(path, Fault::new(0, "is too long for a manifest")));
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0).at(path)?;
    match Manifest::parse(&bytes) {
        Ok(manifest) => Ok(Some((manifest, bytes))),
        Err(fault) if last && !bytes.is_empty() => Err(Error::format(path, fault)),
        Err(_) => Ok(None),
    }
}

/// The directories that hold a model's manifest, the innermost last.
fn dirs_above(name: &ModelName) -> impl Iterator<Item = String> {
    let host = format!("{MANIFESTS}/{}", name.host);
    let namespace = format!("{host}/{}", name.namespace);
    let model = format!("{namespace}/{}", name.name);
    [host, namespace, model].into_iter()
}
