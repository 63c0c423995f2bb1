use super::*;
use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::extent::ExtentMap;
use crate::extent::tests::MemoryBlobs;
use crate::model::Tensor;

pub(super) fn tensor(blobs: &mut MemoryBlobs, name: &str, dtype: Dtype, shape: &[u64], data: &[u8]) -> Tensor {
    let blob = blobs.put(data.to_vec());
    let len = data.len() as u64;
    Tensor {
        name: name.into(),
        dtype,
        shape: shape.into(),
        blob,
        blob_len: len,
        offset: 0,
        len,
        named: None,
        plain: None,
    }
}

/// Header, sections and weights as they are given.
fn file(metadata: &[u8], config: &[u8], tokenizer: &[u8], weights: &[u8]) -> Vec<u8> {
    let mut bytes = b"AMBEE\x01\0\0".to_vec();
    for section in [metadata, config, tokenizer] {
        bytes.extend((section.len() as u32).to_le_bytes());
    }
    bytes.extend((weights.len() as u64).to_le_bytes());
    [&bytes, metadata, config, tokenizer, weights].concat()
}

fn record(name: &[u8], shape: &[u32], code: u8, data: &[u8]) -> Vec<u8> {
    let mut bytes = (name.len() as u16).to_le_bytes().to_vec();
    bytes.extend(name);
    bytes.push(shape.len() as u8);
    bytes.extend(shape.iter().flat_map(|dim| dim.to_le_bytes()));
    bytes.push(code);
    bytes.extend((data.len() as u64).to_le_bytes());
    bytes.extend(data);
    bytes
}

/// A file with nothing before its weights, so that records begin at byte 28.
fn with_records(records: &[Vec<u8>]) -> Vec<u8> {
    let mut weights = Vec::new();
    for record in records {
        weights.extend(record);
        weights.resize((28 + weights.len()).next_multiple_of(8) - 28, 0);
    }
    file(b"", b"", b"", &weights)
}

fn fault(bytes: &[u8]) -> String {
    parse(bytes).expect_err("refused").to_string()
}

fn good() -> Vec<u8> {
    let records = [
        record(b"a", &[2, 3], 0, &[1; 24]),
        record(b"", &[], 1, &[2; 2]),
        record("\u{e9}".as_bytes(), &[0, 9], 2, b""),
        record(b"plain", &[5], 3, &[3; 5]),
        record(b"scaled", &[5], 3, &[3, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        record(b"blocks", &[40], 6, &[6; 7]),
        record(b"foreign", &[1], 8, b""),
    ];
    with_records(&records)
}

#[test]
fn every_type_is_read() {
    let parsed = parse(good().as_slice()).expect("valid");
    let dtypes: Vec<_> = parsed.records.iter().map(|record| record.dtype).collect();
    let (f32, f16, bf16, i8) = (Some(Dtype::F32), Some(Dtype::F16), Some(Dtype::BF16), Some(Dtype::I8));
    assert_eq!(dtypes, [f32, f16, bf16, i8, None, None, None]);
    assert_eq!((parsed.records[0].offset, parsed.records[0].len), (28 + 2 + 1 + 1 + 8 + 9, 24));
    assert_eq!(parsed.records[2].dims(), [0, 9]);
    let sections = parse(file(b"{\"a\":1} \n", b"{}", &[0; 11], b"").as_slice()).expect("valid");
    assert_eq!((sections.metadata, sections.config, sections.tokenizer), (28..37, 37..39, 39..50));
    let flags = parse([b"AMBEE\x01\x34\x12".as_slice(), &[0; 20]].concat().as_slice()).expect("valid").flags;
    assert_eq!(flags, 0x1234);
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    let whole = good();
    for len in 0..whole.len() {
        assert!(parse(&whole[..len]).is_err(), "{len}");
    }
    assert!(fault(&[&whole[..], b"x"].concat()).contains("1 bytes follow"));
    // The same with a header that says so.
    for len in 28..whole.len() {
        let mut cut = whole[..len].to_vec();
        cut[20..28].copy_from_slice(&(len as u64 - 28).to_le_bytes());
        match parse(cut.as_slice()) {
            Ok(parsed) => assert!(parsed.records.len() < 7 && len % 8 == 0 || len == 28, "{len}"),
            Err(fault) => assert!(fault.to_string().contains("past the weights section"), "{len}: {fault}"),
        }
    }
}

#[test]
fn faults_are_named_in_the_order_of_the_document() {
    let mut all = file(b"[]", b"", b"", b"x");
    all[..6].copy_from_slice(b"XMBEE\x02");
    all.push(0);
    assert!(fault(&all).contains("AMBEE"));
    all[0] = b'A';
    assert!(fault(&all).contains("version is 2"));
    all[5] = 1;
    assert!(fault(&all).contains("follow its last section"));
    all.pop();
    assert!(fault(&all).contains("metadata section is no JSON object"));
    all[28..30].copy_from_slice(b"{}");
    assert!(fault(&all).contains("the length of the name of tensor number 0 runs past"));
}

#[test]
fn sections_that_do_not_fit_are_refused() {
    let sized = |sizes: [u32; 3], weights: u64| {
        let mut bytes = file(b"", b"", b"", b"");
        for (at, size) in [8, 12, 16].into_iter().zip(sizes) {
            bytes[at..at + 4].copy_from_slice(&size.to_le_bytes());
        }
        bytes[20..28].copy_from_slice(&weights.to_le_bytes());
        fault(&bytes)
    };
    assert!(sized([0; 3], u64::MAX).contains("overflow"));
    assert!(sized([u32::MAX; 3], 0).contains("its sections need"));
    assert!(sized([0; 3], 1).contains("need 29 bytes but the file has 28"));
    for (bad, what) in [
        (file(b"nil", b"", b"", b""), "metadata"),
        (file(b"", b"[]", b"", b""), "config"),
        (file(b"", b"{\"x\":NaN}", b"", b""), "config"),
        (file(b"{} {}", b"", b"", b""), "metadata"),
        (file(b"\xff", b"", b"", b""), "metadata"),
        (file(b"", b"", &[0; 10], b""), "tokenizer"),
    ] {
        assert!(fault(&bad).contains(&format!("the {what} section")), "{}", fault(&bad));
    }
}

#[test]
fn records_that_do_not_fit_are_refused() {
    let plain = record(b"t", &[2], 0, &[0; 8]);
    let mut long_name = with_records(std::slice::from_ref(&plain));
    long_name[28..30].copy_from_slice(&u16::MAX.to_le_bytes());
    let mut many_dims = with_records(std::slice::from_ref(&plain));
    many_dims[31] = 255;
    let mut long_data = with_records(std::slice::from_ref(&plain));
    long_data[37..45].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut padded = with_records(&[record(b"t", &[1], 3, &[0; 1])]);
    *padded.last_mut().expect("not empty") = 1;
    let odd_name = with_records(&[record(b"\xff", &[2], 0, &[0; 8])]);
    let quantised = |data: &[u8]| with_records(&[record(b"t", &[5], 3, data)]);
    for (bad, what) in [
        (long_name, "the name of tensor number 0 runs past"),
        (many_dims, "the shape of tensor number 0 runs past"),
        (long_data, "bytes run past"),
        (padded, "padding is not zero"),
        (odd_name, "is not UTF-8"),
        (with_records(&[plain.clone(), plain.clone()]), "\"t\" occurs twice"),
        (with_records(&[record(b"t", &[2], 9, &[0; 8])]), "data type 9"),
        (with_records(&[record(b"t", &[3], 0, &[0; 8])]), "has not 8 bytes"),
        (with_records(&[record(b"t", &[u32::MAX; 3], 1, &[0; 8])]), "has not 8 bytes"),
        (with_records(&[record(b"t", &[2], 2, b"")]), "has not 0 bytes"),
        (quantised(&[0; 3]), "has not 3 bytes"),
        (quantised(&[4, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]), "has not 13 bytes"),
        (quantised(&[3, 0, 0, 2, 1, 2, 3, 4, 5, 6, 7, 8, 9]), "has not 13 bytes"),
    ] {
        assert!(fault(&bad).contains(what), "{what}: {}", fault(&bad));
    }
}

#[test]
fn the_same_model_gives_the_same_bytes_for_ever() {
    let mut blobs = MemoryBlobs::default();
    let values: Vec<u8> = (0..600).flat_map(|i: i32| ((i * 37 % 101 - 50) as f32 * 0.03).to_le_bytes()).collect();
    let tensors = [
        tensor(&mut blobs, "a.norm", Dtype::F32, &[2, 300], &values),
        tensor(&mut blobs, "b", Dtype::BF16, &[3, 400], &values),
        tensor(&mut blobs, "c", Dtype::F16, &[600, 2], &values),
        tensor(&mut blobs, "d", Dtype::F32, &[20, 30], &values),
        tensor(&mut blobs, "e", Dtype::I8, &[2400], &values),
    ];
    let sections = Sections {
        metadata: b"{\"name\":\"x\"}".to_vec(),
        config: b"{}".to_vec(),
        tokenizer: ExtentMap::from_bytes(vec![7; 12]),
    };
    let variants = Variant::ALL.iter().map(|(name, variant)| (*name, Some(*variant)));
    let digests: Vec<(&str, String)> = std::iter::once(("", None))
        .chain(variants)
        .map(|(name, variant)| {
            let map = plan(&sections, &tensors, variant).expect("expressible");
            let bytes = map.read_all(&blobs).expect("readable");
            let parsed = parse(bytes.as_slice()).expect("valid");
            assert_eq!(parsed.records.len(), 5);
            (name, Digest::of(&bytes).hex()[..16].to_owned())
        })
        .collect();
    let expected: [(&str, &str); 8] = [
        ("", "4479c0dbe75d3405"),
        ("f16", "35ab6a6d3646ce51"),
        ("int8", "25e470dccbe8e8e4"),
        ("int4-32", "d75dce92235b5b76"),
        ("int4-128", "50a8e3c1e53e0789"),
        ("int5-32", "22c45f5bd8f386c8"),
        ("int5-128", "f3aa255b640d30f3"),
        ("adaptive-32", "a5017a5ceeed0bcf"),
    ];
    assert_eq!(digests, expected.map(|(name, digest)| (name, digest.to_owned())));
}

#[test]
fn names_that_are_too_many_to_be_held_are_refused() {
    let many = |count: usize| {
        let name = |number: usize| format!("{number:0>65000}").into_bytes();
        with_records(&(0..count).map(|number| record(&name(number), &[], 3, &[0])).collect::<Vec<_>>())
    };
    assert_eq!(parse(many(20).as_slice()).expect("valid").records.len(), 20);
    assert!(fault(&many(2100)).contains("the names and shapes of its tensors come to more than 128 MiB"));
}
