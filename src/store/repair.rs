//! Getting the bytes of damaged blobs back from wherever else they are.
//!
//! Content decides: what is found is written as a new blob, hashed on the way, and takes the place of the damaged one
//! only if it has the digest that the name says. It is looked for, in this order,
//!
//! - in other stores, as the same blob;
//! - in this store and the others, as a tensor of the same length in another blob, behind the header that the
//!   manifests say;
//! - in directories of original files, by doing what an import would do.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::import::{self, Progress};
use super::stage::Stage;
use super::verify::{Damage, VerifyReport};
use super::{OWN, Store};
use crate::budget::Budget;
use crate::chunks::{buffer, for_each_chunk};
use crate::digest::{Digest, Hasher};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::format::Form;
use crate::format::ollama::{self, Layer, Manifest};

/// The file in `.wmount/` that tells mounts what was repaired.
const LOG: &str = "repaired";
/// Lines of earlier repairs that are kept.
const LOG_LINES: usize = 10_000;

/// A blob that was damaged and is whole again.
#[derive(Debug, serde::Serialize)]
pub struct Repaired {
    /// What was wrong.
    #[serde(flatten)]
    pub damage: Damage,
    /// Where its bytes came from.
    pub from: String,
}

/// One line of the log: a blob that was repaired, each time it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RepairedFile {
    /// The blob.
    pub digest: Digest,
    /// The inode number of the file that was damaged, 0 if there was none; it may be that of another file since.
    pub inode: u64,
    /// When, in nanoseconds since 1970, so that no two repairs are one; 0 where the log was written without.
    pub time: u128,
}

/// What is looked for, and what was found.
struct Search<'a> {
    stage: &'a Stage<'a>,
    /// The lengths of the blobs that are still missing.
    missing: HashMap<Digest, u64>,
    found: HashMap<Digest, String>,
}

impl Store {
    /// Mends what the report says is damaged, as far as its bytes are anywhere else: in this store, or in one of
    /// `from`, each another store or a directory of original files.
    ///
    /// What was mended moves in the report from the damaged to the repaired.
    pub fn repair(&self, report: &mut VerifyReport, from: &[PathBuf], progress: &dyn Progress) -> Result<()> {
        let blobs = report.damaged.iter().filter_map(|damage| Some((damage.digest?, damage.size)));
        let missing: HashMap<Digest, u64> = blobs.collect();
        if missing.is_empty() {
            return Ok(());
        }
        let lock = self.lock()?;
        let stage = Stage::replacing(self, &lock, missing.clone())?;
        let inode = |digest| fs::metadata(self.blob_path(digest)).map_or(0, |found| found.ino());
        let inodes: Vec<(Digest, u64)> = missing.keys().map(|digest| (*digest, inode(digest))).collect();
        let (stores, others): (Vec<&PathBuf>, Vec<&PathBuf>) = from.iter().partition(|path| import::is_store(path));
        let stores: Vec<Store> = stores.into_iter().map(Store::open).collect::<Result<_>>()?;
        let mut search = Search { stage: &stage, missing, found: HashMap::new() };
        search.made_anew()?;
        stores.iter().try_for_each(|store| search.same_blobs(store))?;
        let all: Vec<&Store> = std::iter::once(self).chain(&stores).collect();
        search.tensors(&all)?;
        for path in others {
            report.notes.extend(search.originals(path, progress)?);
        }
        stage.flush()?;
        let Search { found, .. } = search;
        self.announce(inodes.into_iter().filter(|(digest, _)| found.contains_key(digest)).collect());
        report.settle(|digest, size| {
            let from = found.get(digest)?;
            self.blobs.forget(digest);
            self.check_blob(digest, size, &|_| ()).is_ok().then(|| from.clone())
        });
        Ok(())
    }

    /// Lets running mounts know of blobs that are repaired, each with the inode number of its damaged file, and drops what
    /// was computed from damaged bytes.
    pub(super) fn announce(&self, files: Vec<(Digest, u64)>) {
        // However many there are, running mounts must hear of all that are new.
        let kept = files.len().max(LOG_LINES);
        for memo in ["memo", "memo.json"] {
            let path = self.root.join(OWN).join(memo);
            let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
        }
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let new = files.into_iter().map(|(digest, inode)| RepairedFile { digest, inode, time });
        let lines = self.repairs().into_iter().chain(new);
        let line = |it: RepairedFile| format!("{} {} {}\n", it.digest.file_name(), it.inode, it.time);
        let lines: Vec<String> = lines.map(line).collect();
        self.set_own_file(LOG, lines[lines.len().saturating_sub(kept)..].concat().as_bytes());
        self.wake_mounts();
    }

    /// The files that were damaged and replaced.
    pub fn repairs(&self) -> Vec<RepairedFile> {
        let text = self.own_file(LOG).unwrap_or_default();
        let line = |line: &str| {
            let mut words = line.split(' ');
            let digest = Digest::from_file_name(words.next()?)?;
            let inode = words.next()?.parse().ok()?;
            let time = words.next().map_or(Ok(0), str::parse).ok()?;
            Some(RepairedFile { digest, inode, time })
        };
        String::from_utf8_lossy(&text).lines().filter_map(line).collect()
    }

    fn manifests(&self) -> Vec<(String, Manifest)> {
        let found = self.find().unwrap_or_default();
        found.into_iter().filter_map(|found| Some((found.name.to_string(), self.manifest(&found).ok()?))).collect()
    }
}

/// A tensor that could be what is missing.
struct Candidate<'a> {
    store: &'a Store,
    digest: Digest,
    offset: u64,
    len: u64,
    model: String,
    tensor: String,
}

impl Search<'_> {
    fn found(&mut self, digest: &Digest, from: String) {
        if self.missing.remove(digest).is_some() {
            self.found.insert(*digest, from);
        }
    }

    /// What wmount writes into every store, and what is nothing.
    fn made_anew(&mut self) -> Result<()> {
        for known in [&ollama::safetensors_config(&[])[..], b""] {
            let (digest, is_new) = self.stage.add_bytes(known)?;
            if is_new {
                self.found(&digest, "made anew".into());
            }
        }
        Ok(())
    }

    /// The same blobs in another store.
    fn same_blobs(&mut self, store: &Store) -> Result<()> {
        for (digest, len) in self.missing.clone() {
            if self.write(digest, &[], store, &digest, 0, len)? {
                self.found(&digest, store.blob_path(&digest).display().to_string());
            }
        }
        Ok(())
    }

    /// The same tensors in other blobs.
    fn tensors(&mut self, stores: &[&Store]) -> Result<()> {
        let manifests: Vec<_> = stores.iter().map(|store| (*store, store.manifests())).collect();
        let layers = || manifests.iter().flat_map(|(_, manifests)| manifests).flat_map(|(_, it)| &it.layers);
        // By length: the headers that a tensor can have in a blob that is missing.
        let mut headers: HashMap<u64, HashSet<Vec<u8>>> = HashMap::new();
        for layer in layers() {
            for (header, len) in self.headers(layer) {
                headers.entry(len).or_default().insert(header);
            }
        }
        let mut seen = HashSet::new();
        for (store, manifests) in &manifests {
            for (model, manifest) in manifests {
                for layer in manifest.layers.iter().filter(|layer| layer.is_tensor()) {
                    let (mut tensors, mut defects) = (Vec::new(), Vec::new());
                    store.tensors_of(layer, &mut tensors, &mut defects, &Budget::default());
                    for tensor in tensors.into_iter().filter(|tensor| headers.contains_key(&tensor.len)) {
                        if self.missing.is_empty() {
                            return Ok(());
                        }
                        if !seen.insert((store.root(), tensor.blob, tensor.offset)) {
                            continue;
                        }
                        let (digest, offset, len) = (tensor.blob, tensor.offset, tensor.len);
                        let (model, tensor) = (model.clone(), tensor.name);
                        let candidate = Candidate { store, digest, offset, len, model, tensor };
                        self.try_one(&candidate, &headers[&len])?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The headers that the tensor of a layer has in a missing blob, and the tensor's length.
    fn headers(&self, layer: &Layer) -> Vec<(Vec<u8>, u64)> {
        let (Some(shape), Ok(dtype)) = (&layer.shape, layer.dtype.parse::<Dtype>()) else { return Vec::new() };
        let Some(len) = dtype.bytes(shape) else { return Vec::new() };
        let forms = Form::ALL.map(|form| form.header(&layer.name, dtype, shape, len));
        let fits = |digest: Option<Digest>, header: &[u8]| {
            let missing = digest.and_then(|digest| self.missing.get(&digest));
            missing.is_some_and(|&size| header.len() as u64 + len == size)
        };
        let of_missing = |header: &Vec<u8>| fits(Some(layer.digest), header) || fits(layer.named, header);
        forms.into_iter().filter(of_missing).map(|header| (header, len)).collect()
    }

    /// Hashes a tensor behind each of these headers.
    fn try_one(&mut self, it: &Candidate, headers: &HashSet<Vec<u8>>) -> Result<()> {
        let mut hashers: Vec<(&Vec<u8>, Hasher)> = headers.iter().map(|header| (header, Hasher::new())).collect();
        hashers.iter_mut().for_each(|(header, hasher)| hasher.update(header));
        let read = each_chunk(it.store, &it.digest, it.offset..it.offset + it.len, |chunk| {
            hashers.iter_mut().for_each(|(_, hasher)| hasher.update(chunk));
            Ok(())
        });
        if read.is_err() {
            // It may be the damaged blob itself, or another one.
            return Ok(());
        }
        for (header, hasher) in hashers {
            let digest = hasher.finish();
            if self.missing.contains_key(&digest)
                && self.write(digest, header, it.store, &it.digest, it.offset, it.len)?
            {
                let place = it.store.blob_path(&it.digest);
                self.found(&digest, format!("tensor {:?} of {} in {}", it.tensor, it.model, place.display()));
            }
        }
        Ok(())
    }

    /// Writes a header and a range of a blob as a new blob; `false` if they are not what they should be.
    fn write(
        &self,
        expected: Digest,
        header: &[u8],
        store: &Store,
        digest: &Digest,
        offset: u64,
        len: u64,
    ) -> Result<bool> {
        if !fs::metadata(store.blob_path(digest)).is_ok_and(|found| found.is_file() && found.len() >= offset + len) {
            return Ok(false);
        }
        let mut draft = self.stage.draft()?;
        draft.write(header)?;
        match each_chunk(store, digest, offset..offset + len, |chunk| draft.write(chunk)) {
            Ok(()) if draft.digest() == expected => Ok(self.stage.add(draft)?.1),
            Ok(()) | Err(Error::Damaged { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What an import of a directory or file would store, and its files as they are. Returns what could not be read.
    fn originals(&mut self, path: &Path, progress: &dyn Progress) -> Result<Vec<String>> {
        let waited: HashSet<Digest> = self.missing.keys().copied().collect();
        let found = import::salvage(self.stage, path, &waited, progress)?;
        for (digest, place) in found.places {
            self.found(&digest, place.display().to_string());
        }
        Ok(found.notes)
    }
}

fn each_chunk(store: &Store, digest: &Digest, range: Range<u64>, each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut buf = buffer(range.end - range.start);
    for_each_chunk(range, &mut buf, |at, part| store.blobs().read_exact(digest, at, part), each)
}
