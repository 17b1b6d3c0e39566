//! Training on all ranks against training on one.

use super::small_model::{STEPS, plain, train};
use super::{CheckError, Checked, SelfTest, expect_near};
use crate::deepspeed::MixedPrecision;
use crate::schedule::ConstantSchedule;
use crate::{
    AcceleratorBuilder, DataLoader, DataParallel, FsdpStrategy, FullyShardedOptions, LossScaling, Sgd,
    ShardingStrategy, TensorDataset, Weights, WrapPolicy, ZeroStage,
};
use candle_core::{Device, Tensor};
use candle_nn::Module;

/// Sums over ranks run in another order than those over rows.
const NEAR: f32 = 2e-5;
/// How far from f32 a few steps in 16 bits may end, of the way that f32 goes.
const PART_OF_THE_WAY: f32 = 0.3;

/// Stage 3 without a parameter that stays whole.
const ZERO_3: ZeroStage = ZeroStage::Three {
    persistence_threshold: 0,
};

fn by(strategy: impl ShardingStrategy + 'static) -> AcceleratorBuilder {
    AcceleratorBuilder::default().strategy(strategy)
}

fn by_fsdp(strategy: FsdpStrategy) -> AcceleratorBuilder {
    AcceleratorBuilder::default().fully_sharded(FullyShardedOptions {
        sharding_strategy: Some(strategy),
        auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
        ..FullyShardedOptions::default()
    })
}

fn like_plain(test: &SelfTest<'_>, builder: AcceleratorBuilder) -> Checked {
    expect_near("weights", &train(test, builder, 1)?, &plain(test.ranks(), STEPS)?, NEAR)
}

pub(super) fn data_parallel(test: &SelfTest<'_>) -> Checked {
    like_plain(test, by(DataParallel))
}

pub(super) fn zero_1(test: &SelfTest<'_>) -> Checked {
    like_plain(test, by(ZeroStage::One))
}

pub(super) fn zero_2(test: &SelfTest<'_>) -> Checked {
    like_plain(test, by(ZeroStage::Two))
}

pub(super) fn zero_3(test: &SelfTest<'_>) -> Checked {
    like_plain(test, by(ZERO_3))
}

pub(super) fn full_shard(test: &SelfTest<'_>) -> Checked {
    like_plain(test, by_fsdp(FsdpStrategy::FullShard))
}

pub(super) fn shard_grad_op(test: &SelfTest<'_>) -> Checked {
    like_plain(test, by_fsdp(FsdpStrategy::ShardGradOp))
}

pub(super) fn accumulation(test: &SelfTest<'_>) -> Checked {
    let expected = plain(test.ranks(), STEPS)?;
    expect_near(
        "weights of data parallelism",
        &train(test, by(DataParallel), 2)?,
        &expected,
        NEAR,
    )?;
    expect_near("weights of stage 3", &train(test, by(ZERO_3), 4)?, &expected, NEAR)
}

pub(super) fn half_precision(test: &SelfTest<'_>) -> Checked {
    let (initial, expected) = (plain(test.ranks(), 0)?, plain(test.ranks(), STEPS)?);
    let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt();
    let way = distance(&initial, &expected);
    let mut worst = 0f32;
    for precision in [MixedPrecision::Bf16, MixedPrecision::Fp16] {
        for (name, builder) in [("data parallelism", by(DataParallel)), ("stage 3", by(ZERO_3))] {
            // A scale that begins at 1 overflows in no step.
            let builder = builder
                .mixed_precision(precision)
                .loss_scaling(LossScaling::Static(1.0));
            let part = distance(&train(test, builder, 1)?, &expected) / way;
            if part.is_nan() || part > PART_OF_THE_WAY {
                return Err(format!(
                    "weights in {precision} of {name} end {part} of f32's way from f32's, expected {PART_OF_THE_WAY} at most"
                )
                .into());
            }
            worst = worst.max(part);
        }
    }
    Ok(format!(
        "weights end {worst:.3} of f32's way from f32's (limit {PART_OF_THE_WAY})"
    ))
}

/// Accelerate's training check: SGD on `y = 2x + 3`, three epochs of batches of 8.
pub(super) fn linear_regression(test: &SelfTest<'_>) -> Checked {
    const BATCH: usize = 8;
    const EPOCHS: usize = 3;
    const RATE: f64 = 0.1;
    let samples = 8 * BATCH * test.ranks();
    let x = Vec::from_iter((0..samples).map(|sample| (sample as f32 * 1.7).sin()));
    let y = Vec::from_iter(x.iter().map(|x| 2.0 * x + 3.0));
    let data = || -> Result<TensorDataset, CheckError> {
        let column = |values: &[f32]| Tensor::from_vec(values.to_vec(), (samples, 1), &Device::Cpu);
        Ok(TensorDataset::new(vec![column(&x)?, column(&y)?])?)
    };
    // By hand, in f64, from the values at which the model begins.
    let fit = |(mut a, mut b): (f64, f64)| {
        for _ in 0..EPOCHS {
            for (x, y) in x.chunks(BATCH * test.ranks()).zip(y.chunks(BATCH * test.ranks())) {
                let residuals = x
                    .iter()
                    .zip(y)
                    .map(|(x, y)| (f64::from(*x), a * f64::from(*x) + b - f64::from(*y)));
                let (da, db) = residuals.fold((0.0, 0.0), |sum, (x, residual)| {
                    (sum.0 + residual * x, sum.1 + residual)
                });
                a -= RATE * 2.0 * da / x.len() as f64;
                b -= RATE * 2.0 * db / x.len() as f64;
            }
        }
        [a as f32, b as f32]
    };
    let mut told = String::new();
    for split in [false, true] {
        let acc = test.new_accelerator(by(DataParallel))?;
        let model = candle_nn::linear(1, 1, acc.var_builder(Weights::Random { seed: 3 })?)?;
        let values = || -> candle_core::Result<[f32; 2]> {
            let scalar = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>();
            let bias = model.bias().map(scalar).transpose()?.unwrap_or_default();
            Ok([scalar(model.weight())?[0], bias[0]])
        };
        let rule = Sgd {
            learning_rate: RATE,
            ..Sgd::default()
        };
        let batch = if split { BATCH * test.ranks() } else { BATCH };
        let loader = DataLoader::new(data()?, batch).split_batches(split);
        let (mut optimizer, mut loader, _) = acc.prepare(rule, loader, ConstantSchedule)?;
        let [a, b] = values()?;
        let expected = fit((f64::from(a), f64::from(b)));
        for _ in 0..EPOCHS {
            for batch in &mut loader {
                let batch = batch?;
                let residual = (model.forward(&batch[0])? - &batch[1])?;
                acc.backward(&residual.sqr()?.mean_all()?)?;
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
        }
        // In the order of the loader, ranks take turns in batches of 8, which are one batch of all together.
        told = expect_near(&format!("a and b, split {split},"), &values()?, &expected, NEAR)?;
    }
    Ok(told)
}
