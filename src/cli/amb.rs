//! What an AMB file holds, as text and JSON.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use super::output::{count, print, print_json, size, table};
use crate::error::{AtPath, Fault, Result};
use crate::format::Bytes;
use crate::format::amb::{self, Record};
use crate::store::Store;
use crate::vfs::Vfs;

/// Whether an argument is an AMB file and no model's name.
pub(super) fn is_file(argument: &str) -> bool {
    let path = Path::new(argument);
    let mut head = Vec::new();
    let is_amb = |file: File| file.take(5).read_to_end(&mut head).is_ok_and(|_| amb::is_amb(&head));
    path.is_file() && (argument.ends_with(".amb") || File::open(path).is_ok_and(is_amb))
}

/// Shows a file.
pub(super) fn show_file(path: &str, as_json: bool) -> Result<()> {
    let file = File::open(path).at(path)?;
    let len = file.metadata().at(path)?.len();
    let read = |offset: u64, buf: &mut [u8]| file.read_exact_at(buf, offset).map_err(|error| error.to_string());
    show(path, &Seen { len, read }, as_json)
}

/// Shows the AMB file at this path of the tree.
pub(super) fn show_model(store: Arc<Store>, path: &str, as_json: bool) -> Result<()> {
    let vfs = Vfs::new(store)?;
    let attr = super::tree::resolve(&vfs, path)?;
    // No tensor is computed for it: what is read are the heads of the records.
    let read = |offset: u64, buf: &mut [u8]| match vfs.read(attr.ino, offset, buf) {
        Ok(len) if len == buf.len() => Ok(()),
        Ok(_) => Err("the file ends here".into()),
        Err(error) => Err(error.to_string()),
    };
    show(path, &Seen { len: attr.size, read }, as_json)
}

/// A file as a parser sees it.
struct Seen<R> {
    len: u64,
    read: R,
}

impl<R: Fn(u64, &mut [u8]) -> Result<(), String>> Bytes for Seen<R> {
    fn len(&self) -> u64 {
        self.len
    }

    fn get(&self, offset: u64, len: usize) -> Result<Cow<'_, [u8]>, Fault> {
        self.check_range(offset, len)?;
        let mut bytes = vec![0; len];
        (self.read)(offset, &mut bytes).map_err(|what| Fault::new(offset, what))?;
        Ok(Cow::Owned(bytes))
    }
}

fn show(path: &str, bytes: &impl Bytes, as_json: bool) -> Result<()> {
    let file = amb::parse(bytes).at(path)?;
    let object = |what: &str, range: &Range<u64>| amb::json_section(bytes, what, range).at(path);
    let metadata = object("metadata", &file.metadata)?;
    let config = object("config", &file.config)?;
    let tokenizer = match file.tokenizer.is_empty() {
        true => Value::Null,
        false => tokenizer(&bytes.get(file.tokenizer.start, 11).at(path)?),
    };
    let section = |range: &Range<u64>| json!({"offset": range.start, "bytes": range.end - range.start});
    let tensor = |record: &Record| {
        json!({"name": record.name, "shape": record.shape, "dtype": record.type_name(), "code": record.code,
            "quantised": record.dtype.is_none(), "offset": record.offset, "bytes": record.len})
    };
    let description = json!({
        "path": path,
        "bytes": bytes.len(),
        "version": 1,
        "flags": file.flags,
        "sections": {
            "metadata": section(&file.metadata),
            "config": section(&file.config),
            "tokenizer": section(&file.tokenizer),
            "weights": section(&file.weights),
        },
        "metadata": metadata,
        "config": config,
        "tokenizer": tokenizer,
        "tensors": file.records.iter().map(tensor).collect::<Vec<_>>(),
    });
    if as_json { print_json(&description) } else { print(&text(&description, &file)) }
}

/// Type and ids, from the fixed part of the section.
fn tokenizer(bytes: &[u8]) -> Value {
    let kind = ["BPE", "SentencePiece", "WordPiece", "custom"].get(usize::from(bytes[0])).copied();
    let id = |index: usize| match u16::from_le_bytes([bytes[1 + 2 * index], bytes[2 + 2 * index]]) {
        u16::MAX => Value::Null,
        id => json!(id),
    };
    json!({"type": kind.map_or(json!(bytes[0]), |kind| json!(kind)),
        "bos": id(0), "eos": id(1), "pad": id(2), "unk": id(3), "mask": id(4)})
}

fn text(description: &Value, file: &amb::File) -> String {
    let indent = |rows: &[Vec<String>], right: &[usize]| {
        table(rows, right).lines().map(|line| format!("  {line}\n")).collect::<String>()
    };
    let bytes = size(description["bytes"].as_u64().unwrap_or(0));
    let mut text = format!(
        "{}: AMB version 1, flags {}, {bytes}\n\nsections\n",
        description["path"].as_str().unwrap_or_default(),
        file.flags
    );
    let sections = [
        ("metadata", &file.metadata),
        ("config", &file.config),
        ("tokenizer", &file.tokenizer),
        ("weights", &file.weights),
    ];
    let sections =
        sections.map(|(name, range)| vec![name.into(), range.start.to_string(), size(range.end - range.start)]);
    text += &indent(&sections, &[1, 2]);
    for section in ["metadata", "config", "tokenizer"] {
        let Some(object) = description[section].as_object() else { continue };
        text += &format!("\n{section}\n");
        let rows: Vec<Vec<String>> = object.iter().map(|(key, value)| vec![key.clone(), word(value)]).collect();
        text += &indent(&rows, &[]);
    }
    text += &format!("\n{}\n", count(file.records.len() as u64, "tensor"));
    let row = |record: &Record| {
        let shape = format!("{:?}", record.shape);
        vec![record.name.clone(), shape, record.type_name().into(), record.offset.to_string(), size(record.len)]
    };
    text + &indent(&file.records.iter().map(row).collect::<Vec<_>>(), &[3, 4])
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
