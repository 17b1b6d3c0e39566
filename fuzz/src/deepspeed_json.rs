//! DeepSpeed's JSON: any text is a configuration or an error, and a configuration can be filled and asked for its sizes.

use sconce_core::deepspeed::{AutoValues, DeepSpeedConfig, MixedPrecision, Validation};

/// What a program could know, so that `"auto"` is filled everywhere.
fn program() -> AutoValues {
    AutoValues {
        data_parallel_size: Some(4),
        micro_batch_size_per_rank: Some(2),
        gradient_accumulation_steps: Some(3),
        gradient_clipping: Some(1.0),
        mixed_precision: Some(MixedPrecision::Bf16),
        learning_rate: Some(1e-3),
        betas: Some((0.9, 0.999)),
        epsilon: Some(1e-8),
        weight_decay: Some(0.01),
        warmup_steps: Some(10),
        total_steps: Some(100),
        hidden_size: Some(64),
        ..AutoValues::default()
    }
}

/// Reads a text as DeepSpeed's configuration, under both rules of repeated keys.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let lenient = DeepSpeedConfig::parse(text, "ds.json", Validation::Lenient);
    if let Ok(strict) = DeepSpeedConfig::parse(text, "ds.json", Validation::Strict) {
        let lenient = lenient
            .as_ref()
            .expect("what is right by the strict rule is right by the other");
        assert_eq!(
            strict.warnings().len(),
            lenient.warnings().len(),
            "the strict rule drops no warning"
        );
    }
    let config = match lenient {
        Ok(config) => config,
        Err(error) => return assert!(error.to_string().contains("ds.json"), "{error} names no file"),
    };
    for warning in config.warnings() {
        assert!(!warning.to_string().is_empty());
    }
    for ranks in [1, 8, u64::MAX] {
        let _ = config.batch_sizes(ranks).map_err(|error| error.to_string());
    }
    let _ = config
        .fill_known(&AutoValues::default())
        .map_err(|error| error.to_string());
    if let Ok(filled) = config.fill(&program()) {
        let again = filled
            .fill(&program())
            .expect("what is filled has nothing left to fill");
        assert_eq!(format!("{filled:?}"), format!("{again:?}"));
    }
}
