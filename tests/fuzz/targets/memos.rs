//! What wmount keeps of a model below `.wmount/`, replaced by anything.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;
use wmount::digest::Digest;
use wmount::format::Form;
use wmount::store::Store;

use super::parts;
use super::stores::{import_into, open, walk};

/// A store of one model whose memos are all there. It is made once, and its memos are written anew for each input.
struct Kept {
    dir: TempDir,
    forms: Vec<(PathBuf, Vec<u8>)>,
    memos: Vec<(PathBuf, Vec<u8>)>,
}

static KEPT: Mutex<Option<Kept>> = Mutex::new(None);

const HEADER: &[u8] = br#"{"w":{"dtype":"BF16","shape":[4,64],"data_offsets":[0,512]},"b":{"dtype":"F32","shape":[64],"data_offsets":[512,768]}}"#;

/// The model's file: matrices and vectors of numbers that every variant can express.
fn source() -> Vec<u8> {
    let length = (HEADER.len() as u64).to_le_bytes();
    let matrix = (0..256u16).flat_map(|at| (0x3c00 + at * 3).to_le_bytes());
    let vector = (0..64u16).flat_map(|at| f32::from(at).to_le_bytes());
    length.into_iter().chain(HEADER.iter().copied()).chain(matrix).chain(vector).collect()
}

fn kept() -> MutexGuard<'static, Option<Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kept {
    fn new() -> Kept {
        let dir = TempDir::with_prefix("wmount-fuzz-").unwrap();
        let (path, root) = (dir.path().join("model.safetensors"), dir.path().join("store"));
        fs::write(&path, source()).unwrap();
        import_into(&root, &path, "model").unwrap();
        walk(&open(&root).unwrap(), true);
        let store = Store::open(&root).unwrap();
        for form in Form::ALL {
            store.set_form(&store.find().unwrap()[0], form, &[Digest::of(b"w"), Digest::of(b"b")]).unwrap();
        }
        let (forms, memos) = (files(&root.join(".wmount/forms")), files(&root.join(".wmount/memo")));
        assert!(forms.len() == 2 && memos.len() > 1, "too little is kept: {} and {}", forms.len(), memos.len());
        Kept { dir, forms, memos }
    }
}

fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// A memo with another result: it begins with the digest of the rest, which is the key with its length, and the result.
fn seal(whole: &[u8], result: &[u8]) -> Vec<u8> {
    let key = u32::from_le_bytes(whole[32..36].try_into().unwrap()) as usize;
    let body = [&whole[32..36 + key], result].concat();
    [Digest::of(&body).as_bytes(), &body[..]].concat()
}

/// Memos that are believed, since their digest is right, give other bytes in the files that they are about, or errors;
/// those that are not believed change nothing.
pub fn memos(input: &[u8]) {
    let [list, form, unsealed, results] = parts(input);
    let results: [&[u8]; 8] = parts(results);
    let mut kept = kept();
    let kept = kept.get_or_insert_with(Kept::new);
    let root = kept.dir.path().join("store");
    if !list.is_empty() {
        fs::write(root.join(".wmount/memo.json"), list).unwrap();
    }
    for (path, whole) in &kept.forms {
        fs::write(path, seal(whole, form)).unwrap();
    }
    for (index, (path, whole)) in kept.memos.iter().enumerate() {
        let result = results[index % results.len()];
        let is_sealed = unsealed.get(index / 8).is_none_or(|bits| bits >> (index % 8) & 1 == 0);
        let memo = if is_sealed { seal(whole, result) } else { [&whole[..32], result].concat() };
        fs::write(path, memo).unwrap();
    }
    let vfs = open(&root).unwrap();
    walk(&vfs, false);
    let attr = vfs.resolve("original/model/latest/model.safetensors").unwrap();
    let mut shown = vec![0; source().len()];
    assert_eq!(vfs.read(attr.ino, 0, &mut shown).unwrap(), shown.len());
    assert!(shown == source(), "a file that needs no memo is another one");
}

/// Lets go of the store.
pub fn finish() {
    *kept() = None;
}
