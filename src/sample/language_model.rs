//! A llama with noise for weights.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Tensor, mix, too_large, write_file, write_streamed};
use crate::dtype::Dtype;
use crate::error::{AtPath, Error, Result};

/// The tokens that every vocabulary begins with.
const SPECIAL: [&str; 3] = ["<unk>", "<s>", "</s>"];

/// The sizes of a made-up llama and how it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LanguageModel {
    /// What the weights depend on.
    pub seed: u64,
    /// Width of a token's state; even.
    pub hidden: u64,
    /// Number of layers.
    pub layers: u64,
    /// Number of tokens; above 3.
    pub vocabulary: u64,
    /// F32 or BF16.
    pub dtype: Dtype,
    /// Number of safetensors files.
    pub shards: usize,
    /// Layers that were trained on, which makes their weights others than those of the seed.
    pub tuned: Vec<u64>,
}

impl LanguageModel {
    /// A model in F32 and in one file.
    pub fn new(seed: u64, hidden: u64, layers: u64, vocabulary: u64) -> Self {
        LanguageModel { seed, hidden, layers, vocabulary, dtype: Dtype::F32, shards: 1, tuned: Vec::new() }
    }

    /// Width within the feed-forward part.
    fn intermediate(&self) -> u64 {
        self.hidden.saturating_mul(2)
    }

    /// Number and width of the attention heads: as wide as a power of two can be, up to 64.
    fn heads(&self) -> (u64, u64) {
        let width = 1 << self.hidden.trailing_zeros().min(6);
        (self.hidden / width, width)
    }

    /// Number of heads for keys and values: half as many where that is possible.
    fn key_value_heads(&self) -> u64 {
        let (heads, _) = self.heads();
        if heads % 2 == 0 { heads / 2 } else { heads }
    }

    fn check(&self) -> Result<()> {
        let fault = |what: &str| Err(Error::Invalid(format!("a sample language model {what}")));
        match self {
            _ if self.hidden == 0 || self.hidden % 2 == 1 => fault("needs an even hidden size above 0"),
            _ if self.vocabulary <= SPECIAL.len() as u64 => fault("needs a vocabulary of more than 3 tokens"),
            _ if !matches!(self.dtype, Dtype::F32 | Dtype::BF16) => fault("is stored as F32 or BF16"),
            _ if self.shards == 0 => fault("needs at least one file"),
            _ => Ok(()),
        }
    }

    /// A fine-tune that left all layers but one as they were.
    pub fn tune(mut self, layer: u64) -> Self {
        self.tuned.push(layer);
        self
    }

    fn tensor(&self, name: String, shape: &[u64]) -> Tensor {
        let seed = name.bytes().fold(mix(self.seed), |seed, byte| mix(seed ^ u64::from(byte)));
        let is_tuned = |layer: &u64| name.starts_with(&format!("model.layers.{layer}."));
        let seed = if self.tuned.iter().any(is_tuned) { mix(!seed) } else { seed };
        let matrix = shape.len() > 1;
        // Rows of unit variance in sum, as after a common initialisation; norms stay close to one.
        let (mean, spread) = if matrix { (0.0, (3.0 / self.hidden as f32).sqrt()) } else { (1.0, 0.1) };
        Tensor { name, dtype: self.dtype, shape: shape.to_vec(), seed, mean, spread }
    }

    /// The tensors, in the order of the model.
    pub fn tensors(&self) -> Vec<Tensor> {
        let (hidden, intermediate) = (self.hidden, self.intermediate());
        let key_value = hidden / self.heads().0.max(1) * self.key_value_heads();
        let mut tensors = vec![self.tensor("model.embed_tokens.weight".into(), &[self.vocabulary, hidden])];
        for layer in 0..self.layers {
            for (part, shape) in [
                ("input_layernorm", &[hidden][..]),
                ("self_attn.q_proj", &[hidden, hidden]),
                ("self_attn.k_proj", &[key_value, hidden]),
                ("self_attn.v_proj", &[key_value, hidden]),
                ("self_attn.o_proj", &[hidden, hidden]),
                ("post_attention_layernorm", &[hidden]),
                ("mlp.gate_proj", &[intermediate, hidden]),
                ("mlp.up_proj", &[intermediate, hidden]),
                ("mlp.down_proj", &[hidden, intermediate]),
            ] {
                tensors.push(self.tensor(format!("model.layers.{layer}.{part}.weight"), shape));
            }
        }
        tensors.push(self.tensor("model.norm.weight".into(), &[hidden]));
        tensors.push(self.tensor("lm_head.weight".into(), &[self.vocabulary, hidden]));
        tensors
    }

    /// The matrices of the feed-forward parts that can be applied one after the other, in F32: what a package that
    /// shares tensors with this model is made of.
    pub fn feed_forward(&self) -> Vec<Tensor> {
        let model = LanguageModel { dtype: Dtype::F32, ..self.clone() };
        let mut tensors = model.tensors();
        tensors.retain(|tensor| {
            ["mlp.gate_proj.weight", "mlp.down_proj.weight"].iter().any(|it| tensor.name.ends_with(it))
        });
        tensors
    }

    /// Writes the directory that `from_pretrained` of transformers and `load` of mlx_lm read.
    pub fn write(&self, dir: &Path) -> Result<()> {
        self.check()?;
        fs::create_dir_all(dir).at(dir)?;
        for (name, json) in [
            ("config.json", self.config()),
            ("generation_config.json", json!({"bos_token_id": 1, "do_sample": false, "eos_token_id": 2})),
            ("tokenizer.json", self.tokenizer()),
            ("tokenizer_config.json", tokenizer_config()),
        ] {
            write_file(&dir.join(name), format!("{json:#}\n").as_bytes())?;
        }
        self.write_weights(dir)
    }

    fn config(&self) -> Value {
        let (heads, head_width) = self.heads();
        json!({
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": false,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": head_width,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate(),
            "max_position_embeddings": 2048,
            "mlp_bias": false,
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.key_value_heads(),
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": false,
            "torch_dtype": if self.dtype == Dtype::BF16 { "bfloat16" } else { "float32" },
            "vocab_size": self.vocabulary,
        })
    }

    /// Byte-level BPE: the special tokens, the bytes with those of text first, then pairs of small letters, as far as
    /// the vocabulary goes.
    fn tokenizer(&self) -> Value {
        let room = usize::try_from(self.vocabulary).unwrap_or(usize::MAX);
        let letters = || (b'a'..=b'z').map(char::from);
        let pairs: Vec<(char, char)> = letters().flat_map(|a| letters().map(move |b| (a, b))).collect();
        let merges = &pairs[..room.saturating_sub(SPECIAL.len() + 256).min(pairs.len())];
        let tokens = SPECIAL.iter().map(|token| token.to_string()).chain(byte_alphabet().map(String::from));
        let tokens = tokens.chain(merges.iter().map(|(a, b)| format!("{a}{b}"))).take(room);
        let vocabulary: Map<String, Value> = tokens.zip(0..).map(|(token, id)| (token, json!(id))).collect();
        let special = |(id, content): (usize, &&str)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        };
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
        });
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": SPECIAL.iter().enumerate().map(special).collect::<Vec<_>>(),
            "normalizer": null,
            "pre_tokenizer": byte_level,
            "post_processor": null,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": "<unk>",
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "vocab": vocabulary,
                "merges": merges.iter().map(|(a, b)| format!("{a} {b}")).collect::<Vec<_>>(),
            },
        })
    }

    fn write_weights(&self, dir: &Path) -> Result<()> {
        let tensors = self.tensors();
        let sizes = tensors.iter().map(Tensor::size).collect::<Result<Vec<u64>>>()?;
        let total = sizes.iter().try_fold(0u64, |total, &size| total.checked_add(size));
        let total = total.ok_or_else(|| too_large("the model"))?;
        if self.shards == 1 {
            return write_safetensors(&dir.join("model.safetensors"), tensors);
        }
        let mut shards = vec![Vec::new(); self.shards.min(tensors.len())];
        let (count, mut before) = (shards.len(), 0);
        for (tensor, size) in tensors.into_iter().zip(sizes) {
            // Each tensor goes where its first byte would be if the shards were cut at equal sizes.
            let shard = u128::from(before) * count as u128 / u128::from(total.max(1));
            shards[shard as usize].push(tensor);
            before += size;
        }
        shards.retain(|shard| !shard.is_empty());
        let (count, mut files) = (shards.len(), Map::new());
        for (index, shard) in shards.into_iter().enumerate() {
            let file = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
            files.extend(shard.iter().map(|tensor| (tensor.name.clone(), json!(file))));
            write_safetensors(&dir.join(file), shard)?;
        }
        files.sort_keys();
        let index = json!({"metadata": {"total_size": total}, "weight_map": files});
        write_file(&dir.join("model.safetensors.index.json"), format!("{index:#}\n").as_bytes())
    }
}

fn tokenizer_config() -> Value {
    json!({
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": false,
        "eos_token": "</s>",
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    })
}

/// The characters that stand for the 256 bytes in a byte-level vocabulary: those that can be seen for themselves, the
/// others as U+0100 and on. The space and the small letters come first, then the rest of ASCII.
fn byte_alphabet() -> impl Iterator<Item = char> {
    let mut unseen = '\u{100}'..;
    let mut symbols: Vec<(u8, char)> = (0..=u8::MAX)
        .filter_map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => Some((byte, byte.into())),
            _ => unseen.next().map(|char| (byte, char)),
        })
        .collect();
    symbols.sort_by_key(|(byte, _)| match byte {
        b' ' => 0,
        b'a'..=b'z' => 1,
        b'!'..=b'~' => 2,
        _ => 3,
    });
    symbols.into_iter().map(|(_, char)| char)
}

/// Writes a safetensors file as its Rust crate does: widest type first, then by name, the header padded to 8 bytes.
fn write_safetensors(path: &Path, mut tensors: Vec<Tensor>) -> Result<()> {
    tensors.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for tensor in &tensors {
        let start: u64 = end;
        end = start.checked_add(tensor.size()?).ok_or_else(|| too_large("the file"))?;
        let entry = json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [start, end]});
        header.insert(tensor.name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let elements = tensors.iter().map(Tensor::elements).collect::<Result<Vec<u64>>>()?;
    write_streamed(path, |file| {
        use std::io::Write;
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        tensors.iter().zip(elements).try_for_each(|(tensor, elements)| tensor.write(file, elements))
    })
}
