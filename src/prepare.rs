//! Preparing a variant: all that must be known of its tensors before it can be read at full speed, found out at once.

use std::collections::BTreeMap;

use crate::chunks::{buffer, for_each_chunk};
use crate::cores::try_on_all_cores;
use crate::digest::{Digest, PairHasher};
use crate::error::{Error, Result};
use crate::extent::{Blobs, Computed};
use crate::format::Form;
use crate::model::Tensor;
use crate::tree::{Body, Node};

/// The computations below a node that need a survey of their tensor, one for each survey, the longest first.
pub fn surveyed<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Vec<Computed> {
    fn collect(node: &Node, found: &mut BTreeMap<String, Computed>) {
        match &node.body {
            Body::Dir(children) => children.iter().for_each(|(_, child)| collect(child, found)),
            Body::File(file) => {
                let computed = file.content.computed_in(0..file.content.size());
                found.extend(computed.filter(|it| it.transform.is_surveyed()).map(|it| (it.survey_key(), *it)));
            }
        }
    }
    let mut found = BTreeMap::new();
    nodes.into_iter().for_each(|node| collect(node, &mut found));
    let mut found: Vec<Computed> = found.into_values().collect();
    found.sort_by_key(|computed| std::cmp::Reverse(computed.input_len));
    found
}

/// Makes these surveys on all cores; `advance` is told of each that is done. The first error ends it.
pub fn prepare(surveys: &[Computed], blobs: &dyn Blobs, advance: &(dyn Fn(&Computed) + Sync)) -> Result<()> {
    try_on_all_cores(surveys.len(), &|index| {
        surveys[index].survey(blobs)?;
        advance(&surveys[index]);
        Ok(())
    })
    .map(drop)
}

/// The digest of each tensor's blob in a form, computed on all cores where it is not known.
///
/// # Errors
/// A blob whose content is not what its name says: the digest of it would be that of the damage.
pub fn form_digests(
    tensors: &[Tensor],
    form: Form,
    blobs: &dyn Blobs,
    advance: &(dyn Fn(u64) + Sync),
) -> Result<Vec<Digest>> {
    try_on_all_cores(tensors.len(), &|index| match form.digest(&tensors[index]) {
        Some(known) => Ok(known),
        None => form_digest(&tensors[index], form, blobs, advance),
    })
}

/// Reads the tensor's blob once for both digests, its own and that of the form.
fn form_digest(tensor: &Tensor, form: Form, blobs: &dyn Blobs, advance: &(dyn Fn(u64) + Sync)) -> Result<Digest> {
    let mut hashers = PairHasher::new(b"", &form.header_of(tensor));
    let mut buf = buffer(tensor.blob_len);
    let mut read = |range, update: &mut dyn FnMut(&[u8])| {
        let fill = |at, part: &mut [u8]| blobs.read_exact(&tensor.blob, at, part);
        for_each_chunk(range, &mut buf, fill, |part| {
            update(part);
            advance(part.len() as u64);
            Ok(())
        })
    };
    read(0..tensor.offset, &mut |header| hashers.update_first(header))?;
    read(tensor.offset..tensor.blob_len, &mut |part| hashers.update(part))?;
    let [actual, digest] = hashers.finish();
    if actual != tensor.blob {
        return Err(Error::Damaged { digest: tensor.blob, fault: format!("its content has the digest {actual}") });
    }
    Ok(digest)
}
