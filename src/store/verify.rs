//! Hashing blobs against their names, and reading the models that they make up.

use std::collections::{BTreeMap, HashSet};

use super::{Found, Repaired, Store};
use crate::chunks::{buffer, for_each_chunk};
use crate::cores::on_all_cores;
use crate::digest::{Digest, Hasher};
use crate::error::{Error, Result};
use crate::format::ollama::{self, Layer};

/// What `verify` found.
#[derive(Debug, Default, serde::Serialize)]
pub struct VerifyReport {
    /// Blobs hashed.
    pub blobs: u64,
    /// Their bytes, as the manifests say.
    pub bytes: u64,
    /// What is wrong.
    pub damaged: Vec<Damage>,
    /// What was wrong and is mended.
    pub repaired: Vec<Repaired>,
    /// Why a place could not be searched for bytes.
    pub notes: Vec<String>,
}

impl VerifyReport {
    /// Adds what nobody could look at, and which may be a model.
    pub fn add_hidden(&mut self, hidden: Vec<Error>) {
        let damage = |error: Error| Damage::of_manifest(error.to_string(), Vec::new());
        self.damaged.extend(hidden.into_iter().map(damage));
    }

    /// Moves what is mended to the repaired; `mended` says from where.
    pub(super) fn settle(&mut self, mended: impl Fn(&Digest, u64) -> Option<String>) {
        for damage in std::mem::take(&mut self.damaged) {
            match damage.digest.and_then(|digest| mended(&digest, damage.size)) {
                Some(from) => self.repaired.push(Repaired { damage, from }),
                None => self.damaged.push(damage),
            }
        }
    }
}

/// A blob or manifest that is not what it should be.
#[derive(Debug, serde::Serialize)]
pub struct Damage {
    /// The blob; `None` for a manifest that cannot be read.
    pub digest: Option<Digest>,
    /// The length that the manifests say, in bytes.
    pub size: u64,
    /// What is wrong with it.
    pub fault: String,
    /// The models that it hurts; none if nobody can tell which.
    pub models: Vec<String>,
    /// The tensors and files that it holds, a few of them, by name.
    pub holds: Vec<String>,
}

impl Damage {
    fn of_manifest(fault: String, models: Vec<String>) -> Damage {
        Damage { digest: None, size: 0, fault, models, holds: Vec::new() }
    }
}

/// Who needs a blob, and for what.
#[derive(Debug, Clone, Default)]
struct Users {
    models: Vec<String>,
    holds: Vec<String>,
}

impl Users {
    /// A blob can go by very many names; so many of them say what it is.
    const NAMES: usize = 4;

    fn add(&mut self, model: &str, layer: &Layer) {
        if self.models.last().is_none_or(|last| last != model) {
            self.models.push(model.to_owned());
        }
        let name = match layer.media_type.as_str() {
            ollama::OWN_RECIPE => format!("the recipe of {:?}", layer.name),
            ollama::OWN_FRAGMENT => "a part of original/".into(),
            _ if layer.name.is_empty() => return,
            _ if layer.is_tensor() => format!("tensor {:?}", layer.name),
            _ => format!("file {:?}", layer.name),
        };
        if self.holds.len() < Self::NAMES && !self.holds.contains(&name) {
            self.holds.push(name);
        }
    }
}

impl Store {
    /// Hashes the blobs of these models, on all cores, and reads the models; `advance` is told of the bytes done.
    pub fn verify(&self, models: &[Found], advance: &(dyn Fn(u64) + Sync)) -> Result<VerifyReport> {
        let mut report = VerifyReport::default();
        let mut whole = Vec::new();
        let mut users: BTreeMap<(Digest, u64), Users> = BTreeMap::new();
        for found in models {
            let model = found.name.to_string();
            match self.manifest(found) {
                Ok(manifest) => {
                    for layer in manifest.blobs() {
                        users.entry((layer.digest, layer.size)).or_default().add(&model, layer);
                    }
                    whole.push(found);
                }
                Err(error) => report.damaged.push(Damage::of_manifest(error.to_string(), vec![model])),
            }
        }
        let blobs: Vec<((Digest, u64), Users)> = users.into_iter().collect();
        let damage = |index: usize| {
            let ((digest, size), users) = &blobs[index];
            let fault = self.check_blob(digest, *size, advance).err()?;
            let Users { models, holds } = users.clone();
            Some(Damage { digest: Some(*digest), size: *size, fault, models, holds })
        };
        report.damaged.extend(on_all_cores(blobs.len(), &damage).into_iter().flatten());
        // Blobs can be what their names say, and no model.
        let told: HashSet<Digest> = report.damaged.iter().filter_map(|damage| damage.digest).collect();
        for found in whole {
            match self.load(found) {
                Err(Error::Damaged { digest, .. }) if told.contains(&digest) => {}
                Err(error) => {
                    report.damaged.push(Damage::of_manifest(error.to_string(), vec![found.name.to_string()]));
                }
                Ok(_) => {}
            }
        }
        report.blobs = blobs.len() as u64;
        report.bytes = blobs.iter().map(|((_, size), _)| size).fold(0, |sum, size| sum.saturating_add(*size));
        report.damaged.sort_by_key(|damage| damage.digest);
        Ok(report)
    }

    /// Bytes of the blobs of these models, as far as their manifests can be read.
    pub fn total_bytes(&self, models: &[Found]) -> u64 {
        let manifests = models.iter().filter_map(|found| self.manifest(found).ok());
        let blobs: BTreeMap<Digest, u64> =
            manifests.flat_map(|manifest| manifest.blobs().map(|l| (l.digest, l.size)).collect::<Vec<_>>()).collect();
        // A sum of claims.
        blobs.values().fold(0, |sum, size| sum.saturating_add(*size))
    }

    /// Why a blob is damaged, if it is.
    pub(super) fn check_blob(&self, digest: &Digest, size: u64, advance: &(dyn Fn(u64) + Sync)) -> Result<(), String> {
        let say = |error: Error| match error {
            Error::Damaged { fault, .. } => fault,
            other => other.to_string(),
        };
        let file = self.blobs.open(digest).map_err(say)?;
        let len = file.metadata().map_err(|error| error.to_string())?.len();
        if len != size {
            return Err(format!("it has {len} bytes, its manifest says {size}"));
        }
        let mut hasher = Hasher::new();
        let read = |at, part: &mut [u8]| self.blobs().read_exact(digest, at, part).map_err(say);
        for_each_chunk(0..size, &mut buffer(size), read, |part| {
            hasher.update(part);
            advance(part.len() as u64);
            Ok(())
        })?;
        digest.check(hasher.finish())
    }
}
