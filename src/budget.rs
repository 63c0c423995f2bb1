//! What the documents of one model may take together: a limit on each is none for a model that names many, or one of them
//! many times.

use std::cell::{Cell, RefCell};

use crate::error::Fault;

/// Extents of all files of a model. One takes 64 bytes in memory; a hundred thousand tensors in forty shapes take as many.
pub(crate) const MAX_EXTENTS: u64 = 8 << 20;

/// A file takes as much memory as so many extents.
pub(crate) const FILE: u64 = 8;

/// Bytes of all recipes, maps and headers of a model.
const MAX_TEXT: u64 = 512 << 20;

/// Tensors that the headers of a model's blobs name.
const MAX_TENSORS: u64 = 1 << 20;

/// What is left to a model. What is used again counts again: somebody looks at it again.
#[derive(Debug)]
pub struct Budget {
    text: Cell<u64>,
    extents: Cell<u64>,
    tensors: Cell<u64>,
    over: RefCell<Option<Fault>>,
}

impl Default for Budget {
    fn default() -> Self {
        let [text, extents, tensors] = [MAX_TEXT, MAX_EXTENTS, MAX_TENSORS].map(Cell::new);
        Budget { text, extents, tensors, over: RefCell::default() }
    }
}

impl Budget {
    /// Takes so many bytes of text.
    pub(crate) fn text(&self, bytes: u64) -> Result<(), Fault> {
        self.take(&self.text, bytes, || format!("its recipes, maps and headers have more than {MAX_TEXT} bytes"))
    }

    /// Takes a file of so many extents.
    pub(crate) fn file(&self, extents: usize) -> Result<(), Fault> {
        let what =
            || format!("its files are more than {}, or cut into more than {MAX_EXTENTS} pieces", MAX_EXTENTS / FILE);
        self.take(&self.extents, extents as u64 + FILE, what)
    }

    /// Takes so many tensors that a header names.
    pub(crate) fn tensors(&self, count: usize) -> Result<(), Fault> {
        self.take(&self.tensors, count as u64, || format!("its blobs have more than {MAX_TENSORS} tensors"))
    }

    fn take(&self, left: &Cell<u64>, wanted: u64, what: impl Fn() -> String) -> Result<(), Fault> {
        let Some(rest) = left.get().checked_sub(wanted) else {
            let fault = Fault::new(0, format!("the model is too large: {}: make several models of it", what()));
            *self.over.borrow_mut() = Some(fault.clone());
            return Err(fault);
        };
        left.set(rest);
        Ok(())
    }

    /// What was wanted last that there was no more of.
    pub(crate) fn over(&self) -> Option<Fault> {
        self.over.borrow().clone()
    }
}
