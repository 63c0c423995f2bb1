//! `wmount status`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::{AtPath, Error, Result};
use crate::front::mounts::{self, Mounted};

/// Show what is mounted, and how it does
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    /// Only the mount at this place
    pub mountpoint: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Prints the state of one mount or of all.
pub fn run(args: &StatusArgs) -> Result<()> {
    let states: Vec<Value> = chosen(args)?.iter().map(state).collect();
    let text = if args.json { format!("{:#}\n", Value::from(states)) } else { text(&states) };
    io::stdout().write_all(text.as_bytes()).at("stdout")
}

fn chosen(args: &StatusArgs) -> Result<Vec<Mounted>> {
    let mut mounts = mounts::all().at("/proc/self/mountinfo")?;
    mounts.retain(Mounted::is_wmount);
    if let Some(mountpoint) = &args.mountpoint {
        let path = mounts::canonical(mountpoint).at(mountpoint)?;
        mounts.retain(|mount| mount.mountpoint == path);
        if mounts.is_empty() {
            return Err(Error::Invalid(format!("{} is not a wmount", path.display())));
        }
    }
    Ok(mounts)
}

/// What the mount says of itself, or what is wrong with it, and where it is.
fn state(mount: &Mounted) -> Value {
    let mut state = Map::new();
    state.insert("mountpoint".into(), json!(mount.mountpoint.to_string_lossy()));
    state.insert("store".into(), json!(mount.source.to_string_lossy()));
    match report(&mount.mountpoint) {
        Ok(report) => state.extend(report),
        Err(error) => {
            state.insert("error".into(), json!(error));
        }
    }
    Value::Object(state)
}

fn report(mountpoint: &Path) -> Result<Map<String, Value>, String> {
    let shown = mountpoint.display();
    let text = fs::read(mountpoint.join(".wmount/status.json")).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOTCONN) => format!("the process that served it is gone; clean up: wmount umount {shown}"),
        _ if error.kind() == io::ErrorKind::PermissionDenied => {
            "mounted by another user; ask as that user, or mount with --allow-other".to_owned()
        }
        _ => error.to_string(),
    })?;
    serde_json::from_slice(&text).map_err(|error| format!(".wmount/status.json: {error}"))
}

fn text(states: &[Value]) -> String {
    if states.is_empty() {
        return "nothing is mounted\n".to_owned();
    }
    states.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// One mount: its place, then a line for each thing it says.
fn one(state: &Value) -> String {
    let said: Vec<_> = state.as_object().into_iter().flatten().collect();
    let width = said.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    said.iter().map(|(key, value)| format!("{:width$}  {}\n", label(key), plain(value))).collect()
}

fn label(key: &str) -> String {
    key.replace('_', " ")
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(list) if list.is_empty() => "none".to_owned(),
        Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join("; "),
        Value::Object(map) => {
            map.iter().map(|(key, value)| format!("{} {}", label(key), plain(value))).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_for_each_thing_said() {
        let state = json!({"mountpoint": "/mnt/w", "bytes_read": 12, "problems": [], "models": ["a", "b"]});
        assert_eq!(one(&state), "mountpoint  /mnt/w\nbytes read  12\nproblems    none\nmodels      a; b\n");
    }

    #[test]
    fn no_mount_is_no_error() {
        assert_eq!(text(&[]), "nothing is mounted\n");
    }

    #[test]
    fn what_is_not_mounted_has_no_state() {
        let place = tempfile::tempdir().unwrap();
        let args = StatusArgs { mountpoint: Some(place.path().to_owned()), json: false };
        assert!(run(&args).unwrap_err().to_string().contains("not a wmount"));
    }
}
