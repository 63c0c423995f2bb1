//! What is in a directory.

use std::sync::Arc;

use super::Kind;
use crate::tree::Union;

/// An entry of a directory.
#[derive(Debug, Clone)]
pub struct Child {
    /// Its name.
    pub name: Box<str>,
    /// Its inode number.
    pub ino: u64,
    /// Directory or file.
    pub kind: Kind,
}

/// The entries of a directory, without `.` and `..`, in order of name.
#[derive(Debug, Clone)]
pub struct Listing {
    /// The directory above, for `..`.
    pub parent: u64,
    /// The entries.
    pub children: Children,
}

/// The entries of a directory in order of name.
#[derive(Debug, Clone)]
pub enum Children {
    /// Of most directories.
    Few(Arc<[Child]>),
    /// Of one that holds the blobs of all models.
    Blobs(Arc<Union>),
}

impl Children {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Children::Few(children) => children.len(),
            Children::Blobs(union) => union.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One of them.
    pub fn get(&self, index: usize) -> Option<Child> {
        match self {
            Children::Few(children) => children.get(index).cloned(),
            Children::Blobs(union) => {
                union.get(index).map(|(name, ino)| Child { name: name.into(), ino, kind: Kind::File })
            }
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Child> {
        (0..self.len()).filter_map(|index| self.get(index))
    }
}

impl FromIterator<Child> for Children {
    fn from_iter<I: IntoIterator<Item = Child>>(children: I) -> Self {
        Children::Few(children.into_iter().collect())
    }
}
