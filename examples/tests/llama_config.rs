//! Which `config.json` files describe a Llama, and what is said of those that do not.

use std::path::Path;

use sconce_examples::models::{LlamaConfig, RopeScaling};
use serde_json::{Value, json};

fn minimal() -> Value {
    json!({
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32, "hidden_size": 24, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 6,
    })
}

fn with(changes: Value) -> Value {
    let mut config = minimal();
    let (fields, changes) = (config.as_object_mut().unwrap(), changes.as_object().unwrap().clone());
    fields.extend(changes);
    config
}

fn parse(config: &Value) -> anyhow::Result<LlamaConfig> {
    LlamaConfig::from_json(&config.to_string(), Path::new("somewhere/config.json"))
}

fn error_of(changes: Value) -> String {
    format!("{:#}", parse(&with(changes)).unwrap_err())
}

#[test]
fn what_the_file_leaves_out_has_the_defaults_of_transformers() {
    let config = parse(&minimal()).unwrap();
    let expected = LlamaConfig {
        vocab_size: 32,
        hidden_size: 24,
        intermediate_size: 48,
        num_hidden_layers: 1,
        num_attention_heads: 6,
        num_key_value_heads: 6,
        head_dim: 4,
        ..LlamaConfig::default()
    };
    assert_eq!(config, expected);
    assert_eq!(
        parse(&with(json!({"head_dim": null, "num_key_value_heads": null}))).unwrap(),
        expected
    );
}

#[test]
fn rope_theta_is_read_from_both_generations_of_the_file() {
    assert_eq!(parse(&with(json!({"rope_theta": 5e5}))).unwrap().rope_theta, 5e5);
    let nested = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}});
    assert_eq!(parse(&with(nested)).unwrap().rope_theta, 2e4);
    let both = json!({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 2e4}});
    assert_eq!(parse(&with(both)).unwrap().rope_theta, 2e4);
    assert_eq!(
        parse(&with(json!({"rope_theta": 5e5, "rope_scaling": null})))
            .unwrap()
            .rope_theta,
        5e5
    );
}

#[test]
fn rope_scaling_is_read_from_both_generations_of_the_file() {
    let scaling = |changes| parse(&with(changes)).unwrap().rope_scaling;
    assert_eq!(
        scaling(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})),
        RopeScaling::Linear { factor: 2.0 }
    );
    assert_eq!(
        scaling(json!({"rope_parameters": {"rope_type": "dynamic", "factor": 4, "rope_theta": 5e5}})),
        RopeScaling::Dynamic { factor: 4.0 }
    );
    let llama3 = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
    assert_eq!(
        scaling(llama3),
        RopeScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original: 8192
        }
    );
}

#[test]
fn each_family_has_its_own_windows_biases_and_norms() {
    let family = |model_type: &str, changes: Value| {
        let mut config = with(json!({"model_type": model_type, "architectures": null, "num_hidden_layers": 3}));
        config
            .as_object_mut()
            .unwrap()
            .extend(changes.as_object().unwrap().clone());
        parse(&config).unwrap()
    };
    // What Mistral's file leaves out is a window of 4096; null is none.
    assert_eq!(family("mistral", json!({})).sliding_windows, [Some(4096); 3]);
    assert_eq!(family("mistral", json!({"sliding_window": null})).sliding_windows, []);
    let qwen2 = json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2});
    assert_eq!(family("qwen2", qwen2).sliding_windows, [None, None, Some(8)]);
    let qwen2 = family("qwen2", json!({"sliding_window": 8}));
    assert_eq!(qwen2.sliding_windows, []);
    assert!(qwen2.attention_bias && !qwen2.attention_output_bias && !qwen2.query_key_norm);
    let qwen3 = family("qwen3", json!({}));
    assert!(!qwen3.attention_bias && qwen3.query_key_norm);
    assert_eq!(qwen3.head_dim, 128);
    let llama = family("llama", json!({"sliding_window": 8, "attention_bias": true}));
    assert_eq!(llama.sliding_windows, []);
    assert!(llama.attention_bias && llama.attention_output_bias);
}

#[test]
fn settings_of_the_file_are_honoured() {
    let changes = json!({
        "head_dim": 10, "num_key_value_heads": 2, "tie_word_embeddings": true, "attention_bias": true,
        "mlp_bias": true, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    });
    let config = parse(&with(changes)).unwrap();
    assert_eq!(
        (
            config.head_dim,
            config.num_key_value_heads,
            config.max_position_embeddings
        ),
        (10, 2, 64)
    );
    assert!(config.tie_word_embeddings && config.attention_bias && config.mlp_bias);
    assert_eq!(config.rms_norm_eps, 1e-5);
}

#[test]
fn another_architecture_is_one_error_with_file_found_and_supported() {
    // A GPT-2 file has none of Llama's fields: the architecture is still what the error is about.
    let gpt2 = json!({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768});
    let error = format!("{:#}", parse(&gpt2).unwrap_err());
    for part in [
        "somewhere/config.json",
        "\"gpt2\"",
        "GPT2LMHeadModel",
        "\"llama\"",
        "LlamaForCausalLM",
    ] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(error_of(json!({"architectures": ["LlamaForSequenceClassification"]})).contains("supported"));
    assert!(error_of(json!({"model_type": "mistral"})).contains("\"mistral\""));
    assert!(error_of(json!({"model_type": "gemma", "architectures": null})).contains("\"gemma\""));
    assert!(error_of(json!({"model_type": null, "architectures": null})).contains("missing"));
    assert!(parse(&with(json!({"architectures": null}))).is_ok());
}

#[test]
fn settings_that_would_change_the_result_and_are_not_implemented_are_errors() {
    assert!(error_of(json!({"hidden_act": "gelu"})).contains("`hidden_act` is \"gelu\", supported is \"silu\""));
    assert!(error_of(json!({"attention_dropout": 0.1})).contains("attention_dropout"));
    assert!(error_of(json!({"rope_parameters": {"rope_type": "longrope"}})).contains("\"longrope\""));
    assert!(error_of(json!({"rope_scaling": {"type": "linear"}})).contains("`factor` is missing"));
    let wavelengths = json!({"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}});
    assert!(error_of(wavelengths).contains("`high_freq_factor` of the rotary settings is 1, expected more than"));
    let layers = json!({"model_type": "qwen2", "architectures": null, "use_sliding_window": true,
        "layer_types": ["chunked_attention"]});
    assert!(error_of(layers).contains("`layer_types` has \"chunked_attention\""));
    assert!(error_of(json!({"rope_parameters": {"partial_rotary_factor": 0.5}})).contains("partial_rotary_factor"));
}

#[test]
fn sizes_that_do_not_fit_together_are_errors_with_both_numbers() {
    assert!(error_of(json!({"num_attention_heads": 5})).contains("`hidden_size` is 24 and `num_attention_heads` is 5"));
    assert!(error_of(json!({"num_key_value_heads": 4})).contains("`num_key_value_heads` is 4"));
    assert!(error_of(json!({"head_dim": 3})).contains("`head_dim` is 3, expected an even number"));
    assert!(error_of(json!({"num_attention_heads": 0})).contains("num_attention_heads"));
    assert!(error_of(json!({"num_key_value_heads": 0})).contains("`num_key_value_heads` is 0"));
    assert!(error_of(json!({"vocab_size": 0})).contains("`vocab_size` is 0"));
    assert!(error_of(json!({"rms_norm_eps": -1.0})).contains("`rms_norm_eps` is -1"));
    assert!(error_of(json!({"rope_theta": 0.0})).contains("`rope_theta` is 0"));
}

#[test]
fn a_missing_field_and_a_broken_file_name_the_file() {
    let mut config = minimal();
    config.as_object_mut().unwrap().remove("hidden_size");
    let error = format!("{:#}", parse(&config).unwrap_err());
    assert!(
        error.contains("somewhere/config.json") && error.contains("hidden_size"),
        "{error}"
    );
    let error = LlamaConfig::from_json("{\"vocab_size\": ", Path::new("somewhere/config.json")).unwrap_err();
    assert!(format!("{error:#}").contains("somewhere/config.json"));
}
