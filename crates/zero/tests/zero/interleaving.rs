//! Forwards and backwards in any order: evaluations anywhere, several losses, several backwards to a step.

use super::parity::{SHARDED, WIDTH, assert_sharding_changes_nothing, builder, mean_square, rows, weight};
use super::{bits, engine, flat, on_ranks, values};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use sconce_zero::{AdamW, DataParallel, Engine, EngineOptions, ParameterSet, Sgd, Unit, Weights, ZeroStage, unit};

/// Four units, the last of which is frozen in part.
struct Chain {
    layers: Vec<Unit<Linear>>,
    head: Unit<(Tensor, Tensor)>,
}

impl Chain {
    fn new(vb: &VarBuilder<'_>) -> Self {
        let layer = |number: usize| unit(vb.pp("layers"), &number.to_string(), |vb| linear(WIDTH, WIDTH, vb)).unwrap();
        let head = |vb: VarBuilder<'_>| Ok((weight(&vb, (WIDTH, 3), "base")?, weight(&vb, 3, "offset")?));
        Self {
            layers: (0..3).map(layer).collect(),
            head: unit(vb.clone(), "head", head).unwrap(),
        }
    }

    fn loss(&self, engine: &Engine, step: usize) -> Tensor {
        let mut hidden = rows(step, engine.communicator().rank());
        for layer in &self.layers {
            hidden = layer.forward(&hidden).unwrap().tanh().unwrap();
        }
        let output = self.head.run(hidden, |(base, offset), hidden| {
            hidden.matmul(base)?.broadcast_add(offset)
        });
        mean_square(&output.unwrap()).unwrap()
    }
}

fn options() -> EngineOptions {
    EngineOptions {
        frozen: ParameterSet::matching(|parameter| parameter.name.ends_with("base")),
        ..EngineOptions::default()
    }
}

/// Trains for five steps; `step` does the forwards and backwards of one and returns what it computes.
fn check(step: impl Fn(&Engine, &Chain, usize) -> Vec<f32> + Sync) {
    // Stage 2 adds micro-batches up in the same order.
    assert_sharding_changes_nothing(
        || Box::new(ZeroStage::Two),
        options,
        |engine| {
            let chain = Chain::new(&builder(engine));
            engine.set_optimizer(Box::new(AdamW::default())).unwrap();
            let mut trace = Vec::new();
            for number in 0..5 {
                trace.extend(bits(&step(engine, &chain, number)));
                engine.clip_grad_norm(0.1).unwrap();
                engine.step(0.01).unwrap();
                assert_eq!(engine.memory().gathered, 0);
                engine.zero_grad();
            }
            trace.extend(bits(&values(engine)));
            trace
        },
    );
}

#[test]
fn two_losses_in_one_backward() {
    check(|engine, chain, step| {
        let loss = (chain.loss(engine, step) + chain.loss(engine, step + 10)).unwrap();
        engine.backward(&loss, true).unwrap();
        flat(&loss)
    });
}

#[test]
fn several_backwards_before_a_step_of_which_the_last_synchronises() {
    check(|engine, chain, step| {
        let micro = |number: usize| {
            let loss = chain.loss(engine, 3 * step + number);
            engine.backward(&loss, number == 2).unwrap();
            flat(&loss)
        };
        (0..3).flat_map(micro).collect()
    });
}

#[test]
fn all_forwards_before_all_backwards() {
    check(|engine, chain, step| {
        let losses: Vec<_> = (0..3).map(|number| chain.loss(engine, 3 * step + number)).collect();
        let in_reverse = losses.iter().enumerate().rev();
        in_reverse.for_each(|(number, loss)| engine.backward(loss, number == 0).unwrap());
        losses.iter().flat_map(flat).collect()
    });
}

#[test]
fn evaluations_between_steps_and_forwards_without_a_backward() {
    check(|engine, chain, step| {
        // None, one, two, none, one.
        let mut found: Vec<_> = (0..step % 3).flat_map(|n| flat(&chain.loss(engine, 20 + n))).collect();
        let loss = chain.loss(engine, step);
        engine.backward(&loss, true).unwrap();
        found.extend(flat(&loss));
        found
    });
}

#[test]
fn evaluations_between_a_forward_and_its_backward_and_before_the_step() {
    check(|engine, chain, step| {
        let loss = chain.loss(engine, step);
        let mut found: Vec<_> = (0..step % 3).flat_map(|n| flat(&chain.loss(engine, 20 + n))).collect();
        engine.backward(&loss, true).unwrap();
        found.extend(flat(&chain.loss(engine, 30)));
        found.extend(flat(&loss));
        found
    });
}

#[test]
fn an_evaluation_of_a_part_of_the_model() {
    check(|engine, chain, step| {
        let input = rows(step, engine.communicator().rank());
        let mut found = flat(&chain.layers[1].forward(&input).unwrap());
        let loss = chain.loss(engine, step);
        found.extend(flat(&chain.layers[2].forward(&input).unwrap()));
        engine.backward(&loss, true).unwrap();
        found
    });
}

#[test]
fn models_whose_units_run_in_an_order_that_changes_from_step_to_step() {
    check(|engine, chain, step| {
        let mut hidden = rows(step, engine.communicator().rank());
        let orders = [[0, 1, 2], [0, 1, 2], [0, 2, 1], [2, 1, 0], [2, 1, 0]];
        for number in orders[step] {
            hidden = chain.layers[number].forward(&hidden).unwrap().tanh().unwrap();
        }
        let output = chain.head.run(hidden, |(base, offset), hidden| {
            hidden.matmul(base)?.broadcast_add(offset)
        });
        let loss = mean_square(&output.unwrap()).unwrap();
        engine.backward(&loss, true).unwrap();
        flat(&loss)
    });
}

#[test]
fn parameters_can_be_read_anywhere_without_a_change() {
    check(|engine, chain, step| {
        let before = values(engine);
        let loss = chain.loss(engine, step);
        assert_eq!(bits(&values(engine)), bits(&before));
        engine.backward(&loss, true).unwrap();
        assert_eq!(bits(&values(engine)), bits(&before));
        before
    });
}

#[test]
fn half_precision_parameters_with_their_f32_masters() {
    for dtype in [DType::BF16, DType::F16] {
        assert_sharding_changes_nothing(
            || Box::new(DataParallel),
            options,
            |engine| {
                let vb = engine
                    .var_builder(Weights::Random { seed: 3 }, dtype, &Device::Cpu)
                    .unwrap();
                let layer = |name: &str| unit(vb.clone(), name, |vb| linear(WIDTH, WIDTH, vb)).unwrap();
                let layers = [layer("first"), layer("base"), layer("last")];
                engine.set_optimizer(Box::new(Sgd::default())).unwrap();
                let mut trace = Vec::new();
                for step in 0..4 {
                    let mut hidden = rows(step, engine.communicator().rank()).to_dtype(dtype).unwrap();
                    for layer in &layers {
                        hidden = layer.forward(&hidden).unwrap().tanh().unwrap();
                    }
                    let loss = mean_square(&hidden.to_dtype(DType::F32).unwrap()).unwrap();
                    engine.backward(&loss, true).unwrap();
                    engine.step(0.003).unwrap();
                    engine.zero_grad();
                    trace.extend(bits(&flat(&loss)));
                }
                let tensors = engine.tensors(true).unwrap();
                let wide = |tensor: &Tensor| bits(&flat(&tensor.to_dtype(DType::F32).unwrap()));
                trace.extend(tensors.iter().flat_map(|(_, tensor)| wide(tensor)));
                trace
            },
        );
    }
}

#[test]
fn masters_of_sharded_parameters_are_shares_and_frozen_ones_have_none() {
    const ELEMENTS: u64 = (64 * 64) as u64;
    on_ranks(4, |communicator| {
        let options = EngineOptions {
            strategy: Box::new(SHARDED),
            ..options()
        };
        let engine = engine(&communicator, options);
        let vb = engine
            .var_builder(Weights::Random { seed: 3 }, DType::BF16, &Device::Cpu)
            .unwrap();
        unit(vb.clone(), "trained", |vb| weight(&vb, (64, 64), "weight")).unwrap();
        unit(vb, "frozen", |vb| weight(&vb, (64, 64), "base")).unwrap();
        engine.set_optimizer(Box::new(Sgd::default())).unwrap();
        let memory = engine.memory();
        assert_eq!(memory.parameters, 2 * 2 * ELEMENTS / 4);
        assert_eq!(memory.masters, 4 * ELEMENTS / 4);
    });
}
