//! `wmount cat TREE-PATH`.

use std::io::{self, Write};

use super::export::for_each_chunk;
use super::tree::TreeArgs;
use crate::error::{AtPath, Error, Result};
use crate::vfs::Kind;

/// Print a file of the tree without a mount
#[derive(Debug, clap::Args)]
pub struct CatArgs {
    /// Path below the mountpoint, such as safetensors/llama/latest/config.json
    #[arg(value_name = "TREE-PATH")]
    path: String,
    #[command(flatten)]
    tree: TreeArgs,
}

pub(super) fn run(args: &CatArgs) -> Result<()> {
    let (vfs, attr) = args.tree.at(&args.path)?;
    if attr.kind == Kind::Dir {
        return Err(Error::Invalid(format!("{:?}: is a directory; wmount export writes those", args.path)));
    }
    let mut stdout = io::stdout().lock();
    let mut gone = false;
    for_each_chunk(&vfs, &attr, |chunk| match stdout.write_all(chunk) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            gone = true;
            Ok(false)
        }
        outcome => outcome.at("stdout").map(|()| true),
    })?;
    if gone { Ok(()) } else { stdout.flush().at("stdout") }
}
