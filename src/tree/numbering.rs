//! Inode numbers: a hash of path, content and time, so that a number means one content for ever.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use super::view::View;
use super::{Body, FileBody, Kind, Node};
use crate::digest::{Digest, Hasher};
use crate::extent::ExtentMap;
use crate::layout::Branch;
use crate::model::to_unix;
use crate::store::Found;

/// Gives the nodes of one anchor their numbers.
pub(super) struct Numbering<'a> {
    model: &'a Arc<Found>,
    view: View,
    /// How many files share a link and a content.
    links: HashMap<(&'static str, Digest), u32>,
    /// Fingerprints of maps that several files have.
    fingerprints: HashMap<*const ExtentMap, Digest>,
}

impl<'a> Numbering<'a> {
    pub fn new(branch: &Branch, model: &'a Arc<Found>, view: View) -> Self {
        let mut numbering = Numbering { model, view, links: HashMap::new(), fingerprints: HashMap::new() };
        numbering.count(branch);
        numbering
    }

    fn count(&mut self, branch: &Branch) {
        match branch {
            Branch::Dir(children, _) => children.values().for_each(|child| self.count(child)),
            Branch::File(file) => {
                if let Some(link) = file.link {
                    let known = self.fingerprints.entry(Arc::as_ptr(&file.content));
                    let fingerprint = *known.or_insert_with(|| file.content.fingerprint());
                    *self.links.entry((link, fingerprint)).or_default() += 1;
                }
            }
        }
    }

    /// The node of a branch at `path`, below the anchor at `anchor`.
    pub fn node(&self, anchor: &str, path: &str, branch: Branch) -> Arc<Node> {
        let node = match branch {
            Branch::File(file) => {
                let known = self.fingerprints.get(&Arc::as_ptr(&file.content)).copied();
                let fingerprint = known.unwrap_or_else(|| file.content.fingerprint());
                let place = file.link.map_or(path.to_owned(), |link| format!("{anchor}\0{link}"));
                let nlink = file.link.map_or(1, |link| self.links[&(link, fingerprint)]);
                let ino = number(&["file", &place], &[fingerprint.as_bytes(), &time_bytes(file.mtime)]);
                let body = FileBody {
                    content: file.content,
                    model: self.model.clone(),
                    layout: self.view.layout,
                    variant: self.view.variant,
                    fallback: file.fallback,
                };
                Node { ino, mtime: file.mtime, nlink, body: Body::File(body) }
            }
            Branch::Dir(children, mtime) => {
                let child = |(name, child): (String, Branch)| {
                    let node = self.node(anchor, &format!("{path}/{name}"), child);
                    (name.into_boxed_str(), node)
                };
                let children: Vec<(Box<str>, Arc<Node>)> = children.into_iter().map(child).collect();
                let newest = || children.iter().map(|(_, child)| child.mtime).max();
                let mtime = mtime.or_else(newest).unwrap_or(self.model.written);
                let mut content = time_bytes(mtime).to_vec();
                for (name, child) in &children {
                    content.extend(child.ino.to_le_bytes());
                    content.extend(name.as_bytes());
                    content.push(0);
                }
                let dirs = children.iter().filter(|(_, child)| child.kind() == Kind::Dir).count();
                let ino = number(&["dir", path], &[&content]);
                Node { ino, mtime, nlink: 2 + dirs as u32, body: Body::Dir(children) }
            }
        };
        Arc::new(node)
    }
}

fn time_bytes(time: SystemTime) -> [u8; 12] {
    let (seconds, nanos) = to_unix(time);
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&seconds.to_le_bytes());
    bytes[8..].copy_from_slice(&nanos.to_le_bytes());
    bytes
}

/// An inode number from words and bytes. Never 0, which is none, or 1, the root; it fits an i64 for those who ask.
pub(crate) fn number(words: &[&str], bytes: &[&[u8]]) -> u64 {
    let mut hasher = Hasher::new();
    for part in words.iter().map(|word| word.as_bytes()).chain(bytes.iter().copied()) {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    (hasher.finish().prefix() >> 1).max(2)
}
