//! JSON of any origin: a look at the text says what it would take in memory, before anything is made of it.
//!
//! A list of zeros takes fifty times as much memory as text, so a limit on the text alone is none. Numbers keep
//! their digits: what is shown again says what its source says, to the last of them.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::Fault;

/// Marks in a text of which each value is made; a value takes about 110 bytes for each. A tokenizer of half a million
/// merges has two million.
const VALUES: usize = 4 << 20;

/// The same for documents that are read into types of their own, which take less.
const TYPED: usize = 16 << 20;

/// Checks that a text has at most so many marks between and around values.
fn check(text: &[u8], most: usize) -> Result<(), Fault> {
    // No text has more marks than bytes.
    if text.len() <= most {
        return Ok(());
    }
    let marks = text.iter().filter(|byte| matches!(byte, b',' | b':' | b'[' | b'{')).count();
    if marks <= most {
        return Ok(());
    }
    Err(Fault::new(0, format!("{} bytes of JSON with {marks} values and separators, more than {most}", text.len())))
}

/// Reads any object.
pub(crate) fn object(text: &[u8]) -> Result<Map<String, Value>, Fault> {
    loose(text)
}

/// Reads an object that Python may have written, as configs are: its json writes `NaN`, `Infinity` and `-Infinity`, which
/// are no JSON. An infinity becomes a number past any float, which readers take for the same, and NaN null.
pub(crate) fn config(text: &[u8]) -> Result<Map<String, Value>, Fault> {
    object(text).or_else(|fault| object(&without_words(text)).map_err(|_| fault))
}

/// The text with JSON in place of Python's words for numbers, where they stand for a value or the end of a negative one.
fn without_words(text: &[u8]) -> Vec<u8> {
    const WORDS: [(&[u8], &[u8]); 2] = [(b"NaN", b"null"), (b"Infinity", b"1e999")];
    let (mut all, mut at, mut in_string) = (Vec::with_capacity(text.len()), 0, false);
    while let Some(&byte) = text.get(at) {
        let is_value = !in_string && all.last().is_some_and(|last| b"[:,- \t\r\n".contains(last));
        let word = WORDS.iter().find(|(word, _)| is_value && text[at..].starts_with(word));
        let (read, written) = match word {
            Some((word, json)) => (word.len(), *json),
            None if in_string && byte == b'\\' => (2, &text[at..text.len().min(at + 2)]),
            None => (1, &text[at..=at]),
        };
        in_string ^= byte == b'"';
        all.extend(written);
        at += read;
    }
    all
}

/// Reads a document of a type that takes no more memory than its text and 20 bytes for each mark.
pub(crate) fn typed<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Fault> {
    check(text, TYPED)?;
    read(text)
}

/// The same for types that take as much as any value does.
pub(crate) fn loose<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Fault> {
    check(text, VALUES)?;
    read(text)
}

/// serde_json lets any bytes pass in strings that no type asks for.
fn read<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, Fault> {
    let whole = str::from_utf8(text)
        .map_err(|error| Fault::new(error.valid_up_to() as u64, "the bytes here are no UTF-8".to_owned()))?;
    serde_json::from_str(whole).map_err(|error| fault(text, &error))
}

/// A fault where serde_json found it, which counts lines and columns.
fn fault(text: &[u8], error: &serde_json::Error) -> Fault {
    let lines = text.split(|&byte| byte == b'\n').take(error.line().saturating_sub(1));
    let before: usize = lines.map(|line| line.len() + 1).sum();
    Fault::new((before + error.column().saturating_sub(1)) as u64, error.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_too_many_values_are_refused_unread() {
        let text = |values: usize| format!("{{\"a\":[{}0]}}", "0,".repeat(values)).into_bytes();
        assert_eq!(object(&text(10)).unwrap()["a"].as_array().unwrap().len(), 11);
        assert!(object(&text(VALUES)).unwrap_err().what.contains("more than"));
        assert!(object(b"[]").is_err());
    }

    #[test]
    fn numbers_keep_their_digits() {
        let text =
            r#"{"a":984418506.5213703,"b":0.9357362201159075,"seed":18446744073709551616,"c":[1e-05,1.0,-7,1e+999]}"#;
        assert_eq!(Value::Object(object(text.as_bytes()).unwrap()).to_string(), text);
    }

    #[test]
    fn configs_have_numbers_as_python_writes_them() {
        let text = br#"{"a":[0.0, Infinity,-Infinity],"NaN":NaN,"b":": NaN \\\" Infinity","c":"NaN"}"#;
        let expected = r#"{"a":[0.0,1e+999,-1e+999],"NaN":null,"b":": NaN \\\" Infinity","c":"NaN"}"#;
        assert_eq!(Value::Object(config(text).unwrap()).to_string(), expected);
        assert_eq!(object(text).unwrap_err().at, 11);
        for wrong in ["1Infinity", "1.Infinity", "NaNs", "-NaN", "nan", "[NaN", "\"\\", "\"NaN"] {
            assert!(config(format!("{{\"a\":{wrong}").as_bytes()).is_err(), "{wrong}");
            assert!(config(format!("{{\"a\":{wrong}}}").as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn faults_are_where_the_text_breaks() {
        assert_eq!(object(b"{\n\"a\":\n!}").unwrap_err().at, 7);
        assert_eq!(object(b"").unwrap_err().at, 0);
        assert_eq!(object(b"{\"a\":\"\xff\"}").unwrap_err().at, 6);
        #[derive(Debug, Deserialize)]
        struct Nothing {}
        assert!(typed::<Nothing>(b"{\"unread\":\"\xff\"}").unwrap_err().what.contains("no UTF-8"));
    }
}
