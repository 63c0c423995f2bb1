//! Text for people: sizes, tables, errors; JSON for programs.

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::error::{AtPath, Error, Result, plain};

/// Prints text to stdout. Control characters of names that strangers gave are escaped: a terminal would obey them.
pub fn print(text: &str) -> Result<()> {
    let acts = |char: char| char.is_control() && !matches!(char, '\n' | '\t');
    if !text.contains(acts) {
        return write(text);
    }
    let escaped = |char: char| if acts(char) { char.escape_default().collect() } else { String::from(char) };
    write(&text.chars().map(escaped).collect::<String>())
}

/// A reader that has gone away is no error.
fn write(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.at("stdout"),
    }
}

/// Prints a value as JSON.
pub fn print_json(value: &impl serde::Serialize) -> Result<()> {
    write(&(json(value) + "\n"))
}

/// A value as JSON, which leaves some control characters as they are: they are escaped, too.
fn json(value: &impl serde::Serialize) -> String {
    let text = serde_json::to_string_pretty(value).expect("what is printed is plain data");
    let acts = |char: char| char.is_control() && char != '\n';
    if !text.contains(acts) {
        return text;
    }
    let escaped = |char: char| if acts(char) { format!("\\u{:04x}", u32::from(char)) } else { String::from(char) };
    text.chars().map(escaped).collect()
}

/// Prints an error as one line on stderr.
pub fn complain(error: &Error) {
    let line = plain(error.to_string());
    let _ = writeln!(io::stderr(), "wmount: {line}");
}

/// A size as people read it: `86.7 MiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A number with its noun: `1 tensor`, `2 tensors`.
pub fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Columns of text, each as wide as its widest cell; numbers and sizes stand to the right. A cell is in one line, whatever
/// names are in it.
pub fn table(rows: &[Vec<String>], right: &[usize]) -> String {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().cloned().map(plain).collect()).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row: &Vec<String>| Some(row.get(column)?.chars().count())).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().enumerate().map(|(column, cell)| match right.contains(&column) {
            true => format!("{cell:>width$}", width = widths[column]),
            false => format!("{cell:<width$}", width = widths[column]),
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// A progress bar over bytes; drawn only on a terminal, and only if the work takes more than a moment.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar that knows its length later.
    pub fn new(what: &'static str) -> Bar {
        let target =
            if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        let style = "{msg} {bar:32} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
        bar.set_style(ProgressStyle::with_template(style).expect("the template is fixed"));
        bar.set_message(what);
        Bar(bar)
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

impl crate::store::import::Progress for Bar {
    fn begin(&self, total: u64) {
        self.0.set_length(total);
    }

    fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_make_a_row() {
        let rows = [vec!["a\nb\x1b[2J".to_owned(), "1".to_owned()], vec!["c".to_owned(), "23".to_owned()]];
        assert_eq!(table(&rows, &[1]), "a\\nb\\u{1b}[2J   1\nc              23\n");
    }

    #[test]
    fn json_says_the_same_without_what_a_terminal_obeys() {
        let value = serde_json::json!({"a\u{9b}2J\u{7f}\n": ["\u{e9}\u{1b}[2J\u{85}"]});
        let text = json(&value);
        assert!(!text.contains(|char: char| char.is_control() && char != '\n') && text.contains('\u{e9}'), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn sizes() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (90868376, "86.7 MiB")]
        {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(size(u64::MAX), "16.0 EiB");
    }
}
