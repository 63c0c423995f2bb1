//! Reads the tree of a store without a mount: every path with its size, inode number and number of names.
//!
//! ```text
//! cargo run --example tree -- ~/models coreml
//! ```

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use wmount::error::{Error, Result};
use wmount::store::Store;
use wmount::vfs::{Attr, Kind, Vfs};

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (store, path) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    match show(&store, &path) {
        Ok(text) => {
            let printed = std::io::stdout().write_all(text.as_bytes());
            if printed.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn show(store: &str, path: &str) -> Result<String, Error> {
    let vfs = Vfs::new(Arc::new(Store::open(store)?))?;
    let mut text = String::new();
    branch(&vfs, &vfs.resolve(path)?, path, &mut text)?;
    Ok(text)
}

fn branch(vfs: &Vfs, attr: &Attr, path: &str, text: &mut String) -> Result<()> {
    if attr.kind == Kind::File {
        *text += &format!("{:>20} {:>3} {:>14}  {path}\n", attr.ino, attr.nlink, attr.size);
        return Ok(());
    }
    for child in vfs.entries(attr.ino)?.children.iter() {
        let below = if path.is_empty() { child.name.to_string() } else { format!("{path}/{}", child.name) };
        branch(vfs, &vfs.lookup(attr.ino, &child.name)?, &below, text)?;
    }
    Ok(())
}
