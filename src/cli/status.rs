//! `wmount status`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use super::output::{count, print, print_json, size, table};
use crate::error::{AtPath, Error, Result, quoted};
use crate::front::mounts::{self, Mounted};
use crate::model::to_unix;

/// Lines of a list that are shown; who wants all of them asks for JSON.
const LISTED: usize = 20;

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
///
/// A mount whose process is gone is a failure, and so is one that was asked for and does not tell.
pub fn run(args: &StatusArgs) -> Result<ExitCode> {
    let mounts = chosen(args)?;
    let states: Vec<Value> = mounts.iter().map(state).collect();
    let silent = |state: &Value| state.get("error").is_some();
    let failed = |(mount, state): (&Mounted, &Value)| silent(state) && (args.mountpoint.is_some() || mount.is_dead());
    let failed = mounts.iter().zip(&states).any(failed);
    if args.json {
        print_json(&states)?
    } else {
        print(&text(&states))?
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
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
    let text = fs::read(mountpoint.join(".wmount/status.json")).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOTCONN) => {
            format!("the process that served it is gone; clean up: wmount umount {}", quoted(mountpoint))
        }
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
    let now = to_unix(SystemTime::now()).0;
    states.iter().map(|state| one(state, now)).collect::<Vec<_>>().join("\n")
}

/// One mount: its place, then a line for each thing it says, with a table below where one line is not enough.
fn one(state: &Value, now: i64) -> String {
    let said: Vec<_> = state.as_object().into_iter().flatten().collect();
    let width = said.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (key, value) in said {
        let (line, rows) = said_of(key, value, now);
        text += format!("{:width$}  {line}", label(key)).trim_end();
        text.push('\n');
        // Only layouts have numbers behind their names.
        let right: &[usize] = if key == "layouts" { &[1, 2] } else { &[] };
        text.extend(table(&rows, right).lines().map(|row| format!("  {row}\n")));
    }
    text
}

/// A value as people read it, and the rows below it.
fn said_of(key: &str, value: &Value, now: i64) -> (String, Vec<Vec<String>>) {
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match (key, value) {
        ("started", Value::Number(at)) => (ago(at.as_i64(), now), Vec::new()),
        ("bytes_read", Value::Number(bytes)) => (size(bytes.as_u64().unwrap_or(0)), Vec::new()),
        ("layouts", Value::Object(layouts)) => {
            let number = |layout: &Value, key: &str| layout[key].as_u64().unwrap_or(0);
            let row = |(name, layout): (&String, &Value)| {
                let mut row = vec![name.clone(), count(number(layout, "reads"), "read"), size(number(layout, "bytes"))];
                if let Some(seconds) = layout["compute_seconds"].as_f64() {
                    let (made, lost) = (number(layout, "preparations"), number(layout, "fallbacks"));
                    let from = size(number(layout, "blob_bytes"));
                    let (made, lost) = (count(made, "preparation"), count(lost, "fallback"));
                    row.push(format!("from {from} of blobs in {seconds:.1} s of computing, {made}, {lost}"));
                }
                row
            };
            (String::new(), layouts.iter().map(row).collect())
        }
        ("verified", verified @ Value::Object(_)) => {
            let number = |key: &str| verified[key].as_u64().unwrap_or(0);
            (format!("{}, {}", count(number("blobs"), "blob"), size(number("bytes"))), Vec::new())
        }
        (_, Value::Array(list)) if list.is_empty() => ("none".into(), Vec::new()),
        (_, Value::Array(list)) => {
            let row = |value: &Value| match value.get("model") {
                Some(model) => vec![word(model), format!("written {}", ago(value["written"].as_i64(), now))],
                None if key == "waiting" => {
                    let reads = count(value["threads"].as_u64().unwrap_or(0), "read");
                    vec![format!("{}  for {} s, {reads}", word(&value["blob"]), value["seconds"])]
                }
                None => vec![word(value)],
            };
            let mut rows: Vec<_> = list.iter().take(LISTED).map(row).collect();
            if list.len() > LISTED {
                rows.push(vec![format!("and {} more; --json lists all", list.len() - LISTED)]);
            }
            (list.len().to_string(), rows)
        }
        (_, other) => (word(other), Vec::new()),
    }
}

/// How long ago a time was, in the largest unit of which there are two.
fn ago(time: Option<i64>, now: i64) -> String {
    const UNITS: [(i64, &str); 4] = [(86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")];
    let Some(passed) = time.and_then(|time| now.checked_sub(time)) else { return "at an unknown time".into() };
    let fits = |&&(unit, _): &&(i64, &str)| passed >= 2 * unit;
    match UNITS.iter().find(fits) {
        Some((unit, name)) => format!("{} {name}s ago", passed / unit),
        // A clock that was set back is no news worth a line of its own.
        None => "just now".into(),
    }
}

fn label(key: &str) -> String {
    key.replace('_', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_for_each_thing_said() {
        let state = json!({
            "mountpoint": "/mnt/w", "started": 1000, "bytes_read": 4096, "problems": [],
            "models": [{"model": "a:latest", "path": "a/latest", "written": 400}, {"model": "long:latest", "written": 0}],
            "layouts": {"amb": {"reads": 1, "bytes": 4096}, "coreml": {"reads": 0, "bytes": 0}},
        });
        let text = [
            "mountpoint  /mnt/w",
            "started     2 minutes ago",
            "bytes read  4.0 KiB",
            "problems    none",
            "models      2",
            "  a:latest     written 12 minutes ago",
            "  long:latest  written 19 minutes ago",
            "layouts",
            "  amb      1 read  4.0 KiB",
            "  coreml  0 reads      0 B",
            "",
        ];
        assert_eq!(one(&state, 1150), text.join("\n"));
    }

    #[test]
    fn a_long_list_is_cut_and_says_so() {
        let problems: Vec<String> = (0..LISTED + 2).map(|number| format!("p{number}")).collect();
        let text = one(&json!({"problems": problems}), 0);
        assert_eq!(text.lines().count(), LISTED + 2);
        assert!(text.ends_with("and 2 more; --json lists all\n"), "{text}");
    }

    #[test]
    fn times_are_told_in_units_that_fit() {
        for (passed, text) in [
            (-5, "just now"),
            (1, "just now"),
            (119, "119 seconds ago"),
            (120, "2 minutes ago"),
            (7200, "2 hours ago"),
            (864_000, "10 days ago"),
        ] {
            assert_eq!(ago(Some(0), passed), text);
        }
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
