//! The config section, from config.json.

use serde_json::{Map, Value, json};

type Object = Map<String, Value>;

/// The keys of the seed, from those that Hugging Face configs use for them. A key whose value is not known is left out.
pub(super) fn section(config: &Object) -> Vec<u8> {
    let text = text_config(config);
    let defaults = defaults(text);
    let first = |keys: &[&str]| {
        let value = |key: &&str| text.get(*key).filter(|value| !value.is_null());
        keys.iter().find_map(value).or_else(|| keys.iter().find_map(|key| defaults.get(*key))).cloned()
    };
    let heads = first(&["num_attention_heads", "n_head", "n_heads"]);
    let rope = rope(text, &defaults);
    let mut section = Object::new();
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            section.insert(key.into(), value);
        }
    };
    put("architecture", first(&["model_type"]));
    put("n_vocab", first(&["vocab_size", "n_vocab"]));
    put("n_embd", first(&["hidden_size", "n_embd", "d_model", "dim"]));
    put("n_layers", first(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"]));
    put("n_heads", heads.clone());
    put("n_kv_heads", first(&["num_key_value_heads", "n_kv_heads"]).or(heads));
    put("max_seq_len", first(&["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"]));
    put("is_rope", Some(json!(rope.is_some())));
    put("activation_fn", first(&["hidden_activation", "hidden_act", "activation_function", "activation"]));
    if let Some((base, scaling)) = rope {
        put("rope_freq_base", Some(base));
        put("rope_scaling", Some(scaling));
    }
    Value::Object(section).to_string().into_bytes()
}

/// The part of a multimodal config that speaks of the language model, or the config itself.
pub(super) fn text_config(config: &Object) -> &Object {
    config.get("text_config").and_then(Value::as_object).unwrap_or(config)
}

/// What published configs of a family leave to transformers.
fn defaults(config: &Object) -> Object {
    let defaults = match config.get("model_type").and_then(Value::as_str).unwrap_or_default() {
        "llama" | "mistral" | "qwen2" | "qwen2_moe" | "qwen3" | "qwen3_moe" | "gemma" | "gemma2" | "phi" | "phi3"
        | "stablelm" => json!({"rope_theta": 10_000.0}),
        "mixtral" => json!({"rope_theta": 1_000_000.0}),
        "gemma3_text" => json!({"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 131_072, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1_000_000.0}),
        _ => Value::Null,
    };
    if let Value::Object(defaults) = defaults { defaults } else { Object::new() }
}

/// Base frequency and scaling factor, if positions are rotary: of the layers that see everything, where others differ.
fn rope(config: &Object, defaults: &Object) -> Option<(Value, Value)> {
    let object = |value: Option<&Value>| value.and_then(Value::as_object).cloned();
    let number = |value: Option<&Value>| value.filter(|value| value.is_number()).cloned();
    // transformers 5 moved rope_theta and rope_scaling into rope_parameters, with an object for each kind of layer
    // where kinds differ.
    let parameters = object(config.get("rope_parameters"));
    let parameters = parameters.map(|all| object(all.get("full_attention")).unwrap_or(all)).unwrap_or_default();
    let stated = ["rope_theta", "global_rope_theta", "rotary_emb_base"].map(|key| config.get(key));
    let theta = stated.into_iter().chain([parameters.get("rope_theta"), defaults.get("rope_theta")]).find_map(number);
    let scaling = object(config.get("rope_scaling")).unwrap_or(parameters);
    if theta.is_none() && scaling.is_empty() {
        return None;
    }
    let factor = number(scaling.get("factor")).or_else(|| stretched(config, &scaling));
    Some((theta.unwrap_or(json!(10_000.0)), factor.unwrap_or(json!(1.0))))
}

/// The factor of a scaling that tells the length that the model was trained for instead, as longrope does.
fn stretched(config: &Object, scaling: &Object) -> Option<Value> {
    const TRAINED: &str = "original_max_position_embeddings";
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type"))?;
    let trained = scaling.get(TRAINED).or_else(|| config.get(TRAINED))?.as_f64().filter(|length| *length > 0.0)?;
    let length = config.get("max_position_embeddings")?.as_f64()?;
    (kind != "default").then(|| json!(length / trained))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(text: &str) -> Value {
        let source: Object = serde_json::from_str(text).expect("an object");
        serde_json::from_slice(&section(&source)).expect("JSON")
    }

    #[test]
    fn families() {
        let llama = mapped(
            r#"{"model_type":"llama","vocab_size":100,"hidden_size":64,"num_hidden_layers":2,"num_attention_heads":4,
                "max_position_embeddings":128,"hidden_act":"silu","rope_theta":500000.0,
                "rope_scaling":{"rope_type":"llama3","factor":8.0}}"#,
        );
        assert_eq!(
            llama,
            json!({"architecture":"llama","n_vocab":100,"n_embd":64,"n_layers":2,"n_heads":4,"n_kv_heads":4,
                "max_seq_len":128,"is_rope":true,"activation_fn":"silu","rope_freq_base":500000.0,"rope_scaling":8.0})
        );
        let bert = mapped(r#"{"model_type":"bert","hidden_size":384,"hidden_act":"gelu"}"#);
        assert_eq!((&bert["is_rope"], bert.get("rope_freq_base")), (&json!(false), None));
        let new = mapped(r#"{"model_type":"x","rope_parameters":{"rope_theta":1000000.0,"rope_type":"default"}}"#);
        assert_eq!((&new["rope_freq_base"], &new["rope_scaling"]), (&json!(1e6), &json!(1.0)));
        let nested = mapped(r#"{"model_type":"gemma3","text_config":{"model_type":"gemma3_text","hidden_size":8}}"#);
        assert_eq!(
            (&nested["architecture"], &nested["n_embd"], &nested["is_rope"]),
            (&json!("gemma3_text"), &json!(8), &json!(true))
        );
    }

    #[test]
    fn numbers_keep_their_digits() {
        let source: Object =
            serde_json::from_str(r#"{"vocab_size":5,"rope_theta":984418506.5213703}"#).expect("an object");
        let expected = r#"{"n_vocab":5,"is_rope":true,"rope_freq_base":984418506.5213703,"rope_scaling":1.0}"#;
        assert_eq!(String::from_utf8(section(&source)).expect("text"), expected);
    }

    /// What the families in common use publish, cut to what is mapped.
    #[test]
    fn published_configs() {
        let cases = [
            (
                r#"{"model_type":"mistral","vocab_size":32768,"hidden_size":4096,"num_hidden_layers":32,"head_dim":null,
                    "num_attention_heads":32,"num_key_value_heads":8,"max_position_embeddings":32768,"hidden_act":"silu",
                    "rope_theta":1000000.0,"sliding_window":null}"#,
                json!(["mistral", 32768, 4096, 32, 32, 8, 32768, true, "silu", 1e6, 1.0]),
            ),
            (
                r#"{"model_type":"qwen2","vocab_size":151936,"hidden_size":896,"num_hidden_layers":24,
                    "num_attention_heads":14,"num_key_value_heads":2,"max_position_embeddings":32768,"hidden_act":"silu",
                    "rope_theta":1000000.0,"use_sliding_window":false}"#,
                json!(["qwen2", 151936, 896, 24, 14, 2, 32768, true, "silu", 1e6, 1.0]),
            ),
            (
                r#"{"model_type":"qwen3","vocab_size":151936,"hidden_size":1024,"num_hidden_layers":28,"head_dim":128,
                    "num_attention_heads":16,"num_key_value_heads":8,"max_position_embeddings":40960,"hidden_act":"silu",
                    "rope_scaling":null,"rope_theta":1000000}"#,
                json!(["qwen3", 151936, 1024, 28, 16, 8, 40960, true, "silu", 1000000, 1.0]),
            ),
            (
                r#"{"model_type":"gemma","vocab_size":256000,"hidden_size":2048,"num_hidden_layers":18,"head_dim":256,
                    "num_attention_heads":8,"num_key_value_heads":1,"max_position_embeddings":8192,
                    "hidden_act":"gelu","hidden_activation":"gelu_pytorch_tanh","rope_theta":10000.0}"#,
                json!(["gemma", 256000, 2048, 18, 8, 1, 8192, true, "gelu_pytorch_tanh", 10000.0, 1.0]),
            ),
            (
                r#"{"model_type":"gemma","vocab_size":256000,"hidden_size":3072,"num_hidden_layers":28,"head_dim":256,
                    "num_attention_heads":16,"num_key_value_heads":16,"max_position_embeddings":8192,
                    "hidden_act":"gelu","hidden_activation":null,"rope_scaling":null,"rope_theta":10000.0}"#,
                json!(["gemma", 256000, 3072, 28, 16, 16, 8192, true, "gelu", 10000.0, 1.0]),
            ),
            (
                r#"{"model_type":"gemma3","text_config":{"model_type":"gemma3_text","hidden_size":2560,
                    "num_hidden_layers":34,"rope_scaling":{"factor":8.0,"rope_type":"linear"},"sliding_window":1024}}"#,
                json!(["gemma3_text", 262208, 2560, 34, 8, 4, 131072, true, "gelu_pytorch_tanh", 1e6, 8.0]),
            ),
            (
                r#"{"model_type":"gemma3_text","vocab_size":262144,"hidden_size":1152,"num_hidden_layers":26,
                    "num_attention_heads":4,"num_key_value_heads":1,"max_position_embeddings":32768,
                    "hidden_activation":"gelu_pytorch_tanh","rope_parameters":{
                    "full_attention":{"rope_theta":1000000,"rope_type":"default"},
                    "sliding_attention":{"rope_theta":10000,"rope_type":"default"}}}"#,
                json!(["gemma3_text", 262144, 1152, 26, 4, 1, 32768, true, "gelu_pytorch_tanh", 1000000, 1.0]),
            ),
            (
                r#"{"model_type":"qwen2","vocab_size":151936,"hidden_size":3584,"num_hidden_layers":28,
                    "num_attention_heads":28,"num_key_value_heads":4,"max_position_embeddings":131072,
                    "hidden_act":"silu","rope_theta":1000000.0,
                    "rope_scaling":{"factor":4.0,"original_max_position_embeddings":32768,"type":"yarn"}}"#,
                json!(["qwen2", 151936, 3584, 28, 28, 4, 131072, true, "silu", 1e6, 4.0]),
            ),
            (
                r#"{"model_type":"phi","vocab_size":51200,"hidden_size":2560,"num_hidden_layers":32,
                    "num_attention_heads":32,"num_key_value_heads":null,"max_position_embeddings":2048,
                    "hidden_act":"gelu_new","partial_rotary_factor":0.4}"#,
                json!(["phi", 51200, 2560, 32, 32, 32, 2048, true, "gelu_new", 10000.0, 1.0]),
            ),
            (
                r#"{"model_type":"phi3","vocab_size":32064,"hidden_size":3072,"num_hidden_layers":32,
                    "num_attention_heads":32,"num_key_value_heads":32,"max_position_embeddings":4096,"hidden_act":"silu",
                    "rope_theta":10000.0,"rope_scaling":null}"#,
                json!(["phi3", 32064, 3072, 32, 32, 32, 4096, true, "silu", 10000.0, 1.0]),
            ),
            (
                r#"{"model_type":"phi3","vocab_size":32064,"hidden_size":3072,"num_hidden_layers":32,
                    "num_attention_heads":32,"num_key_value_heads":32,"max_position_embeddings":131072,"hidden_act":"silu",
                    "original_max_position_embeddings":4096,"rope_theta":10000.0,
                    "rope_scaling":{"type":"longrope","long_factor":[1.0],"short_factor":[1.0]}}"#,
                json!(["phi3", 32064, 3072, 32, 32, 32, 131072, true, "silu", 10000.0, 32.0]),
            ),
            (
                r#"{"model_type":"bert","vocab_size":30522,"hidden_size":384,"num_hidden_layers":6,
                    "num_attention_heads":12,"max_position_embeddings":512,"hidden_act":"gelu",
                    "position_embedding_type":"absolute"}"#,
                json!(["bert", 30522, 384, 6, 12, 12, 512, false, "gelu", null, null]),
            ),
            (
                r#"{"model_type":"gpt2","vocab_size":50257,"n_embd":768,"n_layer":12,"n_head":12,"n_positions":1024,
                    "n_ctx":1024,"activation_function":"gelu_new"}"#,
                json!(["gpt2", 50257, 768, 12, 12, 12, 1024, false, "gelu_new", null, null]),
            ),
        ];
        const KEYS: [&str; 11] = [
            "architecture",
            "n_vocab",
            "n_embd",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "max_seq_len",
            "is_rope",
            "activation_fn",
            "rope_freq_base",
            "rope_scaling",
        ];
        for (config, expected) in cases {
            let mapped = mapped(config);
            assert_eq!(Value::from(KEYS.map(|key| mapped[key].clone()).to_vec()), expected);
        }
    }
}
