//! The names of an open directory, as they were when it was opened.

use std::collections::HashSet;

use super::Form;
use crate::vfs::{Child, Children};

/// What was added to a directory, then what the tree shows in it.
pub struct Names {
    own: Vec<(Box<str>, u64, Form)>,
    taken: HashSet<Box<str>>,
    base: Children,
}

impl Names {
    pub(super) fn new(ino: u64, parent: u64, own: Vec<(Box<str>, u64, Form)>, base: Children) -> Names {
        let taken = own.iter().map(|(name, ..)| name.clone()).collect();
        let mut all = vec![(".".into(), ino, Form::Dir), ("..".into(), parent, Form::Dir)];
        all.extend(own);
        Names { own: all, taken, base }
    }

    /// From the one with this number on: the number of the next one, name, inode number and form of each.
    pub fn from(&self, first: u64) -> impl Iterator<Item = (u64, Box<str>, u64, Form)> {
        let first = usize::try_from(first).unwrap_or(usize::MAX);
        (first.min(self.own.len() + self.base.len())..self.own.len() + self.base.len()).filter_map(|index| {
            let (name, ino, form) = match self.own.get(index) {
                Some(own) => own.clone(),
                None => {
                    let Child { name, ino, kind } = self.base.get(index - self.own.len())?;
                    if self.taken.contains(&name) {
                        return None;
                    }
                    (name, ino, kind.into())
                }
            };
            Some((index as u64 + 1, name, ino, form))
        })
    }
}
