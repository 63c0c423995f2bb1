//! `wmount doctor`.

use std::io;
use std::process::ExitCode;

use serde::Serialize;

use super::output;
use crate::error::Result;
use crate::front::machine::{self, Machine, MountFacts};

/// The kernel that reads a whole blob by itself.
const PASSTHROUGH: (u32, u32) = (6, 9);
/// The kernel that maps files which are read past the page cache.
const DIRECT_MAPS: (u32, u32) = (6, 6);
/// Readers that map a file and say that they go through it in order get less than a tenth of its speed below this.
const READ_AHEAD_KB: u64 = 1024;
/// What is advised.
const ADVISED_KB: u64 = 4096;
/// The kernel's own limit. More gave nothing to reads and slowed maps.
const REQUEST_PAGES: u64 = 256;

/// Say what this machine leaves on the table, and the command that takes it up; changes nothing
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    state: State,
    what: String,
    /// Why it matters, where it is not as it could be.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    /// What to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Good,
    /// It works, and could be faster or do more.
    Better,
    /// Nothing can be mounted.
    Broken,
}

/// Prints the findings. Fails if this user cannot mount at all.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let findings = findings(&machine::look());
    if args.json {
        output::print_json(&findings)?;
    } else {
        output::print(&text(&findings))?;
    }
    let broken = findings.iter().any(|finding| finding.state == State::Broken);
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn findings(machine: &Machine) -> Vec<Finding> {
    let mut findings = vec![device(machine)];
    if !machine.root {
        findings.extend([helper(machine), allow_other(machine)]);
    }
    findings.extend([kernel(machine), rights(machine)]);
    findings.extend(machine.max_pages.map(request));
    findings.extend(
        machine
            .mounts
            .iter()
            .flat_map(|mount| [read_ahead(mount), passthrough(mount), filter(mount), fence(mount)])
            .flatten(),
    );
    findings
}

fn good(what: impl Into<String>) -> Finding {
    Finding { state: State::Good, what: what.into(), why: None, command: None }
}

fn bad(state: State, what: impl Into<String>, why: &str, command: impl Into<String>) -> Finding {
    Finding { state, what: what.into(), why: Some(why.into()), command: Some(command.into()) }
}

fn device(machine: &Machine) -> Finding {
    let why = "the kernel and the mount talk through it";
    match machine.device {
        Ok(()) => good("/dev/fuse can be opened"),
        Err(io::ErrorKind::NotFound) => bad(
            State::Broken,
            "/dev/fuse is missing",
            "the kernel and the mount talk through it; a container gets it by --device /dev/fuse --cap-add SYS_ADMIN",
            "sudo modprobe fuse",
        ),
        Err(_) => bad(State::Broken, "/dev/fuse cannot be opened by this user", why, "sudo chmod 666 /dev/fuse"),
    }
}

fn helper(machine: &Machine) -> Finding {
    if machine.helper {
        return good("fusermount3 is installed");
    }
    let why = "an ordinary user mounts through it";
    bad(State::Broken, "fusermount3 is missing", why, "sudo apt-get install fuse3")
}

fn allow_other(machine: &Machine) -> Finding {
    if machine.allow_other {
        return good("users may show their mounts to others (user_allow_other)");
    }
    let why = "services under other users, such as ollama, do not see a mount without it";
    let command = "echo user_allow_other | sudo tee -a /etc/fuse.conf";
    bad(State::Better, "--allow-other is not open to users", why, command)
}

fn kernel(machine: &Machine) -> Finding {
    let (major, minor) = machine.kernel;
    let what = format!("the kernel is Linux {major}.{minor}");
    let command = "sudo apt-get install -t stable-backports linux-image-$(dpkg --print-architecture)";
    if machine.kernel >= PASSTHROUGH {
        good(what)
    } else if machine.kernel >= DIRECT_MAPS {
        let why = "files that are one blob (ollama, GGUF) are read at the disk cache's own speed from 6.9 on";
        bad(State::Better, what, why, command)
    } else {
        let why = "large reads past the page cache need 6.6, files that are one blob at the disk cache's own speed 6.9";
        bad(State::Better, what, why, command)
    }
}

fn rights(machine: &Machine) -> Finding {
    if machine.administers {
        return good("this user may let the kernel read blobs by itself");
    }
    let why = "only a mount made by root lets the kernel read files that are one blob (ollama, GGUF) by itself";
    bad(State::Better, "this user lacks CAP_SYS_ADMIN", why, "sudo wmount --allow-other STORE MOUNTPOINT")
}

fn request(pages: u64) -> Finding {
    let what = format!("a request can have {pages} pages");
    if pages >= REQUEST_PAGES {
        return good(what);
    }
    let command = format!("echo {REQUEST_PAGES} | sudo tee /proc/sys/fs/fuse/max_pages_limit");
    bad(State::Better, what, "every request costs as much as copying 100 KiB", command)
}

fn read_ahead(mount: &MountFacts) -> Option<Finding> {
    let (at, file, now) = (mount.mountpoint.display(), mount.read_ahead_file.display(), mount.read_ahead?);
    let what = format!("{at} is read ahead by {now} KiB");
    if now >= READ_AHEAD_KB {
        return Some(good(what));
    }
    let why = "a loader that maps files waits for the mount at every step of this size";
    Some(bad(State::Better, what, why, format!("echo {ADVISED_KB} | sudo tee {file}")))
}

fn passthrough(mount: &MountFacts) -> Option<Finding> {
    let said = mount.passthrough.as_deref()?;
    let what = format!("{}: passthrough is {said}", mount.mountpoint.display());
    let why = "files that are one blob are read through the daemon, at a fraction of the speed";
    Some(on_or(what, said, why))
}

fn filter(mount: &MountFacts) -> Option<Finding> {
    let said = mount.filter.as_deref()?;
    let what = format!("{}: the filter of system calls is {said}", mount.mountpoint.display());
    let why = "a parser that a model took over could run programs and open connections";
    Some(on_or(what, said, why))
}

fn fence(mount: &MountFacts) -> Option<Finding> {
    let said = mount.fence.as_deref()?;
    let what = format!("{}: the fence around the store is {said}", mount.mountpoint.display());
    let why = "a parser that a model took over could write what its user may write; Linux 6.2 has all of Landlock";
    Some(on_or(what, said, why))
}

/// What a mount says of itself, where there is no command that changes it.
fn on_or(what: String, said: &str, why: &str) -> Finding {
    if said == "on" {
        return good(what);
    }
    Finding { state: State::Better, what, why: Some(why.into()), command: None }
}

fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let mark = match finding.state {
            State::Good => "good   ",
            State::Better => "better ",
            State::Broken => "broken ",
        };
        text += &format!("{mark} {}\n", finding.what);
        let more = [&finding.why, &finding.command];
        more.into_iter().flatten().for_each(|line| text += &format!("          {line}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn perfect() -> Machine {
        let mount = MountFacts {
            mountpoint: "/mnt/w".into(),
            read_ahead_file: "/sys/class/bdi/0:51/read_ahead_kb".into(),
            read_ahead: Some(4096),
            passthrough: Some("on".into()),
            filter: Some("on".into()),
            fence: Some("on".into()),
        };
        Machine {
            kernel: (6, 18),
            root: false,
            administers: true,
            device: Ok(()),
            helper: true,
            allow_other: true,
            max_pages: Some(256),
            mounts: vec![mount],
        }
    }

    fn commands(machine: &Machine) -> Vec<String> {
        findings(machine).into_iter().filter(|it| it.state != State::Good).filter_map(|it| it.command).collect()
    }

    #[test]
    fn nothing_is_asked_of_a_machine_that_has_all() {
        assert!(findings(&perfect()).iter().all(|finding| finding.state == State::Good));
    }

    #[test]
    fn every_lack_has_its_command() {
        let mut mount = perfect().mounts.remove(0);
        mount.read_ahead = Some(128);
        let cases = [
            (Machine { kernel: (6, 1), ..perfect() }, "linux-image"),
            (Machine { administers: false, ..perfect() }, "sudo wmount"),
            (Machine { device: Err(io::ErrorKind::NotFound), ..perfect() }, "modprobe fuse"),
            (Machine { device: Err(io::ErrorKind::PermissionDenied), ..perfect() }, "chmod 666 /dev/fuse"),
            (Machine { helper: false, ..perfect() }, "install fuse3"),
            (Machine { allow_other: false, ..perfect() }, "user_allow_other"),
            (Machine { max_pages: Some(32), ..perfect() }, "max_pages_limit"),
            (Machine { mounts: vec![mount], ..perfect() }, "tee /sys/class/bdi/0:51/read_ahead_kb"),
        ];
        for (machine, word) in cases {
            let commands = commands(&machine);
            assert!(commands.len() == 1 && commands[0].contains(word), "{commands:?}");
        }
    }

    #[test]
    fn what_a_mount_lacks_is_told() {
        let mut mount = perfect().mounts.remove(0);
        mount.filter = Some("off: no".into());
        let found = text(&findings(&Machine { mounts: vec![mount], ..perfect() }));
        assert!(found.contains("better  /mnt/w: the filter of system calls is off: no\n"), "{found}");
    }

    #[test]
    fn root_needs_no_helper() {
        assert!(commands(&Machine { root: true, helper: false, allow_other: false, ..perfect() }).is_empty());
    }
}
