//! The metadata section: what the model says about itself in README.md, config.json and its name.

use saphyr_parser::{Event, Parser, ScalarStyle, StrInput, Tag};
use serde_json::{Map, Value, json};

use super::config::text_config;
use crate::error::Result;
use crate::layout::Files;
use crate::model::Model;

type Object = Map<String, Value>;

/// The section of a model.
pub(super) fn section(model: &Model, files: Files<'_>, config: Option<&Object>) -> Result<Vec<u8>> {
    let readme = match model.file("README.md") {
        Some(file) => String::from_utf8_lossy(&files.read(file)?).into_owned(),
        None => String::new(),
    };
    let front = front_matter(&readme);
    let said = |keys: &[&str]| keys.iter().find_map(|key| front.get(*key)).cloned();
    let mut metadata = Object::new();
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            metadata.insert(key.into(), value);
        }
    };
    put("name", Some(json!(model.name.name)));
    put("family", config.and_then(|config| text_config(config).get("model_type")).cloned());
    put("creator", said(&["model_creator", "creator", "author"]));
    put("description", said(&["description", "summary"]));
    put("license", said(&["license", "license_name"]));
    put("created", said(&["created", "date"]));
    put("version", Some(json!(model.name.tag)));
    put("tags", said(&["tags"]).map(list));
    put("language", said(&["language"]).map(list));
    put("base_model", said(&["base_model"]));
    Ok(Value::Object(metadata).to_string().into_bytes())
}

fn list(value: Value) -> Value {
    if value.is_array() { value } else { json!([value]) }
}

/// The front matter of a model card as far as it is text and lists of text; nested values, aliases and null are passed
/// over. Numbers and the like are the text that they are written as. Of what is no YAML nothing is read.
fn front_matter(text: &str) -> Object {
    let text = text.trim_start_matches('\u{feff}');
    let rest = text.split_once('\n').filter(|(first, _)| first.trim_end() == "---").map_or("", |(_, rest)| rest);
    let lines = rest.split_inclusive('\n').take_while(|line| line.trim_end() != "---");
    let len: usize = lines.map(str::len).sum();
    if len == rest.len() { Object::new() } else { pairs(&rest[..len]).unwrap_or_default() }
}

/// The pairs of a YAML mapping; `None` if it is none.
fn pairs(yaml: &str) -> Option<Object> {
    let mut parser = Parser::new_from_str(yaml);
    let mut found = Object::new();
    while !matches!(next(&mut parser)?, Event::MappingStart(..)) {}
    loop {
        let key = match next(&mut parser)? {
            Event::MappingEnd => break,
            event => value(event, &mut parser)?,
        };
        let event = next(&mut parser)?;
        if let (Some(Value::String(key)), Some(value)) = (key, value(event, &mut parser)?) {
            found.insert(key, value);
        }
    }
    parser.all(|event| event.is_ok()).then_some(found)
}

fn next<'a>(parser: &mut Parser<'a, StrInput<'a>>) -> Option<Event<'a>> {
    Some(parser.next_event()?.ok()?.0)
}

/// The value that begins with this event, if it is text or a list of text; `None` if the YAML breaks within it.
fn value<'a>(mut event: Event<'a>, parser: &mut Parser<'a, StrInput<'a>>) -> Option<Option<Value>> {
    let (mut depth, mut items, mut is_list) = (0, Vec::new(), matches!(event, Event::SequenceStart(_, None)));
    // Block sequences may be nested as deep as the text is long.
    loop {
        match event {
            Event::Scalar(text, style, _, tag) => match (depth, word(&text, style, tag.as_deref())) {
                (0, word) => return Some(word),
                (1, word) => items.extend(word),
                _ => {}
            },
            Event::Alias(_) if depth == 0 => return Some(None),
            Event::Alias(_) => is_list = false,
            Event::SequenceStart(..) | Event::MappingStart(..) => {
                is_list &= depth == 0;
                depth += 1;
            }
            Event::SequenceEnd | Event::MappingEnd if depth == 1 => {
                return Some(is_list.then_some(Value::Array(items)));
            }
            Event::SequenceEnd | Event::MappingEnd => depth -= 1,
            _ => {}
        }
        event = next(parser)?;
    }
}

/// The text of a scalar; `None` for null and what a tag makes of it.
fn word(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Option<Value> {
    let is_text = match tag {
        Some(tag) => tag.is_yaml_core_schema() && tag.suffix == "str",
        None => style != ScalarStyle::Plain || !matches!(text, "" | "~" | "null" | "Null" | "NULL"),
    };
    is_text.then(|| json!(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_cards() {
        let card = "---\nlicense: apache-2.0 # as ever\ntags:\n- a\n- \"b c\"\nlanguage: [en, 'de']\nwidget:\n- text: x\n\
                    \x20 y: z\nempty:\nbase_model: org/base\n---\n# Title\nlicense: other\n";
        let expected =
            json!({"license": "apache-2.0", "tags": ["a", "b c"], "language": ["en", "de"], "base_model": "org/base"});
        assert_eq!(Value::Object(front_matter(card)), expected);
        for none in ["", "# Title\n", "--\nlicense: x\n", "---", "---\nlicense: x\n", "---\nlicense: x\na: [b\n---\n"] {
            assert!(front_matter(none).is_empty());
        }
    }

    #[test]
    fn front_matter_is_yaml() {
        for (yaml, expected) in [
            ("t: [a, \"b, c\", d]", json!({"t": ["a", "b, c", "d"]})),
            ("t: # c\n- a\n\n# more\n- b", json!({"t": ["a", "b"]})),
            ("a: null\nb: ~\nc:\nd: 'null'", json!({"d": "null"})),
            (
                r#"a: "caf\u00e9"
b: 'it''s'"#,
                json!({"a": "caf\u{e9}", "b": "it's"}),
            ),
            ("t: [a, [b, c]]\nu:\n- - a\nv: {a: b}\nw: x", json!({"w": "x"})),
            ("a: !!str mit\nb: !!binary mit\nc: !x mit", json!({"a": "mit"})),
            ("a: b\n  c\nd: >\n  e\n  f", json!({"a": "b c", "d": "e f\n"})),
            ("a: &x mit\nb: *x\nc: [*x]\n*x : d", json!({"a": "mit"})),
            ("a: 1.0\nlanguage: no\n1: 2", json!({"a": "1.0", "language": "no", "1": "2"})),
            ("- a", json!({})),
        ] {
            assert_eq!(Value::Object(front_matter(&format!("---\n{yaml}\n---\n"))), expected, "{yaml}");
        }
        let deep = format!("---\na: b\nc:\n{}d\n---\n", "- ".repeat(1 << 16));
        assert_eq!(Value::Object(front_matter(&deep)), json!({"a": "b"}));
    }
}
