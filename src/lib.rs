//! wmount: one stored set of model tensors, shown as every file layout that a model loader wants.
//!
//! | noun | meaning |
//! |---|---|
//! | blob | an immutable file in the store, named by its sha256 |
//! | tensor | name, dtype, shape and the source of its bytes |
//! | model | a name and tag with its tensors, small files, programs and recipes |
//! | extent | one piece of a virtual file: inline bytes, a range of a blob, zeros, or computed from a range of a blob |
//! | extent map | the ordered extents that make up one virtual file |
//! | recipe | a stored extent map that reproduces an imported file byte for byte |
//! | format | a container: parse (bytes to named tensors with ranges) and plan (tensors to an extent map) |
//! | layout | a view: model to a directory tree of virtual files |
//! | tree | the immutable, inode-numbered snapshot of all layouts |
//! | front | what serves the tree |
//! | variant | `model@variant`: the same model with bytes computed on read |
//! | program | a CoreML model.mlmodel for one shape of one model |
//!
//! Data flows one way: format, store, model, layout, tree, front. A module imports only from those above it in the
//! list below: a front knows no format, a format knows no kernel.

pub mod error;
mod slips;
mod chunks;
mod cores;
pub mod digest;
pub mod dtype;
pub mod budget;
pub mod transform;
pub mod extent;
pub mod waits;
pub mod model;
pub mod format;
pub mod sample;
pub mod store;
pub mod layout;
pub mod keep;
pub mod memo;
pub mod tree;
pub mod prepare;
mod meter;
pub mod vfs;
pub mod ingest;
pub mod front;
pub mod cli;
