//! What was found out about tensors by reading all of them, kept in `.wmount/memo/` and in memory.
//!
//! A memo is named by its key, which says all that it depends on, the tensor's blob first of all: it cannot be stale. It
//! begins with a digest of the rest, so a damaged one is made anew. All of them can be deleted at any time.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tempfile::NamedTempFile;

use crate::digest::{Digest, Hasher};
use crate::error::Result;

/// Bytes of memos that are kept in memory.
const KEPT: u64 = 64 << 20;
/// The longest memo that is read.
const MAX: u64 = 1 << 30;

/// The memos of one store.
#[derive(Debug)]
pub(super) struct Memos {
    /// The store's own directory; where there is none, nothing is written.
    own: PathBuf,
    kept: Cache<Digest, Arc<[u8]>, Bytes>,
}

#[derive(Debug, Clone)]
struct Bytes;

impl Weighter<Digest, Arc<[u8]>> for Bytes {
    fn weight(&self, _: &Digest, memo: &Arc<[u8]>) -> u64 {
        128 + memo.len() as u64
    }
}

impl Memos {
    /// The memos of a store whose own directory is `own`.
    pub fn new(own: PathBuf) -> Memos {
        Memos { own, kept: Cache::with_weighter(10_000, KEPT, Bytes) }
    }

    /// The memo of a key, made if there is none; who asks for one that is being made waits for it.
    pub fn get(&self, key: &str, make: &dyn Fn() -> Result<Vec<u8>>) -> Result<Arc<[u8]>> {
        let name = Digest::of(key.as_bytes());
        self.kept.get_or_insert_with(&name, || {
            if let Some(memo) = self.read(&name, key) {
                return Ok(memo.into());
            }
            let memo = make()?;
            if let Err(error) = self.write(&name, key, &memo) {
                // A store on a read-only medium has its memos made anew by every mount.
                tracing::debug!("memo of {key}: {error}");
            }
            Ok(memo.into())
        })
    }

    fn read(&self, name: &Digest, key: &str) -> Option<Vec<u8>> {
        let path = self.own.join("memo").join(name.hex());
        let mut bytes = Vec::new();
        match File::open(&path).and_then(|file| file.take(MAX).read_to_end(&mut bytes)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!("{}: {error}: it is made anew", path.display());
                return None;
            }
        }
        let memo = bytes.split_first_chunk::<32>().filter(|(digest, memo)| **digest == *seal(key, memo).as_bytes());
        if memo.is_none() {
            tracing::warn!("{}: is damaged: it is made anew", path.display());
        }
        memo.map(|(_, memo)| memo.to_vec())
    }

    fn write(&self, name: &Digest, key: &str, memo: &[u8]) -> io::Result<()> {
        let dir = self.own.join("memo");
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let mut file = NamedTempFile::new_in(&dir)?;
        file.write_all(seal(key, memo).as_bytes())?;
        file.write_all(memo)?;
        // Not made durable: what a crash leaves of it is seen to be damaged.
        file.persist(dir.join(name.hex())).map(drop).map_err(|error| error.error)
    }
}

/// The digest that a memo begins with.
fn seal(key: &str, memo: &[u8]) -> Digest {
    let mut hasher = Hasher::new();
    hasher.update(&(key.len() as u64).to_le_bytes());
    hasher.update(key.as_bytes());
    hasher.update(memo);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_memo_is_made_once_and_again_when_it_is_damaged() {
        let own = tempfile::tempdir().expect("a directory");
        let made = AtomicUsize::new(0);
        let get = || {
            let make = || {
                made.fetch_add(1, Ordering::Relaxed);
                Ok(b"known".to_vec())
            };
            // As a new process would, which has none in memory.
            assert_eq!(*Memos::new(own.path().into()).get("key", &make).expect("made"), *b"known");
            made.load(Ordering::Relaxed)
        };
        assert_eq!((get(), get()), (1, 1));
        let path = own.path().join("memo").join(Digest::of(b"key").hex());
        let whole = fs::read(&path).expect("written");
        for damage in [&whole[..10], &whole[..whole.len() - 1], &[whole.clone(), vec![0]].concat(), b""] {
            let before = get();
            fs::write(&path, damage).expect("writable");
            assert_eq!((get(), get()), (before + 1, before + 1));
        }
    }

    #[test]
    fn without_a_directory_nothing_is_written() {
        let own = tempfile::tempdir().expect("a directory");
        let missing = own.path().join(".wmount");
        assert_eq!(*Memos::new(missing.clone()).get("key", &|| Ok(vec![1])).expect("made"), [1]);
        assert!(!missing.exists());
    }
}
