//! The digests that the tensors of a model have in ollama's other form, computed by `wmount prepare` and kept here.
//!
//! ollama has stored a tensor under its own name or as `data`, so a blob of one form has another digest in the other,
//! which takes a read of the whole tensor to know. What is computed is in `.wmount/forms/`, a file for each model and
//! form, sealed like a memo; its key is the digest of the manifest, so that of a manifest that was replaced is nobody's.

use std::collections::HashMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use tempfile::NamedTempFile;

use super::memo::{parse, seal};
use super::{Found, OWN, Store, make_dir};
use crate::digest::Digest;
use crate::error::{AtPath, Error, Result};
use crate::format::Form;
use crate::model::{Model, ModelName};

/// The directory in `.wmount/`.
const DIR: &str = "forms";

impl Form {
    fn key(self, manifest: &[u8]) -> String {
        format!("{} {}", self.name(), Digest::of(manifest))
    }

    fn file(self, name: &ModelName) -> String {
        format!("{}.{}", Digest::of(name.manifest_path().as_bytes()).hex(), self.name())
    }
}

/// The files of all models by name, each with a number that says which version of it this is.
pub(super) struct FormFiles(HashMap<String, u64>);

impl FormFiles {
    /// The numbers of a model's files, 0 where it has none.
    pub fn of(&self, name: &ModelName) -> [u64; 2] {
        match self.0.is_empty() {
            true => [0; 2],
            false => Form::ALL.map(|form| self.0.get(&form.file(name)).copied().unwrap_or(0)),
        }
    }
}

/// A number, never 0, that another version of a file does not have.
fn version(file: &fs::Metadata) -> u64 {
    let parts = [file.ino(), file.len(), file.mtime() as u64, file.mtime_nsec() as u64];
    Digest::of(&parts.map(u64::to_le_bytes).concat()).prefix().max(1)
}

impl Store {
    /// The files of all models.
    pub(super) fn form_files(&self) -> FormFiles {
        let entries = fs::read_dir(self.root.join(OWN).join(DIR)).into_iter().flatten().flatten();
        FormFiles(
            entries
                .filter_map(|entry| Some((entry.file_name().into_string().ok()?, version(&entry.metadata().ok()?))))
                .collect(),
        )
    }

    /// The same for one model.
    pub(super) fn form_files_of(&self, name: &ModelName) -> [u64; 2] {
        let dir = self.root.join(OWN).join(DIR);
        Form::ALL.map(|form| fs::metadata(dir.join(form.file(name))).map_or(0, |found| version(&found)))
    }

    /// Makes known what was computed for a model with this manifest.
    pub(super) fn fill_forms(&self, found: &Found, manifest: &[u8], model: &mut Model) {
        for form in Form::ALL.into_iter().zip(found.forms).filter(|(_, file)| *file != 0).map(|(form, _)| form) {
            let Some(bytes) = self.own_file(&format!("{DIR}/{}", form.file(&found.name))) else { continue };
            let Some(digests) = parse(&bytes, &form.key(manifest)) else {
                tracing::warn!("{}@{}: what was prepared is damaged or old; prepare it again", found.name, form.name());
                continue;
            };
            let (digests, rest) = digests.as_chunks::<32>();
            if digests.len() == model.tensors.len() && rest.is_empty() {
                let both = model.tensors.iter_mut().zip(digests);
                both.for_each(|(tensor, digest)| form.set_digest(tensor, Digest::from_bytes(*digest)));
            }
        }
    }

    /// Keeps the digests of a model's tensors, in their order; mounts notice it.
    pub fn set_form(&self, found: &Found, form: Form, digests: &[Digest]) -> Result<()> {
        let manifest = self.manifest_bytes(found)?;
        let result: Vec<u8> = digests.iter().flat_map(|digest| *digest.as_bytes()).collect();
        let dir = self.own_path(DIR)?;
        make_dir(&dir).at(&dir)?;
        let mut file = NamedTempFile::new_in(&dir).at(&dir)?;
        file.write_all(&seal(&form.key(&manifest), &result)).at(file.path())?;
        file.as_file().set_permissions(fs::Permissions::from_mode(0o644)).at(file.path())?;
        let path = dir.join(form.file(&found.name));
        file.persist(&path).map_err(|error| Error::io(&path, error.error))?;
        self.wake_mounts();
        Ok(())
    }

    /// Removes what was computed for models that are gone.
    pub(super) fn clean_forms(&self, models: &[Found]) -> Result<()> {
        let kept = |file: &String| models.iter().any(|found| Form::ALL.iter().any(|it| it.file(&found.name) == *file));
        for file in self.form_files().0.keys().filter(|file| !kept(file)) {
            let path = self.own_path(&format!("{DIR}/{file}"))?;
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(Error::io(&path, error)),
                _ => {}
            }
        }
        Ok(())
    }
}
