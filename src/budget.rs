//! What the documents of one model may take together: a limit on each is none for a model that names many, or one of them
//! many times.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};

use crate::error::Fault;
use crate::format::Bytes;

/// Extents of all files of a model; a hundred thousand tensors in forty shapes take as many.
pub(crate) const MAX_EXTENTS: u64 = 8 << 20;

/// Bytes that one takes in memory.
const EXTENT: u64 = 64;

/// A file takes as much memory as so many extents.
pub(crate) const FILE: u64 = 8;

/// What one model may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of all programs, recipes, maps and headers.
    pub text: u64,
    /// Extents of all files.
    pub extents: u64,
    /// Tensors that programs and headers name.
    pub tensors: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { text: 512 << 20, extents: MAX_EXTENTS, tensors: 1 << 20 }
    }
}

/// What is left to a model. What is used again counts again: somebody looks at it again.
#[derive(Debug)]
pub struct Budget {
    limits: Limits,
    text: Cell<u64>,
    extents: Cell<u64>,
    tensors: Cell<u64>,
    over: RefCell<Option<Fault>>,
}

impl Default for Budget {
    fn default() -> Self {
        Budget::of(Limits::default())
    }
}

impl Budget {
    /// All of these.
    pub fn of(limits: Limits) -> Self {
        let [text, extents, tensors] = [limits.text, limits.extents, limits.tensors].map(Cell::new);
        Budget { limits, text, extents, tensors, over: RefCell::default() }
    }

    /// Takes so many bytes of text.
    pub(crate) fn text(&self, bytes: u64) -> Result<(), Fault> {
        let most = self.limits.text;
        self.take(&self.text, bytes, || format!("its programs, recipes, maps and headers have more than {most} bytes"))
    }

    /// Takes a file of so many extents.
    pub(crate) fn file(&self, extents: usize) -> Result<(), Fault> {
        let most = self.limits.extents;
        let what = || format!("its files are more than {}, or cut into more than {most} pieces", most / FILE);
        self.take(&self.extents, (extents as u64).saturating_add(FILE), what)
    }

    /// Takes so many tensors that a header or a program names.
    pub(crate) fn tensors(&self, count: usize) -> Result<(), Fault> {
        let most = self.limits.tensors;
        self.take(&self.tensors, count as u64, || format!("its programs and blobs have more than {most} tensors"))
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

    /// Takes a file that takes so many bytes of memory.
    pub(crate) fn memory(&self, bytes: u64) -> Result<(), Fault> {
        self.file(usize::try_from(bytes / EXTENT).unwrap_or(usize::MAX))
    }

    /// What was wanted last that there was no more of.
    pub(crate) fn over(&self) -> Option<Fault> {
        self.over.borrow().clone()
    }
}

/// What a read costs besides its bytes.
const READ: u64 = 256;

/// A container of which only so much may be read.
pub(crate) struct Counted<'a, B>(pub B, pub &'a Budget);

impl<B: Bytes> Bytes for Counted<'_, B> {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        self.1.text(READ + len as u64)?;
        self.0.get(offset, len)
    }
}
