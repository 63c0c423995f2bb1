//! `-o OPTION,...`, as mount(8) gives what stands in /etc/fstab.

use std::ffi::{OsStr, OsString};

use clap::CommandFactory;

use super::Cli;

/// Options of every file system, which are for mount(8), or say what our mounts are anyway.
const GENERIC: &[&str] = &[
    "async",
    "atime",
    "auto",
    "defaults",
    "dev",
    "diratime",
    "dirsync",
    "exec",
    "group",
    "iversion",
    "lazytime",
    "mand",
    "noatime",
    "noauto",
    "nodev",
    "nodiratime",
    "noexec",
    "nofail",
    "noiversion",
    "nolazytime",
    "nomand",
    "norelatime",
    "nostrictatime",
    "nosuid",
    "nouser",
    "owner",
    "relatime",
    "ro",
    "rw",
    "strictatime",
    "suid",
    "sync",
    "user",
    "users",
    "_netdev",
    "comment",
];

/// Puts the options of `-o` as long options in its place: `-o allow_other,read=direct` is `--allow-other --read=direct`.
///
/// # Errors
/// An option that no mount has, in words.
pub(super) fn spread(args: Vec<OsString>) -> Result<Vec<OsString>, String> {
    let mut spread = Vec::with_capacity(args.len());
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let joined = arg.to_str().and_then(|arg| arg.strip_prefix("-o")).filter(|rest| !rest.is_empty());
        match (joined.map(OsString::from), arg == "-o") {
            (Some(list), _) => spread.extend(long(&list)?),
            // Without a list it is told of as clap tells of it.
            (None, true) => match args.next() {
                Some(list) => spread.extend(long(&list)?),
                None => spread.push(arg),
            },
            (None, false) => spread.push(arg),
        }
    }
    Ok(spread)
}

fn long(list: &OsStr) -> Result<Vec<OsString>, String> {
    let command = Cli::command();
    // One that is no text is no option.
    let list = list.to_string_lossy();
    let is_ours = |option: &&str| {
        let name = option.split('=').next().unwrap_or_default();
        !(GENERIC.contains(&name) || name.is_empty() || name.starts_with("x-"))
    };
    let long = |option: &str| {
        let (name, value) = option.split_at(option.find('=').unwrap_or(option.len()));
        let long = name.replace('_', "-");
        match command.get_arguments().any(|arg| arg.get_long() == Some(&long)) {
            true => Ok(format!("--{long}{value}").into()),
            false => Err(format!("unknown mount option '{name}' in -o")),
        }
    };
    list.split(',').filter(is_ours).map(long).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_mount_become_our_own() {
        for (given, expected) in [
            ("s m -o rw,dev,suid,allow_other,_netdev,x-systemd.automount", "s m --allow-other"),
            ("-oro,read=direct,verify_on_read s m", "--read=direct --verify-on-read s m"),
            ("s m -o defaults -o variant=int8,log=/a_b", "s m --variant=int8 --log=/a_b"),
            ("s m -o", "s m -o"),
            ("s m --allow-other", "s m --allow-other"),
        ] {
            let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
            assert_eq!(spread(words(given)), Ok(words(expected)), "{given}");
        }
        let given = ["s", "m", "-o", "ro,uid=5"].map(OsString::from);
        assert_eq!(spread(given.into()), Err("unknown mount option 'uid' in -o".into()));
    }
}
