//! What a file of a source is cut into, and the open file that it is read from.

use std::borrow::Cow;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use super::bounds::real_path;
use super::scan::FoundFile;
use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Fault, Result};
use crate::format::{Bytes, gguf};

/// A part of a file, never empty but for tensors and empty files.
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
    /// A whole file of weights that stays one blob.
    Weights(Weights),
    /// A range of the file of weights that the source's files are merged to, from this byte of it on.
    Merged(u64),
    /// Bytes between tensors, kept in the recipe or, if they are many, as a blob.
    Between,
}

/// A name that a tensor goes by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorName {
    pub name: String,
    /// Whether it is one of the model's own weights, which ollama and AMB show.
    pub own: bool,
    /// Its dtype and shape where they are not those of the piece: several tensors can lie over the same bytes.
    pub other_type: Option<(Dtype, Vec<u64>)>,
}

/// A GGUF file: what ollama has to know of it.
#[derive(Debug, Clone)]
pub(super) struct Weights {
    /// Media type of its layer.
    pub media_type: &'static str,
    pub header: gguf::Header,
}

/// A file that is no container: one piece.
pub(super) fn whole(file: &FoundFile) -> Vec<Piece> {
    vec![Piece { offset: 0, len: file.len, content: Content::File }]
}

/// The whole content of a file that is parsed in memory, of at most so many bytes.
pub(super) fn read_small(file: &FoundFile, most: u64) -> Result<Vec<u8>> {
    if file.len > most {
        let what = format!("{} bytes are too many for what it is: more than {most}", file.len);
        return Err(Error::format(&file.place, Fault::new(0, what)));
    }
    Ok(FileBytes::open(file)?.get(0, file.len as usize).at(&file.place)?.into_owned())
}

/// What is cut into a blob: a file, or what files are merged to.
#[derive(Debug)]
pub(super) enum Input<'a> {
    /// A file.
    File(FileBytes),
    /// Stretches of several files, and the bytes between them.
    Merged(Vec<FileBytes>, &'a [gguf::Run]),
}

impl Input<'_> {
    /// Fills `buf` from `offset` on; an error is that of the file with this index.
    pub fn read(&self, mut offset: u64, mut buf: &mut [u8]) -> Result<(), (usize, std::io::Error)> {
        let (files, runs) = match self {
            Input::File(file) => return file.read(offset, buf).map_err(|error| (0, error)),
            Input::Merged(files, runs) => (files, runs),
        };
        for run in *runs {
            let Some(rest) = run.len().checked_sub(offset) else {
                offset -= run.len();
                continue;
            };
            let (now, later) = buf.split_at_mut(usize::try_from(rest).unwrap_or(usize::MAX).min(buf.len()));
            match run {
                gguf::Run::Bytes(bytes) => now.copy_from_slice(&bytes[offset as usize..][..now.len()]),
                gguf::Run::Zeros(_) => now.fill(0),
                gguf::Run::Part { part, offset: from, .. } => {
                    files[*part].read(from + offset, now).map_err(|error| (*part, error))?;
                }
            }
            (offset, buf) = (0, later);
        }
        if buf.is_empty() { Ok(()) } else { Err((0, std::io::ErrorKind::UnexpectedEof.into())) }
    }
}

/// An open file of the source, with the length it had when it was scanned.
#[derive(Debug)]
pub(super) struct FileBytes {
    file: File,
    len: u64,
}

impl FileBytes {
    pub fn open(found: &FoundFile) -> Result<FileBytes> {
        // Between scan and open the path may have come to mean a FIFO, or a file that it may not lead to.
        let open = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(&found.place);
        let file = open.at(&found.place)?;
        if !file.metadata().at(&found.place)?.is_file() {
            return Err(Error::Invalid(format!("{}: is no regular file any more", found.place.display())));
        }
        if real_path(&file, &found.place).at(&found.place)? != found.real {
            return Err(Error::Invalid(format!("{}: leads elsewhere by now", found.place.display())));
        }
        Ok(FileBytes { file, len: found.len })
    }

    /// Opens a container of tensors, or says that it was not fetched: Git leaves a text in its place.
    pub fn open_container(found: &FoundFile) -> Result<FileBytes> {
        const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
        let bytes = FileBytes::open(found)?;
        let head = bytes.get(0, bytes.len.min(POINTER.len() as u64) as usize).at(&found.place)?.into_owned();
        if head == POINTER {
            let what = "is what Git LFS has in the place of the file: fetch that with git lfs pull";
            return Err(Error::format(&found.place, Fault::new(0, what)));
        }
        Ok(bytes)
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
        self.check_range(offset, len)?;
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes).map_err(|error| Fault::new(offset, error.to_string()))?;
        Ok(Cow::Owned(bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::super::bounds::Bounds;
    use super::super::scan::scan;
    use super::*;

    #[test]
    fn a_file_that_leads_elsewhere_by_the_time_it_is_opened_is_not_read() {
        let place = tempfile::tempdir().unwrap();
        let source = place.path().join("source");
        fs::create_dir_all(source.join("deep")).unwrap();
        for name in ["source/a", "source/deep/a", "secret"] {
            fs::write(place.path().join(name), name).unwrap();
        }
        let found = scan(&source, &Bounds::of(std::slice::from_ref(&source))).unwrap();
        let outcomes = || found.files.iter().map(|file| FileBytes::open(file).is_ok()).collect::<Vec<_>>();
        assert_eq!(outcomes(), [true, true]);
        fs::remove_file(source.join("a")).unwrap();
        symlink("../secret", source.join("a")).unwrap();
        fs::rename(source.join("deep"), place.path().join("moved")).unwrap();
        symlink("../moved", source.join("deep")).unwrap();
        assert_eq!(outcomes(), [false, false]);
    }
}
