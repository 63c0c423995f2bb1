//! What the demo shows of a tree: the largest files of each layout, and what all of them cost.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::size;
use crate::cli::output::{count, table};
use crate::digest::Digest;
use crate::error::{AtPath, Result};
use crate::extent::ExtentBytes;
use crate::layout;
use crate::tree::{Body, FileBody, Node, SkeletonDir, Step, Tree};
use crate::vfs::Vfs;

/// Files of each layout that are listed.
const LISTED: usize = 3;
/// The longest path that is not abbreviated, in characters.
const PATH: usize = 64;

/// A file of the tree by one of its names.
struct Name {
    path: String,
    node: Arc<Node>,
}

impl Name {
    fn body(&self) -> Option<&FileBody> {
        match &self.node.body {
            Body::File(file) => Some(file),
            Body::Dir(_) => None,
        }
    }
}

/// Every file of a layout.
fn names_in(tree: &Tree, layout: &str) -> Result<Vec<Name>> {
    let mut names = Vec::new();
    if let Some(dir) = tree.dir(layout) {
        walk(dir, &mut names)?;
    }
    Ok(names)
}

fn walk(dir: &SkeletonDir, names: &mut Vec<Name>) -> Result<()> {
    for (name, ..) in dir.entries()? {
        match dir.child(&name)? {
            Step::Dir(below) => walk(below, names)?,
            Step::Node(node, _) => walk_node(format!("{}/{name}", dir.path), &node, names),
        }
    }
    Ok(())
}

fn walk_node(path: String, node: &Arc<Node>, names: &mut Vec<Name>) {
    match &node.body {
        Body::File(_) => names.push(Name { path, node: Arc::clone(node) }),
        Body::Dir(children) => {
            children.iter().for_each(|(name, child)| walk_node(format!("{path}/{name}"), child, names));
        }
    }
}

/// The largest files of each layout with their sizes and inode numbers.
pub(super) fn tree_of(vfs: &Vfs) -> Result<String> {
    let cells = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
    let mut rows = vec![cells(["file", "size", "inode", ""])];
    for layout in layout::all() {
        let mut names = names_in(&vfs.tree(), layout.name())?;
        names.sort_by_key(|name| std::cmp::Reverse(name.node.size()));
        let rest = names.len().saturating_sub(LISTED);
        names.truncate(LISTED);
        names.sort_by(|a, b| a.path.cmp(&b.path));
        for Name { path, node } in &names {
            let links = if node.nlink > 1 { format!("one of its {} names", node.nlink) } else { String::new() };
            rows.push(vec![abbreviated(path), size(node.size()), node.ino.to_string(), links]);
        }
        if rest > 0 {
            rows.push(cells([&format!("{} in {}/", count(rest as u64, "more file"), layout.name()), "", "", ""]));
        }
    }
    Ok(table(&rows, &[1, 2]))
}

/// A path that fits a line: without the middle of CoreML's, and the beginning of a digest alone.
fn abbreviated(path: &str) -> String {
    if path.chars().count() <= PATH {
        return path.to_owned();
    }
    let path = path.replace("/Data/com.apple.CoreML/", "/.../");
    let kept: String = path.chars().take(PATH - 3).collect();
    if kept.len() + 3 < path.len() { kept + "..." } else { path }
}

/// What each layout would take as copies, and what it adds to the store.
pub(super) fn table_of(vfs: &Vfs) -> Result<String> {
    let cells = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
    let mut rows = vec![cells(["layout", "files", "as copies", "added to the store"])];
    let (mut seen, mut files, mut copies, mut blobs) = (HashSet::new(), 0, 0, 0);
    // Whichever comes first has the tensors to itself; the other layouts show how little they add.
    for layout in ["safetensors", "original", "ollama", "amb", "coreml"] {
        let names = names_in(&vfs.tree(), layout)?;
        let size_of = |name: &Name| name.node.size();
        let (bytes, added) = (names.iter().map(size_of).sum::<u64>(), new_bytes(vfs, &names, &mut seen)?);
        rows.push(vec![layout.into(), names.len().to_string(), size(bytes), size(added)]);
        files += names.len();
        copies += bytes;
        blobs += added;
    }
    let store = size_below(vfs.store().root())?;
    rows.push(cells(["manifests, recipes", "", "", &size(store.saturating_sub(blobs))]));
    rows.push(vec!["all".into(), files.to_string(), size(copies), size(store)]);
    let times = copies as f64 / store.max(1) as f64;
    Ok(table(&rows, &[1, 2, 3]) + &format!("The store is {times:.1} times smaller than the copies.\n"))
}

/// Bytes of the blobs that these files need and that no earlier ones did.
fn new_bytes(vfs: &Vfs, names: &[Name], seen: &mut HashSet<Digest>) -> Result<u64> {
    let mut bytes = 0;
    for extent in names.iter().filter_map(Name::body).flat_map(|file| file.content.extents()) {
        if let ExtentBytes::Blob { digest, .. } = extent.bytes
            && seen.insert(digest)
        {
            let path = vfs.store().blob_path(&digest);
            bytes += fs::metadata(&path).at(&path)?.len();
        }
    }
    Ok(bytes)
}

fn size_below(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(dir).at(dir)? {
        let path = entry.at(dir)?.path();
        let metadata = fs::symlink_metadata(&path).at(&path)?;
        bytes += if metadata.is_dir() { size_below(&path)? } else { metadata.len() };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_paths_are_abbreviated() {
        assert_eq!(abbreviated("amb/a.amb"), "amb/a.amb");
        let weights = "coreml/llama/chat/tokens-128.mlpackage/Data/com.apple.CoreML/weights/weight.bin";
        assert_eq!(abbreviated(weights), "coreml/llama/chat/tokens-128.mlpackage/.../weights/weight.bin");
        assert_eq!(abbreviated(&format!("ollama/blobs/sha256-{}", "0".repeat(64))).len(), PATH);
    }
}
