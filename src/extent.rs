//! The heart: an [`ExtentMap`] says for every byte of a virtual file where it comes from, and
//! [`ExtentMap::read`] fetches any range of it.
//!
//! Invariants: no extent is empty; they follow each other without gap or overlap; the size is exact before a byte
//! is read; every blob range was checked against the blob's recorded length when the map was built, so a read fails
//! only on I/O. A read is short only at the end of the file: the kernel would believe that the file shrank.

mod computed;
mod send;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::digest::{Digest, Hasher};
use crate::error::Result;

pub use computed::Computed;
pub use send::Sink;

/// Runs of zeros up to this length are cheaper as part of an inline neighbour than as an extent.
pub(crate) const SHORT_ZEROS: u64 = 64;

/// Where blobs are read from.
pub trait Blobs: Send + Sync {
    /// Fills `buf` with the bytes of the blob from `offset` on, all of them or an error.
    fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()>;

    /// Has `sink` take `len` bytes of the blob from `offset` on, all of them or `None`.
    fn send(&self, digest: &Digest, offset: u64, len: usize, sink: &mut dyn Sink) -> Option<()> {
        let mut bytes = vec![0; len];
        self.read_exact(digest, offset, &mut bytes).ok()?;
        sink.bytes(&bytes)
    }

    /// What `make` returns for a key, which says all that it depends on: this blob, and what is done with it. Made anew
    /// unless an implementation keeps it.
    ///
    /// # Errors
    /// Those of `make`, and where it is kept, a blob whose content is not what its name says.
    fn memo(&self, _key: &str, _digest: &Digest, make: &dyn Fn() -> Result<Vec<u8>>) -> Result<Arc<[u8]>> {
        make().map(Arc::from)
    }
}

/// Where the bytes of one extent come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    /// The map's own inline bytes, from this index on.
    Inline(usize),
    /// A blob, from this offset on.
    Blob(Digest, u64),
    /// Zeros.
    Zeros,
    /// One of the map's computations, from this byte of its output on.
    Computed(usize, u64),
}

/// One extent as seen from outside: its place in the virtual file and where its bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent<'a> {
    /// First byte in the virtual file.
    pub start: u64,
    /// Length in bytes, never 0.
    pub len: u64,
    /// Where the bytes are.
    pub bytes: ExtentBytes<'a>,
}

/// The bytes of an [`Extent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentBytes<'a> {
    /// Held in the map.
    Inline(&'a [u8]),
    /// In a blob, from `offset` on.
    Blob {
        /// The blob.
        digest: Digest,
        /// First byte in the blob.
        offset: u64,
    },
    /// All zero.
    Zeros,
    /// The output of a transform, from its byte `skip` on.
    Computed {
        /// What is computed.
        computed: &'a Computed,
        /// First byte of the output.
        skip: u64,
    },
}

impl Extent<'_> {
    /// What of it is in a range of the virtual file, if anything is.
    fn cut(self, range: &Range<u64>) -> Option<Self> {
        let (start, end) = (range.start.max(self.start), range.end.min(self.start + self.len));
        let len = end.checked_sub(start).filter(|len| *len > 0)?;
        let before = start - self.start;
        let bytes = match self.bytes {
            ExtentBytes::Inline(bytes) => ExtentBytes::Inline(&bytes[before as usize..][..len as usize]),
            ExtentBytes::Blob { digest, offset } => ExtentBytes::Blob { digest, offset: offset + before },
            ExtentBytes::Zeros => ExtentBytes::Zeros,
            ExtentBytes::Computed { computed, skip } => ExtentBytes::Computed { computed, skip: skip + before },
        };
        Some(Extent { start, len, bytes })
    }
}

/// The extents that make up one virtual file.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct ExtentMap {
    /// Start of each extent, strictly increasing; the first is 0.
    starts: Vec<u64>,
    sources: Vec<Source>,
    inline: Vec<u8>,
    computed: Vec<Computed>,
    size: u64,
}

impl ExtentMap {
    /// An empty file, to be appended to.
    pub fn new() -> Self {
        Self::default()
    }

    /// A file of these bytes.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        let mut map = Self::new();
        map.push_inline(&bytes);
        map
    }

    /// A file that is a whole blob of `len` bytes.
    pub fn from_blob(digest: Digest, len: u64) -> Self {
        let mut map = Self::new();
        map.push(Source::Blob(digest, 0), len);
        map
    }

    /// Size of the virtual file in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Appends bytes that the map itself holds.
    pub fn push_inline(&mut self, bytes: &[u8]) {
        let at = self.inline.len();
        self.inline.extend_from_slice(bytes);
        if let Some(Source::Inline(_)) = self.sources.last() {
            // The inline bytes of neighbours are neighbours, so the last extent just grows.
            self.size += bytes.len() as u64;
        } else {
            self.push(Source::Inline(at), bytes.len() as u64);
        }
    }

    /// Appends `len` zeros.
    pub fn push_zeros(&mut self, len: u64) {
        match self.sources.last() {
            Some(Source::Zeros) => self.size += len,
            Some(Source::Inline(_)) if len <= SHORT_ZEROS => {
                self.push_inline(&[0; SHORT_ZEROS as usize][..len as usize])
            }
            _ => self.push(Source::Zeros, len),
        }
    }

    /// Appends the range `offset..offset + len` of a blob that holds `blob_len` bytes.
    ///
    /// `None` if the range is not within the blob; the map is then unchanged.
    #[must_use = "a range outside of the blob is not appended"]
    pub fn push_blob(&mut self, digest: Digest, blob_len: u64, offset: u64, len: u64) -> Option<()> {
        if offset.checked_add(len)? > blob_len {
            return None;
        }
        self.push(Source::Blob(digest, offset), len);
        Some(())
    }

    /// Appends a transform's output for the tensor at `offset` of a blob that holds `blob_len` bytes.
    ///
    /// `None` if the tensor is not within the blob or is no input for the transform; the map is then unchanged.
    #[must_use = "what cannot be computed is not appended"]
    pub fn push_computed(&mut self, computed: Computed, blob_len: u64) -> Option<()> {
        if computed.offset.checked_add(computed.input_len)? > blob_len {
            return None;
        }
        let len = computed.transform.output_len(computed.input_len)?;
        self.size.checked_add(len)?;
        self.push_output(computed, 0, len);
        Some(())
    }

    /// Appends all extents of another map.
    pub fn append(&mut self, other: &ExtentMap) {
        self.push_range(other, 0..other.size);
    }

    /// Appends a range of another map; what of it lies after that map's end is left out.
    pub fn push_range(&mut self, other: &ExtentMap, range: Range<u64>) {
        for extent in other.extents_in(range) {
            match extent.bytes {
                ExtentBytes::Inline(bytes) => self.push_inline(bytes),
                ExtentBytes::Blob { digest, offset } => self.push(Source::Blob(digest, offset), extent.len),
                ExtentBytes::Zeros => self.push_zeros(extent.len),
                ExtentBytes::Computed { computed, skip } => self.push_output(*computed, skip, extent.len),
            }
        }
    }

    /// Appends zeros up to the next multiple of `alignment` bytes.
    pub fn align(&mut self, alignment: u64) {
        self.push_zeros(self.size.next_multiple_of(alignment) - self.size);
    }

    fn push_output(&mut self, computed: Computed, skip: u64, len: u64) {
        self.push(Source::Computed(self.computed.len(), skip), len);
        self.computed.push(computed);
    }

    fn push(&mut self, source: Source, len: u64) {
        if len > 0 {
            self.starts.push(self.size);
            self.sources.push(source);
            self.size += len;
        }
    }

    /// How many extents it has.
    pub fn count(&self) -> usize {
        self.starts.len()
    }

    /// The extents in order.
    pub fn extents(&self) -> impl Iterator<Item = Extent<'_>> {
        (0..self.starts.len()).map(|index| self.extent(index))
    }

    fn extent(&self, index: usize) -> Extent<'_> {
        let start = self.starts[index];
        let end = self.starts.get(index + 1).copied().unwrap_or(self.size);
        let len = end - start;
        let bytes = match self.sources[index] {
            Source::Inline(at) => ExtentBytes::Inline(&self.inline[at..at + len as usize]),
            Source::Blob(digest, offset) => ExtentBytes::Blob { digest, offset },
            Source::Zeros => ExtentBytes::Zeros,
            Source::Computed(index, skip) => ExtentBytes::Computed { computed: &self.computed[index], skip },
        };
        Extent { start, len, bytes }
    }

    /// The blobs that the file is made of, each as often as it has extents.
    pub fn digests(&self) -> impl Iterator<Item = Digest> {
        self.sources.iter().filter_map(|source| self.digest_of(*source))
    }

    /// The blobs that a read of this range touches.
    pub fn digests_in(&self, range: Range<u64>) -> impl Iterator<Item = Digest> {
        self.sources_in(range).iter().filter_map(|source| self.digest_of(*source))
    }

    /// The computations that a read of this range makes.
    pub fn computed_in(&self, range: Range<u64>) -> impl Iterator<Item = &Computed> {
        self.sources_in(range).iter().filter_map(|source| match source {
            Source::Computed(index, _) => Some(&self.computed[*index]),
            _ => None,
        })
    }

    /// The extents that a range touches; an empty range touches the one that it begins in.
    fn indices_in(&self, range: &Range<u64>) -> Range<usize> {
        let first = self.starts.partition_point(|&start| start <= range.start).saturating_sub(1);
        first..self.starts.partition_point(|&start| start < range.end).max(first)
    }

    fn sources_in(&self, range: Range<u64>) -> &[Source] {
        &self.sources[self.indices_in(&range)]
    }

    /// The extents of a range, the first and the last of them cut to it; what of it lies after the end is left out.
    fn extents_in(&self, range: Range<u64>) -> impl Iterator<Item = Extent<'_>> {
        self.indices_in(&range).filter_map(move |index| self.extent(index).cut(&range))
    }

    fn digest_of(&self, source: Source) -> Option<Digest> {
        match source {
            Source::Blob(digest, _) => Some(digest),
            Source::Computed(index, _) => Some(self.computed[index].digest),
            Source::Inline(_) | Source::Zeros => None,
        }
    }

    /// About how many bytes of memory the map takes.
    pub fn memory(&self) -> u64 {
        64 * self.starts.len() as u64 + self.inline.len() as u64 + 256 * self.computed.len() as u64 + 128
    }

    /// The blob that this file is, if it is nothing else.
    pub fn whole_blob(&self) -> Option<Digest> {
        match self.sources[..] {
            [Source::Blob(digest, 0)] => Some(digest),
            _ => None,
        }
    }

    /// Reads from `offset` on into `buf` and returns how many bytes there were: fewer than asked only at the end.
    pub fn read(&self, blobs: &dyn Blobs, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let wanted = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(buf.len());
        let mut rest = &mut buf[..wanted];
        for extent in self.extents_in(offset..offset.saturating_add(wanted as u64)) {
            let part = rest.split_off_mut(..extent.len as usize).unwrap_or_default();
            match extent.bytes {
                ExtentBytes::Inline(bytes) => part.copy_from_slice(bytes),
                ExtentBytes::Blob { digest, offset } => blobs.read_exact(&digest, offset, part)?,
                ExtentBytes::Zeros => part.fill(0),
                ExtentBytes::Computed { computed, skip } => {
                    computed.read(blobs, skip, part)?;
                }
            }
        }
        Ok(wanted)
    }

    /// The whole file, for the small ones.
    pub fn read_all(&self, blobs: &dyn Blobs) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.size).unwrap_or(usize::MAX)];
        self.read(blobs, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Says what the content is without reading it: equal fingerprints mean equal bytes.
    ///
    /// The reverse holds for maps built the same way. Inode numbers are made of it, so its input never changes.
    pub fn fingerprint(&self) -> Digest {
        let mut hasher = Hasher::new();
        for extent in self.extents() {
            hasher.update(&extent.len.to_le_bytes());
            match extent.bytes {
                ExtentBytes::Inline(bytes) => {
                    hasher.update(b"i");
                    hasher.update(bytes);
                }
                ExtentBytes::Blob { digest, offset } => {
                    hasher.update(b"b");
                    hasher.update(digest.as_bytes());
                    hasher.update(&offset.to_le_bytes());
                }
                ExtentBytes::Zeros => hasher.update(b"z"),
                ExtentBytes::Computed { computed, skip } => {
                    hasher.update(b"c");
                    hasher.update(computed.key().as_bytes());
                    if skip > 0 {
                        hasher.update(&skip.to_le_bytes());
                    }
                }
            }
        }
        hasher.finish()
    }
}

impl fmt::Debug for ExtentMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.extents()).finish()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::error::Error;

    /// Blobs in memory.
    #[derive(Default)]
    pub(crate) struct MemoryBlobs(pub HashMap<Digest, Vec<u8>>);

    impl MemoryBlobs {
        pub(crate) fn put(&mut self, bytes: Vec<u8>) -> Digest {
            let digest = Digest::of(&bytes);
            self.0.insert(digest, bytes);
            digest
        }
    }

    impl Blobs for MemoryBlobs {
        fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
            let bytes = self.0.get(digest).and_then(|blob| blob.get(offset as usize..)?.get(..buf.len()));
            let missing = || Error::Damaged { digest: *digest, fault: "missing".into() };
            buf.copy_from_slice(bytes.ok_or_else(missing)?);
            Ok(())
        }
    }

    /// What was sent, and what of it was promised.
    #[derive(Default)]
    struct Sent {
        promised: usize,
        pieces: usize,
        taken: usize,
        bytes: Vec<u8>,
        ended: bool,
    }

    impl Sink for Sent {
        fn begin(&mut self, len: usize, pieces: usize) -> Option<()> {
            (self.promised, self.pieces) = (len, pieces);
            Some(())
        }

        fn bytes(&mut self, bytes: &[u8]) -> Option<()> {
            self.taken += 1;
            self.bytes.extend_from_slice(bytes);
            Some(())
        }

        fn file(&mut self, _: &std::fs::File, _: u64, _: usize) -> Option<()> {
            None
        }

        fn end(&mut self) -> Option<()> {
            self.ended = true;
            Some(())
        }
    }

    #[derive(Debug, Clone)]
    enum Piece {
        Inline(Vec<u8>),
        Blob(Vec<u8>, usize, usize),
        Zeros(u64),
    }

    fn piece() -> impl Strategy<Value = Piece> {
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40).prop_map(Piece::Inline),
            (prop::collection::vec(any::<u8>(), 1..80), any::<prop::sample::Index>(), any::<prop::sample::Index>())
                .prop_map(|(bytes, a, b)| {
                    let (a, b) = (a.index(bytes.len() + 1), b.index(bytes.len() + 1));
                    Piece::Blob(bytes, a.min(b), a.max(b))
                }),
            (0u64..100).prop_map(Piece::Zeros),
        ]
    }

    proptest! {
        #[test]
        fn a_read_is_the_slice_of_the_whole(
            pieces in prop::collection::vec(piece(), 0..12),
            offset in 0usize..600, len in 0usize..600,
        ) {
            let (mut map, mut blobs, mut naive) = (ExtentMap::new(), MemoryBlobs::default(), Vec::new());
            for piece in pieces {
                match piece {
                    Piece::Inline(bytes) => {
                        map.push_inline(&bytes);
                        naive.extend(bytes);
                    }
                    Piece::Blob(bytes, from, to) => {
                        naive.extend(&bytes[from..to]);
                        let blob_len = bytes.len() as u64;
                        map.push_blob(blobs.put(bytes), blob_len, from as u64, (to - from) as u64).expect("in range");
                    }
                    Piece::Zeros(len) => {
                        map.push_zeros(len);
                        naive.resize(naive.len() + len as usize, 0);
                    }
                }
            }
            prop_assert_eq!(map.size(), naive.len() as u64);
            prop_assert!(map.extents().all(|extent| extent.len > 0));
            prop_assert_eq!(&map.read_all(&blobs)?, &naive);
            let mut buf = vec![0xAA; len];
            let read = map.read(&blobs, offset as u64, &mut buf)?;
            let end = (offset + len).min(naive.len());
            prop_assert_eq!(&buf[..read], naive.get(offset..end).unwrap_or(&[]));
            let mut sent = Sent::default();
            prop_assert_eq!(map.send(&blobs, offset as u64, len, &mut sent), (read > 0).then_some(read));
            prop_assert_eq!(&sent.bytes, &buf[..read]);
            prop_assert_eq!((sent.promised, sent.pieces, sent.ended), (read, sent.taken, read > 0));
            prop_assert!(buf[read..].iter().all(|&byte| byte == 0xAA));
        }
    }

    #[test]
    fn ranges_outside_of_the_blob_are_refused() {
        let mut map = ExtentMap::new();
        let digest = Digest::of(b"x");
        assert_eq!(map.push_blob(digest, 10, 5, 6), None);
        assert_eq!(map.push_blob(digest, 10, u64::MAX, 2), None);
        assert_eq!(map, ExtentMap::new());
        assert_eq!(map.push_blob(digest, 10, 5, 5), Some(()));
        assert_eq!(map.whole_blob(), None);
        assert_eq!(ExtentMap::from_blob(digest, 10).whole_blob(), Some(digest));
    }

    #[test]
    fn far_reads_are_empty() {
        let map = ExtentMap::from_bytes(vec![1, 2, 3]);
        let mut buf = [9; 2];
        for offset in [3, 4, u64::MAX] {
            assert_eq!(map.read(&MemoryBlobs::default(), offset, &mut buf).expect("no I/O"), 0);
        }
        assert_eq!(buf, [9, 9]);
    }
}
