//! Several models in one loop: a loss that passes through all of them trains the one whose accelerator it is given to.

use super::{bits, build, flat, on_ranks};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{Linear, linear};
use sconce_collectives::Communicator;
use sconce_core::{
    Accelerator, AcceleratorBuilder, FsdpStrategy, FullyShardedOptions, ParameterSet, Sgd, Unit, Weights, WrapPolicy,
    ZeroStage, unit,
};
use std::sync::Arc;

const RATE: f64 = 0.1;
const STEPS: usize = 4;
const ROWS: usize = 12;

/// Rows of inputs [ROWS, 3], of which a rank of `world` takes its own.
fn inputs(rank: usize, world: usize) -> Tensor {
    let values: Vec<f32> = (0..ROWS * 3).map(|i| (i as f32 * 0.7).sin()).collect();
    let all = Tensor::from_vec(values, (ROWS, 3), &Device::Cpu).unwrap();
    all.narrow(0, rank * ROWS / world, ROWS / world).unwrap()
}

/// What the first model tries to make large and the second to make small; both are in the loss.
fn loss(first: &dyn Module, second: &dyn Module, inputs: &Tensor) -> Tensor {
    let middle = first.forward(inputs).unwrap().tanh().unwrap();
    second.forward(&middle).unwrap().sqr().unwrap().mean_all().unwrap()
}

fn build_model(acc: &dyn Accelerator, seed: u64) -> Unit<Linear> {
    let vb = acc.var_builder(Weights::Random { seed }).unwrap();
    unit(vb, "layer", |vb| linear(3, 3, vb)).unwrap()
}

fn train(builder: AcceleratorBuilder, communicator: Arc<dyn Communicator>) -> Vec<f32> {
    let one = build(builder.communicator(communicator));
    let other = one.for_another_model(ParameterSet::none()).unwrap();
    let (first, second) = (build_model(&*one, 1), build_model(&*other, 2));
    let rule = || {
        Box::new(Sgd {
            learning_rate: RATE,
            ..Sgd::default()
        })
    };
    let mut first_optimizer = one.prepare_optimizer(rule()).unwrap();
    let mut second_optimizer = other.prepare_optimizer(rule()).unwrap();
    let inputs = inputs(one.world().rank, one.world().size);
    for _ in 0..STEPS {
        other.backward(&loss(&first, &second, &inputs)).unwrap();
        second_optimizer.step().unwrap();
        second_optimizer.zero_grad().unwrap();
        one.backward(&loss(&first, &second, &inputs).neg().unwrap()).unwrap();
        first_optimizer.step().unwrap();
        first_optimizer.zero_grad().unwrap();
    }
    let values = [&one, &other].map(|acc| acc.engine().tensors(true).unwrap());
    values
        .into_iter()
        .flatten()
        .flat_map(|(_, tensor)| flat(&tensor))
        .collect()
}

/// The same with plain variables and candle's own backward.
fn plain(initial: &[f32]) -> Vec<f32> {
    let variable = |values: &[f32]| Var::from_slice(values, values.len(), &Device::Cpu).unwrap();
    // In the order of names: bias, weight; first model, second model.
    let models = [&initial[..12], &initial[12..]].map(|values| [variable(&values[..3]), variable(&values[3..])]);
    let layer =
        |[bias, weight]: &[Var; 2]| Linear::new(weight.reshape((3, 3)).unwrap(), Some(bias.as_tensor().clone()));
    for _ in 0..STEPS {
        for (trained, sign) in [(1, 1.0), (0, -1.0)] {
            let loss = loss(&layer(&models[0]), &layer(&models[1]), &inputs(0, 1));
            let gradients = (loss * sign).unwrap().backward().unwrap();
            for variable in &models[trained] {
                let gradient = gradients.get(variable).unwrap();
                variable
                    .set(&(variable.as_tensor() - (gradient * RATE).unwrap()).unwrap())
                    .unwrap();
            }
        }
    }
    models.iter().flatten().flat_map(|variable| flat(variable)).collect()
}

#[test]
fn each_model_learns_from_its_own_loss_alone_as_with_plain_variables() {
    let initial = on_ranks(1, |communicator| {
        let one = build(AcceleratorBuilder::default().communicator(communicator));
        let other = one.for_another_model(ParameterSet::none()).unwrap();
        let _models = [build_model(&*one, 1), build_model(&*other, 2)];
        let values = [&one, &other].map(|acc| acc.engine().tensors(true).unwrap());
        Vec::from_iter(values.into_iter().flatten().flat_map(|(_, tensor)| flat(&tensor)))
    });
    let expected = plain(&initial[0]);
    for world in 1..=4 {
        for found in on_ranks(world, |communicator| train(AcceleratorBuilder::default(), communicator)) {
            let pairs = found.iter().zip(&expected);
            let furthest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(furthest < 1e-6, "world {world}: {furthest}");
        }
    }
}

#[test]
fn sharded_models_come_to_the_same_bits_also_where_they_compute_again() {
    for world in 1..=3 {
        let expected = on_ranks(world, |communicator| {
            bits(&train(AcceleratorBuilder::default(), communicator))
        });
        let zero = || {
            AcceleratorBuilder::default().strategy(ZeroStage::Three {
                persistence_threshold: 0,
            })
        };
        assert_eq!(
            on_ranks(world, |communicator| bits(&train(zero(), communicator))),
            expected
        );
        let fsdp = || {
            AcceleratorBuilder::default().fully_sharded(FullyShardedOptions {
                sharding_strategy: Some(FsdpStrategy::FullShard),
                auto_wrap_policy: Some(WrapPolicy::TransformerBased { classes: Vec::new() }),
                activation_checkpointing: Some(true),
                ..FullyShardedOptions::default()
            })
        };
        assert_eq!(
            on_ranks(world, |communicator| bits(&train(fsdp(), communicator))),
            expected
        );
    }
}

#[test]
fn a_loss_given_to_the_accelerator_of_a_model_it_does_not_reach_is_an_error_that_names_its_parameters() {
    let acc = build(AcceleratorBuilder::default());
    let other = acc.for_another_model(ParameterSet::none()).unwrap();
    let (first, _second) = (build_model(&*acc, 1), build_model(&*other, 2));
    acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
    other.prepare_optimizer(Box::new(Sgd::default())).unwrap();
    let loss = first
        .forward(&Tensor::ones((1, 3), DType::F32, &Device::Cpu).unwrap())
        .unwrap();
    let error = other.backward(&loss.sum_all().unwrap()).unwrap_err().to_string();
    assert!(
        error.contains("layer.weight") && error.contains("layer.bias"),
        "{error}"
    );
}
