//! Parameters that are f32 in a run that is not.

use super::{SHORT, build, model, tokens, train};
use candle_core::DType;
use sconce_collectives::single;
use sconce_core::deepspeed::MixedPrecision;
use sconce_core::{
    AcceleratorBuilder, FsdpStrategy, FullyShardedOptions, ParameterInfo, ParameterSet, WrapPolicy, ZeroStage,
};

/// Norms, embedding, the output layer and one projection.
fn is_kept(parameter: &ParameterInfo) -> bool {
    let names = ["norm", "embed_tokens", "lm_head", "layers.1.mlp.down_proj"];
    names.iter().any(|name| parameter.name.contains(name))
}

fn keeping(precision: MixedPrecision) -> AcceleratorBuilder {
    AcceleratorBuilder::default()
        .mixed_precision(precision)
        .keep_in_f32(ParameterSet::matching(is_kept))
}

#[test]
fn parameters_that_are_kept_are_f32_and_what_follows_them_stays_narrow() {
    for (precision, dtype) in [
        (MixedPrecision::Bf16, DType::BF16),
        (MixedPrecision::Fp16, DType::F16),
        (MixedPrecision::Fp8, DType::BF16),
    ] {
        let acc = build(keeping(precision), single());
        let model = model(&*acc);
        let state = acc.engine().tensors(true).unwrap();
        let mut kept = 0;
        for (name, tensor) in &state {
            let info = ParameterInfo {
                name: name.clone(),
                shape: tensor.dims().to_vec(),
            };
            let expected = if is_kept(&info) { DType::F32 } else { dtype };
            assert_eq!(tensor.dtype(), expected, "{precision}, {name}");
            kept += usize::from(is_kept(&info));
        }
        assert_eq!((kept, state.len()), (8, 21));
        let logits = model.forward(&tokens().narrow(0, 0, 2).unwrap()).unwrap();
        assert_eq!(logits.dtype(), dtype, "{precision}");
        if let Some(scaling) = acc.fp8() {
            let layers = scaling.layers();
            assert_eq!(layers.len(), 13);
            assert!(
                layers
                    .iter()
                    .all(|layer| !layer.name().contains("down_proj") || layer.name().contains("layers.0"))
            );
        }
    }
}

#[test]
fn training_around_kept_parameters_comes_to_the_same_bits_however_state_is_sharded() {
    for precision in [MixedPrecision::Bf16, MixedPrecision::Fp8] {
        let parallel = train(SHORT, &|| keeping(precision));
        let stage = |stage| train(SHORT, &|| keeping(precision).strategy(stage));
        assert!(stage(ZeroStage::Two).early == parallel.early, "{precision}");
        let three = ZeroStage::Three {
            persistence_threshold: 0,
        };
        assert!(stage(three).early == parallel.early, "{precision}");
        let options = FullyShardedOptions {
            sharding_strategy: Some(FsdpStrategy::FullShard),
            auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
            activation_checkpointing: Some(true),
            ..FullyShardedOptions::default()
        };
        let sharded = train(SHORT, &|| keeping(precision).fully_sharded(options.clone()));
        assert!(sharded.early == parallel.early, "{precision}");
        let narrow = train(SHORT, &|| AcceleratorBuilder::default().mixed_precision(precision));
        assert!(narrow.early != parallel.early, "{precision}");
    }
}
