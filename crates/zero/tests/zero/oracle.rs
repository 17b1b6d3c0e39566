//! Training equals training of plain candle variables: bit for bit on one rank, within f32 rounding on several.

use super::{bits, buckets, engine, flat, on_ranks, values};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Init, Linear, Module, VarBuilder, linear};
use sconce_zero::{Engine, EngineOptions, Sgd, Unit, Weights, unit};
use std::collections::HashMap;

pub(crate) const ROWS: usize = 24;
pub(crate) const INPUTS: usize = 7;
pub(crate) const STEPS: usize = 6;
const RATE: f64 = 0.3;

/// Odd sizes, and one weight at both ends.
pub(crate) struct Model {
    input: Unit<Tensor>,
    up: Unit<Linear>,
    down: Unit<Linear>,
    output: Unit<Tensor>,
}

impl Model {
    fn new(vb: VarBuilder<'_>) -> Self {
        let tied =
            |vb: VarBuilder<'_>| vb.get_with_hints((INPUTS, 13), "weight", Init::Randn { mean: 0.0, stdev: 0.4 });
        Self {
            input: unit(vb.clone(), "tied", tied).unwrap(),
            up: unit(vb.clone(), "up", |vb| linear(13, 17, vb)).unwrap(),
            down: unit(vb.clone(), "down", |vb| linear(17, 13, vb)).unwrap(),
            output: unit(vb, "tied", tied).unwrap(),
        }
    }

    pub(crate) fn loss(&self, rows: &Tensor, targets: &Tensor) -> Tensor {
        let input = self.input.run(rows.clone(), |tied, rows| rows.matmul(tied)?.gelu());
        let hidden = input.unwrap();
        let hidden = self.up.forward(&hidden).unwrap().gelu().unwrap();
        let hidden = self.down.forward(&hidden).unwrap();
        let output = self.output.run(hidden, |tied, hidden| hidden.matmul(&tied.t()?));
        let output = output.unwrap();
        (output - targets).unwrap().sqr().unwrap().mean_all().unwrap()
    }
}

/// Rows and targets of a step.
pub(crate) fn batch(step: usize) -> (Tensor, Tensor) {
    let wave = |factor: f32| {
        let values: Vec<f32> = (0..ROWS * INPUTS)
            .map(|i| (factor * (i + 31 * step) as f32).sin())
            .collect();
        Tensor::from_vec(values, (ROWS, INPUTS), &Device::Cpu).unwrap()
    };
    (wave(0.7), wave(1.3))
}

/// What a run is compared by.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Trace {
    pub(crate) losses: Vec<u32>,
    pub(crate) norms: Vec<u64>,
    pub(crate) parameters: Vec<u32>,
}

impl Trace {
    fn losses(&self) -> Vec<f64> {
        self.losses
            .iter()
            .map(|loss| f64::from(f32::from_bits(*loss)))
            .collect()
    }

    fn norms(&self) -> Vec<f64> {
        self.norms.iter().map(|norm| f64::from_bits(*norm)).collect()
    }

    fn parameters(&self) -> Vec<f64> {
        self.parameters
            .iter()
            .map(|value| f64::from(f32::from_bits(*value)))
            .collect()
    }
}

pub(crate) fn new_model(engine: &Engine) -> Model {
    model_of_dtype(engine, DType::F32)
}

pub(crate) fn model_of_dtype(engine: &Engine, dtype: DType) -> Model {
    let vb = engine.var_builder(Weights::Random { seed: 3 }, dtype, &Device::Cpu);
    Model::new(vb.unwrap())
}

/// Makes the model of plain candle variables, by name, with the values that [`new_model`] has.
pub(crate) fn plain_model() -> (Vec<(String, Var)>, Model) {
    let source = engine(&sconce_collectives::single(), EngineOptions::default());
    new_model(&source);
    let variables: Vec<(String, Var)> = source
        .tensors(true)
        .unwrap()
        .iter()
        .map(|(name, tensor)| (name.clone(), Var::from_tensor(tensor).unwrap()))
        .collect();
    let tensors: HashMap<String, Tensor> = variables
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()))
        .collect();
    let model = Model::new(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu));
    (variables, model)
}

/// Trains variables with candle's own backward on whole batches.
fn train_plain() -> Trace {
    let (variables, model) = plain_model();
    let mut trace = Trace {
        losses: Vec::new(),
        norms: Vec::new(),
        parameters: Vec::new(),
    };
    for step in 0..STEPS {
        let (rows, targets) = batch(step);
        let loss = model.loss(&rows, &targets);
        let gradients = loss.backward().unwrap();
        let mut squares = 0.0;
        for (name, variable) in &variables {
            let gradient = gradients
                .get(variable)
                .unwrap_or_else(|| panic!("{name} has a gradient"));
            squares += flat(gradient).iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
            variable
                .set(&(variable.as_tensor() - (gradient * RATE).unwrap()).unwrap())
                .unwrap();
        }
        trace.losses.push(loss.to_scalar::<f32>().unwrap().to_bits());
        trace.norms.push(squares.sqrt().to_bits());
    }
    trace.parameters = variables
        .iter()
        .flat_map(|(_, variable)| bits(&flat(variable)))
        .collect();
    trace
}

/// Trains through the engine, each rank on its share of the rows.
fn train_managed(world: usize, options: impl Fn() -> EngineOptions + Sync) -> Vec<Trace> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, options());
        let model = new_model(&engine);
        engine.set_optimizer(Box::new(Sgd::default())).unwrap();
        let mut trace = Trace {
            losses: Vec::new(),
            norms: Vec::new(),
            parameters: Vec::new(),
        };
        for step in 0..STEPS {
            let (rows, targets) = batch(step);
            let share = ROWS / world;
            let own = |tensor: Tensor| tensor.narrow(0, communicator.rank() * share, share).unwrap();
            let loss = model.loss(&own(rows), &own(targets));
            engine.backward(&loss, true).unwrap();
            trace.norms.push(engine.grad_norm().unwrap().to_bits());
            engine.step(RATE).unwrap();
            engine.zero_grad();
            let mut mean = [loss.to_scalar::<f32>().unwrap()];
            communicator
                .all_reduce(&mut mean, sconce_collectives::ReduceOp::Mean)
                .unwrap();
            trace.losses.push(mean[0].to_bits());
        }
        trace.parameters = bits(&values(&engine));
        trace
    })
}

/// Returns the largest relative deviation of losses, of norms and of parameters.
pub(crate) fn deviations(found: &Trace, expected: &Trace) -> [f64; 3] {
    let largest = |found: Vec<f64>, expected: Vec<f64>, floor: f64| {
        let relative = |(f, e): (&f64, &f64)| (f - e).abs() / (floor + e.abs());
        found.iter().zip(&expected).map(relative).fold(0.0, f64::max)
    };
    [
        largest(found.losses(), expected.losses(), 0.0),
        largest(found.norms(), expected.norms(), 0.0),
        largest(found.parameters(), expected.parameters(), 1.0),
    ]
}

#[test]
fn one_rank_gives_the_bits_of_plain_variables() {
    let plain = train_plain();
    let managed = train_managed(1, EngineOptions::default);
    assert_eq!(managed[0].losses, plain.losses);
    assert_eq!(managed[0].parameters, plain.parameters);
    // The norm's squares are summed in another order.
    assert!(deviations(&managed[0], &plain)[1] < 1e-12);
}

#[test]
fn several_ranks_equal_one_within_rounding_and_each_other_bit_for_bit() {
    let plain = train_plain();
    for world in 2..=4 {
        let ranks = train_managed(world, EngineOptions::default);
        let found = deviations(&ranks[0], &plain);
        println!("world {world}: losses, norms, parameters deviate by {found:?}");
        assert!(
            found.iter().all(|deviation| *deviation < 2e-6),
            "world {world}: {found:?}"
        );
        for rank in &ranks[1..] {
            assert_eq!(rank, &ranks[0], "world {world}");
        }
    }
}

#[test]
fn training_goes_somewhere() {
    let plain = train_plain();
    let losses = plain.losses();
    assert!(losses[STEPS - 1] < 0.9 * losses[0], "{losses:?}");
}

#[test]
fn two_runs_give_the_same_bits() {
    for world in 1..=4 {
        let run = || train_managed(world, EngineOptions::default);
        assert_eq!(run(), run(), "world {world}");
    }
}

#[test]
fn bucket_sizes_do_not_change_a_bit_of_losses_and_parameters() {
    for world in 1..=4 {
        let reference = train_managed(world, EngineOptions::default);
        // One parameter a bucket; a few a bucket; the first alone, the others together.
        for (first, others) in [(0, 0), (1, 1), (600, 1000), (1, 1 << 20)] {
            let found = train_managed(world, || buckets(first, others));
            for (found, reference) in found.iter().zip(&reference) {
                assert_eq!(
                    found.losses, reference.losses,
                    "world {world}, buckets {first} {others}"
                );
                assert_eq!(
                    found.parameters, reference.parameters,
                    "world {world}, buckets {first} {others}"
                );
            }
        }
    }
}

#[test]
fn a_parameter_asked_for_twice_is_one_parameter() {
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let vb = engine
        .var_builder(Weights::Random { seed: 3 }, DType::F32, &Device::Cpu)
        .unwrap();
    let init = Init::Randn { mean: 0.0, stdev: 1.0 };
    let one = vb.pp("head").get_with_hints((2, 3), "weight", init).unwrap();
    let two = vb.get_with_hints((2, 3), "head.weight", init).unwrap();
    assert_eq!(one.id(), two.id());
    assert_eq!(engine.parameters().len(), 1);
}
