//! The tokenizer section: type byte, special token ids, vocabulary.
//!
//! Its form is part of the page of [`crate::format::amb`].

use serde_json::{Map, Value};

use crate::error::Result;
use crate::extent::ExtentMap;
use crate::layout::Files;
use crate::model::Model;

type Object = Map<String, Value>;

const SPECIAL: [&str; 5] = ["bos", "eos", "pad", "unk", "mask"];
/// How a serialised SentencePiece model begins: with its first piece. Others, such as tiktoken's, have the same file name.
const SENTENCE_PIECE: &[u8] = b"\n";
const NO_TOKEN: u16 = u16::MAX;

/// The section of a model; empty if it has no tokenizer.
pub(super) fn section(model: &Model, files: Files<'_>, config: Option<&Object>) -> Result<ExtentMap> {
    let tokenizer = files.json(model, "tokenizer.json")?;
    let settings = files.json(model, "tokenizer_config.json")?;
    let map = files.json(model, "special_tokens_map.json")?;
    let ids = special_ids(tokenizer.as_ref(), settings.as_ref(), map.as_ref(), config);
    let start = |kind: u8| {
        let mut bytes = vec![kind];
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes
    };
    let content = |path: &str| model.file(path).map(|file| ExtentMap::from_blob(file.blob, file.len));
    let after = |kind: u8, content: &ExtentMap| {
        let mut map = ExtentMap::from_bytes(start(kind));
        map.append(content);
        map
    };
    if let Some(content) = content("tokenizer.model")
        && files.part(&content, 0..content.size().min(1))? == SENTENCE_PIECE
    {
        return Ok(after(1, &content));
    }
    let parsed = tokenizer.as_ref().and_then(vocabulary);
    if let Some((kind, vocabulary)) = parsed {
        return Ok(ExtentMap::from_bytes([start(kind), vocabulary].concat()));
    }
    Ok(content("tokenizer.json").map(|content| after(3, &content)).unwrap_or_default())
}

/// Type and vocabulary of a tokenizer.json, if it is BPE or WordPiece and fits the section's fields.
fn vocabulary(tokenizer: &Object) -> Option<(u8, Vec<u8>)> {
    let model = tokenizer.get("model")?.as_object()?;
    // Old files leave the type out where it is BPE.
    let kind = model.get("type").and_then(Value::as_str).unwrap_or("BPE");
    let mut bytes = Vec::new();
    let kind = match kind {
        "BPE" => {
            let merges = model.get("merges")?.as_array()?;
            bytes.extend(u32::try_from(merges.len()).ok()?.to_le_bytes());
            for merge in merges {
                push_text(&mut bytes, &merge_text(merge)?)?;
            }
            0
        }
        "WordPiece" => 2,
        _ => return None,
    };
    let mut tokens = Vec::new();
    for (token, id) in model.get("vocab")?.as_object()? {
        tokens.push((u32::try_from(id.as_u64()?).ok()?, token.as_str()));
    }
    for added in added_tokens(tokenizer) {
        tokens.push((u32::try_from(added.get("id")?.as_u64()?).ok()?, added.get("content")?.as_str()?));
    }
    tokens.sort_unstable();
    tokens.dedup();
    bytes.extend(u32::try_from(tokens.len()).ok()?.to_le_bytes());
    for (id, token) in tokens {
        bytes.extend(id.to_le_bytes());
        push_text(&mut bytes, token)?;
    }
    Some((kind, bytes))
}

/// A merge is `"left right"` or, in newer files, `["left", "right"]`; only there a side can have a space in it, which the
/// section cannot tell from the one between them.
fn merge_text(merge: &Value) -> Option<String> {
    match merge {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => match &pair[..] {
            [Value::String(left), Value::String(right)] if ![left, right].iter().any(|side| side.contains(' ')) => {
                Some(format!("{left} {right}"))
            }
            _ => None,
        },
        _ => None,
    }
}

fn push_text(bytes: &mut Vec<u8>, text: &str) -> Option<()> {
    bytes.extend(u16::try_from(text.len()).ok()?.to_le_bytes());
    bytes.extend(text.as_bytes());
    Some(())
}

fn added_tokens(tokenizer: &Object) -> impl Iterator<Item = &Object> {
    tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_object)
}

/// The special ids: of the token that tokenizer_config.json or special_tokens_map.json names, which tokenizer.json or the
/// first knows, else that of `<which>_token_id` in config.json, else what the vocabulary says of itself.
fn special_ids(
    tokenizer: Option<&Object>,
    settings: Option<&Object>,
    map: Option<&Object>,
    config: Option<&Object>,
) -> [u16; 5] {
    SPECIAL.map(|which| {
        let by_text = || {
            let key = format!("{which}_token");
            let text = |token: &Value| token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned);
            let text = [settings, map].into_iter().flatten().find_map(|file| text(file.get(&key)?))?;
            tokenizer.and_then(|tokenizer| token_id(tokenizer, &text)).or_else(|| decoder_id(settings?, &text))
        };
        let by_id = || {
            let id = config?.get(&format!("{which}_token_id"))?;
            // Models with several end tokens list the main one first.
            id.as_u64().or_else(|| id.as_array()?.first()?.as_u64())
        };
        let by_model = || {
            let model = tokenizer?.get("model")?;
            let text = match which {
                "unk" => model.get("unk_token")?.as_str()?,
                // What BERT's tokenizers take where no file names any.
                "pad" if model.get("type")? == "WordPiece" => "[PAD]",
                "mask" if model.get("type")? == "WordPiece" => "[MASK]",
                _ => return None,
            };
            token_id(tokenizer?, text)
        };
        by_text().or_else(by_id).or_else(by_model).and_then(|id| u16::try_from(id).ok()).unwrap_or(NO_TOKEN)
    })
}

/// The id of a token in tokenizer_config.json, which has the special ones by their ids.
fn decoder_id(settings: &Object, text: &str) -> Option<u64> {
    let tokens = settings.get("added_tokens_decoder")?.as_object()?;
    let (id, _) = tokens.iter().find(|(_, token)| token.get("content").and_then(Value::as_str) == Some(text))?;
    id.parse().ok()
}

fn token_id(tokenizer: &Object, text: &str) -> Option<u64> {
    let added = added_tokens(tokenizer).find(|added| added.get("content").and_then(Value::as_str) == Some(text));
    let id = added.and_then(|added| added.get("id")).or_else(|| tokenizer.get("model")?.get("vocab")?.get(text))?;
    id.as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(text: &str) -> Object {
        serde_json::from_str(text).expect("an object")
    }

    #[test]
    fn bpe_bytes() {
        let tokenizer = object(
            r#"{"added_tokens":[{"id":2,"content":"</s>"}],
                "model":{"type":"BPE","vocab":{"b":1,"a":0},"merges":["a b",["c","d"]]}}"#,
        );
        let (kind, bytes) = vocabulary(&tokenizer).expect("BPE");
        let expected = b"\x02\0\0\0\x03\0a b\x03\0c d\x03\0\0\0\0\0\0\0\x01\0a\x01\0\0\0\x01\0b\x02\0\0\0\x04\0</s>";
        assert_eq!((kind, bytes.as_slice()), (0, expected.as_slice()));
        for other in [r#""type":"Unigram","vocab":[]"#, r#""vocab":{},"merges":[["a b","c"]]"#] {
            assert_eq!(vocabulary(&object(&format!("{{\"model\":{{{other}}}}}"))), None, "{other}");
        }
    }

    #[test]
    fn the_vocabulary_knows_its_unknown_token() {
        let tokenizer = object(
            r#"{"model":{"type":"WordPiece","unk_token":"[UNK]","vocab":{"[PAD]":0,"[UNK]":100,"[MASK]":103}}}"#,
        );
        assert_eq!(special_ids(Some(&tokenizer), None, None, None), [NO_TOKEN, NO_TOKEN, 0, 100, 103]);
        let map = object(r#"{"mask_token":{"content":"[UNK]"},"pad_token":"[MASK]"}"#);
        assert_eq!(special_ids(Some(&tokenizer), None, Some(&map), None), [NO_TOKEN, NO_TOKEN, 103, 100, 100]);
    }

    #[test]
    fn special_tokens() {
        let tokenizer = object(r#"{"added_tokens":[{"id":7,"content":"<s>"}],"model":{"vocab":{"</s>":9}}}"#);
        let settings = object(r#"{"bos_token":{"content":"<s>"},"eos_token":"</s>","pad_token":null}"#);
        let config = object(r#"{"pad_token_id":70000,"unk_token_id":[3,4]}"#);
        let ids = special_ids(Some(&tokenizer), Some(&settings), None, Some(&config));
        assert_eq!(ids, [7, 9, NO_TOKEN, 3, NO_TOKEN]);
        let settings = object(r#"{"unk_token":"<unk>","added_tokens_decoder":{"5":{"content":"<unk>"}}}"#);
        assert_eq!(special_ids(None, Some(&settings), None, None)[3], 5);
    }
}
