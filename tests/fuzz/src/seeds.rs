//! Writes valid inputs for every target to begin with: `seeds CORPUS`.

#![allow(clippy::unwrap_used)]

#[path = "../targets/mod.rs"]
#[allow(dead_code)]
mod targets;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use targets::SEPARATOR;
use wmount::digest::Digest;
use wmount::dtype::Dtype;
use wmount::format::{amb, milblob, mlpackage, ollama, safetensors};
use wmount::sample::{LanguageModel, write_package};

fn main() {
    let root = PathBuf::from(std::env::args_os().nth(1).expect("the directory of the corpora"));
    let seeds = Seeds { root };
    let made = tempfile::tempdir().unwrap();
    let tensors = tensor_files();
    for (index, file) in tensors.iter().enumerate() {
        seeds.put("safetensors", &format!("{index}"), file);
        seeds.put("import", &format!("safetensors{index}"), &[b"\0", &file[..]].concat());
    }
    // Values that no field of a tensor asks for.
    for (name, value) in [("far", "1e999"), ("half", r#""\ud800""#), ("deep", &("[".repeat(200) + &"]".repeat(200)))] {
        let text = format!(r#"{{"t":{{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{value}}}}}"#);
        let len = (text.len() as u64).to_le_bytes();
        seeds.put("safetensors", name, &[&len[..], text.as_bytes(), b"7"].concat());
    }
    weights(&seeds);
    programs(&seeds, made.path());
    amb_files(&seeds);
    gguf_files(&seeds);
    documents(&seeds);
    names(&seeds);
    extents(&seeds);
    ingest(&seeds);
    directories(&seeds, made.path(), &tensors);
    stores(&seeds, &tensors);
    memos(&seeds);
}

struct Seeds {
    root: PathBuf,
}

impl Seeds {
    fn put(&self, target: &str, name: &str, bytes: &[u8]) {
        let dir = self.root.join(target);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(name), bytes).unwrap();
    }
}

fn join(parts: &[&[u8]]) -> Vec<u8> {
    parts.join(SEPARATOR)
}

fn tensor_file(metadata: &[(&str, &str)], tensors: &[(&str, Dtype, &[u64])]) -> Vec<u8> {
    let len = |dtype: Dtype, shape: &[u64]| dtype.bytes(shape).unwrap();
    let list = tensors.iter().map(|(name, dtype, shape)| (*name, *dtype, *shape, len(*dtype, shape)));
    let mut file = safetensors::file_header(metadata, list);
    let data: u64 = tensors.iter().map(|(_, dtype, shape)| len(*dtype, shape)).sum();
    file.extend((0..data).map(|at| (at * 37) as u8));
    file
}

fn tensor_files() -> Vec<Vec<u8>> {
    let every: Vec<(&str, Dtype, &[u64])> = Dtype::all()
        .filter(|dtype| dtype.in_safetensors())
        .map(|dtype| (dtype.name(), dtype, &[2u64, 4][..]))
        .collect();
    let mut raw = br#"{"b":{"data_offsets":[4,8],"dtype":"F32","shape":[]},"__metadata__":null}"#.to_vec();
    raw.splice(..0, (raw.len() as u64).to_le_bytes());
    vec![
        tensor_file(&[], &[]),
        tensor_file(&[("format", "pt")], &[("w", Dtype::F32, &[2, 3]), ("w.bias", Dtype::F32, &[3])]),
        tensor_file(&[], &every),
        tensor_file(&[], &[("", Dtype::U8, &[0, 9]), ("\u{e9}\n\"<", Dtype::BF16, &[]), ("a/b", Dtype::F4, &[2])]),
        tensor_file(&[], &[("embed.weight", Dtype::BF16, &[8, 4]), ("h.0.attn.weight", Dtype::F16, &[4, 4])]),
        safetensors::blob_header(Dtype::I4, &[3], 2),
        [safetensors::named_header("a<b", Dtype::F16, &[3], 6), b"abcdef".to_vec()].concat(),
        raw,
    ]
}

fn weight_file(blobs: &[(Dtype, u64, u64)]) -> Vec<u8> {
    let plan = milblob::plan(blobs.iter().copied()).unwrap();
    let mut file = plan.header.to_vec();
    for blob in &plan.blobs {
        file.resize(blob.metadata as usize, 0);
        file.extend(milblob::metadata(blob));
        file.extend((0..blob.size).map(|at| at as u8 | 1));
    }
    file
}

fn weights(seeds: &Seeds) {
    let every: Vec<(Dtype, u64, u64)> =
        Dtype::all().filter(|dtype| dtype.mil_blob_code().is_some()).map(|dtype| (dtype, 8, 0)).collect();
    let files = [
        weight_file(&[]),
        weight_file(&[])[..56].to_vec(),
        weight_file(&[(Dtype::F16, 6, 0), (Dtype::U3, 2, 1)]),
        weight_file(&[(Dtype::F32, 0, 0), (Dtype::F32, 64, 0), (Dtype::I8, 65, 0)]),
        weight_file(&every),
    ];
    files.iter().enumerate().for_each(|(index, file)| seeds.put("milblob", &format!("{index}"), file));
}

fn programs(seeds: &Seeds, dir: &Path) {
    for (index, (hidden, layers)) in [(2, 1), (4, 2)].into_iter().enumerate() {
        let package = dir.join(format!("{index}.mlpackage"));
        let model = LanguageModel::new(1, hidden, layers, 8);
        write_package(&package, 1 << (10 * index), &model.feed_forward()).unwrap();
        let read = |path: &str| fs::read(package.join(path)).unwrap();
        let (manifest, program) = (read("Manifest.json"), read("Data/com.apple.CoreML/model.mlmodel"));
        seeds.put("mlmodel", &format!("sample{index}"), &program);
        seeds.put("mlpackage", &format!("sample{index}"), &manifest);
        let weights = read("Data/com.apple.CoreML/weights/weight.bin");
        let parts = join(&[&manifest, &program, &weights]);
        seeds.put("import", &format!("package{index}"), &[b"\x03", &parts[..]].concat());
        let beside = join(&[&manifest, &program, &weights, CONFIG.as_bytes()]);
        seeds.put("import", &format!("beside{index}"), &[b"\xfe", &beside[..]].concat());
    }
    let other = mlpackage::Manifest::new(&Digest::of(b"x"), false);
    seeds.put("mlpackage", "without", &other.render());
    let go = other.with_weights(&Digest::of(b"y"), "com.apple.CoreML/weights/weight.bin").unwrap();
    seeds.put("mlpackage", "go", &go.render());
    let bare = r#"{"fileFormatVersion":"0.9.7","itemInfoEntries":{"":{"author":"","description":"","name":"","path":"a"}},"rootModelIdentifier":""}"#;
    seeds.put("mlpackage", "bare", bare.as_bytes());
    let text = r#"program(1.0)
{ func main<ios17>(tensor<fp32, [1, 4]> x) {
    tensor<fp16, [3]> w = const()[name = tensor<string, []>("w"), val = tensor<fp16, [3]>(BLOBFILE(path = tensor<string, []>("@model_path/weights/weight.bin"), offset = tensor<uint64, []>(64)))];
    tensor<fp16, [9]> p = constexpr_lut_to_dense()[indices = tensor<uint3, [5]>(BLOBFILE(path = string("@model_path/weights/weight.bin"), offset = uint64(192))), lut = tensor<fp16, [4]>([0, 1, 2, 3])];
  } -> (w); }"#;
    seeds.put("mil_text", "text", text.as_bytes());
    for (index, word) in
        ["BLOBFILE(", "tensor<fp16, []>(BLOBFILE(path=\"x\", offset=a(1)))", ";", "a = b(c)[d"].iter().enumerate()
    {
        seeds.put("mil_text", &format!("{index}"), word.as_bytes());
    }
    let weights = weight_file(&[(Dtype::F16, 6, 0), (Dtype::U3, 2, 1)]);
    seeds.put("import", "compiled", &[b"\x04", &join(&[text.as_bytes(), &weights])[..]].concat());
}

fn amb_file(sections: [&[u8]; 3], records: &[(&str, &[u32], u8, &[u8])]) -> Vec<u8> {
    let mut file = b"AMBEE\x01\0\0".to_vec();
    file.extend(sections.iter().flat_map(|section| (section.len() as u32).to_le_bytes()));
    let weights_at = file.len() as u64 + 8 + sections.iter().map(|section| section.len() as u64).sum::<u64>();
    let mut weights = Vec::new();
    for (name, shape, code, data) in records {
        weights.extend((name.len() as u16).to_le_bytes());
        weights.extend(name.as_bytes());
        weights.push(shape.len() as u8);
        weights.extend(shape.iter().flat_map(|dim| dim.to_le_bytes()));
        weights.push(*code);
        weights.extend((data.len() as u64).to_le_bytes());
        weights.extend(*data);
        while !(weights_at + weights.len() as u64).is_multiple_of(8) {
            weights.push(0);
        }
    }
    file.extend((weights.len() as u64).to_le_bytes());
    sections.iter().for_each(|section| file.extend(*section));
    file.extend(weights);
    assert!(amb::parse(&file[..]).is_ok());
    file
}

fn amb_files(seeds: &Seeds) {
    let tokenizer = b"\x01\x01\0\x02\0\x03\0\xff\xff\xff\xffa\0b\0";
    let data = [63u8; 64];
    let plain: [(&str, &[u32], u8, &[u8]); 4] = [
        ("transformer.wte", &[4, 4], 0, &data),
        ("b", &[2, 16], 1, &data),
        ("c.norm", &[32], 2, &data),
        ("", &[], 3, &data[..1]),
    ];
    let quantised: [(&str, &[u32], u8, &[u8]); 3] =
        [("q", &[3], 3, b"\x03\0\0\x01abcde"), ("r", &[9], 7, &data[..21]), ("s", &[0], 8, b"")];
    let files = [
        amb_file([b"", b"", b""], &[]),
        amb_file([b"{}", br#"{"hidden_size":4,"quant":{"type":"fp16"}} "#, tokenizer], &plain),
        amb_file([b"{\"a\":[1]}", b"", tokenizer], &quantised),
        amb_file([b"", b"{}", b""], &plain[..1]),
        amb_file([b"", b"", b""], &[("e", &[0, 3], 2, b""), ("f", &[1], 0, &data[..4])]),
    ];
    for (index, file) in files.iter().enumerate() {
        seeds.put("amb", &format!("{index}"), file);
        seeds.put("import", &format!("amb{index}"), &[b"\x02", &file[..]].concat());
    }
}

fn gguf_files(seeds: &Seeds) {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let key = |name: &str, kind: u32, value: &[u8]| [&string(name)[..], &kind.to_le_bytes(), value].concat();
    let tensor = |name: &str, dims: &[u64], kind: u32, offset: u64| {
        let dims_bytes: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        let count = (dims.len() as u32).to_le_bytes();
        [&string(name)[..], &count, &dims_bytes, &kind.to_le_bytes(), &offset.to_le_bytes()].concat()
    };
    let file = |version: u32, keys: &[Vec<u8>], tensors: &[Vec<u8>], data: usize| {
        let counts = [(tensors.len() as u64).to_le_bytes(), (keys.len() as u64).to_le_bytes()].concat();
        let mut file = [b"GGUF", &version.to_le_bytes()[..], &counts, &keys.concat(), &tensors.concat()].concat();
        file.resize(file.len().next_multiple_of(32) + data, 7);
        file
    };
    let words = [&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &string("a"), &string("bc")].concat();
    let nested = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &2u32.to_le_bytes(), &3u64.to_le_bytes(), &[0; 6]];
    let keys = vec![
        key("general.architecture", 8, &string("llama")),
        key("general.type", 8, &string("model")),
        key("general.file_type", 4, &7u32.to_le_bytes()),
        key("tokenizer.ggml.tokens", 9, &words),
        key("nested", 9, &nested.concat()),
        key("x.eps", 6, &[0; 4]),
    ];
    let clip = vec![key("general.architecture", 8, &string("clip")), key("general.alignment", 4, &64u32.to_le_bytes())];
    let split = vec![key("split.count", 2, &2u16.to_le_bytes()), key("split.no", 2, &[0, 0])];
    let second = vec![key("split.no", 2, &[1, 0]), split[0].clone()];
    let parts = [
        file(3, &[&keys[..], &split].concat(), &[tensor("w", &[4], 1, 0)], 8),
        file(3, &second, &[tensor("a", &[64, 3], 8, 0), tensor("b", &[5], 0, 224)], 256),
    ];
    seeds.put("import", "split", &[b"\xff", &join(&[&parts[0], &parts[1]])[..]].concat());
    let files = [
        file(3, &[], &[], 0),
        file(2, &keys, &[tensor("a", &[64, 3], 8, 0), tensor("b", &[5], 0, 224), tensor("n", &[7], 99, 256)], 256),
        file(3, &clip, &[tensor("v", &[32, 2], 2, 0)], 64),
        file(3, &split, &[tensor("w", &[4], 1, 0)], 8),
        file(3, &keys[..1], &[tensor("w", &[256], 12, 0), tensor("", &[], 30, 160)], 162),
    ];
    for (index, file) in files.iter().enumerate() {
        seeds.put("gguf", &format!("{index}"), file);
        seeds.put("import", &format!("gguf{index}"), &[b"\x08", &file[..]].concat());
    }
}

fn documents(seeds: &Seeds) {
    let digest = |char: &str| format!("sha256:{}", char.repeat(64));
    let layer = |kind: &str, char: &str, name: &str| json!({"mediaType": kind, "digest": digest(char), "size": 9, "name": name});
    let config = layer(ollama::CONFIG, "a", "");
    let described = json!({"mediaType": ollama::OWN_TENSOR, "digest": digest("b"), "size": 90, "name": "t<",
        "dtype": "F32", "shape": [2, 3], "named": digest("c")});
    let manifests = [
        json!({"schemaVersion": 2, "config": config, "layers": null}),
        json!({"schemaVersion": 2, "mediaType": ollama::MANIFEST, "config": config, "layers": []}),
        json!({"schemaVersion": 2, "mediaType": "x\"y", "config": config, "layers": [described, layer("a\"", "B", "n\u{1}")]}),
        json!({"schemaVersion": 2, "config": config, "layers": [layer(ollama::TENSOR, "b", "x"), layer(ollama::JSON, "c", "config.json")]}),
        json!({"schemaVersion": 1, "config": config}),
    ];
    manifests
        .iter()
        .enumerate()
        .for_each(|(at, json)| seeds.put("ollama", &format!("{at}"), json.to_string().as_bytes()));

    let entry = |path: &str, dtype: &str, shape: &[u64]| json!({"path": path, "dtype": dtype, "shape": shape});
    let exports = [
        json!({}),
        json!({"a.b": entry("a__b.bin", "float16", &[2, 3])}),
        json!({"a": entry("a.raw", "bfloat16", &[]), "b": entry("x/b.bin", "int64", &[0, 1 << 40]), "c": entry("c.bin", "bool", &[7])}),
        json!({"a": {"path": "a.bin", "dtype": "float32", "shape": [1], "packed": null, "transport": null}}),
        json!({"a": {"path": "a.pt", "dtype": "torch.bfloat16", "shape": [1], "packed": "mxfp4"}}),
    ];
    exports.iter().enumerate().for_each(|(at, json)| seeds.put("gds", &format!("{at}"), json.to_string().as_bytes()));
    let export = join(&[exports[1].to_string().replace("a__b", "w").as_bytes(), b"0123456789ab"]);
    seeds.put("import", "export", &[b"\x05", &export[..]].concat());

    let blobs = json!([["ab".repeat(32), 1000], ["cd".repeat(32), 72]]);
    let extents = json!(["68656164", 8, [0, 72], [0, 80, 100], [1, 0, 72], 1u64 << 40]);
    let file = |path: &str| json!({"path": path, "mtime": [1_700_000_000, 5], "extents": extents});
    let mapped = json!({"path": "w.bin", "mtime": [-1, 0], "map": ["ef".repeat(32), 50]});
    let recipe = |kind: &str, files: serde_json::Value| json!({"version": 1, "kind": kind, "blobs": blobs, "dirs": [{"path": "Data", "mtime": [0, 0]}], "files": files});
    let map = json!({"version": 1, "blobs": blobs, "extents": vec![extents.clone(); 3].concat_all()});
    let recipes = [
        recipe("safetensors", json!([])),
        recipe("amb", json!([file("a"), file("b/c")])),
        recipe("mlpackage", json!([file("Manifest.json"), mapped])),
        recipe("gds_export", json!([{"path": "x", "mtime": [0, 999_999_999], "extents": []}])),
        recipe("mlmodelc", json!([{"path": "x", "mtime": [0, 0], "extents": ["", 0, "00", 1, "ff", 65, "0000"]}])),
    ];
    for (at, recipe) in recipes.iter().enumerate() {
        seeds.put("recipe", &format!("{at}"), &join(&[recipe.to_string().as_bytes(), map.to_string().as_bytes()]));
    }
}

/// Lists in a row.
trait Concat {
    fn concat_all(self) -> serde_json::Value;
}

impl Concat for Vec<serde_json::Value> {
    fn concat_all(self) -> serde_json::Value {
        self.into_iter().flat_map(|list| list.as_array().cloned().unwrap_or_default()).collect()
    }
}

fn names(seeds: &Seeds) {
    let names =
        ["a", "me/a:x", "localhost:5000/me/a:v1.0", "hf.co/A_b-c/D.e:q4_0", "My Model (v2)", "..", "a/b c/\u{e9}.json"];
    names.iter().enumerate().for_each(|(at, name)| seeds.put("names", &format!("{at}"), name.as_bytes()));
    let paths = [
        "amb/llama/latest.amb",
        "amb/llama/latest@int4-32.amb",
        "safetensors/llama/latest/model.safetensors",
        "ollama/manifests/registry.ollama.ai/library/llama/latest",
        "ollama/blobs/sha256-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "original/llama/latest/llama/config.json",
        "gds_export/llama/latest@fp8/manifest.json",
        ".wmount/status.json",
        "ollama@seed/blobs/",
        "coreml",
    ];
    paths.iter().enumerate().for_each(|(at, path)| seeds.put("tree_path", &format!("{at}"), path.as_bytes()));
}

fn extents(seeds: &Seeds) {
    let reads = [[0u8, 0, 255, 255], [10, 0, 100, 0], [255, 0, 1, 1]].concat();
    let files: [&[u8]; 6] = [
        &[],
        &[3, 0, 4, 1, 2, 3, 4, 1, 70, 0, 3, 6],
        &[2, 2, 1, 3, 0, 50, 0, 2, 2, 0, 1, 100, 2],
        &[3, 2, 3, 0, 0, 0, 4, 1, 5, 0, 4, 10, 0, 100, 0],
        &[2, 5, 0, 0, 0, 3, 0, 0, 0, 16, 5, 1, 1, 2, 3, 4, 0, 0, 8],
        &[3, 5, 2, 0, 4, 3, 8, 0, 0, 8, 5, 0, 1, 5, 16, 0, 2, 0, 0, 0, 2, 5, 0, 0, 1, 3, 0, 0, 0, 4],
    ];
    for (at, file) in files.iter().enumerate() {
        seeds.put("extents", &format!("{at}"), &[file, &reads[..]].concat());
    }
}

/// Calls as ollama makes them: a blob under another name that is renamed, a manifest, and their removal.
fn ingest(seeds: &Seeds) {
    let blob =
        |index: u8| vec![0, 1, 4 + index, 2, 0, 0, index, index, 0, 0, 5, 0, 0, index, 7 + 16, 1, 4 + index, 1, index];
    let manifest = |content: u8| vec![0, 3, 8, 2, 0, 0, 2, content, 0, 0, 5, 0, 0, 2, 6, 0, 0, 2];
    let calls = [
        vec![0],
        [vec![0], blob(0), blob(1), manifest(2), vec![15, 3, 8]].concat(),
        [vec![1], manifest(3), vec![8, 3, 8, 8, 1, 0, 8, 1, 1]].concat(),
        vec![1, 14, 3, 8, 0, 0, 0, 0, 0, 28, 0, 0, 0, 2, 0, 0, 0, 3, 5, 0, 0, 0, 6, 0, 0, 0],
        vec![0, 9, 0, 15, 10, 5, 15, 9, 3, 9, 25, 0, 15, 11, 5, 14, 0, 13 + 16, 0, 0, 9, 0, 0, 15, 1, 0],
        [vec![0], blob(1), vec![34, 0, 0, 0, 1, 5, 9, 39, 1, 1, 1, 14, 8, 1, 14, 15, 0, 0]].concat(),
    ];
    calls.iter().enumerate().for_each(|(at, calls)| seeds.put("ingest", &format!("{at}"), calls));
}

const CONFIG: &str = r#"{"model_type":"llama","hidden_size":8,"num_hidden_layers":1,"num_attention_heads":2,"vocab_size":4,"max_position_embeddings":8,"intermediate_size":16,"rms_norm_eps":1e-5,"bos_token_id":1,"eos_token_id":[2,3],"quantization":{"group_size":32,"bits":4}}"#;
const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[{"id":0,"content":"<unk>","special":true}],"model":{"type":"BPE","vocab":{"<unk>":0,"a":1,"b":2,"ab":3},"merges":["a b",["a","b"]]}}"#;

fn directories(seeds: &Seeds, dir: &Path, tensors: &[Vec<u8>]) {
    let index = r#"{"metadata":{"total_size":36},"weight_map":{"w":"model-00001-of-00001.safetensors"}}"#;
    let shards = join(&[index.as_bytes(), b"{}", &tensors[1]]);
    seeds.put("import", "shards", &[b"\x06", &shards[..]].concat());
    LanguageModel::new(1, 2, 1, 4).write(&dir.join("llama")).unwrap();
    let read = |name: &str| fs::read(dir.join("llama").join(name)).unwrap();
    let llama = join(&[&read("config.json"), &read("tokenizer.json"), &read("model.safetensors")]);
    seeds.put("import", "llama", &[b"\x07", &llama[..]].concat());
    let small = join(&[CONFIG.as_bytes(), TOKENIZER.as_bytes(), &tensors[4]]);
    seeds.put("import", "directory", &[b"\x07", &small[..]].concat());
}

fn stores(seeds: &Seeds, tensors: &[Vec<u8>]) {
    let digest = |char: &str| format!("sha256:{}", char.repeat(64));
    let store = |name: &str, layers: &[(&str, &str, &[u8])]| {
        let letters = ["b", "c", "d", "e", "f"];
        let image = br#"{"model_format":"safetensors","capabilities":["completion"]}"#;
        let layer = |((kind, name, bytes), char): (&(&str, &str, &[u8]), &str)| {
            let kind = if kind.contains('/') { (*kind).into() } else { format!("application/vnd.ollama.image.{kind}") };
            json!({"mediaType": kind, "digest": digest(char), "size": bytes.len(), "name": name})
        };
        let config = json!({"mediaType": ollama::CONFIG, "digest": digest("a"), "size": image.len()});
        let layers_json: Vec<_> = layers.iter().zip(letters).map(layer).collect();
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers_json}).to_string();
        let mut parts: Vec<&[u8]> = vec![manifest.as_bytes(), image];
        parts.extend(layers.iter().map(|(_, _, bytes)| *bytes));
        seeds.put("store", name, &join(&parts));
    };
    let (config, tokenizer) = (CONFIG.as_bytes(), TOKENIZER.as_bytes());
    store(
        "named",
        &[("tensor", "w", &tensors[1]), ("json", "config.json", config), ("json", "tokenizer.json", tokenizer)],
    );
    store("every", &[("tensor", "x", &tensors[2]), ("tensor", "y", &tensors[4]), ("config", "config.json", b"{}")]);
    store("gguf", &[("model", "", b"GGUF\x03\0\0\0"), ("template", "", b"{{ .Prompt }}"), ("params", "", b"{}")]);
    store(
        "parts",
        &[("tensor", "a/w", &tensors[1]), ("json", "a/config.json", config), ("json", "model_index.json", b"{}")],
    );
    let quantised = tensor_file(
        &[("quant_type", "int4"), ("group_size", "32")],
        &[
            ("q.weight", Dtype::U32, &[4, 4]),
            ("q.weight.scale", Dtype::BF16, &[4, 1]),
            ("q.weight.bias", Dtype::BF16, &[4, 1]),
        ],
    );
    store("quantised", &[("tensor", "q.weight", &quantised), ("json", "config.json", config)]);
    let recipe = json!({"version": 1, "kind": "safetensors", "blobs": [["c".repeat(64), tensors[1].len()]], "dirs": [],
        "files": [{"path": "model.safetensors", "mtime": [0, 0], "extents": [[0, 0]]}]});
    let recipe = recipe.to_string();
    store("recipe", &[(ollama::OWN_RECIPE, "dir", recipe.as_bytes()), (ollama::TENSOR, "w", &tensors[1])]);
    let package = json!({"version": 1, "kind": "mlmodel", "blobs": [["c".repeat(64), 4]], "dirs": [],
        "files": [{"path": "m.mlmodel", "mtime": [0, 0], "extents": [[0, 0], 3, "0801"]}]});
    let package = package.to_string();
    store(
        "program",
        &[(ollama::OWN_RECIPE, "m.mlmodel", package.as_bytes()), (ollama::OWN_FILE, "m", b"\x08\x07\x12\0")],
    );
}

fn memos(seeds: &Seeds) {
    let list = json!({"version": env!("CARGO_PKG_VERSION"), "rules": 2, "layouts": ["amb"], "models": {
        "registry.ollama.ai/library/model/latest": [[1, 2, 3, 4, [5, 6]], 255]}});
    let digests = [Digest::of(b"a"), Digest::of(b"b")].map(|digest| *digest.as_bytes()).concat();
    let scales: Vec<u8> = (1..9u8).flat_map(|at| f32::from(at).to_le_bytes()).collect();
    let hexes = [Digest::of(b"a"), Digest::of(b"b")].map(|digest| digest.hex()).concat();
    let results = [&b"\x01"[..], &[0xff; 8], &scales, &digests, &[], hexes.as_bytes(), &[0; 64]];
    seeds.put("memos", "list", list.to_string().as_bytes());
    seeds.put("memos", "form", &join(&[b"", &digests]));
    seeds.put("memos", "unsealed", &join(&[b"", b"", &[0xff; 4], &join(&results)]));
    for (index, result) in results.into_iter().enumerate() {
        seeds.put("memos", &format!("result{index}"), &join(&[b"", b"", b"", result]));
    }
    seeds.put("memos", "results", &join(&[list.to_string().as_bytes(), &digests, b"\x05", &join(&results)]));
}
