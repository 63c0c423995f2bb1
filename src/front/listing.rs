//! Attributes, and the entries of an open directory in the order and with the offsets that the kernel sees.

use std::time::SystemTime;

use fuser::{FileAttr, FileType, INodeNo};

use super::readpath;
use crate::vfs::{Access, Kind, Listing};

/// One name of an open directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Where a reading goes on after this entry.
    pub next: u64,
    pub ino: u64,
    pub kind: Kind,
    pub name: Box<str>,
}

/// The entries of directory `dir` from `offset` on: ".", "..", then the children; the n-th entry has offset n.
pub(super) fn entries_from(dir: INodeNo, listing: &Listing, offset: u64) -> impl Iterator<Item = Entry> {
    let dots = [(dir.0, "."), (listing.parent, "..")].map(|(ino, name)| (ino, Kind::Dir, Box::from(name)));
    let end = dots.len() + listing.children.len();
    let first = usize::try_from(offset).unwrap_or(usize::MAX);
    let entry = move |index: usize| {
        let child = || listing.children.get(index - dots.len()).map(|child| (child.ino, child.kind, child.name));
        let (ino, kind, name) = dots.get(index).cloned().or_else(child)?;
        Some(Entry { next: index as u64 + 1, ino, kind, name })
    };
    (first.min(end)..end).map_while(entry)
}

/// What differs between the attributes of two inodes.
pub(super) struct Attributes {
    pub ino: u64,
    pub size: u64,
    pub mtime: SystemTime,
    pub kind: FileType,
    pub perm: u16,
    pub nlink: u32,
    pub access: Access,
}

impl Attributes {
    /// As the kernel takes them, for what belongs to this user and group unless it is somebody else's.
    pub fn of(self, owner: (u32, u32)) -> FileAttr {
        let Attributes { ino, size, mtime, kind, perm, nlink, access } = self;
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size.div_ceil(512),
            atime: mtime,
            mtime,
            ctime: mtime,
            crtime: mtime,
            kind,
            perm,
            nlink,
            uid: access.uid.unwrap_or(owner.0),
            gid: access.gid.unwrap_or(owner.1),
            rdev: 0,
            blksize: readpath::block_size(size),
            flags: 0,
        }
    }
}

pub(super) fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::Dir => FileType::Directory,
        Kind::File => FileType::RegularFile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vfs::Child;

    fn listing() -> Listing {
        let child = |name: &str, ino| Child { name: name.into(), ino, kind: Kind::File };
        Listing { parent: 1, children: [child("a", 10), child("b", 11)].into_iter().collect() }
    }

    #[test]
    fn an_offset_is_where_the_next_page_begins() {
        let listing = listing();
        let all: Vec<_> = entries_from(INodeNo(5), &listing, 0).collect();
        let names: Vec<_> = all.iter().map(|entry| &*entry.name).collect();
        assert_eq!(names, [".", "..", "a", "b"]);
        assert_eq!((all[0].ino, all[1].ino), (5, 1));
        for entry in &all {
            let rest: Vec<_> = entries_from(INodeNo(5), &listing, entry.next).collect();
            assert_eq!(rest, all[entry.next as usize..]);
        }
        assert_eq!(entries_from(INodeNo(5), &listing, u64::MAX).count(), 0);
    }
}
