//! Names of models, paths of layers, and paths into the tree.

use std::sync::{Mutex, PoisonError};

use tempfile::TempDir;
use wmount::model::{ModelName, check_path};
use wmount::sample::LanguageModel;
use wmount::vfs::{Kind, Vfs};

use super::stores::{import_into, open};

/// A text as a model's name, as any text to make one of, and as a path.
pub fn names(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    for name in [text.parse::<ModelName>(), ModelName::from_any(&text)].into_iter().flatten() {
        let shown = name.to_string();
        assert_eq!(shown.parse::<ModelName>().ok().as_ref(), Some(&name), "{shown:?}");
        let path = name.manifest_path();
        assert_eq!(path.split('/').count(), 4, "{path:?}");
        assert!(path.len() <= 350 + 3 * 80 + 3);
        for path in [path.as_str(), &name.tree_path()] {
            assert_eq!(check_path(path).is_ok(), path.split('/').all(|part| part.len() <= 255), "{path:?}");
        }
    }
    if check_path(&text).is_ok() {
        let path = std::path::Path::new(&*text);
        assert!(path.is_relative() && path.components().all(|part| matches!(part, std::path::Component::Normal(_))));
        assert!(!text.contains(char::is_control) && !text.is_empty());
    }
}

/// One model in all layouts that can show it.
static TREE: Mutex<Option<(TempDir, Vfs)>> = Mutex::new(None);

pub fn finish() {
    TREE.lock().unwrap_or_else(PoisonError::into_inner).take();
}

/// A path into the tree of a store with one model.
pub fn tree_path(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut tree = TREE.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, vfs) = tree.get_or_insert_with(|| {
        let dir = TempDir::with_prefix("wmount-fuzz-").unwrap();
        LanguageModel::new(1, 16, 1, 8).write(&dir.path().join("llama")).unwrap();
        import_into(&dir.path().join("store"), &dir.path().join("llama"), "llama").unwrap();
        let vfs = open(&dir.path().join("store")).unwrap();
        (dir, vfs)
    });
    let Ok(attr) = vfs.resolve(&text) else { return };
    // The status of a mount is another file from one moment to the next.
    let is_status = text.trim_end_matches('/').ends_with("status.json");
    assert!(is_status || vfs.resolve(&text).unwrap().ino == attr.ino, "{text:?}");
    match attr.kind {
        Kind::Dir => assert!(vfs.entries(attr.ino).is_ok(), "{text:?}"),
        Kind::File => {
            let mut bytes = vec![0; 64];
            let len = vfs.read(attr.ino, attr.size.saturating_sub(32), &mut bytes).unwrap();
            assert_eq!(len as u64, attr.size.min(32), "{text:?}");
        }
    }
}
