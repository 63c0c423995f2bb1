//! The one error type of the library, and [`Fault`], what a parser says of bytes that break its format.
//!
//! Nothing here knows of errno or exit codes: `front` maps an [`Error`] to the first, `cli` to the second.

use std::io;
use std::path::{Path, PathBuf};

use crate::digest::Digest;

/// Result of most library calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong with the bytes of a container, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} (at byte {at})")]
pub struct Fault {
    /// Offset in the container, in bytes.
    pub at: u64,
    /// The fault in words.
    pub what: String,
}

impl Fault {
    /// A fault at byte `at`. Text that the container itself gave is cut and escaped: a fault is a line.
    pub fn new(at: u64, what: impl Into<String>) -> Self {
        Fault { at, what: one_line(what.into()) }
    }
}

/// The most characters at the beginning and at the end of a fault.
const ENDS: usize = 250;

/// A text as one line: control characters escaped, and the middle left out of what is too long to be read.
fn one_line(text: String) -> String {
    let text = plain(text);
    let (head, tail) = (text.char_indices().nth(ENDS), text.char_indices().nth_back(ENDS));
    match (head, tail) {
        (Some((head, _)), Some((tail, _))) if head < tail => format!("{} ... {}", &text[..head], &text[tail..]),
        _ => text,
    }
}

/// A text with its control characters escaped, so that it changes nothing but the line that it is in.
pub(crate) fn plain(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    let escaped = |char: char| if char.is_control() { char.escape_default().collect() } else { String::from(char) };
    text.chars().map(escaped).collect()
}

/// Everything that can go wrong in the library.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation on a path.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The path that was used.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file breaks its format.
    #[error("{path}: {fault}", path = .path.display())]
    Format {
        /// The file that was parsed.
        path: PathBuf,
        /// What is wrong with it.
        fault: Fault,
    },
    /// An input, a name or an argument cannot be used; the text says which, why and what to do.
    #[error("{0}")]
    Invalid(String),
    /// No such model, blob, inode or path in the tree.
    #[error("{0}: not found")]
    NotFound(String),
    /// A variant that is not shown of a model; the text says which and why.
    #[error("{0}")]
    Refused(String),
    /// An inode number that no snapshot of this mount has handed out.
    #[error("inode {0} is not known")]
    Stale(u64),
    /// A directory operation on a file.
    #[error("not a directory")]
    NotDir,
    /// A file operation on a directory.
    #[error("is a directory")]
    IsDir,
    /// A blob of the store is missing, short, unreadable or has other content than its name says.
    #[error("blob {digest}: {fault}")]
    Damaged {
        /// The blob that is damaged.
        digest: Digest,
        /// What is wrong with it.
        fault: String,
    },
    /// The store has not answered in time.
    #[error("the store does not answer")]
    Unanswered,
    /// A fault that hurts a model.
    #[error("model {model}: {error}{holds}")]
    Hurts {
        /// The model's name.
        model: String,
        /// The fault.
        error: Box<Error>,
        /// What of the model a damaged blob holds, in words that follow those of the fault.
        holds: String,
    },
    /// The store is being written by another process.
    #[error("{path}: another wmount is writing to this store; try again when it has finished", path = .0.display())]
    Locked(PathBuf),
}

impl Error {
    /// An I/O error on `path`.
    pub fn io(path: impl AsRef<Path>, source: io::Error) -> Self {
        Error::Io { path: path.as_ref().to_owned(), source }
    }

    /// A format fault in the file `path`.
    pub fn format(path: impl AsRef<Path>, fault: Fault) -> Self {
        Error::Format { path: path.as_ref().to_owned(), fault }
    }

    /// Whether this is that the store has not answered in time.
    pub fn is_unanswered(&self) -> bool {
        match self {
            Error::Hurts { error, .. } => error.is_unanswered(),
            other => matches!(other, Error::Unanswered),
        }
    }
}

/// Adds the path to an I/O error in the expression that caused it.
pub trait AtPath<T> {
    /// Names `path` as the place of the failure.
    fn at(self, path: impl AsRef<Path>) -> Result<T>;
}

impl<T> AtPath<T> for io::Result<T> {
    fn at(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|source| Error::io(path, source))
    }
}

impl<T> AtPath<T> for std::result::Result<T, Fault> {
    fn at(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|fault| Error::format(path, fault))
    }
}

/// A path as a shell takes it, for a command that an error suggests.
pub fn quoted(path: &Path) -> String {
    let path = path.to_string_lossy();
    // Only a NUL cannot be quoted, and no path has one.
    shlex::try_quote(&path).map_or_else(|_| path.to_string(), Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_a_line_that_can_be_read() {
        let fault = Fault::new(7, format!("tensor \"\x1b[2J\n{}\" is too long", "\u{e9}".repeat(1000)));
        assert!(fault.what.starts_with("tensor \"\\u{1b}[2J\\n\u{e9}"), "{fault}");
        assert!(fault.what.ends_with("\u{e9}\" is too long") && fault.what.chars().count() < 520, "{fault}");
        assert_eq!(Fault::new(0, "short \u{e9}").what, "short \u{e9}");
    }

    #[test]
    fn suggested_commands_can_be_pasted() {
        assert_eq!([quoted("/mnt/w".as_ref()), quoted("/mnt/my models".as_ref())], ["/mnt/w", "'/mnt/my models'"]);
    }
}
