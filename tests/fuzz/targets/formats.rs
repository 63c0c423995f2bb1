//! Containers and manifests: what is parsed keeps its promises, and what is written from it is parsed the same.

use std::collections::HashSet;

use safetensors::SafeTensors;
use wmount::digest::Digest;
use wmount::error::{Fault, Result};
use wmount::extent::{Blobs, ExtentBytes, ExtentMap};
use wmount::format::{
    amb as amb_file, gds as export, gguf as gguf_file, milblob as weights, mlpackage as package, recipe as recipes,
};
use wmount::format::{ollama as store, safetensors as tensors};
use wmount::model::Tensor;

use super::parts;

/// Files up to this length are written again.
const MOST: u64 = 1 << 20;

/// The input as the one blob there is.
struct Whole<'a>(&'a [u8]);

impl Blobs for Whole<'_> {
    fn read_exact(&self, _: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
        buf.copy_from_slice(&self.0[offset as usize..][..buf.len()]);
        Ok(())
    }
}

/// A fault is one line of a length that can be shown.
fn shown<T>(parsed: Result<T, Fault>) -> Option<T> {
    parsed.map_err(|fault| super::check_line(&fault.to_string())).ok()
}

/// What the official crate takes, ours takes, and finds the same in it; it takes names that occur twice, too.
fn check_peer(input: &[u8], parsed: &Result<tensors::Header, Fault>) {
    match (parsed, SafeTensors::read_metadata(input)) {
        (Ok(header), Ok((_, peer))) => {
            let theirs = peer.tensors();
            assert_eq!(header.tensors.len(), theirs.len());
            for ours in &header.tensors {
                let tensor = theirs[&ours.name];
                let (begin, end) = tensor.data_offsets;
                assert_eq!((ours.offset - header.data_start, ours.len), (begin as u64, (end - begin) as u64));
                assert!(ours.shape.iter().copied().eq(tensor.shape.iter().map(|&dim| dim as u64)));
                assert_eq!(ours.dtype.to_string(), tensor.dtype.to_string());
            }
        }
        // Values that neither asks for the crate makes anyhow, and ours passes over.
        (Ok(_), Err(error)) => {
            let (unread, error) = (["out of range", "recursion limit", "hex escape"], error.to_string());
            assert!(unread.iter().any(|what| error.contains(what)), "the crate refuses this: {error}");
        }
        (Err(fault), Ok(_)) => assert!(fault.what.ends_with("occurs twice"), "the crate takes this: {fault}"),
        (Err(_), Err(_)) => {}
    }
}

/// A safetensors file.
pub fn safetensors(input: &[u8]) {
    let parsed = tensors::parse(input);
    check_peer(input, &parsed);
    let Some(header) = shown(parsed) else { return };
    let mut end = header.data_start;
    for tensor in &header.tensors {
        assert_eq!(tensor.offset, end);
        assert_eq!(tensor.dtype.bytes(&tensor.shape), Some(tensor.len));
        end += tensor.len;
    }
    assert_eq!(end, input.len() as u64);
    let names: HashSet<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names.len(), header.tensors.len());

    let metadata: Vec<(&str, &str)> = header.metadata.iter().map(|(key, value)| (&**key, &**value)).collect();
    let list = header.tensors.iter().map(|tensor| (&*tensor.name, tensor.dtype, &*tensor.shape, tensor.len));
    let mut written = tensors::file_header(&metadata, list);
    let start = written.len() as u64;
    written.extend(&input[header.data_start as usize..]);
    let again = tensors::parse(&written[..]).unwrap();
    assert_eq!((again.data_start, again.tensors.len()), (start, header.tensors.len()));
    assert_eq!(again.metadata, header.metadata);
    for (new, old) in again.tensors.iter().zip(&header.tensors) {
        assert_eq!((&new.name, new.dtype, &new.shape), (&old.name, old.dtype, &old.shape));
        assert_eq!(new.offset - start, old.offset - header.data_start);
        let alone = tensors::named_header(&old.name, old.dtype, &old.shape, old.len);
        if alone.len() as u64 + old.len <= MOST {
            let alone = tensors::parse(&[&alone[..], &vec![0; old.len as usize]].concat()[..]).unwrap();
            assert_eq!((&alone.tensors[0].name, alone.tensors[0].len), (&old.name, old.len));
        }
    }
}

/// A weight file.
pub fn milblob(input: &[u8]) {
    for at in [0, 64, input.len() as u64 / 2, u64::MAX - 63] {
        shown(weights::parse_blob(input, at));
    }
    let Some(blobs) = shown(weights::parse(input)) else { return };
    let mut at = 0;
    for blob in &blobs {
        assert!(blob.metadata > at && blob.end() <= input.len() as u64);
        assert_eq!(weights::parse_blob(input, blob.metadata).as_ref(), Ok(blob));
        assert!(blob.elements() <= blob.size.saturating_mul(8));
        at = blob.metadata;
    }
    let plan = weights::plan(blobs.iter().map(|blob| (blob.dtype, blob.size, blob.padding_bits))).unwrap();
    if plan.size > MOST {
        return;
    }
    let mut written = plan.header.to_vec();
    for (planned, blob) in plan.blobs.iter().zip(&blobs) {
        written.resize(planned.metadata as usize, 0);
        written.extend(weights::metadata(planned));
        written.extend(&input[blob.offset as usize..blob.end() as usize]);
    }
    assert_eq!(written.len() as u64, plan.size);
    assert_eq!(weights::parse(&written[..]), Ok(plan.blobs));
}

/// The manifest of a Core ML package.
pub fn mlpackage(input: &[u8]) {
    let Some(manifest) = shown(package::parse(input)) else { return };
    assert!(manifest.model_path().is_some());
    for item in manifest.items.values() {
        assert!(!item.path.starts_with('/') && item.path.split('/').all(|part| part != ".."));
    }
    assert_eq!(package::parse(&manifest.render()).as_ref(), Ok(&manifest));
    if let Some(other) = manifest.with_weights(&Digest::of(input), package::WEIGHTS_PATH) {
        assert_eq!(package::parse(&other.render()), Ok(other));
    }
}

/// An AMB file.
pub fn amb(input: &[u8]) {
    let Some(file) = shown(amb_file::parse(input)) else { return };
    assert!(amb_file::is_amb(input));
    for (what, section) in [("metadata", &file.metadata), ("config", &file.config)] {
        amb_file::json_section(input, what, section).unwrap();
    }
    let mut end = file.weights.start;
    for record in &file.records {
        assert!(record.offset > end && record.offset + record.len <= file.weights.end);
        assert!(!record.type_name().is_empty());
        end = record.offset + record.len;
    }
    let blob = Digest::of(input);
    let tensors = file.records.iter().map(|record| {
        let (name, shape, blob_len) = (record.name.clone(), record.dims(), input.len() as u64);
        let (offset, len) = (record.offset, record.len);
        Some(Tensor { name, dtype: record.dtype?, shape, blob, blob_len, offset, len, named: None, plain: None })
    });
    // Quantised records stay opaque; a file without them is that of its tensors and sections.
    let Some(tensors) = tensors.collect::<Option<Vec<Tensor>>>() else { return };
    let section = |range: &std::ops::Range<u64>| input[range.start as usize..range.end as usize].to_vec();
    let sections = amb_file::Sections {
        metadata: section(&file.metadata),
        config: section(&file.config),
        tokenizer: ExtentMap::from_bytes(section(&file.tokenizer)),
    };
    let plan = amb_file::plan(&sections, &tensors, None).unwrap();
    let mut written = plan.read_all(&Whole(input)).unwrap();
    written[6..8].copy_from_slice(&file.flags.to_le_bytes());
    assert!(written == input, "a plan of what was parsed is another file");
    for (_, variant) in amb_file::Variant::ALL {
        let plan = amb_file::plan(&sections, &tensors, Some(variant)).unwrap();
        if plan.size() <= MOST {
            let variant = plan.read_all(&Whole(input)).unwrap();
            assert_eq!(amb_file::parse(&variant[..]).unwrap().records.len(), file.records.len());
        }
    }
}

/// A GGUF file.
pub fn gguf(input: &[u8]) {
    let Some(header) = shown(gguf_file::parse(input)) else { return };
    assert_eq!(gguf_file::check_magic(input), Ok(None));
    assert!(header.architecture.len() <= input.len() && header.tensors <= input.len() as u64);
    // What lies after the data is nobody's.
    assert_eq!(gguf_file::parse(&[input, b"more"].concat()[..]), Ok(header));
    let second = second_part();
    let parts = [input, &second];
    let Ok(merged) = gguf_file::merge(&parts).map_err(|(_, fault)| shown::<()>(Err(fault))) else { return };
    let runs = merged.runs.iter().map(|run| match run {
        gguf_file::Run::Bytes(bytes) => bytes.clone(),
        gguf_file::Run::Zeros(len) => vec![0; *len as usize],
        gguf_file::Run::Part { part, offset, len } => parts[*part][*offset as usize..][..*len as usize].to_vec(),
    });
    let whole = runs.collect::<Vec<_>>().concat();
    assert_eq!((gguf_file::parse(&whole[..]), whole.len() as u64), (Ok(merged.header), merged.len));
}

/// The second of two parts of a GGUF file.
fn second_part() -> Vec<u8> {
    let mut part = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
    for (name, number) in [(&b"split.no"[..], 1), (b"split.count", 2)] {
        part.extend([&(name.len() as u64).to_le_bytes(), name, &2_u32.to_le_bytes(), &[number, 0]].concat());
    }
    // A name, one dimension of 64 elements, 4 byte floats, the begin of the data.
    part.extend(b"\x04\0\0\0\0\0\0\0last\x01\0\0\0\x40\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    part.resize(part.len().next_multiple_of(32) + 256, 5);
    part
}

/// An ollama manifest.
pub fn ollama(input: &[u8]) {
    let brief = store::Manifest::brief(input);
    let Some(manifest) = shown(store::Manifest::parse(input)) else {
        assert_eq!(brief, None);
        return;
    };
    assert!(brief.into_iter().flat_map(|brief| brief.layers).all(|layer| manifest.layers.contains(&layer)));
    assert_eq!(store::Manifest::parse(&manifest.to_bytes()).as_ref(), Ok(&manifest));
    let _ = (manifest.is_foreign(), manifest.has_ours());
    // What ollama reads has the same blobs and names, and none of our keys.
    let go = store::Manifest::parse(&manifest.to_go_bytes()).unwrap();
    assert_eq!(go.layers.len(), manifest.layers.len());
    for (go, ours) in go.blobs().zip(manifest.blobs()) {
        assert_eq!((&go.media_type, go.digest, go.size), (&ours.media_type, ours.digest, ours.size));
        assert!(go.name == ours.name && go.shape.is_none() && go.named.is_none() && go.dtype.is_empty());
    }
}

/// The manifest of a gds_export directory.
pub fn gds(input: &[u8]) {
    let Some(entries) = shown(export::parse(input)) else { return };
    let mut paths = HashSet::new();
    for entry in &entries {
        assert!(paths.insert(&entry.path) && wmount::model::check_path(&entry.path).is_ok());
        assert!(entry.check_len(entry.len()).is_ok());
        shown(entry.check_len(entry.len() ^ 1));
        assert_eq!(export::torch_name(entry.dtype).and_then(export::from_torch_name), Some(entry.dtype));
    }
    assert_eq!(export::parse(&export::render(&entries)), Ok(entries));
}

/// A recipe, and the map that its files may name.
pub fn recipe(input: &[u8]) {
    let [text, map] = parts(input);
    let Some(source) = shown(recipes::parse("model", text, &|_, _| Ok(map.to_vec()), &mut Default::default())) else {
        return;
    };
    let mut lens = std::collections::HashMap::new();
    for extent in source.files.iter().flat_map(|file| file.content.extents()) {
        if let ExtentBytes::Blob { digest, offset } = extent.bytes {
            let len = lens.entry(digest).or_insert(0);
            *len = (offset + extent.len).max(*len);
        }
    }
    for file in &source.files {
        let mut buf = [1; 100];
        for offset in [0, file.content.size() / 2, file.content.size().saturating_sub(50), u64::MAX] {
            let left = file.content.size().saturating_sub(offset).min(100) as usize;
            assert_eq!(file.content.read(&Patterns, offset, &mut buf).unwrap(), left);
        }
    }
    let mut maps = std::collections::HashMap::new();
    let written = recipes::render(&source, &|digest| lens[digest], &mut |map| {
        let digest = Digest::of(&map);
        maps.insert(digest, map);
        Ok::<_, Fault>(digest)
    });
    let again =
        recipes::parse("model", &written.unwrap(), &|digest, _| Ok(maps[digest].clone()), &mut Default::default())
            .unwrap();
    assert_eq!((again.kind, again.files.len(), again.dirs.len()), (source.kind, source.files.len(), source.dirs.len()));
    for (new, old) in again.files.iter().zip(&source.files) {
        assert_eq!((&new.path, new.mtime, new.content.size()), (&old.path, old.mtime, old.content.size()));
        for place in new.content.extents().chain(old.content.extents()) {
            let bytes = |map: &ExtentMap| {
                let mut buf = [0; 40];
                let len = map.read(&Patterns, place.start.saturating_sub(20), &mut buf).unwrap();
                buf[..len].to_vec()
            };
            assert_eq!(bytes(&new.content), bytes(&old.content), "{place:?}");
        }
    }
}

/// Blobs as long as anybody wants, each with bytes of its own.
struct Patterns;

impl Blobs for Patterns {
    fn read_exact(&self, digest: &Digest, offset: u64, buf: &mut [u8]) -> Result<()> {
        for (byte, at) in buf.iter_mut().zip(offset..) {
            *byte = digest.as_bytes()[0] ^ (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
        }
        Ok(())
    }
}
