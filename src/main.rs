//! The `wmount` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    wmount::cli::main()
}
