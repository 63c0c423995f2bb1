//! From a path to a [`SourcePlan`]: every file parsed and cut into pieces, before a byte is written.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::amb;
use super::gds;
use super::scan::{FoundFile, Scan, name_of, scan};
use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::mlprogram::{Program, Reference, weight_file};
use crate::format::{Bytes, milblob, mlpackage, past_the_end, safetensors};
use crate::model::SourceKind;

/// One source to import.
#[derive(Debug)]
pub(super) struct SourcePlan {
    /// Its name: the last component of the path.
    pub name: String,
    pub kind: SourceKind,
    pub scan: Scan,
    /// The pieces of each file of the scan, in its order; they follow each other from byte 0.
    pub pieces: Vec<Vec<Piece>>,
}

/// A part of a file, never empty but for tensors.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub offset: u64,
    pub len: u64,
    pub content: Content,
}

/// What a piece is.
#[derive(Debug, Clone)]
pub(super) enum Content {
    /// A whole file that is no container of tensors.
    File,
    /// A tensor: blob of its own, under each of these names.
    Tensor { dtype: Dtype, shape: Vec<u64>, names: Vec<TensorName> },
    /// Bytes between tensors, kept in the recipe or, if they are many, as a blob.
    Between,
}

/// A name that a tensor goes by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorName {
    pub name: String,
    /// Whether it is one of the model's own weights, which ollama and AMB show.
    pub own: bool,
}

/// Finds out what each path is and plans it; a directory of packages stands for all of them.
pub(super) fn plan_paths(paths: &[PathBuf]) -> Result<Vec<SourcePlan>> {
    let mut plans = Vec::new();
    for path in paths {
        let whole = scan(path)?;
        let packages = packages_in(path, &whole)?;
        if packages.is_empty() {
            plans.push(plan_scan(path, whole)?);
        }
        for package in packages {
            plans.push(plan_scan(&package, scan(&package)?)?);
        }
    }
    let mut names: Vec<&str> = plans.iter().map(|plan| plan.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::Invalid(format!("two of the paths are called {:?}: rename one", pair[0]))),
        None => Ok(plans),
    }
}

/// The packages of a directory that holds nothing else at its top.
fn packages_in(path: &Path, scan: &Scan) -> Result<Vec<PathBuf>> {
    let top: Vec<&str> = scan.dirs.iter().map(|dir| dir.path.as_str()).filter(|path| !path.contains('/')).collect();
    let only_packages = !top.is_empty()
        && top.iter().all(|name| name.ends_with(".mlpackage"))
        && scan.files.iter().all(|file| file.path.contains('/'));
    Ok(if only_packages { top.into_iter().map(|name| path.join(name)).collect() } else { Vec::new() })
}

fn plan_scan(path: &Path, scan: Scan) -> Result<SourcePlan> {
    let name = name_of(path)?;
    let is_safetensors = |file: &FoundFile| file.path.ends_with(".safetensors");
    let (kind, pieces) = if path.is_dir() && (scan.file("Manifest.json").is_some() || name.ends_with(".mlpackage")) {
        (SourceKind::Mlpackage, plan_package(path, &scan)?)
    } else if scan.files.iter().any(is_safetensors) {
        (SourceKind::Safetensors, plan_safetensors(&scan)?)
    } else if path.is_dir()
        && let Some(manifest) = gds::manifest_in(&scan)
    {
        (SourceKind::GdsExport, gds::plan(&scan, manifest)?)
    } else if let [file] = &scan.files[..]
        && !path.is_dir()
        && amb::is_amb(file)?
    {
        (SourceKind::Amb, vec![amb::plan(file)?])
    } else {
        return Err(Error::Invalid(format!(
            "{}: is nothing that can be imported: no .mlpackage, no .amb file, and no .safetensors file or gds_export manifest in it",
            path.display()
        )));
    };
    Ok(SourcePlan { name, kind, scan, pieces })
}

pub(super) fn whole(file: &FoundFile) -> Vec<Piece> {
    let piece = Piece { offset: 0, len: file.len, content: Content::File };
    if file.len == 0 { Vec::new() } else { vec![piece] }
}

/// A Hugging Face style directory, or one safetensors file.
fn plan_safetensors(scan: &Scan) -> Result<Vec<Vec<Piece>>> {
    check_index(scan)?;
    let own = own_weights(scan);
    let mut seen: BTreeMap<String, &Path> = BTreeMap::new();
    let mut pieces = Vec::with_capacity(scan.files.len());
    for file in &scan.files {
        let Some(stem) = file.path.strip_suffix(".safetensors") else {
            pieces.push(whole(file));
            continue;
        };
        let own = own(&file.path);
        // Components of a model keep their tensors apart by the component's name, as ollama's importer does it.
        let prefix = match (own, stem.rsplit_once('/')) {
            (true, None) => String::new(),
            (true, Some((component, _))) => format!("{component}/"),
            (false, _) => format!("{stem}/"),
        };
        let header = safetensors::parse(&FileBytes::open(file)?).at(&file.place)?;
        let mut parts = vec![Piece { offset: 0, len: header.data_start, content: Content::Between }];
        for tensor in header.tensors {
            let name = prefix.clone() + &tensor.name;
            if let Some(other) = seen.insert(name.clone(), &file.place) {
                let what = format!("tensor {name:?} is in {} too", other.display());
                return Err(Error::format(&file.place, Fault::new(tensor.offset, what)));
            }
            let names = vec![TensorName { name, own }];
            let content = Content::Tensor { dtype: tensor.dtype, shape: tensor.shape, names };
            parts.push(Piece { offset: tensor.offset, len: tensor.len, content });
        }
        pieces.push(parts);
    }
    Ok(pieces)
}

/// Which files hold the model's own weights: `model*.safetensors` at the top where there are any (what mlx-lm loads),
/// else every one at the top, else those of the component directories.
fn own_weights(scan: &Scan) -> impl Fn(&str) -> bool {
    let top = |path: &str| !path.contains('/') && path.ends_with(".safetensors");
    let model = move |path: &str| top(path) && path.starts_with("model");
    let any = |test: &dyn Fn(&str) -> bool| scan.files.iter().any(|file| test(&file.path));
    let (has_model, has_top) = (any(&model), any(&top));
    move |path| match (has_model, has_top) {
        (true, _) => model(path),
        (false, true) => top(path),
        (false, false) => true,
    }
}

/// An index must not name a shard that is not there: the rest would load as a model with holes.
fn check_index(scan: &Scan) -> Result<()> {
    const INDEX: &str = "model.safetensors.index.json";
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Some(file) = scan.file(INDEX) else { return Ok(()) };
    let bytes = FileBytes::open(file)?;
    let text = bytes.get(0, usize::try_from(file.len.min(safetensors::MAX_HEADER)).unwrap_or(0)).at(&file.place)?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|error| Error::format(&file.place, Fault::new(0, format!("is no index of shards: {error}"))))?;
    for (tensor, shard) in &index.weight_map {
        if scan.file(shard).is_none() {
            let what = format!("tensor {tensor:?} is in {shard:?}, which is missing");
            return Err(Error::format(&file.place, Fault::new(0, what)));
        }
    }
    Ok(())
}

/// An `.mlpackage`.
fn plan_package(path: &Path, scan: &Scan) -> Result<Vec<Vec<Piece>>> {
    let manifest = scan.file("Manifest.json").ok_or_else(|| {
        Error::Invalid(format!("{}: has no Manifest.json: it is no whole .mlpackage", path.display()))
    })?;
    let parsed = mlpackage::parse(&read_small(manifest)?).at(&manifest.place)?;
    for item in parsed.items.values() {
        let item = format!("Data/{}", item.path);
        if scan.file(&item).is_none() && !scan.dirs.iter().any(|dir| dir.path == item) {
            let what = format!("names {item:?}, which is missing");
            return Err(Error::format(&manifest.place, Fault::new(0, what)));
        }
    }
    let root = parsed.model_path();
    let root = root.ok_or_else(|| Error::format(&manifest.place, Fault::new(0, "names no root model")))?;
    let program = format!("Data/{root}");
    let program = scan.file(&program).ok_or_else(|| {
        Error::format(&manifest.place, Fault::new(0, format!("the model {program:?} is missing or no file")))
    })?;
    let references = Program::parse(&read_small(program)?).and_then(|program| program.references());
    let references = references.at(&program.place)?;
    let weights_dir = program.path.rsplit_once('/').map_or("weights".into(), |(dir, _)| format!("{dir}/weights"));
    let mut by_file: BTreeMap<String, Vec<Reference>> = BTreeMap::new();
    for reference in references {
        let file = format!("{weights_dir}/{}", weight_file(&reference.file).at(&program.place)?);
        if scan.file(&file).is_none() {
            let what = format!("{:?} is in {file:?}, which is missing", reference.name);
            return Err(Error::format(&program.place, Fault::new(0, what)));
        }
        by_file.entry(file).or_default().push(reference);
    }
    let mut pieces = Vec::with_capacity(scan.files.len());
    for file in &scan.files {
        let references = by_file.remove(&file.path).unwrap_or_default();
        let in_weights = file.path.strip_prefix(&weights_dir).is_some_and(|rest| rest.starts_with('/'));
        pieces.push(match in_weights && file.path.ends_with(".bin") {
            true => plan_weights(file, &program.place, references)?,
            false if references.is_empty() => whole(file),
            false => plan_weights(file, &program.place, references)?,
        });
    }
    Ok(pieces)
}

/// A weight file: the blobs that the program names and those that a walk finds.
fn plan_weights(file: &FoundFile, program: &Path, references: Vec<Reference>) -> Result<Vec<Piece>> {
    let bytes = FileBytes::open(file)?;
    let mut blobs: BTreeMap<u64, (milblob::Blob, Vec<Reference>)> = BTreeMap::new();
    for blob in milblob::parse(&bytes).at(&file.place)? {
        blobs.insert(blob.metadata, (blob, Vec::new()));
    }
    for reference in references {
        let (blob, names) = match blobs.entry(reference.offset) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert((milblob::parse_blob(&bytes, reference.offset).at(&file.place)?, Vec::new()))
            }
        };
        check_reference(&reference, blob).at(program)?;
        names.push(reference);
    }
    let mut parts = Vec::new();
    let mut end = 0;
    let mut by_data: Vec<(milblob::Blob, Vec<Reference>)> = blobs.into_values().collect();
    by_data.sort_by_key(|(blob, _)| (blob.offset, blob.size));
    for (blob, references) in by_data {
        let names: Vec<TensorName> =
            references.iter().map(|reference| TensorName { name: reference.name.clone(), own: false }).collect();
        let first = references.into_iter().next();
        let (dtype, shape) = match first {
            Some(reference) => (reference.dtype, reference.shape),
            None => (Dtype::U8, vec![blob.size]),
        };
        // Several blobs may lie over the same bytes: one piece, all the names.
        if let Some(Piece { offset, len, content: Content::Tensor { names: others, .. } }) = parts.last_mut()
            && (*offset, *len) == (blob.offset, blob.size)
            && blob.size > 0
        {
            others.extend(names);
            continue;
        }
        if blob.offset < end && blob.size > 0 {
            let what = format!("the blob at {} overlaps the one before it", blob.metadata);
            return Err(Error::format(&file.place, Fault::new(blob.offset, what)));
        }
        if blob.offset > end {
            parts.push(Piece { offset: end, len: blob.offset - end, content: Content::Between });
        }
        end = end.max(blob.offset + blob.size);
        let content = Content::Tensor { dtype, shape, names };
        parts.push(Piece { offset: blob.offset, len: blob.size, content });
    }
    if end < file.len {
        parts.push(Piece { offset: end, len: file.len - end, content: Content::Between });
    }
    Ok(parts)
}

fn check_reference(reference: &Reference, blob: &milblob::Blob) -> Result<(), Fault> {
    let fault = |what: String| Err(Fault::new(reference.offset, format!("{:?}: {what}", reference.name)));
    // BOOL has no blob code: writers store it as uint8.
    let dtype = if reference.dtype == Dtype::Bool { Dtype::U8 } else { reference.dtype };
    if blob.dtype != dtype {
        return fault(format!("its type is {} but the blob holds {}", reference.dtype, blob.dtype));
    }
    match dtype.bytes(&reference.shape) {
        Some(len) if len == blob.size => Ok(()),
        _ => fault(format!("{dtype} {:?} does not fill the {} bytes of the blob", reference.shape, blob.size)),
    }
}

/// The whole content of a file that is parsed in memory.
pub(super) fn read_small(file: &FoundFile) -> Result<Vec<u8>> {
    /// Protobuf's own limit for a message.
    const MAX: u64 = (1 << 31) - 1;
    if file.len > MAX {
        return Err(Error::format(&file.place, Fault::new(0, format!("{} bytes are too many", file.len))));
    }
    Ok(FileBytes::open(file)?.get(0, file.len as usize).at(&file.place)?.into_owned())
}

/// An open file of the source, with the length it had when it was scanned.
#[derive(Debug)]
pub(super) struct FileBytes {
    file: File,
    len: u64,
}

impl FileBytes {
    pub fn open(found: &FoundFile) -> Result<FileBytes> {
        // Between scan and open the path may have come to mean a FIFO.
        let open = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(&found.place);
        let file = open.at(&found.place)?;
        if !file.metadata().at(&found.place)?.is_file() {
            return Err(Error::Invalid(format!("{}: is no regular file any more", found.place.display())));
        }
        Ok(FileBytes { file, len: found.len })
    }

    /// Fills `buf` from `offset` on.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }
}

impl Bytes for FileBytes {
    fn len(&self) -> u64 {
        self.len
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return Err(past_the_end(self, offset, len));
        }
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes).map_err(|error| Fault::new(offset, error.to_string()))?;
        Ok(Cow::Owned(bytes))
    }
}
