//! The outline and the patches, held against decoding and writing the whole model.

use std::borrow::Cow;

use super::*;
use crate::extent::ExtentMap;
use crate::extent::tests::MemoryBlobs;
use crate::format::Bytes;

fn outlined(model: &[u8]) -> Result<Outline, Fault> {
    super::super::outline(model, &|_| true)
}

fn named(mut references: Vec<Reference>) -> Vec<Reference> {
    references.sort_by(|a, b| (&a.name, a.offset).cmp(&(&b.name, b.offset)));
    references
}

/// What patches make of a model whose references and inline tensors all move; the model itself is a blob.
fn patched(model: &[u8], place: impl Fn(&str, u64) -> Option<Place>, inline: &[Option<Place>]) -> Vec<u8> {
    let outline = outlined(model).unwrap();
    let places: Vec<Option<Place>> = outline.references.iter().map(|it| place(&it.file, it.offset)).collect();
    let mut blobs = MemoryBlobs::default();
    let map = ExtentMap::from_blob(blobs.put(model.to_vec()), model.len() as u64);
    let patches = Patches::new(&outline, &places, inline);
    let patched = patches.apply(&map, 0..map.size());
    if patches.is_empty() {
        assert_eq!(patched, map);
    }
    patched.read_all(&blobs).unwrap()
}

fn decoded(model: &[u8], place: impl Fn(&str, u64) -> Option<Place>) -> Program {
    let mut program = Program::parse(model).unwrap();
    program
        .relocate(&mut |file, offset| {
            Ok(match place(file, offset) {
                Some(place) => (weight_file_reference(&place.file), place.offset),
                None => (file.to_owned(), offset),
            })
        })
        .unwrap();
    program
}

fn at(file: &str, offset: u64) -> Option<Place> {
    Some(Place { file: file.into(), offset })
}

/// Bytes that are only read in small parts, as those of a file are.
struct Parts<'a>(&'a [u8]);

impl Bytes for Parts<'_> {
    fn len(&self) -> u64 {
        Bytes::len(self.0)
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        assert!(len <= 256 << 10, "{len} bytes at once");
        Bytes::get(self.0, offset, len)
    }
}

fn inline_tensor(dtype: u64, shape: &[u64], kind: u64, values: &[u8]) -> Vec<u8> {
    let tensor = field(kind, &field(1, values));
    let immediate = field(3, &[field(1, &tensor), unknown()].concat());
    [unknown(), field(2, &tensor_type(dtype, shape)), immediate].concat()
}

fn inline_constant(name: &str, value: &[u8]) -> Vec<u8> {
    operation(name, "const", &[field(5, &entry("val", value))])
}

#[test]
fn the_outline_is_what_decoding_finds() {
    let model = everywhere();
    let outline = outlined(&model).unwrap();
    assert_eq!(named(outline.references), named(Program::parse(&model).unwrap().references().unwrap()));
    assert_eq!(outline.kind, Kind::MlProgram);
    assert_eq!(outline.specification_version, 7);
    assert_eq!(outline.functions.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["main", "two"]);
    let parts = super::super::outline(&Parts(&model), &|_| true).unwrap();
    assert_eq!(parts.references, super::super::outline(&model[..], &|_| true).unwrap().references);
}

#[test]
fn patching_is_decoding_relocating_and_writing() {
    let model = everywhere();
    type Case<'a> = &'a dyn Fn(&str, u64) -> Option<Place>;
    let cases: [Case<'_>; 6] = [
        &|_, _| None,
        &|_, offset| at("weight.bin", offset),
        &|_, offset| at("weight.bin", offset << 40),
        &|_, offset| at("another and longer.bin", offset),
        &|_, offset| at("w", offset << 7),
        &|_, offset| if offset % 3 == 0 { at("0-weight.bin", 1 << 63) } else { None },
    ];
    for (index, place) in cases.into_iter().enumerate() {
        let patched = patched(&model, place, &[]);
        assert_eq!(Program::parse(&patched).unwrap(), decoded(&model, place), "case {index}");
    }
    assert_eq!(self::patched(&model, |_, _| None, &[]), model);
}

#[test]
fn models_within_pipelines_are_patched() {
    let inner = one_block(&[constant("w", 1)]);
    for ty in [200, 201, 202] {
        let pipeline = [field(1, &inner), field(1, &inner), field(2, b"first"), unknown()].concat();
        let pipeline = if ty == 202 { pipeline } else { [field(1, &pipeline), unknown()].concat() };
        let model = [number(1, 7), field(ty, &pipeline)].concat();
        let outline = outlined(&model).unwrap();
        assert_eq!(outline.kind, Kind::Pipeline);
        assert_eq!(outline.references, Program::parse(&model).unwrap().references().unwrap());
        let place = |_: &str, offset| at("shared.bin", offset << 30);
        assert_eq!(Program::parse(&patched(&model, place, &[])).unwrap(), decoded(&model, place));
    }
}

#[test]
fn inline_tensors_are_found_and_moved() {
    let values: Vec<u8> = (0..24).collect();
    let model = one_block(&[
        inline_constant("floats", &inline_tensor(11, &[2, 3], 1, &values)),
        inline_constant("halves", &inline_tensor(10, &[12], 7, &values)),
        inline_constant("thirds", &inline_tensor(39, &[64], 7, &values)),
        constant("filed", 64),
        operation(
            "y",
            "linear",
            &[field(2, &entry("weight", &field(1, &field(2, &inline_tensor(21, &[24], 7, &values)))))],
        ),
    ]);
    let outline = outlined(&model).unwrap();
    let found: Vec<(&str, Dtype, &[u64])> =
        outline.inline.iter().map(|it| (it.name.as_str(), it.dtype, &it.shape[..])).collect();
    assert_eq!(
        found,
        [
            ("floats", Dtype::F32, &[2, 3][..]),
            ("halves", Dtype::F16, &[12]),
            ("thirds", Dtype::U3, &[64]),
            ("y.weight", Dtype::I8, &[24])
        ]
    );
    for tensor in &outline.inline {
        assert_eq!(&model[tensor.range.start as usize..tensor.range.end as usize], values);
    }
    let moved =
        patched(&model, |_, _| None, &[at("weight.bin", 128), None, at("weight.bin", 256), at("weight.bin", 0)]);
    let after = outlined(&moved).unwrap();
    assert_eq!(after.inline.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["halves"]);
    let references = Program::parse(&moved).unwrap().references().unwrap();
    let references: Vec<(&str, Dtype, u64)> =
        references.iter().map(|it| (it.name.as_str(), it.dtype, it.offset)).collect();
    assert_eq!(
        references,
        [
            ("floats", Dtype::F32, 128),
            ("thirds", Dtype::U3, 256),
            ("filed", Dtype::F32, 64),
            ("y.weight", Dtype::I8, 0)
        ]
    );
}

#[test]
fn what_is_not_raw_stays() {
    let values: Vec<u8> = (0..24).collect();
    let split = field(1, &[field(1, &values[..8]), field(1, &values[8..])].concat());
    let split = [field(2, &tensor_type(11, &[6])), field(3, &field(1, &split))].concat();
    let list =
        [field(2, &tensor_type(11, &[6])), immediate(3, &field(1, &inline_tensor(11, &[6], 1, &values)))].concat();
    for value in [
        inline_tensor(11, &[5], 1, &values),
        inline_tensor(23, &[24], 2, &values),
        inline_tensor(1, &[24], 3, &values),
        inline_tensor(2, &[1], 4, &values),
        inline_tensor(1, &[24], 7, &values),
        inline_tensor(10, &[12], 1, &values),
        inline_tensor(99, &[12], 7, &values),
        inline_tensor(11, &[0], 1, b""),
        split,
        list,
    ] {
        assert_eq!(outlined(&one_block(&[inline_constant("w", &value)])).unwrap().inline, []);
    }
}

#[test]
fn of_equal_keys_the_last_counts_and_the_others_stay() {
    let entries = [field(5, &entry("val", &f32_blob(1))), field(5, &entry("val", &f32_blob(2)))];
    let model = one_block(&[operation("w", "const", &entries)]);
    let outline = outlined(&model).unwrap();
    assert_eq!(outline.references.iter().map(|it| it.offset).collect::<Vec<_>>(), [2]);
    let moved = patched(&model, |_, _| at("weight.bin", 3), &[]);
    assert_eq!(moved.len(), model.len());
    let changed: Vec<usize> = (0..moved.len()).filter(|&index| moved[index] != model[index]).collect();
    assert_eq!(changed.len(), 1);
    assert_eq!(outlined(&moved).unwrap().references[0].offset, 3);
}

#[test]
fn faults_have_names() {
    let fault = |model: &[u8]| outlined(model).unwrap_err().what;
    let with = |value: &[u8]| one_block(&[operation("w", "const", &[field(5, &entry("val", value))])]);
    let ty = tensor_type(11, &[2, 3]);
    for (model, word) in [
        (b"".to_vec(), "no specification version"),
        (everywhere()[..40].to_vec(), "ends"),
        ([number(1, 7), varint(502 << 3 | 2), varint(2 << 30)].concat(), "2147483648 bytes ends after"),
        ([number(1, 7), varint(502 << 3 | 2), vec![0xff; 9], vec![1]].concat(), "ends after"),
        ([number(1, 7), vec![0x0b]].concat(), "groups"),
        ([number(1, 7), vec![0]].concat(), "field number"),
        ([number(1, 7), number(502, 7)].concat(), "is no message"),
        ([number(1, 7), number(1, 7)].concat(), "says again"),
        ([number(1, 7), field(502, b""), field(502, b"")].concat(), "says again"),
        ([number(1, 7), field(500, b""), field(502, b"")].concat(), "says again"),
        (with(&[blob(&ty, 64), field(3, b"")].concat()), "says again"),
        (with(&[blob(&ty, 64), field(5, b"")].concat()), "says again"),
        (with(&[field(2, &ty), field(5, &[number(2, 1), number(2, 2)].concat())].concat()), "says again"),
        (with(&[field(2, &ty), field(5, &[field(1, b"\xff"), number(2, 2)].concat())].concat()), "not UTF-8"),
        (with(&[field(2, &ty), field(5, &field(2, b"1"))].concat()), "is no number"),
        (with(&blob(&tensor_type(2, &[1]), 64)), "\"w\", which is in a weight file, has the data type 2"),
        (with(&blob(b"", 64)), "is no tensor"),
        (
            with(&blob(&field(1, &[number(1, 11), field(3, &field(2, b""))].concat()), 64)),
            "dimension that is not known",
        ),
        (with(&blob(&field(1, &[number(1, 11), number(2, u64::MAX)].concat()), 64)), "unknown number of dimensions"),
    ] {
        assert!(fault(&model).contains(word), "{word}: {}", fault(&model));
    }
    for (levels, fits) in [(40, true), (60, false)] {
        let mut deep = block(&[constant("w", 1)]);
        for _ in 0..levels {
            deep = block(&[operation("c", "cond", &[field(4, &deep)])]);
        }
        let model = model(&program(&[("main", function(&[("CoreML6", deep)]))]));
        match outlined(&model) {
            Ok(outline) => assert!(fits && outline.references.len() == 1),
            Err(fault) => assert!(!fits && fault.what.contains("more than 100 deep"), "{fault}"),
        }
    }
    let operations: Vec<Vec<u8>> = (0..700).map(|_| constant("w", 1)).collect();
    let function = function(&[("CoreML6", block(&operations))]);
    assert!(fault(&self::model(&program(&[(&"f".repeat(100_000), function)]))).contains("more than 64 MiB"));
}

/// A model that is made of the same bytes again and again.
struct Repeated(ExtentMap, MemoryBlobs);

impl Bytes for Repeated {
    fn len(&self) -> u64 {
        self.0.size()
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        self.check_range(offset, len)?;
        let mut bytes = vec![0; len];
        self.0.read(&self.1, offset, &mut bytes).unwrap();
        Ok(Cow::Owned(bytes))
    }
}

#[test]
fn what_is_said_again_and_again_is_not_held() {
    let outlined = |operation: Vec<u8>, times: usize| {
        let operation = field(3, &operation);
        let (mut head, mut len) = (Vec::new(), times * operation.len());
        for (number, before) in
            [(2, field(1, b"CoreML6")), (3, vec![]), (2, field(1, b"main")), (2, vec![]), (502, vec![])]
        {
            let more = [before, varint(number << 3 | 2), varint(len as u64)].concat();
            len += more.len();
            head = [more, head].concat();
        }
        let mut blobs = MemoryBlobs::default();
        let mut map = ExtentMap::from_bytes([number(1, 7), head].concat());
        let (len, digest) = (operation.len() as u64, blobs.put(operation));
        (0..times).for_each(|_| map.push_blob(digest, len, 0, len).unwrap());
        super::super::outline(&Repeated(map, blobs), &|_| true).map(|outline| outline.references.len())
    };
    let constant = |value: &[u8]| operation("w", "const", &[field(5, &entry("val", value))]);
    let file = field(5, &field(1, &vec![b'a'; 1 << 20]));
    let long = constant(&[field(2, &tensor_type(11, &[2, 3])), file].concat());
    assert_eq!(outlined(long.clone(), 100), Ok(100));
    assert!(outlined(long, 300).unwrap_err().what.contains("weight files and shapes come to more than 256 MiB"));
    let wide = |dims: usize| constant(&blob(&tensor_type(11, &vec![1; dims]), 64));
    assert_eq!(outlined(wide(60_000), 1), Ok(1));
    assert!(outlined(wide(70_000), 1).unwrap_err().what.contains("more than 65536 dimensions"));
    // A reference takes a frame for each of the messages around it that is not around the one before.
    let reference = constant(&blob(&tensor_type(11, &[2]), 64));
    let deep = (0..44).fold(reference, |inner, _| field(4, &field(3, &inner)));
    assert_eq!(outlined(deep.clone(), 1000), Ok(1000));
    assert!(outlined(deep, 96_000).unwrap_err().what.contains("in more than 8388608 messages"));
    // Each key is below the limit of all names, and they are not.
    let keys: Vec<Vec<u8>> =
        (0..70).map(|key| field(5, &entry(&format!("{key}{}", "x".repeat(1 << 20)), b""))).collect();
    assert!(outlined(operation("w", "const", &keys), 1).unwrap_err().what.contains("more than 64 MiB"));
}

#[test]
fn a_large_model_is_patched_in_no_time() {
    let values = vec![7; 900];
    let operations: Vec<Vec<u8>> = (0..20_000)
        .map(|index| match index % 2 {
            0 => constant(&format!("w{index}"), 64 * index),
            _ => inline_constant(&format!("i{index}"), &inline_tensor(10, &[450], 7, &values)),
        })
        .collect();
    let model = one_block(&operations);
    let outline = super::super::outline(&Parts(&model), &|_| false).unwrap();
    assert_eq!(outline.references.len(), 10_000);
    let moved = patched(&model, |_, offset| at("weight.bin", offset + (1 << 33)), &[]);
    assert_eq!(
        named(outlined(&moved).unwrap().references),
        named(Program::parse(&moved).unwrap().references().unwrap())
    );
}

proptest! {
    #[test]
    fn any_bytes_are_outlined_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = outlined(&bytes);
    }

    #[test]
    fn any_change_is_patched_or_refused(at in 0usize..4000, with in any::<u8>(), to in any::<u64>()) {
        let mut model = everywhere();
        let index = at % model.len();
        model[index] = with;
        let Ok(outline) = outlined(&model) else { return Ok(()) };
        // What the outline accepts, decoding accepts or refuses for what the outline does not look at.
        let Ok(before) = Program::parse(&model) else { return Ok(()) };
        prop_assert_eq!(named(outline.references), named(before.references()?));
        let place = |_: &str, offset| self::at("shared.bin", offset ^ to);
        prop_assert_eq!(Program::parse(&patched(&model, place, &[])), Ok(decoded(&model, place)));
    }
}
