//! Losses that are scaled before the backward, and gradients that are unscaled by the same number where they are used.

use super::loss_scale::{cases, deepspeed, numbers, overflows, torch};
use super::oracle::{STEPS, new_model};
use super::skipped_steps::{STRATEGIES, share};
use super::{bits, deviation, engine, flat, linear_loss, on_ranks, parameters, sgd, values};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Init, VarBuilder};
use sconce_zero::{
    AdamW, Engine, EngineOptions, Error, HysteresisScaling, LossScaling, Norm, Sgd, Stepped, Weights, unit,
};

/// Doubles with every step but the first.
const GROWING: LossScaling = LossScaling::Hysteresis(HysteresisScaling {
    initial_scale: 1024.0,
    window: 1,
    hysteresis: 1,
    consecutive_hysteresis: false,
    minimum: 1.0,
    fail_at_minimum: true,
});

fn options(scaling: Option<LossScaling>) -> EngineOptions {
    EngineOptions {
        loss_scaling: scaling,
        ..EngineOptions::default()
    }
}

/// An engine of one rank with one parameter of two elements and plain gradient descent.
fn pair(scaling: Option<LossScaling>) -> (Engine, Tensor) {
    let engine = engine(&sconce_collectives::single(), options(scaling));
    let [p] = parameters(&engine, [("p", 2)]);
    engine.set_optimizer(sgd()).unwrap();
    (engine, p)
}

/// Norms of every kind before and after clipping, and all values, of every step.
type Run = Vec<(Vec<u64>, Vec<u32>)>;

fn train(world: usize, micro_batches: usize, options: impl Fn() -> EngineOptions + Sync) -> Vec<Run> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, options());
        let model = new_model(&engine);
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        let mut run = Vec::new();
        for step in 0..STEPS {
            for micro in 0..micro_batches {
                let loss = share(&communicator, |rows, targets| model.loss(rows, targets), step + micro);
                engine.backward(&loss, micro + 1 == micro_batches).unwrap();
                // What comes after is added to clipped gradients.
                engine.clip_grad_norm(0.3).unwrap();
            }
            let norm = |norm| engine.grad_norm_of(norm).unwrap().to_bits();
            let mut norms = vec![norm(Norm::L1), norm(Norm::L2), norm(Norm::Infinity)];
            engine.clip_grad_value(0.004).unwrap();
            norms.extend([norm(Norm::L1), norm(Norm::L2), norm(Norm::Infinity)]);
            norms.push(engine.clip_grad_norm(0.01).unwrap().to_bits());
            let scale = engine.loss_scale();
            assert_eq!(engine.step(1e-2).unwrap(), Stepped::Updated);
            if engine.loss_scale_state().is_some() {
                assert_eq!(engine.loss_scale(), if step == 0 { scale } else { 2.0 * scale });
            }
            engine.zero_grad();
            run.push((norms, bits(&values(&engine))));
        }
        run
    })
}

#[test]
fn scales_that_are_powers_of_two_change_no_bit_of_norms_and_parameters_also_when_they_grow() {
    for world in 1..=3 {
        for micro_batches in [1, 2] {
            for strategy in STRATEGIES {
                let with = |scaling: Option<LossScaling>| EngineOptions {
                    strategy: strategy(),
                    ..options(scaling)
                };
                let expected = train(world, micro_batches, || with(None));
                let found = train(world, micro_batches, || with(Some(GROWING)));
                let name = strategy().name().to_owned();
                assert!(
                    found == expected,
                    "{name}, world {world}, {micro_batches} micro-batches"
                );
            }
        }
    }
}

#[test]
fn a_static_scale_never_changes_and_any_scale_is_divided_out_within_rounding() {
    for scale in [1.0, 1000.0, 0.1, 12345.678, 1e30, 1e-30] {
        let (engine, p) = pair(Some(LossScaling::Static(scale)));
        let before = flat(&p);
        for step in 1..=3 {
            engine.backward(&linear_loss(&p, &[0.3, -0.4]), true).unwrap();
            assert!((engine.grad_norm().unwrap() - 0.5).abs() < 1e-7);
            assert_eq!(engine.step(1.0).unwrap(), Stepped::Updated);
            engine.zero_grad();
            let moved = f64::from(step);
            let expected = [f64::from(before[0]) - 0.3 * moved, f64::from(before[1]) + 0.4 * moved];
            assert!(deviation(&flat(&p), &expected) < 1e-6, "scale {scale}");
        }
        engine.backward(&linear_loss(&p, &[f32::NAN, 0.0]), true).unwrap();
        assert_eq!(engine.step(1.0).unwrap(), Stepped::Skipped);
        assert_eq!(engine.loss_scale(), f64::from(scale as f32));
    }
}

#[test]
fn gradients_keep_the_scale_of_their_window_when_a_step_raises_it() {
    let (engine, p) = pair(Some(GROWING));
    let g = linear_loss(&p, &[3.0, 4.0]);
    for total in 1..=4u32 {
        engine.backward(&g, true).unwrap();
        let norm = engine.grad_norm().unwrap();
        assert_eq!(norm, 5.0 * f64::from(total));
        let before = flat(&p);
        engine.step(2f64.powi(-20)).unwrap();
        let moved = f64::from(total) * 2f64.powi(-20);
        let expected = [f64::from(before[0]) - 3.0 * moved, f64::from(before[1]) - 4.0 * moved];
        assert!(deviation(&flat(&p), &expected) < 1e-7);
        // Held gradients are shown as before although the scale has doubled.
        assert_eq!(engine.grad_norm().unwrap(), norm);
    }
    assert_eq!(engine.loss_scale(), 8192.0);
    engine.zero_grad();
    engine.backward(&g, true).unwrap();
    assert_eq!(engine.grad_norm().unwrap(), 5.0);
}

#[test]
fn the_engine_follows_the_peers_traces_of_scales_and_steps_exactly_where_nothing_overflows() {
    let traces = |peer, scaling: fn(&serde_json::Value) -> LossScaling| {
        let with_scaling = |case: serde_json::Value| (scaling(&case), case);
        cases(peer).into_iter().map(with_scaling).collect::<Vec<_>>()
    };
    for (scaling, case) in [traces("deepspeed", deepspeed), traces("torch", torch)].concat() {
        let (engine, p) = pair(Some(scaling));
        // Far from overflow at every scale of the traces.
        let gradient = 2f32.powi(-20);
        let expected = numbers(&case, "scale_after");
        let mut moved = 0.0;
        let initial = flat(&p);
        for (update, overflow) in overflows(&case).into_iter().enumerate() {
            let first = if overflow { f32::INFINITY } else { gradient };
            engine.backward(&linear_loss(&p, &[first, gradient]), true).unwrap();
            let stepped = engine.step(2f64.powi(20));
            engine.zero_grad();
            let Some(expected) = expected.get(update) else {
                assert_eq!(case["fails"], true);
                assert!(matches!(stepped, Err(Error::LossScaleAtMinimum { .. })));
                continue;
            };
            assert_eq!(stepped.unwrap() == Stepped::Skipped, overflow);
            assert_eq!(engine.loss_scale(), f64::from(*expected as f32), "update {update}");
            moved += f64::from(u8::from(!overflow));
            let expected: Vec<f64> = initial.iter().map(|p| f64::from(*p) - moved).collect();
            assert!(deviation(&flat(&p), &expected) < 1e-6, "update {update}");
        }
    }
}

#[test]
fn a_restored_scale_holds_from_the_next_window_on() {
    let (engine, p) = pair(Some(GROWING));
    let (other, _) = pair(Some(GROWING));
    for _ in 0..3 {
        engine.backward(&linear_loss(&p, &[3.0, 4.0]), true).unwrap();
        engine.step(0.0).unwrap();
        engine.zero_grad();
    }
    let state = engine.loss_scale_state().unwrap();
    assert_eq!(state.scale, 4096.0);
    other.restore_loss_scale(state).unwrap();
    assert_eq!(other.loss_scale_state(), Some(state));
    engine.backward(&linear_loss(&p, &[3.0, 4.0]), true).unwrap();
    engine
        .restore_loss_scale(sconce_zero::LossScaleState { scale: 16.0, ..state })
        .unwrap();
    assert_eq!(engine.grad_norm().unwrap(), 5.0);
    engine.backward(&linear_loss(&p, &[3.0, 4.0]), true).unwrap();
    assert_eq!(engine.grad_norm().unwrap(), 10.0);
}

#[test]
fn a_scale_out_of_range_is_refused_when_the_engine_is_made() {
    for scale in [0.0, -1.0, f64::NAN, 1e39, 1e-42] {
        let error = Engine::new(sconce_collectives::single(), options(Some(LossScaling::Static(scale)))).unwrap_err();
        assert!(error.to_string().contains("loss_scale"), "{error}");
    }
}

/// Two layers with odd sizes in `dtype`; their mean output, in f32, times `factor`.
fn small_model_loss(engine: &Engine, dtype: DType, factor: f64) -> Tensor {
    let vb = engine
        .var_builder(Weights::Random { seed: 5 }, dtype, &Device::Cpu)
        .unwrap();
    // A few bits only, so that f16 holds the same values.
    let layer = |vb: VarBuilder<'_>, inputs, outputs| {
        let weight = vb.get_with_hints((outputs, inputs), "weight", Init::Const(0.125))?;
        Ok(candle_nn::Linear::new(
            weight,
            Some(vb.get_with_hints(outputs, "bias", Init::Const(0.5))?),
        ))
    };
    let first = unit(vb.clone(), "first", |vb| layer(vb, 7, 5)).unwrap();
    let second = unit(vb, "second", |vb| layer(vb, 5, 3)).unwrap();
    let inputs: Vec<f32> = (0..28).map(|i| (i % 9) as f32 * 0.25 - 1.0).collect();
    let inputs = Tensor::from_vec(inputs, (4, 7), &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap();
    let hidden = first.forward(&inputs).unwrap().relu().unwrap();
    let output = second.forward(&hidden).unwrap().to_dtype(DType::F32).unwrap();
    (output.mean_all().unwrap() * factor).unwrap()
}

#[test]
fn gradients_that_vanish_in_f16_do_not_when_the_loss_is_scaled() {
    // Below half of f16's least number, 2^-24, after the mean over 12 outputs.
    let factor = 2f64.powi(-24);
    let train = |world: usize, dtype: DType, options: &(dyn Fn() -> EngineOptions + Sync)| {
        on_ranks(world, |communicator| {
            let engine = engine(&communicator, options());
            let loss = small_model_loss(&engine, dtype, factor);
            engine.set_optimizer(Box::new(Sgd::default())).unwrap();
            engine.backward(&loss, true).unwrap();
            let norm = engine.grad_norm().unwrap();
            assert_eq!(engine.step(2f64.powi(22)).unwrap(), Stepped::Updated);
            let tensors = engine.tensors(true).unwrap();
            let wide = |(_, tensor): &(String, Tensor)| flat(&tensor.to_dtype(DType::F32).unwrap());
            (norm, tensors.iter().flat_map(wide).collect::<Vec<_>>())
        })
    };
    let scaling = LossScaling::Static(65536.0);
    let reference = train(1, DType::F32, &|| options(None)).remove(0);
    let expected: Vec<f64> = reference.1.iter().map(|value| f64::from(*value)).collect();
    for strategy in STRATEGIES {
        for world in 1..=2 {
            let with = |scaling: Option<LossScaling>| EngineOptions {
                strategy: strategy(),
                ..options(scaling)
            };
            let name = strategy().name().to_owned();
            for (norm, parameters) in train(world, DType::F16, &|| with(Some(scaling.clone()))) {
                assert!(
                    (norm / reference.0 - 1.0).abs() < 1e-2,
                    "{name}: {norm}, {}",
                    reference.0
                );
                let deviation = deviation(&parameters, &expected);
                assert!(deviation < 1e-3, "{name}, world {world}: {deviation}");
            }
            for (norm, _) in train(world, DType::F16, &|| with(None)) {
                assert_eq!(norm, 0.0, "{name}, world {world}");
            }
        }
    }
}

#[test]
fn a_loss_of_16_bits_is_scaled_in_f32_and_one_of_f16_makes_the_scale_settle_below_its_range() {
    for (dtype, skipped) in [(DType::F16, 1), (DType::BF16, 0), (DType::F64, 0)] {
        let scaling = LossScaling::Hysteresis(HysteresisScaling {
            hysteresis: 1,
            ..HysteresisScaling::default()
        });
        let (engine, p) = pair(Some(scaling));
        let mut norms = Vec::new();
        for _ in 0..3 {
            // 1000 * 2^16 is beyond f16, and so is the scale itself.
            let loss = (linear_loss(&p, &[3.0, 4.0]) + 1000.0)
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            engine.backward(&loss, true).unwrap();
            norms.push(engine.grad_norm().unwrap());
            engine.step(0.0).unwrap();
            engine.zero_grad();
        }
        assert_eq!(engine.skipped_steps(), skipped, "{dtype:?}");
        assert!(norms[skipped as usize..].iter().all(|norm| *norm == 5.0), "{norms:?}");
    }
}
