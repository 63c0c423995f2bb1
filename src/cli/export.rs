//! `wmount export TREE-PATH DEST`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use super::output::{Bar, count, print, print_json, size};
use super::tree::TreeArgs;
use crate::error::{AtPath, Error, Result};
use crate::store::import::Progress;
use crate::vfs::{Attr, Child, Kind, Vfs};

/// Write a file or directory of the tree as plain files, without a mount
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Path below the mountpoint, such as coreml/bert/latest
    #[arg(value_name = "TREE-PATH")]
    path: String,
    /// Where to write; must not exist
    dest: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    tree: TreeArgs,
}

pub(super) fn run(args: &ExportArgs) -> Result<()> {
    let (vfs, attr) = args.tree.at(&args.path)?;
    if fs::symlink_metadata(&args.dest).is_ok() {
        return Err(Error::Invalid(format!("{}: exists already; export writes over nothing", args.dest.display())));
    }
    let above = args.dest.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // What is missing is told of by its own name.
    fs::metadata(above).at(above)?;
    // Before the first byte is written, signals end the process as they do by themselves.
    let total = total(&vfs, &attr)?;
    let (bar, links) = (Bar::new("exporting"), HashMap::new());
    let mut export = Export { vfs: &vfs, bar, links, stop: stop_flag()?, has_begun: false, files: 0, bytes: 0 };
    export.bar.begin(total);
    let outcome = export.branch(&attr, &args.dest);
    export.bar.finish();
    // What another has put there meanwhile is not ours to remove.
    outcome.map_err(|error| if export.has_begun { take_back(error, attr.kind, &args.dest) } else { error })?;
    // Its own name is durable, too, where whoever may write into a directory may read it.
    File::open(above).map_or(Ok(()), |dir| dir.sync_all()).at(above)?;
    if args.json {
        return print_json(&json!({"path": args.dest.to_string_lossy(), "files": export.files, "bytes": export.bytes}));
    }
    print(&format!("{}: {}, {}\n", args.dest.display(), count(export.files, "file"), size(export.bytes)))
}

/// Removes what was written before an error: what is half there would look like a model.
fn take_back(error: Error, kind: Kind, dest: &Path) -> Error {
    match if kind == Kind::Dir { fs::remove_dir_all(dest) } else { fs::remove_file(dest) } {
        Ok(()) => error,
        Err(why) => Error::Invalid(format!(
            "{error}; what was written so far is left, and is not whole: {}: {why}",
            dest.display()
        )),
    }
}

/// Bytes of all files.
fn total(vfs: &Vfs, attr: &Attr) -> Result<u64> {
    if attr.kind == Kind::File {
        return Ok(attr.size);
    }
    let of = |child: Child| total(vfs, &vfs.lookup(attr.ino, &child.name)?);
    vfs.entries(attr.ino)?.children.iter().try_fold(0, |sum: u64, child| Ok(sum.saturating_add(of(child)?)))
}

/// What SIGINT and its like set, so that nothing half done is left; the second one ends the process at once.
fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register_conditional_default(signal, Arc::clone(&stop)).at("signals")?;
        flag::register(signal, Arc::clone(&stop)).at("signals")?;
    }
    Ok(stop)
}

struct Export<'a> {
    vfs: &'a Vfs,
    bar: Bar,
    /// Where inodes with several names were written first.
    links: HashMap<u64, PathBuf>,
    /// Set by a signal.
    stop: Arc<AtomicBool>,
    /// Whether the destination is of our making.
    has_begun: bool,
    files: u64,
    bytes: u64,
}

impl Export<'_> {
    fn branch(&mut self, attr: &Attr, dest: &Path) -> Result<()> {
        match attr.kind {
            Kind::File => self.file(attr, dest)?,
            Kind::Dir => {
                fs::create_dir(dest).at(dest)?;
                self.has_begun = true;
                for child in self.vfs.entries(attr.ino)?.children.iter() {
                    self.branch(&self.vfs.lookup(attr.ino, &child.name)?, &dest.join(&*child.name))?;
                }
            }
        }
        let written = File::open(dest).at(dest)?;
        written.set_modified(attr.mtime).and_then(|()| written.sync_all()).at(dest)
    }

    fn file(&mut self, attr: &Attr, dest: &Path) -> Result<()> {
        self.files += 1;
        if let Some(first) = self.links.get(&attr.ino) {
            match fs::hard_link(first, dest) {
                Err(error) if has_no_more_links(&error) => {}
                linked => {
                    self.bar.advance(attr.size);
                    return linked.at(dest);
                }
            }
        }
        let mut file = File::create_new(dest).at(dest)?;
        self.has_begun = true;
        for_each_chunk(self.vfs, attr, |chunk| {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Invalid("interrupted".into()));
            }
            self.bar.advance(chunk.len() as u64);
            self.bytes += chunk.len() as u64;
            file.write_all(chunk).at(dest).map(|()| true)
        })?;
        if attr.nlink > 1 {
            self.links.insert(attr.ino, dest.to_owned());
        }
        Ok(())
    }
}

/// Whether a file can have no other name, or none more, where it is: exFAT and FAT know no links.
fn has_no_more_links(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS | libc::EMLINK))
}

/// Reads a file from its start, chunk by chunk, until `each` answers `false`.
pub(super) fn for_each_chunk(vfs: &Vfs, attr: &Attr, mut each: impl FnMut(&[u8]) -> Result<bool>) -> Result<()> {
    let mut buf = vec![0; 1 << 20];
    let mut offset = 0;
    loop {
        let len = vfs.read(attr.ino, offset, &mut buf)?;
        if len == 0 || !each(&buf[..len])? {
            return Ok(());
        }
        offset += len as u64;
    }
}
