//! Which `config.json` files describe a CogVideoX transformer, and what is said of those that do not.

use std::path::Path;

use sconce_core::nn::LoraOptions;
use sconce_examples::models::{Adapters, CogVideoXConfig};
use serde_json::{Value, json};

fn parse(changes: Value) -> anyhow::Result<CogVideoXConfig> {
    let mut config = json!({"_class_name": "CogVideoXTransformer3DModel"});
    config
        .as_object_mut()
        .unwrap()
        .extend(changes.as_object().unwrap().clone());
    CogVideoXConfig::from_json(&config.to_string(), Path::new("somewhere/config.json"))
}

#[test]
fn what_the_file_leaves_out_has_the_defaults_of_diffusers_which_are_the_2b_model() {
    let config = parse(json!({})).unwrap();
    assert_eq!(config, CogVideoXConfig::default());
    assert_eq!(
        (config.inner_dim(), config.num_layers, config.in_channels),
        (1920, 30, 16)
    );
    assert!(!config.is_image_to_video() && config.patch_frames() == 1);
    let config =
        parse(json!({"patch_size_t": 2, "use_rotary_positional_embeddings": true, "in_channels": 32})).unwrap();
    assert!(config.is_image_to_video() && config.patch_frames() == 2);
}

#[test]
fn what_would_change_the_result_and_is_not_implemented_is_refused_by_name() {
    for (changes, words) in [
        (
            json!({"_class_name": "UNet2DConditionModel"}),
            "`_class_name` is \"UNet2DConditionModel\"",
        ),
        (json!({"_class_name": null}), "`_class_name` is missing"),
        (json!({"activation_fn": "geglu"}), "`activation_fn` is \"geglu\""),
        (
            json!({"timestep_activation_fn": "gelu"}),
            "`timestep_activation_fn` is \"gelu\"",
        ),
        (json!({"dropout": 0.1}), "`dropout` is 0.1"),
        (
            json!({"norm_elementwise_affine": false}),
            "`norm_elementwise_affine` is false",
        ),
        (json!({"num_layers": 0}), "`num_layers` is 0"),
        (json!({"text_embed_dim": 1u64 << 40}), "`text_embed_dim`"),
        (
            json!({"attention_head_dim": 40}),
            "`attention_head_dim` is 40, expected a multiple of 16",
        ),
        (
            json!({"in_channels": 17}),
            "`in_channels` is 17 and `out_channels` is 16",
        ),
        (
            json!({"patch_size_t": 2}),
            "`use_rotary_positional_embeddings` is false",
        ),
        (
            json!({"patch_size_t": 2, "use_rotary_positional_embeddings": true, "use_learned_positional_embeddings": true}),
            "no model has both",
        ),
        (json!({"norm_eps": 0.0}), "`norm_eps` is 0"),
        (json!({"patch_size": "two"}), "invalid type"),
    ] {
        let message = format!("{:#}", parse(changes).unwrap_err());
        assert!(
            message.contains(words) && message.contains("somewhere/config.json"),
            "{message}"
        );
    }
}

#[test]
fn adapters_are_given_to_layers_that_can_have_them_alone() {
    let adapters = |targets: &[&str]| {
        Adapters::new(
            LoraOptions::default(),
            &Vec::from_iter(targets.iter().map(|t| t.to_string())),
        )
    };
    assert!(adapters(&Adapters::POSSIBLE).is_ok());
    assert!(adapters(&[]).unwrap_err().to_string().contains("no layers are named"));
    assert!(
        adapters(&["to_q", "norm1.linear"])
            .unwrap_err()
            .to_string()
            .contains("\"norm1.linear\"")
    );
}
