//! A first word that was meant to be a command: in clap's grammar every one that is none is the store.

use std::ffi::OsString;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory};

use super::Cli;
use crate::slips::slips;

/// Words for commands that have other names here.
const SYNONYMS: [(&str, &str); 9] = [
    ("list", "ls"),
    ("info", "show"),
    ("add", "import"),
    ("remove", "rm"),
    ("delete", "rm"),
    ("copy", "cp"),
    ("mv", "cp"),
    ("rename", "cp"),
    ("tag", "cp"),
];

/// The error of arguments whose first word is neither a command nor a store.
pub(super) fn found(args: &[OsString], parsed: &clap::error::Result<Cli>) -> Option<clap::Error> {
    let word = args.get(1)?.to_str()?;
    if word.is_empty() || word.starts_with('-') || word.contains('/') || Path::new(word).exists() {
        return None;
    }
    let mut command = Cli::command();
    let near = near(word, &command);
    let is_command = |command: &Command| command.get_name() == word || word == "help";
    let is_mount = parsed.as_ref().is_ok_and(|cli| cli.command.is_none());
    // Two words can be a store that is not there, and a mountpoint.
    if command.get_subcommands().any(is_command) || (is_mount && near.is_none() && word != "mount") {
        return None;
    }
    let mut error = clap::Error::new(ErrorKind::InvalidSubcommand).with_cmd(&command);
    error.insert(ContextKind::InvalidSubcommand, ContextValue::String(word.into()));
    if word == "mount" {
        let tip = "to mount, leave that word out: wmount STORE MOUNTPOINT".into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    } else if let Some(near) = near {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::String(near));
    }
    error.insert(ContextKind::Usage, ContextValue::StyledStr(command.render_usage()));
    Some(error)
}

/// The command that a word was meant to be.
fn near(word: &str, command: &Command) -> Option<String> {
    if let Some((_, name)) = SYNONYMS.iter().find(|(synonym, _)| *synonym == word) {
        return Some((*name).into());
    }
    let names = command.get_subcommands().map(Command::get_name);
    let (_, name) = names.filter_map(|name| Some((slips(word, name)?, name))).min()?;
    Some(name.into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn told(words: &[&str]) -> Option<String> {
        let args: Vec<OsString> = [&["wmount"], words].concat().into_iter().map(OsString::from).collect();
        found(&args, &Cli::try_parse_from(&args)).map(|error| error.to_string())
    }

    #[test]
    fn the_command_that_was_meant_is_named() {
        for (words, named) in [
            (&["lss"][..], "'ls'"),
            (&["shwo", "llama"], "'show'"),
            (&["list"], "'ls'"),
            (&["mv", "llama", "mama"], "'cp'"),
            (&["unmount", "/mnt/w"], "'umount'"),
            (&["improt", "a", "b", "-n", "x"], "'import'"),
            (&["mount", "a", "b"], "wmount STORE MOUNTPOINT"),
            (&["klingon"], "unrecognized subcommand 'klingon'"),
        ] {
            assert!(told(words).is_some_and(|text| text.contains(named)), "{words:?}: {:?}", told(words));
        }
    }

    #[test]
    fn stores_commands_and_options_are_left_alone() {
        for words in [&["no-store", "mnt"][..], &["./lss"], &["src"], &["ls"], &["help", "ls"], &["--read", "x"], &[]] {
            assert_eq!(told(words), None, "{words:?}");
        }
    }
}
