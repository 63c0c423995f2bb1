//! The command: one file per verb, each turning arguments into a library call and its result into text or JSON.
//!
//! Exit status: 0, 1 for a failure, 2 for misuse.

mod amb;
mod cat;
mod completions;
mod cp;
mod demo;
mod doctor;
mod export;
mod fstab;
mod gc;
mod import;
mod ls;
mod mistyped;
mod mount;
mod output;
mod prepare;
mod rm;
mod show;
mod status;
mod tree;
mod umount;
mod variant;
mod verify;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::error::{Error, Result};
use crate::store::Store;
use crate::vfs::Vfs;

/// One stored set of model tensors, mounted as every layout that loaders want
#[derive(Debug, Parser)]
#[command(name = "wmount", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(override_usage = "wmount [OPTIONS] STORE MOUNTPOINT\n       wmount [--store DIR] COMMAND ...")]
struct Cli {
    #[command(flatten)]
    mount: Option<mount::MountArgs>,
    #[command(subcommand)]
    command: Option<Command>,
}

/// Where the store is.
#[derive(Debug, Clone, Args)]
pub struct StoreArgs {
    /// The store [env: WMOUNT_STORE=] [default: ~/models]
    // The variable is not clap's, for which an empty one is a store.
    #[arg(short, long, value_name = "DIR", global = true)]
    store: Option<PathBuf>,
}

impl StoreArgs {
    fn path(&self) -> Result<PathBuf> {
        let given = std::env::var_os("WMOUNT_STORE").filter(|given| !given.is_empty()).map(PathBuf::from);
        match (self.store.clone().or(given), std::env::home_dir()) {
            (Some(store), _) => Ok(store),
            (None, Some(home)) => Ok(home.join("models")),
            (None, None) => Err(Error::Invalid("there is no home directory: say where the store is with -s".into())),
        }
    }

    fn open(&self) -> Result<Store> {
        Store::open(self.path()?)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    Import(import::ImportArgs),
    Ls(ls::LsArgs),
    Show(show::ShowArgs),
    Cat(cat::CatArgs),
    Export(export::ExportArgs),
    Verify(verify::VerifyArgs),
    Prepare(prepare::PrepareArgs),
    Cp(cp::CpArgs),
    Rm(rm::RmArgs),
    Gc(gc::GcArgs),
    Umount(umount::UmountArgs),
    Status(status::StatusArgs),
    Doctor(doctor::DoctorArgs),
    Demo(demo::DemoArgs),
    Completions(completions::CompletionsArgs),
}

/// Runs the command that the process was started with.
pub fn main() -> ExitCode {
    let args = with_store_first(std::env::args_os());
    let is_command = |name: &OsString| Cli::command().get_subcommands().any(|command| *name == *command.get_name());
    let has_options = args.iter().any(|arg| arg.as_encoded_bytes().starts_with(b"-o"));
    let args = if has_options && !args.get(1).is_some_and(is_command) {
        fstab::spread(args).unwrap_or_else(|why| misuse(&why))
    } else {
        args
    };
    let parsed = Cli::try_parse_from(&args);
    if let Some(error) = mistyped::found(&args, &parsed) {
        error.exit();
    }
    let cli = parsed.unwrap_or_else(|error| error.exit());
    let is_mount = cli.command.is_none();
    if !is_mount {
        // What it tells of is the error that the command ends with.
        crate::front::daemon::log_to_stderr("warn,wmount::vfs=off");
    }
    let outcome = match cli.command {
        Some(command) => command.run(),
        None => {
            let args = cli.mount.expect("clap demands STORE and MOUNTPOINT where there is no command");
            let read = args.read_mode().unwrap_or_else(|why| misuse(&why));
            let listed = variant::listed(&args.variants);
            mount::run(&args, read, |store| {
                Ok(Arc::new(Vfs::listing(
                    Arc::new(Store::open(store)?.allowing_overflow(args.allow_overflow).checking(args.verify_on_read)),
                    &listed,
                )?))
            })
            .map(|()| ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|error| {
        output::complain(&error);
        ExitCode::FAILURE
    })
}

/// Ends the process as clap does where it finds misuse itself.
fn misuse(why: &str) -> ! {
    Cli::command().error(ErrorKind::ValueValidation, why).exit()
}

/// Moves `-s DIR` and `--store DIR` from before the command to behind it, where clap looks for it: the arguments of
/// mounting, which has no such option, come first in its grammar.
fn with_store_first(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<_> = args.collect();
    let text = |arg: Option<&OsString>| arg.map(|arg| arg.to_string_lossy().into_owned());
    let taken = match text(args.get(1)).as_deref() {
        Some("-s" | "--store") => 2,
        Some(arg) if arg.starts_with("--store=") || (arg.starts_with("-s") && arg.len() > 2) => 1,
        _ => 0,
    };
    if taken > 0 && args.len() > 1 + taken {
        let option: Vec<_> = args.drain(1..1 + taken).collect();
        args.splice(2..2, option);
    }
    args
}

impl Command {
    fn run(self) -> Result<ExitCode> {
        let done = |outcome: Result<()>| outcome.map(|()| ExitCode::SUCCESS);
        match self {
            Command::Import(args) => import::run(&args),
            Command::Ls(args) => done(ls::run(&args)),
            Command::Show(args) => done(show::run(&args)),
            Command::Cat(args) => done(cat::run(&args)),
            Command::Export(args) => done(export::run(&args)),
            Command::Verify(args) => verify::run(&args),
            Command::Prepare(args) => done(prepare::run(&args)),
            Command::Cp(args) => cp::run(&args),
            Command::Rm(args) => done(rm::run(&args)),
            Command::Gc(args) => done(gc::run(&args)),
            Command::Umount(args) => done(umount::run(&args)),
            Command::Status(args) => status::run(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Demo(args) => done(demo::run(&args)),
            Command::Completions(args) => done(completions::run(&args)),
        }
    }
}
