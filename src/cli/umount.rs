//! `wmount umount MOUNTPOINT`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::error::{AtPath, Error, Result, quoted};
use crate::front::mountpoint::Mountpoint;
use crate::front::{mounts, sys};

/// How long the serving process is waited for.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a use by no process that can be seen is waited for: most often one that looked at the status and has gone.
const MOMENT: Duration = Duration::from_secs(1);
/// As many processes are named as fit a line.
const NAMED: usize = 5;

/// Unmount
#[derive(Debug, clap::Args)]
pub struct UmountArgs {
    /// Where the store is mounted
    pub mountpoint: PathBuf,
    /// Unmount even if files are open; they stay readable until they are closed
    #[arg(short, long)]
    pub lazy: bool,
}

/// Unmounts a wmount, and nothing else.
pub fn run(args: &UmountArgs) -> Result<()> {
    let path = mounts::canonical(&args.mountpoint).at(&args.mountpoint)?;
    let mountpoint = Mountpoint::hold(path.clone()).at(&path)?;
    let shown = path.display();
    if cfg!(target_os = "linux") {
        let mount = mountpoint.mounted().at(&path)?;
        let mount = mount.ok_or_else(|| Error::Invalid(format!("{shown} is not mounted; see `wmount status`")))?;
        if !mount.is_wmount() {
            return Err(Error::Invalid(format!("{shown} is a mount of type {}, not a wmount", mount.kind)));
        }
        if let Some(user) = mount.user.filter(|user| !sys::is_root() && *user != sys::owner().0) {
            let what =
                format!("{shown} was mounted by the user with the id {user}: unmount it as that user, or as root");
            return Err(Error::Invalid(what));
        }
    }
    let server = if args.lazy { None } else { server_of(&path) };
    let began = Instant::now();
    let outcome = loop {
        match mountpoint.unmount(args.lazy) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => match users_of(&path) {
                users if users.is_empty() && began.elapsed() < MOMENT => std::thread::sleep(MOMENT / 50),
                users => return Err(Error::Invalid(busy(&path, &users))),
            },
            outcome => break outcome,
        }
    };
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::Other => Err(Error::Invalid(error.to_string())),
        outcome => outcome.at(&path).map(|()| server.into_iter().for_each(wait_for_end)),
    }
}

/// The process that serves a mount, by its own word; `None` if it does not answer.
fn server_of(path: &Path) -> Option<u32> {
    let status = path.join(".wmount/status.json");
    let (told, heard) = mpsc::channel();
    // A server that hangs must not hang its own unmounting.
    std::thread::spawn(move || told.send(fs::read(status)));
    let status: serde_json::Value = serde_json::from_slice(&heard.recv_timeout(PATIENCE).ok()?.ok()?).ok()?;
    status["pid"].as_u64()?.try_into().ok()
}

/// Waits until a process has closed its files, so that the store's own file system can be unmounted next.
fn wait_for_end(pid: u32) {
    let began = Instant::now();
    // The state follows the name in parentheses. A zombie has closed its files, which a process without an entry in
    // its table of files has not yet.
    let state = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']));
    // Its first thread can be a zombie before the others have ended, and the last of them closes the files.
    let threads = || fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let runs = || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(state) || threads() > 1;
    while began.elapsed() < PATIENCE && runs() {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn busy(path: &Path, users: &BTreeMap<u32, String>) -> String {
    let shown = path.display();
    let mut named: Vec<_> = users.iter().take(NAMED).map(|(pid, name)| format!("{name} ({pid})")).collect();
    if users.len() > NAMED {
        named.push(format!("{} more", users.len() - NAMED));
    }
    let who = if named.is_empty() {
        "a process that you may not see, or by a mount below it".to_owned()
    } else {
        named.join(", ")
    };
    format!("{shown} is in use by {who}; end it, or run: wmount umount --lazy {}", quoted(path))
}

/// The processes that have a file below `path` open or mapped, or stand in it, as far as we may see.
fn users_of(path: &Path) -> BTreeMap<u32, String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbered = processes.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())));
    let users = numbered.filter(|&(pid, ref process)| pid != std::process::id() && uses(process, path));
    users.map(|(pid, process)| (pid, name_of(&process))).collect()
}

fn uses(process: &Path, path: &Path) -> bool {
    let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
    let places = ["cwd", "root", "exe"].map(|name| process.join(name));
    let held = files.chain(places).any(|link| fs::read_link(link).is_ok_and(|target| target.starts_with(path)));
    held || maps(&process.join("maps"), path)
}

/// A line of maps ends in the path of the mapped file, after five fields.
fn maps(list: &Path, path: &Path) -> bool {
    let list = fs::read(list).unwrap_or_default();
    let list = String::from_utf8_lossy(&list);
    list.lines().any(|line| line.find('/').is_some_and(|at| Path::new(&line[at..]).starts_with(path)))
}

fn name_of(process: &Path) -> String {
    fs::read_to_string(process.join("comm")).unwrap_or_default().trim().to_owned()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn an_open_file_is_found() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        let reader = Command::new("sleep").arg("60").stdin(fs::File::create(&file).unwrap()).spawn();
        let mut reader = reader.unwrap();
        let found = users_of(place.path());
        let others = users_of(&file.join("none"));
        reader.kill().and_then(|()| reader.wait()).unwrap();
        assert!(found.contains_key(&reader.id()), "{found:?}");
        assert!(others.is_empty(), "{others:?}");
    }

    #[test]
    fn only_ours_is_unmounted() {
        let args = UmountArgs { mountpoint: "/proc".into(), lazy: false };
        assert!(run(&args).unwrap_err().to_string().contains("not a wmount"));
    }
}
