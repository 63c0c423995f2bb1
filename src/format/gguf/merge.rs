//! The parts of a split file merged to one: what `llama-gguf-split --merge` writes of what `--split` has written.
//!
//! The first part has the keys, each part its tensors. In the merged file `split.count` is the last key and 0; the tensors
//! follow in the order of the parts, and the data of each part begins where that of the one before it ends, aligned.
//!
//! Readers take each part by its own alignment, and a merged file by that of the first, in which every tensor begins where
//! the one before it ends, aligned: llama.cpp takes no other place. So the data of a part of another alignment is put
//! there tensor by tensor.

use std::collections::HashSet;
use std::ops::Range;

use super::{Bytes, Description, Header, MAGIC, SPLIT_COUNT, START, U16, Walked, walk};
use crate::error::Fault;
use crate::format::{MAX_TENSORS, too_many_tensors};

/// Most bytes of the descriptions of all tensors: they are in memory.
const MAX_DESCRIPTIONS: u64 = 64 << 20;
/// Largest alignment of the data, which can be followed by so much padding.
const MAX_ALIGNMENT: u64 = 1 << 16;
/// The version that is written.
const VERSION: u32 = 3;

/// A merged file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// What is said of it as a whole.
    pub header: Header,
    /// Its length in bytes.
    pub len: u64,
    /// What follows each other in it.
    pub runs: Vec<Run>,
}

/// A stretch of a merged file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Run {
    /// Bytes that no part has.
    Bytes(Vec<u8>),
    /// So many zeros.
    Zeros(u64),
    /// A range of a part, which never ends before the range of it that came last.
    Part {
        /// The index of the part.
        part: usize,
        /// Where the range begins.
        offset: u64,
        /// Its bytes.
        len: u64,
    },
}

/// Merges the parts of a file, which are in order. A fault is that of the part with this index.
pub fn merge<B: Bytes + ?Sized>(parts: &[&B]) -> Result<Merged, (usize, Fault)> {
    let (mut merging, mut first) = (Merging::default(), None);
    for (index, part) in parts.iter().enumerate() {
        let walked = merging.add(index, parts.len(), *part).map_err(|fault| (index, fault))?;
        first.get_or_insert(walked);
    }
    let first = first.ok_or_else(|| (0, Fault::new(0, "there is no part")))?;
    merging.finish(first).map_err(|fault| (0, fault))
}

/// What the parts so far come to.
#[derive(Default)]
struct Merging {
    alignment: u64,
    tensors: usize,
    elements: u64,
    names: HashSet<Vec<u8>>,
    descriptions: Vec<u8>,
    data: Vec<Run>,
    data_len: u64,
}

impl Merging {
    fn add(&mut self, index: usize, total: usize, part: &(impl Bytes + ?Sized)) -> Result<Walked, Fault> {
        let (mut tensors, mut begin) = (Vec::new(), None);
        let most = MAX_DESCRIPTIONS - self.descriptions.len() as u64;
        let walked = walk(part, |tensor| {
            if let Some(kind) = tensor.unknown {
                let what = format!("the tensor here is of type {kind}, whose size is not known: it cannot be merged");
                return Err(Fault::new(tensor.at, what));
            }
            if self.tensors + tensors.len() == MAX_TENSORS {
                return Err(too_many_tensors(tensor.at));
            }
            if tensor.offset_at + 8 - *begin.get_or_insert(tensor.at) > most {
                let what = format!("what is said of the tensors takes more than {} MiB", MAX_DESCRIPTIONS >> 20);
                return Err(Fault::new(tensor.at, what));
            }
            tensors.push(tensor);
            Ok(())
        })?;
        let (number, count) = (walked.number.map_or(0, |number| number.saturating_add(1)), walked.header.parts);
        if (number, count) != (index as u64 + 1, total as u64) {
            let what =
                format!("says that it is part {number} of {count}, not {} of {total} as its name does", index + 1);
            return Err(Fault::new(walked.count.start, what));
        }
        if index == 0 {
            self.alignment = walked.alignment;
            if self.alignment > MAX_ALIGNMENT {
                let what = format!("an alignment of {} is more than {MAX_ALIGNMENT}", self.alignment);
                return Err(Fault::new(0, what));
            }
        }
        if self.is_misaligned(&walked, part.len()) {
            let what = format!(
                "its data is aligned to {} as in the first part, but does not say so: readers take {} and misread it; \
                 write the parts again with general.alignment in each",
                self.alignment, walked.alignment
            );
            return Err(Fault::new(walked.tensors.end, what));
        }
        let places = match walked.alignment == self.alignment {
            true => self.put_whole(index, &walked, &tensors, part.len()),
            false => self.put_each(index, &walked, &tensors),
        }?;
        self.describe(part, &walked, &tensors, &places)?;
        self.elements = self.elements.saturating_add(walked.header.elements);
        Ok(walked)
    }

    /// Whether the data of a part of this length ends where the part does only by the first part's alignment. gguf-py's
    /// writer aligns all parts alike and says so in the first alone.
    fn is_misaligned(&self, part: &Walked, len: u64) -> bool {
        let data = |alignment: u64| part.tensors.end.checked_next_multiple_of(alignment);
        let fits = |alignment: u64| {
            let len = data(alignment).and_then(|data| len.checked_sub(data));
            len.is_some_and(|len| {
                len == part.data_len || Some(len) == part.data_len.checked_next_multiple_of(alignment)
            })
        };
        part.data_len > 0
            && data(self.alignment) != data(part.alignment)
            && !fits(part.alignment)
            && fits(self.alignment)
    }

    /// Takes over the data of a part as it is, and returns the places that its tensors have then.
    fn put_whole(&mut self, index: usize, part: &Walked, tensors: &[Description], len: u64) -> Result<Vec<u64>, Fault> {
        let places = tensors.iter().map(|tensor| tensor.offset.checked_add(self.data_len));
        let places = places.collect::<Option<Vec<u64>>>().ok_or_else(|| too_long(part.data))?;
        self.put(index, part.data..part.data + part.data_len, len)?;
        Ok(places)
    }

    /// The same of a part of another alignment.
    fn put_each(&mut self, index: usize, part: &Walked, tensors: &[Description]) -> Result<Vec<u64>, Fault> {
        let mut places = vec![0; tensors.len()];
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&number| (tensors[number].offset, tensors[number].end));
        let mut end = 0;
        for number in order {
            let &Description { at, offset, end: own_end, .. } = &tensors[number];
            if offset < end {
                let what = format!(
                    "the data of the tensor here is that of another, too: it cannot be aligned to {}",
                    self.alignment
                );
                return Err(Fault::new(at, what));
            }
            (places[number], end) = (self.data_len, own_end);
            self.put(index, part.data + offset..part.data + own_end, 0)?;
        }
        Ok(places)
    }

    /// Appends a range of a part, filled up to the alignment with what follows it there before `limit`, and then with
    /// zeros.
    fn put(&mut self, part: usize, Range { start, end }: Range<u64>, limit: u64) -> Result<(), Fault> {
        let whole = (end - start).checked_next_multiple_of(self.alignment).ok_or_else(|| too_long(start))?;
        let len = whole.min(limit.max(end) - start);
        self.data.push(Run::Part { part, offset: start, len });
        self.data.push(Run::Zeros(whole - len));
        self.data_len = self.data_len.checked_add(whole).ok_or_else(|| too_long(start))?;
        Ok(())
    }

    /// Takes over the descriptions of a part's tensors, with the places that their data will have.
    fn describe(
        &mut self,
        part: &(impl Bytes + ?Sized),
        walked: &Walked,
        tensors: &[Description],
        places: &[u64],
    ) -> Result<(), Fault> {
        let begin = walked.tensors.start;
        let mut bytes = part.get(begin, (walked.tensors.end - begin) as usize)?.into_owned();
        for (&Description { at, name, offset_at, .. }, moved) in tensors.iter().zip(places) {
            let from = (at - begin) as usize + 8;
            let name = &bytes[from..from + name as usize];
            if !self.names.insert(name.to_vec()) {
                let what = format!("the tensor \"{}\" is there already", name.escape_ascii());
                return Err(Fault::new(at, what));
            }
            let field = (offset_at - begin) as usize;
            bytes[field..field + 8].copy_from_slice(&moved.to_le_bytes());
        }
        self.descriptions.append(&mut bytes);
        self.tensors += tensors.len();
        Ok(())
    }

    /// The file, whose keys are those of the first part.
    fn finish(self, first: Walked) -> Result<Merged, Fault> {
        let tensors = self.tensors as u64;
        let head = [&MAGIC[..], &VERSION.to_le_bytes(), &tensors.to_le_bytes(), &first.keys.to_le_bytes()].concat();
        let name = (SPLIT_COUNT.len() as u64).to_le_bytes();
        let count = [&name, SPLIT_COUNT.as_bytes(), &U16.to_le_bytes(), &0u16.to_le_bytes()].concat();
        let keys = |offset: u64, end: u64| Run::Part { part: 0, offset, len: end - offset };
        let mut runs = vec![
            Run::Bytes(head),
            keys(START, first.count.start),
            keys(first.count.end, first.tensors.start),
            Run::Bytes([count, self.descriptions].concat()),
        ];
        let before: u64 = runs.iter().map(Run::len).sum();
        runs.push(Run::Zeros(before.next_multiple_of(self.alignment) - before));
        runs.extend(self.data);
        runs.retain(|run| !run.is_empty());
        let len = before.next_multiple_of(self.alignment).checked_add(self.data_len);
        let len = len.ok_or_else(|| too_long(0))?;
        let header = Header { parts: 0, tensors, elements: self.elements, ..first.header };
        Ok(Merged { header, len, runs })
    }
}

fn too_long(at: u64) -> Fault {
    Fault::new(at, "the merged file is larger than a file can be")
}

impl Run {
    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Run::Bytes(bytes) => bytes.len() as u64,
            Run::Zeros(len) | Run::Part { len, .. } => *len,
        }
    }

    /// Whether it has no bytes; none of a merged file is so.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{file, key, string, tensor};
    use super::super::{STRING, parse};
    use super::*;

    /// A part with these tensors of 8 bit blocks, by rows of 32 elements, each filled with a number of its own.
    fn part(number: u16, count: u16, more: &[Vec<u8>], tensors: &[(&str, u64)]) -> Vec<u8> {
        let mut keys = more.to_vec();
        keys.push(key("split.no", U16, &number.to_le_bytes()));
        keys.push(key("split.count", U16, &count.to_le_bytes()));
        keys.push(key("split.tensors.count", 5, &3_i32.to_le_bytes()));
        let (mut described, mut data) = (Vec::new(), Vec::new());
        for (name, rows) in tensors {
            described.push(tensor(name, &[32, *rows], 8, data.len() as u64));
            data.resize(data.len() + 34 * *rows as usize, name.as_bytes()[0]);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        [file(3, &keys, &described, 0), data].concat()
    }

    fn whole(parts: &[Vec<u8>], merged: &Merged) -> Vec<u8> {
        let bytes = merged.runs.iter().map(|run| match run {
            Run::Bytes(bytes) => bytes.clone(),
            Run::Zeros(len) => vec![0; *len as usize],
            Run::Part { part, offset, len } => parts[*part][*offset as usize..][..*len as usize].to_vec(),
        });
        bytes.collect::<Vec<_>>().concat()
    }

    fn merged(parts: &[Vec<u8>]) -> Result<Merged, (usize, Fault)> {
        merge(&parts.iter().map(|part| &part[..]).collect::<Vec<_>>())
    }

    #[test]
    fn parts_become_the_file_that_was_split() {
        let general = [key("general.architecture", STRING, &string("llama"))];
        let mut parts =
            [part(0, 3, &general, &[]), part(1, 3, &[], &[("a", 3), ("b", 1)]), part(2, 3, &[], &[("c", 5)])];
        let found = merged(&parts).unwrap();
        let keys = [
            general[0].clone(),
            key("split.no", U16, &[0; 2]),
            key("split.tensors.count", 5, &3_i32.to_le_bytes()),
            key("split.count", U16, &[0; 2]),
        ];
        let tensors = [tensor("a", &[32, 3], 8, 0), tensor("b", &[32, 1], 8, 128), tensor("c", &[32, 5], 8, 192)];
        let mut expected = file(3, &keys, &tensors, 0);
        for (byte, len) in [(b'a', 102), (b'b', 34), (b'c', 170)] {
            expected.resize(expected.len() + len, byte);
            expected.resize(expected.len().next_multiple_of(32), 0);
        }
        assert_eq!(whole(&parts, &found), expected);
        assert_eq!((parse(&expected[..]), expected.len() as u64), (Ok(found.header.clone()), found.len));
        // Not every writer fills the last tensor up.
        let cut = parts[1].len() - 30;
        parts[1].truncate(cut);
        assert_eq!(whole(&parts, &merged(&parts).unwrap()), expected);
    }

    /// The alignment in a file's keys.
    fn aligned(alignment: u32) -> Vec<u8> {
        key("general.alignment", 4, &alignment.to_le_bytes())
    }

    #[test]
    fn the_tensors_of_a_part_of_another_alignment_go_where_the_first_one_has_them() {
        /// The same as [`part`], aligned otherwise, with waste between, and with the last tensor described first.
        fn turned(number: u16, alignment: u32, tensors: &[(&str, u64)]) -> Vec<u8> {
            let keys =
                [aligned(alignment), key("split.no", U16, &number.to_le_bytes()), key("split.count", U16, &[3, 0])];
            let (mut described, mut data, alignment) = (Vec::new(), Vec::new(), alignment as usize);
            for (name, rows) in tensors {
                data.resize(data.len().next_multiple_of(alignment), 0xEE);
                described.insert(0, tensor(name, &[32, *rows], 8, data.len() as u64));
                data.resize(data.len() + 34 * *rows as usize, name.as_bytes()[0]);
            }
            let mut whole = file(3, &keys, &described, 0);
            whole.resize(whole.len().next_multiple_of(alignment), 0);
            [whole, data].concat()
        }
        let rows = [("a", 1), ("b", 4), ("c", 1), ("d", 3)];
        for (first, other) in [(64, 32), (32, 64), (128, 64), (32, 128)] {
            let parts = [part(0, 3, &[aligned(first)], &[]), turned(1, other, &rows), turned(2, first, &[("e", 2)])];
            let found = merged(&parts).unwrap();
            let whole = whole(&parts, &found);
            assert_eq!((parse(&whole[..]), whole.len() as u64), (Ok(found.header), found.len));
            let mut tensors = Vec::new();
            let walked = walk(&whole[..], |tensor| {
                tensors.push(tensor);
                Ok(())
            })
            .unwrap();
            tensors.sort_by_key(|tensor| tensor.offset);
            let mut next = 0;
            for (tensor, (name, rows)) in tensors.iter().zip(rows.iter().chain(&[("e", 2)])) {
                assert_eq!((tensor.offset, whole[tensor.at as usize + 8]), (next, name.as_bytes()[0]));
                let data = &whole[(walked.data + tensor.offset) as usize..(walked.data + tensor.end) as usize];
                assert!(data.len() as u64 == 34 * rows && data.iter().all(|byte| *byte == name.as_bytes()[0]));
                next = tensor.end.next_multiple_of(first.into());
            }
            assert_eq!((tensors.len(), walked.data + next), (5, found.len));
            let mut ends = [0; 3];
            for run in &found.runs {
                if let Run::Part { part, offset, len } = run {
                    assert!(*offset >= ends[*part]);
                    ends[*part] = offset + len;
                }
            }
        }
    }

    #[test]
    fn a_part_that_is_aligned_otherwise_than_it_says_is_refused() {
        let first = part(0, 2, &[aligned(64)], &[]);
        let mut refused = 0;
        // The description ends at another place for each name.
        for name in ["b", "b2345678901234567890123456789012"] {
            let plain = part(1, 2, &[], &[(name, 2)]);
            let walked = walk(&plain[..], |_| Ok(())).unwrap();
            let (end, data) = (walked.tensors.end as usize, walked.data as usize);
            assert!(merged(&[first.clone(), plain.clone()]).is_ok());
            for last in [68, 128] {
                let mut aligned = plain[..end].to_vec();
                aligned.resize(end.next_multiple_of(64), 0);
                aligned.extend_from_slice(&plain[data..][..68]);
                aligned.resize(aligned.len() - 68 + last, 0);
                match merged(&[first.clone(), aligned]) {
                    Ok(_) => assert_eq!(end.next_multiple_of(64), data),
                    Err((1, fault)) if fault.what.contains("aligned to 64 as in the first part") => refused += 1,
                    Err(other) => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(refused, 2);
    }

    #[test]
    fn parts_that_do_not_belong_together_are_refused() {
        let first = || part(0, 2, &[], &[("a", 1)]);
        let mut strange = part(1, 2, &[], &[("b", 1)]);
        let at = strange.windows(4).rposition(|four| four == 8_u32.to_le_bytes()).unwrap();
        strange[at] = 99;
        let (wide, wider) = (aligned(1 << 17), aligned(64));
        let mut one_over_another = part(1, 2, &[], &[("b", 2), ("c", 1)]);
        let at = one_over_another.windows(8).rposition(|eight| eight == 96_u64.to_le_bytes()).unwrap();
        one_over_another[at] = 64;
        for (parts, index, what) in [
            (vec![], 0, "no part"),
            (vec![first()], 0, "part 1 of 2, not 1 of 1"),
            (vec![first(), first()], 1, "part 1 of 2, not 2 of 2"),
            (vec![first(), file(3, &[], &[], 0)], 1, "part 0 of 0, not 2 of 2"),
            (vec![first(), part(1, 2, &[], &[("a", 1)])], 1, "\"a\" is there already"),
            (vec![first(), strange], 1, "of type 99"),
            (vec![first(), b"GGU".to_vec()], 1, "not with \"GGUF\""),
            (vec![part(0, 2, &[wide], &[]), first()], 0, "an alignment of 131072"),
            (
                vec![part(0, 2, &[wider], &[]), one_over_another],
                1,
                "is that of another, too: it cannot be aligned to 64",
            ),
        ] {
            let (at, fault) = merged(&parts).unwrap_err();
            assert!(at == index && fault.what.contains(what), "{at}: {fault} for {what}");
        }
    }
}
