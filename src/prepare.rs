//! Preparing a variant: all that must be known of its tensors before it can be read at full speed, found out at once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::Result;
use crate::extent::{Blobs, Computed, ExtentBytes};
use crate::tree::{Body, Node};

/// The computations below a node that need a survey of their tensor, the longest first.
pub fn surveyed<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Vec<Computed> {
    fn collect(node: &Node, found: &mut Vec<Computed>) {
        match &node.body {
            Body::Dir(children) => children.iter().for_each(|(_, child)| collect(child, found)),
            Body::File(file) => found.extend(file.content.extents().filter_map(|extent| match extent.bytes {
                ExtentBytes::Computed { computed, .. } if computed.transform.is_surveyed() => Some(*computed),
                _ => None,
            })),
        }
    }
    let mut found = Vec::new();
    nodes.into_iter().for_each(|node| collect(node, &mut found));
    found.sort_by_key(|computed| std::cmp::Reverse(computed.input_len));
    found
}

/// Makes these surveys on all cores; `advance` is told of the bytes of each tensor that is done. The first error ends it.
pub fn prepare(surveys: &[Computed], blobs: &dyn Blobs, advance: &(dyn Fn(u64) + Sync)) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let worker = || {
        while let Some(computed) = surveys.get(next.fetch_add(1, Ordering::Relaxed)) {
            if failed.load(Ordering::Relaxed) {
                break;
            }
            computed.survey(blobs).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            advance(computed.input_len);
        }
        Ok(())
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..cores.min(surveys.len())).map(|_| scope.spawn(worker)).collect();
        let own = worker();
        let others =
            others.into_iter().map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        others.fold(own, Result::and)
    })
}
