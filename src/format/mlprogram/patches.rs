//! Changes to a model that leave every other byte as it is.

use std::ops::Range;

use super::outline::Outline;
use super::weight_file_reference;
use super::wire::{bytes_record, number_record, varint};
use crate::extent::ExtentMap;

/// A place in a weight file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name of the file in the `weights` directory.
    pub file: String,
    /// Offset of the blob's metadata.
    pub offset: u64,
}

/// Ranges of a model and what stands there instead, in order.
#[derive(Debug, Default)]
pub struct Patches(Vec<(Range<u64>, Vec<u8>)>);

impl Patches {
    /// The patches that move references and inline tensors to these places, given in the order of the outline; `None`
    /// leaves one where it is.
    ///
    /// A value that grows or shrinks changes the lengths of all messages around it.
    pub fn new(outline: &Outline, references: &[Option<Place>], inline: &[Option<Place>]) -> Patches {
        let mut patches = Vec::new();
        let mut growth = vec![0i64; outline.frames.len()];
        let mut put = |frame: usize, range: Range<u64>, bytes: Vec<u8>, growth: &mut Vec<i64>| {
            if let Some(growth) = growth.get_mut(frame) {
                *growth += bytes.len() as i64 - (range.end - range.start) as i64;
            }
            patches.push((range, bytes));
        };
        for ((spot, reference), place) in outline.spots.iter().zip(&outline.references).zip(references) {
            let Some(place) = place else { continue };
            let file = weight_file_reference(&place.file);
            let at_end = || spot.end..spot.end;
            if file != reference.file {
                let range = spot.file.clone().unwrap_or_else(at_end);
                put(spot.frame, range, bytes_record(1, file.as_bytes()), &mut growth);
            }
            if place.offset != reference.offset {
                let range = spot.offset.clone().unwrap_or_else(at_end);
                put(spot.frame, range, number_record(2, place.offset), &mut growth);
            }
        }
        for ((frame, record), place) in outline.records.iter().zip(inline) {
            let Some(place) = place else { continue };
            let file = bytes_record(1, weight_file_reference(&place.file).as_bytes());
            let value = [file, number_record(2, place.offset)].concat();
            put(*frame, record.clone(), bytes_record(5, &value), &mut growth);
        }
        // A frame comes after the one around it, so from the end on each has its final growth when it is reached.
        for index in (0..outline.frames.len()).rev() {
            let (frame, grown) = (&outline.frames[index], growth[index]);
            if grown == 0 {
                continue;
            }
            let len = varint(frame.len.saturating_add_signed(grown));
            let more = len.len() as i64 - (frame.len_at.end - frame.len_at.start) as i64;
            if let Some(parent) = frame.parent {
                growth[parent] += grown + more;
            }
            patches.push((frame.len_at.clone(), len));
        }
        patches.sort_by_key(|(range, _)| (range.start, range.end));
        Patches(patches)
    }

    /// Whether nothing is to be changed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A range of the model with the patches applied. No patch may lie across its ends.
    pub fn apply(&self, model: &ExtentMap, range: Range<u64>) -> ExtentMap {
        let mut map = ExtentMap::new();
        let mut at = range.start;
        let first = self.0.partition_point(|(patch, _)| patch.start < range.start);
        for (patch, bytes) in self.0[first..].iter().take_while(|(patch, _)| patch.end <= range.end) {
            map.push_range(model, at..patch.start);
            map.push_inline(bytes);
            at = patch.end;
        }
        map.push_range(model, at..range.end);
        map
    }
}
