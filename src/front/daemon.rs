//! Going to the background: the command starts itself again as a detached process, and returns when that one's mount
//! answers, or passes on why it does not.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tracing_subscriber::EnvFilter;

use super::{mounts, sys};
use crate::error::{AtPath, Error, Result, plain};
use crate::store::is_sole;

/// Set in the environment of the detached process.
const DETACHED: &str = "WMOUNT_DETACHED";
/// What the detached process writes when its mount answers.
const READY: &str = "ready\n";
/// A log longer than this is put aside when the next mount begins; one old log is kept.
const LOG_MAX: u64 = 4 << 20;
/// Where logs are of who has no home, or another user's.
const SYSTEM: &str = "/var/log";

/// Starts this very command as a detached process and waits until its mount answers.
pub fn launch() -> Result<()> {
    let program = std::env::current_exe().at("/proc/self/exe")?;
    let (mut heard, told) = io::pipe().at(&program)?;
    // A lock or a pipe that was handed to this command is not to be held until the mount ends.
    sys::keep_files();
    let mut command = Command::new(&program);
    command.args(std::env::args_os().skip(1)).env(DETACHED, "1");
    let mut child = command.stdin(Stdio::null()).stdout(told).stderr(Stdio::null()).spawn().at(&program)?;
    // The command holds the writing end too; the end of the pipe must be the child's doing.
    drop(command);
    let mut words = String::new();
    heard.read_to_string(&mut words).at(&program)?;
    match words.as_str() {
        READY => Ok(()),
        "" => {
            let status = child.wait().at(&program)?;
            Err(Error::Invalid(format!("the mounting process ended with {status}; its log says more, or try -f")))
        }
        why => Err(Error::Invalid(why.trim_end().to_owned())),
    }
}

/// Where a serving process says that it is ready, and why it is not.
#[derive(Debug)]
pub enum Listener {
    /// The command that waits in [`launch`]; the log is where it is told to look.
    Command,
    /// Nobody, or systemd.
    Foreground(Option<Systemd>),
}

/// A service of `Type=notify` names a socket on which it is told. Ours is opened before this process may open none.
#[derive(Debug)]
pub struct Systemd {
    ours: UnixDatagram,
    its: PathBuf,
}

impl Systemd {
    fn of_this_process() -> io::Result<Option<Systemd>> {
        let its = std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from).filter(|its| its.is_absolute());
        its.map(|its| Ok(Systemd { ours: UnixDatagram::unbound()?, its })).transpose()
    }
}

impl Listener {
    /// Who waits for this process; `None` if it is the one to call [`launch`].
    pub fn of_this_process(foreground: bool) -> Result<Option<Listener>> {
        if std::env::var_os(DETACHED).is_some() {
            Ok(Some(Listener::Command))
        } else if foreground {
            Ok(Some(Listener::Foreground(Systemd::of_this_process().at("NOTIFY_SOCKET")?)))
        } else {
            Ok(None)
        }
    }

    /// Starts the log of a process that serves `mountpoint`: at `log`, at the usual place, or on stderr if in the
    /// foreground. A detached process leaves the terminal, and from here on its stderr is the log.
    pub fn begin(&self, log: Option<&Path>, mountpoint: &Path) -> Result<()> {
        if matches!(self, Listener::Command) {
            sys::leave_terminal().at(mountpoint)?;
            let file = match log {
                Some(log) => Some(open_log(log, 0)?),
                // A home that cannot be written to is no reason not to mount.
                None => usual_logs(mountpoint).into_iter().find_map(|log| open_usual_log(&log).ok()),
            };
            if let Some(file) = file {
                sys::redirect_stderr(&file).at(mountpoint)?;
            }
        } else if let Some(log) = log {
            sys::redirect_stderr(&open_log(log, 0)?).at(log)?;
        }
        log_to_stderr("warn,wmount=info");
        Ok(())
    }

    /// Says that the mount answers, and lets go of the working directory, which may be on a disk that is to be removed.
    pub fn ready(&self) -> Result<()> {
        std::env::set_current_dir("/").at("/")?;
        match self {
            Listener::Command => tell(READY),
            Listener::Foreground(Some(systemd)) => systemd.ours.send_to(b"READY=1", &systemd.its).map(drop),
            Listener::Foreground(None) => Ok(()),
        }
        .at("stdout")
    }

    /// Says why there is no mount.
    pub fn failed(&self, error: &Error) {
        if matches!(self, Listener::Command) {
            // If the command that waits is gone, the log has it.
            let _ = tell(&format!("{error}\n"));
        }
    }
}

/// Writes to the pipe that is our stdout, and closes it: the command waits for its end.
fn tell(words: &str) -> io::Result<()> {
    let mut pipe = io::stdout();
    pipe.write_all(words.as_bytes())?;
    pipe.flush()?;
    sys::redirect_stdout(&OpenOptions::new().write(true).open("/dev/null")?)
}

/// Sends log events of this process, and of the libraries that it uses, to stderr; `WMOUNT_LOG` filters them in place
/// of `usual`.
pub fn log_to_stderr(usual: &str) {
    let filter = EnvFilter::try_from_env("WMOUNT_LOG").unwrap_or_else(|_| EnvFilter::new(usual));
    // It would tell stderr of events that stderr did not take, and panic.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_target(false).log_internal_errors(false);
    // Fails if the program has chosen another log, which then stands.
    let is_terminal = io::stderr().is_terminal();
    let _ =
        log.with_writer(move || OneLine { colours: is_terminal, to: io::stderr() }).with_ansi(is_terminal).try_init();
}

/// Writes each event as one line, whatever names are in it.
struct OneLine<W> {
    /// Whether there are escape sequences of ours; those of names are escaped before.
    colours: bool,
    to: W,
}

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let parts = text.trim_end_matches('\n').split('\x1b').map(|part| plain(part.to_owned()));
        let mut line = parts.collect::<Vec<_>>().join(if self.colours { "\x1b" } else { "\\u{1b}" });
        line.push('\n');
        self.to.write_all(line.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Opens the usual log, in directories that are made. What stands there must be a file of this user's; root writes nowhere
/// where others could put one.
fn open_usual_log(log: &Path) -> Result<File> {
    let refused = || Err(Error::Invalid(format!("{}: others can change what is there", log.display())));
    let Some(parent) = log.parent() else { return refused() };
    let mine = rustix::process::geteuid().as_raw();
    // The group of the system's log may write to its directory, not to ours in it.
    let is_kept = |dir: &Path| mine != 0 || dir.starts_with(SYSTEM) || is_sole(dir, mine);
    let there = parent.ancestors().find(|dir| fs::symlink_metadata(dir).is_ok());
    if !there.is_some_and(is_kept) {
        return refused();
    }
    fs::create_dir_all(parent).at(parent)?;
    let dir = fs::symlink_metadata(parent).at(parent)?;
    if mine == 0 && (!dir.is_dir() || dir.uid() != 0 || dir.mode() & 0o022 != 0) {
        return refused();
    }
    let file = open_log(log, libc::O_NOFOLLOW | libc::O_NONBLOCK)?;
    let found = file.metadata().at(log)?;
    if found.is_file() && found.uid() == mine { Ok(file) } else { refused() }
}

fn open_log(log: &Path, flags: i32) -> Result<File> {
    // What is missing is told of by its own name.
    if let Some(dir) = log.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::metadata(dir).at(dir)?;
    }
    if fs::symlink_metadata(log).is_ok_and(|found| found.is_file() && found.len() > LOG_MAX) {
        let mut aside = log.as_os_str().to_owned();
        aside.push(".old");
        fs::rename(log, aside).at(log)?;
    }
    OpenOptions::new().create(true).append(true).custom_flags(flags).open(log).at(log)
}

/// The logs of the mount at `mountpoint` where none was asked for, the first that can be written to. Root's home may be
/// another user's, as sudo may have it.
fn usual_logs(mountpoint: &Path) -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = variable("XDG_STATE_HOME").or_else(|| variable("HOME").map(|home| home.join(".local/state")));
    let name = format!("{}.log", escaped(mountpoint));
    [state, Some(SYSTEM.into())].into_iter().flatten().map(|dir| dir.join("wmount").join(&name)).collect()
}

/// A path as one file name, the way systemd names mount units: "/mnt/my w" is "mnt-my\x20w".
fn escaped(path: &Path) -> String {
    let path = mounts::canonical(path).or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned());
    let mut name = String::new();
    for &byte in path.as_os_str().as_bytes() {
        match byte {
            b'/' => name.push('-'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b':' | b'_' | b'.' => name.push(char::from(byte)),
            _ => name.push_str(&format!("\\x{byte:02x}")),
        }
    }
    let name = name.trim_matches('-');
    // File names end at 255 bytes; the far end of a path tells more than its beginning.
    name[name.len().saturating_sub(200)..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountpoints_as_file_names() {
        assert_eq!(escaped(Path::new("/mnt/w")), "mnt-w");
        assert_eq!(escaped(Path::new("/mnt/w/")), "mnt-w");
        assert_eq!(escaped(Path::new("/mnt/my w-1")), r"mnt-my\x20w\x2d1");
        assert_eq!(escaped(Path::new(&format!("/{}", "a/".repeat(300)))).len(), 200);
    }

    #[test]
    fn an_event_is_a_line() {
        for (colours, expected) in [(false, "a\\nb\\u{1b}[2J\\r\n"), (true, "a\\nb\x1b[2J\\r\n")] {
            let mut lines = OneLine { colours, to: Vec::new() };
            lines.write_all(b"a\nb\x1b[2J\r\n").unwrap();
            assert_eq!(String::from_utf8(lines.to).unwrap(), expected);
        }
    }

    #[test]
    fn the_usual_log_leads_nowhere_else() {
        let place = tempfile::tempdir().unwrap();
        let (log, target) = (place.path().join("w.log"), place.path().join("target"));
        fs::write(&target, "").unwrap();
        std::os::unix::fs::symlink(&target, &log).unwrap();
        assert!(open_usual_log(&log).is_err());
        fs::remove_file(&log).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &log, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert!(open_usual_log(&log).is_err());
        fs::remove_file(&log).unwrap();
        assert!(open_usual_log(&log).is_ok());
    }

    #[test]
    fn a_long_log_is_put_aside() {
        let place = tempfile::tempdir().unwrap();
        let log = place.path().join("state/w.log");
        assert!(open_log(&log, 0).is_err(), "no directory is made for a log that was asked for");
        open_usual_log(&log).unwrap().set_len(LOG_MAX + 1).unwrap();
        open_usual_log(&log).unwrap();
        assert_eq!(fs::metadata(&log).unwrap().len(), 0);
        assert!(place.path().join("state/w.log.old").exists());
    }
}
