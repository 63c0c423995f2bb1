//! The metadata section: what the model says about itself in README.md, config.json and its name.

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

/// The front matter of a model card as far as it is words and lists of words: `key: word`, `key: [a, b]`, or `key:` and
/// lines of `- word`. Nested values, block scalars and anchors are passed over.
fn front_matter(text: &str) -> Object {
    let mut found = Object::new();
    let mut lines = text.trim_start_matches('\u{feff}').lines();
    if lines.next().map(str::trim_end) != Some("---") {
        return found;
    }
    let lines: Vec<&str> = lines.map(str::trim_end).take_while(|line| *line != "---").collect();
    let mut key = None;
    for line in lines {
        if let Some(item) = line.trim_start().strip_prefix("- ") {
            if let (Some(key), Some(word)) = (key, word(item))
                && let Value::Array(items) = found.entry::<&str>(key).or_insert_with(|| json!([]))
            {
                items.push(word);
            }
            continue;
        }
        key = None;
        let Some((name, value)) = line.split_once(':').filter(|_| !line.starts_with([' ', '\t', '#'])) else {
            continue;
        };
        let value = value.trim();
        match value.strip_prefix('[').and_then(|value| value.strip_suffix(']')) {
            Some(items) => _ = found.insert(name.into(), items.split(',').filter_map(word).collect()),
            None if value.is_empty() => key = Some(name),
            None => _ = word(value).and_then(|word| found.insert(name.into(), word)),
        }
    }
    found
}

/// A plain or quoted word; `None` for what is no word.
fn word(text: &str) -> Option<Value> {
    let text = text.trim();
    let quoted = ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote));
    let plain = text.split(" #").next().unwrap_or_default().trim_end();
    let nested =
        plain.starts_with(['{', '[', '|', '>', '&', '*', '"', '\'']) || plain.contains(": ") || plain.ends_with(':');
    quoted.or((!nested && !plain.is_empty()).then_some(plain)).map(|word| json!(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_cards() {
        let card = "---\nlicense: apache-2.0 # as ever\ntags:\n- a\n  - \"b c\"\nlanguage: [en, 'de']\nwidget:\n- text: x\n\
                    \x20 y: z\nempty:\nbase_model: org/base\n---\n# Title\nlicense: other\n";
        let expected =
            json!({"license": "apache-2.0", "tags": ["a", "b c"], "language": ["en", "de"], "base_model": "org/base"});
        assert_eq!(Value::Object(front_matter(card)), expected);
        for none in ["", "# Title\n", "--\nlicense: x\n", "---"] {
            assert!(front_matter(none).is_empty());
        }
    }
}
