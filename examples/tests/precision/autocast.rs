//! Products in 16 bits from parameters in f32, as PyTorch's autocast computes them.

use super::{Run, SHORT, build, fixtures, model, tokens, train};
use candle_core::{DType, Device, Tensor, safetensors};
use sconce_collectives::single;
use sconce_core::deepspeed::MixedPrecision;
use sconce_core::{AcceleratorBuilder, FsdpStrategy, FullyShardedOptions, WrapPolicy};

fn bf16() -> AcceleratorBuilder {
    AcceleratorBuilder::default().mixed_precision(MixedPrecision::Bf16)
}

/// Logits of the fixtures' first batch, and their dtype.
fn logits(builder: AcceleratorBuilder) -> (Tensor, DType) {
    let acc = build(builder, single());
    let model = model(&*acc);
    let rows = tokens().narrow(0, 0, 8).unwrap();
    let logits = acc.autocast(|| model.forward(&rows)).unwrap().detach();
    (logits.to_dtype(DType::F32).unwrap(), logits.dtype())
}

fn mean_distance(a: &Tensor, b: &Tensor) -> f32 {
    let difference = (a - b).unwrap().abs().unwrap();
    difference.mean_all().unwrap().to_scalar().unwrap()
}

#[test]
fn logits_are_nearer_to_those_of_pytorchs_autocast_than_to_those_of_f32() {
    let recorded = safetensors::load(fixtures().join("step0_bf16.safetensors"), &Device::Cpu).unwrap();
    let recorded = &recorded["logits"].to_dtype(DType::F32).unwrap();
    let (f32, _) = logits(AcceleratorBuilder::default());
    let (cast, dtype) = logits(bf16().autocast(true));
    let (narrow, narrow_dtype) = logits(bf16());
    let from_recorded = [&cast, &narrow, &f32].map(|logits| mean_distance(logits, recorded));
    println!("distance from PyTorch's autocast: autocast, bf16 parameters, f32: {from_recorded:?}");
    // Most of what is left is the last rounding of a logit: a step of bf16 is 0.002 there.
    assert!(from_recorded[0] < 0.85 * from_recorded[2], "{from_recorded:?}");
    assert!(from_recorded[0] < mean_distance(&cast, &f32));
    assert_eq!((dtype, narrow_dtype), (DType::F32, DType::BF16));
}

#[test]
fn parts_that_are_computed_again_compute_in_the_dtype_of_their_forward() {
    let sharded = |recompute| {
        let options = FullyShardedOptions {
            sharding_strategy: Some(FsdpStrategy::FullShard),
            auto_wrap_policy: Some(WrapPolicy::transformer_based(["LlamaDecoderLayer"])),
            activation_checkpointing: Some(recompute),
            ..FullyShardedOptions::default()
        };
        train(SHORT, &|| bf16().autocast(true).fully_sharded(options.clone()))
    };
    let parallel: Run = train(SHORT, &|| bf16().autocast(true));
    assert!(sharded(false).early == parallel.early);
    assert!(sharded(true).early == parallel.early);
    let plain = train(SHORT, &AcceleratorBuilder::default);
    assert!(plain.early != parallel.early);
    let furthest = plain
        .losses
        .iter()
        .zip(&parallel.losses)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max);
    println!("losses are off those of f32 by {furthest:.1e}");
    assert!(furthest < 5e-3, "{furthest}");
}

#[test]
fn a_run_that_is_set_to_autocast_and_computes_without_is_told_so() {
    let acc = build(bf16().autocast(true), single());
    let model = model(&*acc);
    let rows = tokens().narrow(0, 0, 2).unwrap();
    let text = acc
        .backward(&model.loss(&rows, &rows).unwrap())
        .unwrap_err()
        .to_string();
    assert!(text.contains("accelerator.autocast(|| ..)"), "{text}");
    acc.backward(&acc.autocast(|| model.loss(&rows, &rows)).unwrap())
        .unwrap();
    // Without the setting, and in f32, the scope does nothing.
    let (f32, _) = logits(AcceleratorBuilder::default());
    let (set, _) = logits(AcceleratorBuilder::default().autocast(true));
    assert_eq!(mean_distance(&f32, &set), 0.0);
}
