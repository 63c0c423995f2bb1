//! [`Model`], what the layouts see: a name, its tensors, small files and recipes, validated once when it is loaded.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::digest::Digest;
use crate::dtype::Dtype;
use crate::error::Error;
use crate::extent::{Computed, ExtentMap};
use crate::transform::Transform;

/// The host of names that give none.
pub const DEFAULT_HOST: &str = "registry.ollama.ai";
/// The namespace of names that give none.
pub const DEFAULT_NAMESPACE: &str = "library";
/// The tag of names that give none.
pub const DEFAULT_TAG: &str = "latest";

/// A model's full name, by ollama's rules.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelName {
    /// Registry, such as `registry.ollama.ai` or `localhost:5000`.
    pub host: String,
    /// Owner, such as `library`.
    pub namespace: String,
    /// Name proper.
    pub name: String,
    /// Version, such as `latest`.
    pub tag: String,
}

impl ModelName {
    /// A name from its four parts, or why it is none.
    pub fn new(host: &str, namespace: &str, name: &str, tag: &str) -> Result<ModelName, Error> {
        check_part("host", host, 350, "_-.:")?;
        check_part("namespace", namespace, 80, "_-")?;
        check_part("name", name, 80, "_-.")?;
        check_part("tag", tag, 80, "_-.")?;
        Ok(ModelName { host: host.into(), namespace: namespace.into(), name: name.into(), tag: tag.into() })
    }

    /// The manifest's place below `manifests/`.
    pub fn manifest_path(&self) -> String {
        format!("{}/{}/{}/{}", self.host, self.namespace, self.name, self.tag)
    }

    /// The model's place in the layouts: as short as the defaults allow.
    pub fn tree_path(&self) -> String {
        match (self.host == DEFAULT_HOST, self.namespace == DEFAULT_NAMESPACE) {
            (true, true) => format!("{}/{}", self.name, self.tag),
            (true, false) => format!("{}/{}/{}", self.namespace, self.name, self.tag),
            _ => self.manifest_path(),
        }
    }

    /// A valid name made of any text, such as a directory's name: other characters become `-`.
    pub fn from_any(text: &str) -> Result<ModelName, Error> {
        let plain = |char: char| if char.is_ascii_alphanumeric() || "_-.".contains(char) { char } else { '-' };
        let name: String = text.chars().map(plain).collect::<String>().to_lowercase();
        let name: String = name.trim_start_matches(['-', '.']).chars().take(80).collect();
        ModelName::new(DEFAULT_HOST, DEFAULT_NAMESPACE, &name, DEFAULT_TAG)
    }
}

fn check_part(what: &str, text: &str, max: usize, others: &str) -> Result<(), Error> {
    let first = text.chars().next().is_some_and(|char| char.is_ascii_alphanumeric() || char == '_');
    if first && text.len() <= max && text.chars().all(|char| char.is_ascii_alphanumeric() || others.contains(char)) {
        return Ok(());
    }
    let shown: String = text.chars().take(80).collect();
    let others: Vec<String> = others.chars().map(String::from).collect();
    Err(Error::Invalid(format!(
        "{shown:?} is no valid {what} of a model: it takes 1 to {max} of A-Z a-z 0-9 {}, the first a letter, a digit or _",
        others.join(" ")
    )))
}

impl FromStr for ModelName {
    type Err = Error;

    /// `[[HOST/]NAMESPACE/]NAME[:TAG]`
    fn from_str(text: &str) -> Result<ModelName, Error> {
        let (path, tag) = match text.rsplit_once(':') {
            Some((path, tag)) if !tag.contains('/') => (path, tag),
            _ => (text, DEFAULT_TAG),
        };
        let parts: Vec<&str> = path.split('/').collect();
        match parts[..] {
            [name] => ModelName::new(DEFAULT_HOST, DEFAULT_NAMESPACE, name, tag),
            [namespace, name] => ModelName::new(DEFAULT_HOST, namespace, name, tag),
            [host, namespace, name] => ModelName::new(host, namespace, name, tag),
            _ => {
                let shown: String = text.chars().take(80).collect();
                Err(Error::Invalid(format!("{shown:?} is no model name: it takes [[HOST/]NAMESPACE/]NAME[:TAG]")))
            }
        }
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.tree_path();
        let path = path.strip_suffix(&self.tag).and_then(|path| path.strip_suffix('/')).unwrap_or(&path);
        write!(f, "{path}:{}", self.tag)
    }
}

/// Names in a path, at the most: trees are walked by functions that call themselves.
const DEEPEST: usize = 100;

/// A path of plain components, as files of imported directories and layers have: relative, no `.` or `..`,
/// nothing empty, no control characters, no component longer than a file name may be, and not very many of them.
pub fn check_path(path: &str) -> Result<(), String> {
    let plain = |part: &str| {
        !part.is_empty() && part != "." && part != ".." && part.len() <= 255 && !part.contains(char::is_control)
    };
    let shown = || path.chars().take(80).collect::<String>();
    if path.len() > 4096 || !path.split('/').all(plain) {
        return Err(format!("{:?} is no plain relative path", shown()));
    }
    if path.split('/').count() > DEEPEST {
        return Err(format!("{:?} is no plain relative path: it has more than {DEEPEST} names", shown()));
    }
    Ok(())
}

/// Directories of a model, at the most: a few bytes of text can name one, which takes a thousand in memory.
pub(crate) const MAX_DIRS: usize = 1 << 16;

/// How many directories these paths lead through; of paths in order each is counted once.
pub(crate) fn directories<'a>(paths: impl Iterator<Item = &'a str>) -> usize {
    let new = |last: &mut &'a str, path: &'a str| {
        let common = path.bytes().zip(last.bytes()).take_while(|(a, b)| a == b).count();
        *last = path;
        Some(path.bytes().skip(common).filter(|byte| *byte == b'/').count())
    };
    paths.scan("", new).sum()
}

/// A named tensor and the place of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, any string.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: Vec<u64>,
    /// The blob that holds it.
    pub blob: Digest,
    /// Length of that blob, in bytes.
    pub blob_len: u64,
    /// First byte in the blob.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The blob of today's ollama that has the tensor under its name, stored or not, where its digest is known.
    pub named: Option<Digest>,
    /// The blob that has nothing but the tensor, called `data`, stored or not, where its digest is known.
    pub plain: Option<Digest>,
}

impl Tensor {
    /// Appends the tensor's bytes to a map.
    pub fn push_to(&self, map: &mut ExtentMap) {
        map.push_blob(self.blob, self.blob_len, self.offset, self.len).expect("checked when the model was loaded");
    }

    /// The tensor as a transform's input.
    pub fn computed(&self, transform: Transform) -> Computed {
        Computed { transform, digest: self.blob, offset: self.offset, input_len: self.len }
    }
}

/// A small file that the model holds whole in a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SmallFile {
    /// Plain relative path, such as `config.json` or `1_Pooling/config.json`.
    pub path: String,
    /// The blob that it is.
    pub blob: Digest,
    /// Its length in bytes.
    pub len: u64,
}

/// A file of weights that the model holds whole in a blob, as ollama keeps GGUF files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightFile {
    /// What it is to the model.
    pub role: Role,
    /// The blob that it is.
    pub blob: Digest,
    /// Its length in bytes.
    pub len: u64,
    /// Why it is no GGUF file, if it is none.
    pub fault: Option<String>,
}

/// What a [`WeightFile`] is to its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The model itself.
    Model,
    /// What makes images or sound into input of the model.
    Projector,
    /// A LoRA adapter.
    Adapter,
    /// A small model that guesses ahead.
    Draft,
}

/// What kind of thing was imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceKind {
    /// A safetensors file or a directory that holds some.
    Safetensors,
    /// An `.mlpackage`.
    Mlpackage,
    /// A bare `.mlmodel` file.
    Mlmodel,
    /// A compiled `.mlmodelc`.
    Mlmodelc,
    /// A gds_export directory.
    GdsExport,
    /// An AMB file.
    Amb,
    /// A GGUF file that is a model.
    Gguf,
    /// A GGUF file that belongs to one: a projector.
    GgufProjector,
    /// The same: an adapter.
    GgufAdapter,
    /// What lies beside packages in their directory.
    Files,
}

impl SourceKind {
    /// Every kind.
    pub const ALL: [SourceKind; 10] = [
        SourceKind::Safetensors,
        SourceKind::Mlpackage,
        SourceKind::Mlmodel,
        SourceKind::Mlmodelc,
        SourceKind::GdsExport,
        SourceKind::Amb,
        SourceKind::Gguf,
        SourceKind::GgufProjector,
        SourceKind::GgufAdapter,
        SourceKind::Files,
    ];

    /// Whether its tensors are a model's own weights, of which there is one set.
    pub fn is_weights(self) -> bool {
        !self.is_program() && !matches!(self, SourceKind::GgufProjector | SourceKind::GgufAdapter | SourceKind::Files)
    }

    /// The word in recipes and in output.
    pub fn name(self) -> &'static str {
        match self {
            SourceKind::Safetensors => "safetensors",
            SourceKind::Mlpackage => "mlpackage",
            SourceKind::Mlmodel => "mlmodel",
            SourceKind::Mlmodelc => "mlmodelc",
            SourceKind::GdsExport => "gds_export",
            SourceKind::Amb => "amb",
            SourceKind::Gguf => "gguf",
            SourceKind::GgufProjector => "gguf-projector",
            SourceKind::GgufAdapter => "gguf-adapter",
            SourceKind::Files => "files",
        }
    }

    /// Whether it is a program of Core ML, in any form.
    pub fn is_program(self) -> bool {
        matches!(self, SourceKind::Mlpackage | SourceKind::Mlmodel | SourceKind::Mlmodelc)
    }

    /// A source's name without the ending of its kind.
    pub fn stem(self, name: &str) -> &str {
        name.strip_suffix(self.name()).and_then(|stem| stem.strip_suffix('.')).unwrap_or(name)
    }
}

/// One imported directory or file, reproducible byte for byte.
#[derive(Debug, Clone)]
pub struct Source {
    /// Its name where it was imported: the last component of the path.
    pub name: String,
    /// What it is.
    pub kind: SourceKind,
    /// Its files in order of path.
    pub files: Vec<SourceFile>,
    /// Its directories in order of path, the empty ones too, but not the source itself.
    pub dirs: Vec<SourceDir>,
}

/// A file of a [`Source`].
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// Path below the source, or its name if the source is a file.
    pub path: String,
    /// When its content last changed.
    pub mtime: SystemTime,
    /// Its bytes: the recipe. Files that have one map share it.
    pub content: Arc<ExtentMap>,
}

/// A directory of a [`Source`].
#[derive(Debug, Clone)]
pub struct SourceDir {
    /// Path below the source.
    pub path: String,
    /// When it last changed.
    pub mtime: SystemTime,
}

impl Source {
    /// Whether it is one file and no directory.
    pub fn is_file(&self) -> bool {
        self.dirs.is_empty() && matches!(&self.files[..], [file] if file.path == self.name)
    }

    /// The newest time of any of its files.
    pub fn modified(&self) -> SystemTime {
        self.files.iter().map(|file| file.mtime).max().unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

/// A model.
#[derive(Debug, Clone)]
pub struct Model {
    /// Its name.
    pub name: ModelName,
    /// The tensors of the model's own weights, in order of name.
    pub tensors: Vec<Tensor>,
    /// Tensors that only CoreML programs, or files beside the own weights, hold, in order of name.
    pub other_tensors: Vec<Tensor>,
    /// Small files of the model proper, in order of path.
    pub files: Vec<SmallFile>,
    /// Files of weights that are whole blobs, in the order of the manifest.
    pub weights: Vec<WeightFile>,
    /// What was imported, in the order of the imports.
    pub sources: Vec<Source>,
    /// When the manifest was written.
    pub written: SystemTime,
    /// What another program than wmount wrote, if one did.
    pub foreign: Option<Foreign>,
    /// What is wrong with it. What is not named here can be read.
    pub defects: Vec<Defect>,
}

/// A model as its writer left it: what `ollama/` shows unchanged.
#[derive(Debug, Clone)]
pub struct Foreign {
    /// The bytes of the manifest.
    pub manifest: Vec<u8>,
    /// Every blob that the manifest names, with its true length, or that of the manifest if the blob is missing.
    pub blobs: Vec<(Digest, u64)>,
}

/// Something wrong with a model, found when it was loaded.
#[derive(Debug, Clone)]
pub struct Defect {
    /// The defect in words.
    pub what: String,
    /// The blob, and its length by the manifest, whose tensors nobody knows because of it.
    pub unread: Option<(Digest, u64)>,
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unread {
            Some((digest, _)) => write!(f, "blob {digest}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl Model {
    /// Brings everything into order of name. Of two that have one name the first stays, and the other is a defect.
    pub fn sort(&mut self) {
        let defects = &mut self.defects;
        let mut twice = |what: &str, name: &str| {
            let name: String = name.chars().take(80).collect();
            defects.push(Defect { what: format!("{what} {name:?} occurs twice"), unread: None });
        };
        for tensors in [&mut self.tensors, &mut self.other_tensors] {
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            tensors.dedup_by(|next, first| {
                next.name == first.name && {
                    twice("tensor", &first.name);
                    true
                }
            });
        }
        self.files.sort_by(|a, b| a.path.cmp(&b.path));
        self.files.dedup_by(|next, first| {
            next.path == first.path && {
                twice("file", &first.path);
                true
            }
        });
    }

    /// About how many bytes of memory it takes.
    pub fn memory(&self) -> u64 {
        let tensors = 400 * (self.tensors.len() + self.other_tensors.len()) as u64;
        let foreign = self.foreign.iter().map(|it| it.manifest.len() as u64 + 40 * it.blobs.len() as u64).sum::<u64>();
        let files = self.sources.iter().flat_map(|source| &source.files);
        tensors + foreign + 200 * self.files.len() as u64 + files.map(|file| file.content.memory()).sum::<u64>()
    }

    /// Whether reading it again can give nothing else as long as its manifest is the same: mended damage changes none.
    pub fn is_settled(&self) -> bool {
        self.defects.is_empty() && self.weights.iter().all(|file| file.fault.is_none())
    }

    /// The first blob whose tensors are not known, as an error: the model cannot be shown whole.
    pub fn check_whole(&self) -> Result<(), Error> {
        let unread = self.defects.iter().find_map(|defect| Some((defect.unread?.0, defect)));
        unread.map_or(Ok(()), |(digest, defect)| Err(Error::Damaged { digest, fault: defect.what.clone() }))
    }

    /// The tensors that make up the model: its own weights or, if it came from CoreML alone, those of its programs.
    pub fn tensors(&self) -> &[Tensor] {
        if self.tensors.is_empty() { &self.other_tensors } else { &self.tensors }
    }

    /// The small file of this path.
    pub fn file(&self, path: &str) -> Option<&SmallFile> {
        self.files.iter().find(|file| file.path == path)
    }

    /// The sources of one kind.
    pub fn sources(&self, kind: SourceKind) -> impl Iterator<Item = &Source> {
        self.sources.iter().filter(move |source| source.kind == kind)
    }

    /// The programs of Core ML, in any form.
    pub fn programs(&self) -> impl Iterator<Item = &Source> {
        self.sources.iter().filter(|source| source.kind.is_program())
    }

    /// The time that files made of the whole model carry: that of the newest file of the source of its own tensors,
    /// so that it stays the same wherever the store is copied and whatever joins the model later.
    pub fn modified(&self) -> SystemTime {
        let own = self.sources.iter().filter(|source| source.kind.is_weights()).map(Source::modified).max();
        own.or_else(|| self.sources.iter().map(Source::modified).max()).unwrap_or(self.written)
    }
}

/// A time as whole seconds and nanoseconds since 1970, as recipes keep it.
pub fn to_unix(time: SystemTime) -> (i64, u32) {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => (after.as_secs() as i64, after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            let borrow = i64::from(before.subsec_nanos() > 0);
            (-(before.as_secs() as i64) - borrow, (1_000_000_000 - before.subsec_nanos()) % 1_000_000_000)
        }
    }
}

/// The reverse of [`to_unix`]; `None` if there is no such time.
pub fn from_unix((seconds, nanos): (i64, u32)) -> Option<SystemTime> {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base =
        if seconds < 0 { SystemTime::UNIX_EPOCH.checked_sub(whole) } else { SystemTime::UNIX_EPOCH.checked_add(whole) };
    base?.checked_add(Duration::new(0, if nanos < 1_000_000_000 { nanos } else { return None }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (text, path, shown) in [
            ("a", "registry.ollama.ai/library/a/latest", "a:latest"),
            ("a:B.1", "registry.ollama.ai/library/a/B.1", "a:B.1"),
            ("me/a:x", "registry.ollama.ai/me/a/x", "me/a:x"),
            ("localhost:5000/me/a", "localhost:5000/me/a/latest", "localhost:5000/me/a:latest"),
            ("hf.co/me/a", "hf.co/me/a/latest", "hf.co/me/a:latest"),
        ] {
            let name: ModelName = text.parse().expect(text);
            assert_eq!(name.manifest_path(), path);
            assert_eq!(name.to_string(), shown);
            assert_eq!(name.to_string().parse::<ModelName>().expect(shown), name);
        }
        let long = "a".repeat(81);
        for bad in ["", ":", "a:", "-a", "a b", "..", "a/../b", "a/b/c/d", "a:b:c", "\u{e9}", "a\n", &long, "/a", "a/"]
        {
            assert!(bad.parse::<ModelName>().is_err(), "{bad:?}");
        }
        assert_eq!(ModelName::from_any("My Model (v2)").expect("valid").name, "my-model--v2-");
        assert!(ModelName::from_any("...").is_err());
    }

    #[test]
    fn paths() {
        assert!(check_path("a/b c/\u{e9}.json").is_ok());
        let deep = |names: usize| vec!["a"; names].join("/");
        assert!(check_path(&deep(DEEPEST)).is_ok());
        for bad in ["", "/a", "a/", "a//b", "./a", "a/..", "a\0", "a\tb", &"x".repeat(256), &deep(DEEPEST + 1)] {
            assert!(check_path(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn directories_of_paths() {
        assert_eq!(directories(["x", "y"].into_iter()), 0);
        assert_eq!(directories(["a", "a-b/c", "a/b", "a/b/c", "a/bc/d", "a/bc/e", "b/c"].into_iter()), 5);
        assert_eq!(directories(["a/b/c", "d", "a/b/c"].into_iter()), 4);
    }

    #[test]
    fn times_survive() {
        for unix in [(0, 0), (1_700_000_000, 123), (-1, 999_999_999), (-5, 0)] {
            assert_eq!(to_unix(from_unix(unix).expect("a time")), unix);
        }
        assert_eq!(from_unix((0, 1_000_000_000)), None);
    }
}
