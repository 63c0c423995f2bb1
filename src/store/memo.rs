//! Memos: short results of long computations over blobs, kept in `.wmount/memo/` and made anew when they are gone.
//!
//! A memo is a file named by the digest of its key: the sha256 of the rest, the length of the key as u32, the key, and the
//! result. Where it cannot be written, as on a read-only medium, or where there is no `.wmount/`, since wmount never wrote
//! to the store, it is kept in memory.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::beneath::Dir;
use crate::digest::Digest;
use crate::error::{Error, Result};

/// The directory in `.wmount/`.
const DIR: &str = "memo";
/// Bytes of results that are held in memory, and of the longest that is read.
const MEMORY: u64 = 256 << 20;

/// The memos of one store.
pub(super) struct Memos {
    own: PathBuf,
    held: Cache<Digest, Arc<[u8]>, Length>,
    /// Whether one that cannot be written is an error.
    must_keep: AtomicBool,
}

#[derive(Debug, Clone)]
struct Length;

impl Weighter<Digest, Arc<[u8]>> for Length {
    fn weight(&self, _key: &Digest, memo: &Arc<[u8]>) -> u64 {
        memo.len() as u64 + 1
    }
}

impl std::fmt::Debug for Memos {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memos").field("own", &self.own).finish_non_exhaustive()
    }
}

impl Memos {
    /// The memos in `own`, which is `.wmount/`.
    pub fn new(own: PathBuf) -> Self {
        let held = Cache::with_weighter(1024, MEMORY, Length);
        Memos { own, held, must_keep: AtomicBool::new(false) }
    }

    /// The result of a key. Readers who ask for one at the same time wait for the first of them to make it.
    pub fn get(&self, key: &str, make: &dyn Fn() -> Result<Vec<u8>>) -> Result<Arc<[u8]>> {
        let name = Digest::of(key.as_bytes());
        self.held.get_or_insert_with(&name, || {
            let name = name.hex();
            if let Some(result) = self.read(&name).ok().and_then(|bytes| parse(&bytes, key)) {
                return Ok(result);
            }
            let result = make()?;
            if let Err(error) = self.write(&name, &seal(key, &result)) {
                let path = self.own.join(DIR).join(&name);
                if self.must_keep.load(Ordering::Relaxed) {
                    return Err(Error::io(&path, error));
                }
                tracing::debug!("{}: {error}", path.display());
            }
            Ok(result.into())
        })
    }

    /// From now on a result that cannot be written is an error.
    pub fn must_keep(&self) {
        self.must_keep.store(true, Ordering::Relaxed);
    }

    /// Lets go of what is held in memory.
    pub fn forget(&self) {
        self.held.clear();
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        Dir::plain(&self.own.join(DIR))?.read(name, MEMORY)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // Without `.wmount/`, wmount never wrote to the store, and writes nothing into it unasked.
        Dir::plain(&self.own)?.make_dir(DIR)?.write(name, bytes)
    }
}

/// A memo of this key.
pub(super) fn seal(key: &str, result: &[u8]) -> Vec<u8> {
    let body = [&(key.len() as u32).to_le_bytes(), key.as_bytes(), result].concat();
    [Digest::of(&body).as_bytes(), &body[..]].concat()
}

/// The result in a memo, if it is whole and of this key.
pub(super) fn parse(bytes: &[u8], key: &str) -> Option<Arc<[u8]>> {
    let (digest, body) = bytes.split_at_checked(32)?;
    let (len, rest) = body.split_first_chunk()?;
    let (stored, result) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    (stored == key.as_bytes() && Digest::of(body).as_bytes() == digest).then(|| result.into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn a_memo_is_made_once_and_again_when_damaged() {
        let dir = tempfile::tempdir().expect("a directory");
        let made = AtomicU32::new(0);
        let make = || {
            made.fetch_add(1, Ordering::Relaxed);
            Ok(b"result".to_vec())
        };
        let own = dir.path().join(".wmount");
        fs::create_dir(&own).expect("a new directory");
        let memos = Memos::new(own.clone());
        std::thread::scope(|scope| {
            (0..8).for_each(|_| _ = scope.spawn(|| assert_eq!(&*memos.get("key", &make).expect("made"), b"result")));
        });
        assert_eq!(made.load(Ordering::Relaxed), 1);
        let again = || Memos::new(own.clone()).get("key", &make).expect("made");
        assert_eq!((&*again(), made.load(Ordering::Relaxed)), (&b"result"[..], 1));
        let path = own.join(DIR).join(Digest::of(b"key").hex());
        let whole = fs::read(&path).expect("kept");
        let mut flipped = whole.clone();
        flipped[40] ^= 1;
        for (times, bytes) in (2..).zip([&whole[..whole.len() - 1], &flipped, b""]) {
            fs::write(&path, bytes).expect("writable");
            assert_eq!((&*again(), made.load(Ordering::Relaxed)), (&b"result"[..], times));
            assert_eq!(fs::read(&path).expect("mended"), whole);
        }
        let nowhere = Memos::new("/dev/null".into());
        assert!((0..2).all(|_| &*nowhere.get("key", &make).expect("made") == b"result"));
        assert_eq!(made.load(Ordering::Relaxed), 5);
        nowhere.must_keep();
        assert!(nowhere.get("another key", &make).is_err());
    }
}
