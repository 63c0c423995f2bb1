//! Core ML's weight file (`weights/weight.bin`): a header of 64 bytes, then for each blob 64 bytes of metadata and its
//! data, both at multiples of 64, with zeros in the gaps and nothing after the last byte of data.
//!
//! ```text
//! header    u32 count, u32 version = 2, 56 reserved
//! metadata  u32 sentinel, u32 dtype, u64 size, u64 offset of the data, u64 padding bits, 32 reserved
//! ```
//!
//! A program refers to a blob by the offset of its metadata, and Apple's reader looks at nothing else: neither at the
//! count nor at the other blobs. So [`parse_blob`] stands alone, and [`parse`] is the walk that finds all of them.

use super::{Bytes, MAX_TENSORS, too_many_tensors, u32_at, u64_at};
use crate::dtype::Dtype;
use crate::error::Fault;

/// Bytes of the header and of each metadata, and what all parts are aligned to.
pub const UNIT: u64 = 64;

const VERSION: u32 = 2;
const SENTINEL: u32 = 0xDEAD_BEEF;

/// All that go-coreml leaves of a file without blobs.
const SHORT_HEADER: u64 = 56;

/// One blob of a weight file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blob {
    /// Offset of the metadata, which is what programs refer to.
    pub metadata: u64,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Offset of the data.
    pub offset: u64,
    /// Bytes of the data.
    pub size: u64,
    /// Unused bits at the top of the last byte, under 8; 0 for types of whole bytes.
    pub padding_bits: u64,
}

impl Blob {
    /// Number of whole elements.
    pub fn elements(&self) -> u64 {
        let bits = (u128::from(self.size) * 8).saturating_sub(self.padding_bits.into());
        // No type is narrower than a bit, so only a file of over 2^61 bytes could saturate this.
        u64::try_from(bits / u128::from(self.dtype.bits())).unwrap_or(u64::MAX)
    }

    /// Where the data ends; the parser and the planner have checked that it fits.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.size)
    }
}

/// The number of blobs that the header claims; a fault if it is no header of a weight file.
pub fn count(bytes: &(impl Bytes + ?Sized)) -> Result<u32, Fault> {
    let len = bytes.len();
    if len < UNIT && len != SHORT_HEADER {
        return Err(Fault::new(0, format!("a weight file has a header of {UNIT} bytes, this file has {len} in all")));
    }
    let header = bytes.get(0, 8)?;
    let (count, version) = (u32_at(&header, 0), u32_at(&header, 4));
    if version != VERSION {
        return Err(Fault::new(4, format!("weight file version {version}; only {VERSION} is known")));
    }
    if len < UNIT && count != 0 {
        return Err(Fault::new(0, format!("the header claims {count} blobs, but the file has only {len} bytes")));
    }
    Ok(count)
}

/// The blob whose metadata is at `metadata_offset`, which needs no alignment.
///
/// Checks what Apple's reader checks; the size need not be a multiple of the element.
pub fn parse_blob(bytes: &(impl Bytes + ?Sized), metadata_offset: u64) -> Result<Blob, Fault> {
    let at = metadata_offset;
    let metadata = bytes.get(at, UNIT as usize)?;
    // The metadata is within the file, so no offset within it overflows.
    let fault = |field: u64, what: String| Fault::new(at + field, what);
    let sentinel = u32_at(&metadata, 0);
    if sentinel != SENTINEL {
        return Err(fault(0, format!("no blob here: {sentinel:#010x} instead of the sentinel {SENTINEL:#010x}")));
    }
    let code = u32_at(&metadata, 4);
    let dtype = Dtype::from_mil_blob_code(code).ok_or_else(|| fault(4, format!("unknown data type {code}")))?;
    let (size, offset) = (u64_at(&metadata, 8), u64_at(&metadata, 16));
    if offset.checked_add(size).is_none_or(|end| end > bytes.len()) {
        let len = bytes.len();
        return Err(fault(8, format!("{size} bytes of data at {offset} are not within the file of {len} bytes")));
    }
    let padding_bits = u64_at(&metadata, 24);
    if padding_bits >= 8 {
        return Err(fault(24, format!("{padding_bits} padding bits; a byte has no more than 7 to spare")));
    }
    Ok(Blob { metadata: at, dtype, offset, size, padding_bits })
}

/// All blobs, in the order of the file.
///
/// The walk goes from the data of each blob to the next multiple of 64, as often as the header says, and only ever
/// forward: data that would lead it back is a fault.
pub fn parse(bytes: &(impl Bytes + ?Sized)) -> Result<Vec<Blob>, Fault> {
    let count = count(bytes)?;
    let mut blobs = Vec::new();
    let mut at = UNIT;
    for _ in 0..count {
        if blobs.len() == MAX_TENSORS {
            return Err(too_many_tensors(at));
        }
        let blob = parse_blob(bytes, at)?;
        // An end so close to 2^64 that it cannot be rounded up cannot be followed by another blob either.
        let next = blob.end().checked_next_multiple_of(UNIT).unwrap_or(u64::MAX);
        if next <= at {
            let what = format!("the data of this blob ends at {}, before its metadata", blob.end());
            return Err(Fault::new(at + 16, what));
        }
        blobs.push(blob);
        at = next;
    }
    Ok(blobs)
}

/// Every byte of a weight file but the data of its blobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The first 64 bytes.
    pub header: [u8; UNIT as usize],
    /// The blobs, in order; [`metadata`] gives the 64 bytes before each.
    pub blobs: Vec<Blob>,
    /// Size of the whole file: the end of the last blob, which nothing pads.
    pub size: u64,
}

/// Places blobs, given as (dtype, size, padding bits), as coremltools and go-coreml do, byte for byte.
///
/// What is between the end of a blob's data and the next metadata is zero.
pub fn plan(blobs: impl IntoIterator<Item = (Dtype, u64, u64)>) -> Result<Plan, Fault> {
    let mut placed = Vec::new();
    let mut size = UNIT;
    for (dtype, bytes, padding_bits) in blobs {
        if dtype.mil_blob_code().is_none() {
            return Err(Fault::new(size, format!("a weight file cannot hold {dtype}")));
        }
        if padding_bits >= 8 {
            return Err(Fault::new(size, format!("{padding_bits} padding bits; a byte has no more than 7 to spare")));
        }
        let blob = place(size, dtype, bytes, padding_bits)
            .ok_or_else(|| Fault::new(size, format!("a blob of {bytes} bytes makes the file too large")))?;
        size = blob.end();
        placed.push(blob);
    }
    let count = u32::try_from(placed.len())
        .map_err(|_| Fault::new(0, format!("{} blobs are too many for a weight file", placed.len())))?;
    Ok(Plan { header: header(count), blobs: placed, size })
}

/// The blob that follows whatever ends at `end`.
fn place(end: u64, dtype: Dtype, size: u64, padding_bits: u64) -> Option<Blob> {
    let metadata = end.checked_next_multiple_of(UNIT)?;
    let offset = metadata.checked_add(UNIT)?;
    offset.checked_add(size)?;
    Some(Blob { metadata, dtype, offset, size, padding_bits })
}

/// The header of a file with `count` blobs.
pub fn header(count: u32) -> [u8; UNIT as usize] {
    let mut header = [0; UNIT as usize];
    header[..4].copy_from_slice(&count.to_le_bytes());
    header[4..8].copy_from_slice(&VERSION.to_le_bytes());
    header
}

/// The metadata of a blob; 0 stands for a dtype that no parser or plan lets through.
pub fn metadata(blob: &Blob) -> [u8; UNIT as usize] {
    let mut metadata = [0; UNIT as usize];
    metadata[..4].copy_from_slice(&SENTINEL.to_le_bytes());
    metadata[4..8].copy_from_slice(&blob.dtype.mil_blob_code().unwrap_or(0).to_le_bytes());
    metadata[8..16].copy_from_slice(&blob.size.to_le_bytes());
    metadata[16..24].copy_from_slice(&blob.offset.to_le_bytes());
    metadata[24..32].copy_from_slice(&blob.padding_bits.to_le_bytes());
    metadata
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two blobs: 3 halves and 5 uint3.
    fn sample() -> Vec<u8> {
        let mut file = b"\x02\0\0\0\x02\0\0\0".to_vec();
        file.resize(64, 0);
        file.extend(b"\xef\xbe\xad\xde\x01\0\0\0\x06\0\0\0\0\0\0\0\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        file.resize(128, 0);
        file.extend(b"abcdef");
        file.resize(192, 0);
        file.extend(b"\xef\xbe\xad\xde\x0c\0\0\0\x02\0\0\0\0\0\0\0\x00\x01\0\0\0\0\0\0\x01\0\0\0\0\0\0\0");
        file.resize(256, 0);
        file.extend(b"\x88\x46");
        file
    }

    fn changed(at: usize, with: &[u8]) -> Vec<u8> {
        let mut file = sample();
        file[at..at + with.len()].copy_from_slice(with);
        file
    }

    fn written(plan: &Plan, data: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
        let mut file = plan.header.to_vec();
        for (index, blob) in plan.blobs.iter().enumerate() {
            file.resize(blob.metadata as usize, 0);
            file.extend(metadata(blob));
            assert_eq!(file.len() as u64, blob.offset);
            file.extend(data(index));
        }
        file
    }

    #[test]
    fn a_file_is_read() {
        let file = sample();
        let blobs = parse(&file[..]).unwrap();
        assert_eq!(
            blobs,
            [
                Blob { metadata: 64, dtype: Dtype::F16, offset: 128, size: 6, padding_bits: 0 },
                Blob { metadata: 192, dtype: Dtype::U3, offset: 256, size: 2, padding_bits: 1 },
            ]
        );
        assert_eq!(blobs.iter().map(Blob::elements).collect::<Vec<_>>(), [3, 5]);
    }

    #[test]
    fn a_plan_gives_the_same_file() {
        let plan = plan([(Dtype::F16, 6, 0), (Dtype::U3, 2, 1)]).unwrap();
        assert_eq!(plan.size, 258);
        assert_eq!(written(&plan, |index| [b"abcdef".to_vec(), b"\x88\x46".to_vec()][index].clone()), sample());
    }

    #[test]
    fn what_apples_reader_refuses_is_a_fault() {
        for (file, at, word) in [
            (changed(64, &[0]), 64, "sentinel"),
            (changed(4, &[1]), 4, "version"),
            (changed(68, &[18]), 68, "data type 18"),
            (changed(68, &[0]), 68, "data type 0"),
            (changed(72, &[0xff]), 72, "not within"),
            (changed(80, &[0xff, 0xff]), 72, "not within"),
            (changed(80, &[0xff; 8]), 72, "not within"),
            (changed(88, &[8]), 88, "padding"),
            (Vec::new(), 0, "header"),
            (sample()[..63].to_vec(), 0, "header"),
            (sample()[..56].to_vec(), 0, "claims 2"),
            (sample()[..100].to_vec(), 64, "64 bytes are needed"),
        ] {
            let fault = parse(&file[..]).unwrap_err();
            assert_eq!(fault.at, at, "{fault}");
            assert!(fault.what.contains(word), "{fault}");
        }
    }

    #[test]
    fn what_apples_reader_accepts_is_read() {
        let reserved = changed(96, &[0xff; 32]);
        assert_eq!(parse(&reserved[..]), parse(&sample()[..]));
        let elsewhere = changed(80, &[130]);
        assert_eq!(parse(&elsewhere[..]).unwrap()[0].offset, 130);
        let odd = changed(72, &[5]);
        assert_eq!(parse(&odd[..]).unwrap()[0].elements(), 2);
        let mut unaligned = sample();
        unaligned.drain(60..64);
        assert_eq!(parse_blob(&unaligned[..], 60).unwrap().size, 6);
        for count in [0, u32::MAX] {
            let file = changed(0, &count.to_le_bytes());
            assert_eq!(parse_blob(&file[..], 192).unwrap().padding_bits, 1);
        }
        assert_eq!(parse(&changed(0, &[0])[..]), Ok(Vec::new()));
    }

    #[test]
    fn the_walk_only_goes_forward() {
        let still = changed(72, b"\0\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\0");
        assert!(parse(&still[..]).unwrap_err().what.contains("before its metadata"));
        let back = changed(208, &[0, 0]);
        assert!(parse(&back[..]).unwrap_err().what.contains("before its metadata"));
        let endless = changed(0, &[0xff; 4]);
        assert_eq!(parse(&endless[..]).unwrap_err().at, 320);
    }

    #[test]
    fn files_without_blobs_are_empty() {
        assert_eq!(parse(&header(0)[..]), Ok(Vec::new()));
        assert_eq!(parse(&header(0)[..56]), Ok(Vec::new()));
        assert!(parse(&header(0)[..60]).is_err());
        assert_eq!(plan([]).unwrap().size, 64);
    }

    #[test]
    fn an_empty_blob_shares_its_place_with_the_next() {
        let plan = plan([(Dtype::F32, 0, 0), (Dtype::I8, 1, 0)]).unwrap();
        assert_eq!(plan.blobs[0].offset, plan.blobs[1].metadata);
        assert_eq!(parse(&written(&plan, |index| vec![7; index])[..]), Ok(plan.blobs));
    }

    #[test]
    fn what_cannot_be_written_is_a_fault() {
        assert!(plan([(Dtype::I64, 8, 0)]).unwrap_err().what.contains("I64"));
        assert!(plan([(Dtype::U3, 8, 8)]).unwrap_err().what.contains("padding"));
        assert!(plan([(Dtype::F32, u64::MAX - 64, 0)]).unwrap_err().what.contains("too large"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400), at in any::<u64>()) {
            let _ = parse(&bytes[..]);
            let _ = parse_blob(&bytes[..], at);
        }

        #[test]
        fn any_change_is_read_or_refused(at in 0usize..256, with in any::<u8>()) {
            let _ = parse(&changed(at, &[with])[..]);
        }

        #[test]
        fn what_is_planned_is_read(
            blobs in proptest::collection::vec((proptest::sample::select(types()), 0u64..300, 0u64..8), 0..20)
        ) {
            let plan = plan(blobs.iter().copied()).unwrap();
            let file = written(&plan, |index| vec![0xA5; blobs[index].1 as usize]);
            prop_assert_eq!(file.len() as u64, plan.size);
            prop_assert_eq!(parse(&file[..]), Ok(plan.blobs));
        }
    }

    fn types() -> Vec<Dtype> {
        Dtype::all().filter(|dtype| dtype.mil_blob_code().is_some()).collect()
    }
}
