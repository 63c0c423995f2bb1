//! What lies below a path that is to be imported: regular files and directories, links followed as far as they may lead.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::bounds::{Bounds, look};
use crate::error::{AtPath, Error, Result};
use crate::model::{MAX_DIRS, check_path};

/// What tools keep beside models; it is no part of one.
const SKIPPED: [&str; 3] = [".git", ".cache", ".DS_Store"];

/// How the names of AppleDouble files begin, in which macOS keeps what other file systems do not hold of the file of the
/// same name without it, and how their content does.
const APPLE_DOUBLE: (&str, [u8; 4]) = ("._", [0x00, 0x05, 0x16, 0x07]);

/// Paths to one directory, at the most: links can make very many of few.
const MOST: u32 = 64;

/// A regular file.
#[derive(Debug)]
pub(super) struct FoundFile {
    /// Path below the source, `/` between the components.
    pub path: String,
    /// Where it is.
    pub place: PathBuf,
    /// Where it was when that was looked at, links followed.
    pub real: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// When it last changed.
    pub mtime: SystemTime,
    /// When its inode last changed, in seconds and nanoseconds: unlike `mtime` nobody can set it.
    changed: (i64, i64),
}

/// A directory.
#[derive(Debug)]
pub(super) struct FoundDir {
    /// Path below the source.
    pub path: String,
    /// When it last changed.
    pub mtime: SystemTime,
}

/// What tells one version of a file from another: its length and its times.
type Facts = (u64, SystemTime, (i64, i64));

/// Everything below a path.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// The files in order of path.
    pub files: Vec<FoundFile>,
    /// The directories in order of path, without the source itself.
    pub dirs: Vec<FoundDir>,
    /// What was passed over.
    pub skipped: Vec<PathBuf>,
    /// Names at the top that are no part of it.
    others: BTreeSet<String>,
}

impl Scan {
    /// The file of this path.
    pub fn file(&self, path: &str) -> Option<&FoundFile> {
        self.files.binary_search_by(|file| file.path.as_str().cmp(path)).ok().map(|index| &self.files[index])
    }

    /// Whether there is nothing to import.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.dirs.is_empty()
    }

    /// The same without what has these names at the top of `place`, which is where it was found.
    pub fn without(mut self, place: &Path, others: BTreeSet<String>) -> Scan {
        self.files.retain(|file| !others.contains(first(&file.path)));
        self.dirs.retain(|dir| !others.contains(first(&dir.path)));
        let top = |skipped: &PathBuf| Some(skipped.strip_prefix(place).ok()?.iter().next()?.to_str()?.to_owned());
        self.skipped.retain(|skipped| top(skipped).is_none_or(|top| !others.contains(&top)));
        self.others = others;
        self
    }

    /// Refuses what is not as it was when these paths were scanned: what was read of it may be of two states, or not all
    /// of it.
    pub fn check_unchanged(&self, places: &[PathBuf], bounds: &Bounds) -> Result<()> {
        let now = places
            .iter()
            .map(|place| Ok(scan(place, bounds)?.without(place, self.others.clone())))
            .collect::<Result<Vec<_>>>()?;
        let now = now.iter().flat_map(Scan::facts).collect();
        match self.facts().symmetric_difference(&now).next() {
            None => Ok(()),
            Some((changed, _)) => {
                let dir = places.iter().find(|place| place.is_dir());
                let place = dir.map_or_else(|| places[0].with_file_name(changed), |dir| dir.join(changed));
                let what = format!("{}: changed while it was imported: import it when it is whole", place.display());
                Err(Error::Invalid(what))
            }
        }
    }

    /// Every path with the length and the times of what is a file. Its inode number may change where nothing else does, on
    /// some network and overlay file systems.
    fn facts(&self) -> BTreeSet<(&str, Option<Facts>)> {
        let files = self.files.iter().map(|file| (&*file.path, Some((file.len, file.mtime, file.changed))));
        files.chain(self.dirs.iter().map(|dir| (&*dir.path, None))).collect()
    }

    /// Whether there is a directory of this path.
    pub fn has_dir(&self, path: &str) -> bool {
        self.dirs.binary_search_by(|dir| dir.path.as_str().cmp(path)).is_ok()
    }
}

/// The first name of a path.
pub(super) fn first(path: &str) -> &str {
    path.split('/').next().unwrap_or(path)
}

/// What a path leads to and where that is; only regular files and directories within the bounds are let through.
fn checked(path: &Path, bounds: &Bounds) -> Result<(Metadata, PathBuf)> {
    let (metadata, real) = look(path).map_err(|error| {
        let dangling = error.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(path).is_ok();
        let source = if dangling {
            io::Error::other("is a link to nothing: a download may have been cut short; fetch it again")
        } else {
            error
        };
        Error::io(path, source)
    })?;
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_dir() {
        bounds.check(path, &real)?;
        return Ok((metadata, real));
    }
    let what = match kind {
        _ if kind.is_fifo() => "a FIFO",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(Error::Invalid(format!("{}: is {what}; only regular files can be imported", path.display())))
}

/// Lists a file or a directory and all below it.
pub(super) fn scan(path: &Path, bounds: &Bounds) -> Result<Scan> {
    let (metadata, real) = checked(path, bounds)?;
    let mut scan = Scan::default();
    if metadata.is_file() {
        let name = name_of(path)?;
        scan.files.push(found_file(name, path, real, &metadata));
        return Ok(scan);
    }
    let mut walk = Walk { bounds, above: vec![identity(&metadata)], entered: HashMap::new(), scan: &mut scan };
    walk.below(path, "")?;
    scan.files.sort_by(|a, b| a.path.cmp(&b.path));
    scan.dirs.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(scan)
}

/// The last component of a path as text.
pub(super) fn name_of(path: &Path) -> Result<String> {
    let whole = path.canonicalize().at(path)?;
    // The name a user gave is kept where it says something: `.` and `..` do not.
    let last = path.file_name().or_else(|| whole.file_name());
    let name = last.and_then(|name| name.to_str()).map(str::to_owned);
    let name = name.ok_or_else(|| Error::Invalid(format!("{}: its name is not UTF-8", path.display())))?;
    check_path(&name).map_err(|what| Error::Invalid(format!("{}: its name {what}", path.display())))?;
    Ok(name)
}

fn found_file(path: String, place: &Path, real: PathBuf, metadata: &Metadata) -> FoundFile {
    let mtime = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    FoundFile { path, place: place.to_owned(), real, len: metadata.len(), mtime, changed }
}

/// Whether a file is of AppleDouble; who reads one that cannot be read is told why.
fn is_apple_double(name: &str, place: &Path) -> bool {
    let (begin, magic) = APPLE_DOUBLE;
    let mut head = [0; 4];
    let mut read = || {
        // By now it may be a FIFO.
        let open = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(place);
        open.and_then(|mut file| file.read_exact(&mut head))
    };
    name.starts_with(begin) && read().is_ok() && head == magic
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// The walk through a directory.
struct Walk<'a> {
    bounds: &'a Bounds,
    /// The directories that it is in.
    above: Vec<(u64, u64)>,
    /// How often it was in each.
    entered: HashMap<(u64, u64), u32>,
    scan: &'a mut Scan,
}

impl Walk<'_> {
    fn below(&mut self, dir: &Path, prefix: &str) -> Result<()> {
        for entry in fs::read_dir(dir).at(dir)? {
            let place = entry.at(dir)?.path();
            let name = place.file_name().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| Error::Invalid(format!("{}: its name is not UTF-8", place.display())))?;
            if SKIPPED.contains(&name) {
                self.scan.skipped.push(place);
                continue;
            }
            let path = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}/{name}") };
            check_path(&path).map_err(|what| Error::Invalid(format!("{}: {what}", place.display())))?;
            let (metadata, real) = checked(&place, self.bounds)?;
            if metadata.is_file() {
                match is_apple_double(name, &place) {
                    true => self.scan.skipped.push(place),
                    false => self.scan.files.push(found_file(path, &place, real, &metadata)),
                }
                continue;
            }
            let refuse = |what: String| Err(Error::Invalid(format!("{}: {what}", place.display())));
            let identity = identity(&metadata);
            if self.above.contains(&identity) {
                return refuse("is a link to a directory that it is in".into());
            }
            let entered = self.entered.entry(identity).or_default();
            if *entered == MOST {
                return refuse(format!("is a directory that {MOST} other paths lead to already"));
            }
            *entered += 1;
            let mtime = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            self.scan.dirs.push(FoundDir { path: path.clone(), mtime });
            if self.scan.dirs.len() > MAX_DIRS {
                return refuse(format!("there are more than {MAX_DIRS} directories"));
            }
            self.above.push(identity);
            self.below(&place, &path)?;
            self.above.pop();
        }
        Ok(())
    }
}
