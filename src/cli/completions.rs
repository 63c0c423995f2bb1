//! `wmount completions SHELL`.

use clap::CommandFactory;

use super::output::print;
use crate::error::Result;

/// Print the completions of a shell, for its start-up file
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

pub(super) fn run(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::Cli::command(), "wmount", &mut script);
    print(&String::from_utf8_lossy(&script))
}
