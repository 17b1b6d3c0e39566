//! The training loop of the crate's front page, on 1 to 4 ranks, against a reference written out in f64.

use super::{accelerator, bits, build, deviation, flat, on_ranks};
use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module};
use sconce_collectives::Communicator;
use sconce_core::{
    Accelerator, AcceleratorBuilder, AdamW, DataLoader, LinearSchedule, Schedule, Sgd, TensorDataset, Weights,
};
use std::sync::Arc;

pub(super) const FEATURES: usize = 3;

/// Rows of features and a target each.
pub(super) fn dataset(rows: usize) -> (Vec<[f32; FEATURES]>, Vec<f32>, TensorDataset) {
    let features: Vec<[f32; FEATURES]> = (0..rows)
        .map(|row| std::array::from_fn(|i| ((row * FEATURES + i) as f32 * 0.7).sin()))
        .collect();
    let targets: Vec<f32> = (0..rows).map(|row| (row as f32 * 1.1).cos()).collect();
    let x = Tensor::from_vec(features.concat(), (rows, FEATURES), &Device::Cpu).unwrap();
    let y = Tensor::from_vec(targets.clone(), (rows, 1), &Device::Cpu).unwrap();
    (features, targets, TensorDataset::new(vec![x, y]).unwrap())
}

pub(super) fn model(acc: &dyn Accelerator) -> Linear {
    candle_nn::linear(FEATURES, 1, acc.var_builder(Weights::Random { seed: 4 }).unwrap()).unwrap()
}

/// Mean squared error.
pub(super) fn loss(model: &Linear, batch: &[Tensor]) -> Tensor {
    let output = model.forward(&batch[0]).unwrap();
    (output - &batch[1]).unwrap().sqr().unwrap().mean_all().unwrap()
}

/// Weight and bias.
pub(super) fn parameters(model: &Linear) -> Vec<f32> {
    [flat(model.weight()), flat(model.bias().unwrap())].concat()
}

/// The gradient of the mean squared error over `rows`, by hand.
pub(super) fn gradient(parameters: &[f64], features: &[[f32; FEATURES]], targets: &[f32], rows: &[usize]) -> Vec<f64> {
    let mut sum = vec![0.0; FEATURES + 1];
    for row in rows {
        let x: Vec<f64> = features[*row].iter().map(|x| f64::from(*x)).collect();
        let output: f64 = x.iter().zip(parameters).map(|(x, w)| x * w).sum::<f64>() + parameters[FEATURES];
        let outer = 2.0 * (output - f64::from(targets[*row])) / rows.len() as f64;
        x.iter()
            .chain([&1.0])
            .zip(&mut sum)
            .for_each(|(x, sum)| *sum += outer * x);
    }
    sum
}

const ROWS: usize = 24;
const TOGETHER: usize = 12;
const EPOCHS: usize = 3;
const MAX_NORM: f64 = 0.5;
const SCHEDULE: LinearSchedule = LinearSchedule {
    warmup_steps: 2,
    total_steps: 6,
};

/// What a rank saw: norms before clipping, rates, final parameters.
type Seen = (Vec<f64>, Vec<f64>, Vec<f32>);

fn train(communicator: Arc<dyn Communicator>) -> Seen {
    let acc = accelerator(communicator);
    let model = model(&*acc);
    let loader = DataLoader::new(dataset(ROWS).2, TOGETHER / acc.world().size);
    let rule = AdamW {
        learning_rate: 0.1,
        weight_decay: 0.1,
        ..AdamW::default()
    };
    let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rule, loader, SCHEDULE).unwrap();
    let (mut norms, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..EPOCHS {
        for batch in &mut loader {
            acc.backward(&loss(&model, &batch.unwrap())).unwrap();
            norms.push(acc.clip_grad_norm(MAX_NORM).unwrap().expect("every step synchronises"));
            rates.push(optimizer.learning_rate());
            optimizer.step().unwrap();
            scheduler.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    (norms, rates, parameters(&model))
}

/// The same in f64: AdamW as its paper has it, clipping, linear schedule.
fn reference(initial: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let (features, targets, _) = dataset(ROWS);
    let mut parameters: Vec<f64> = initial.iter().map(|p| f64::from(*p)).collect();
    let (mut m, mut v) = (vec![0.0; parameters.len()], vec![0.0; parameters.len()]);
    let mut norms = Vec::new();
    for step in 0..EPOCHS * ROWS / TOGETHER {
        let first = step * TOGETHER % ROWS;
        let rows: Vec<usize> = (first..first + TOGETHER).collect();
        let gradient = gradient(&parameters, &features, &targets, &rows);
        let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        norms.push(norm);
        let rate = SCHEDULE.learning_rate(0.1, step as u64);
        let t = step as i32 + 1;
        for i in 0..parameters.len() {
            let g = gradient[i] * (MAX_NORM / (norm + 1e-6)).min(1.0);
            parameters[i] *= 1.0 - rate * 0.1;
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.999 * v[i] + 0.001 * g * g;
            let (m_hat, v_hat) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.999f64.powi(t)));
            parameters[i] -= rate * m_hat / (v_hat.sqrt() + 1e-8);
        }
    }
    (norms, parameters)
}

#[test]
fn the_loop_of_the_front_page_trains_as_written_out_on_any_number_of_ranks() {
    let initial = on_ranks(1, |communicator| parameters(&model(&*accelerator(communicator)))).remove(0);
    let (norms, expected) = reference(&initial);
    for world in 1..=4 {
        let ranks = on_ranks(world, train);
        for (found_norms, rates, found) in &ranks {
            let worst = deviation(found, &expected);
            println!("world {world}: parameters deviate by {worst:.2e}");
            assert!(worst < 2e-6, "world {world}: {worst}");
            for (found, expected) in found_norms.iter().zip(&norms) {
                assert!(
                    (found / expected - 1.0).abs() < 1e-5,
                    "world {world}: {found}, expected {expected}"
                );
            }
            assert_eq!(found_norms.len(), norms.len());
            let expected: Vec<f64> = (0..6).map(|step| SCHEDULE.learning_rate(0.1, step)).collect();
            assert_eq!(*rates, expected);
            assert_eq!(bits(found), bits(&ranks[0].2), "world {world}");
        }
    }
    // The test shows something only if clipping took place, and not in every step.
    assert!(norms.iter().any(|norm| *norm > MAX_NORM));
}

#[test]
fn state_dict_has_every_parameter_by_name_with_its_current_values() {
    on_ranks(2, |communicator| {
        let acc = accelerator(communicator);
        let model = model(&*acc);
        let (mut optimizer, mut loader, _) = acc
            .prepare(
                Sgd::default(),
                DataLoader::new(dataset(8).2, 2),
                sconce_core::schedule::ConstantSchedule,
            )
            .unwrap();
        let before = parameters(&model);
        for batch in &mut loader {
            acc.backward(&loss(&model, &batch.unwrap())).unwrap();
            optimizer.set_learning_rate(0.5);
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
        let state = acc.state_dict().unwrap();
        assert_eq!(state.is_empty(), !acc.is_main_process());
        assert_ne!(parameters(&model), before);
        if state.is_empty() {
            return;
        }
        let names: Vec<&str> = state.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["bias", "weight"]);
        assert_eq!(flat(&state[0].1), flat(model.bias().unwrap()));
        assert_eq!(flat(&state[1].1), flat(model.weight()));
    });
}

#[test]
fn an_error_of_one_ranks_data_set_ends_all_ranks() {
    use super::loading::Numbers;
    for world in 2..=3 {
        let texts = on_ranks(world, |communicator| {
            let rank = communicator.rank();
            let acc = accelerator(communicator);
            let model = model(&*acc);
            let (x, y) = (
                Tensor::ones((1, 3), candle_core::DType::F32, &Device::Cpu).unwrap(),
                1.0,
            );
            // Sample `world` + 1 is in rank 1's second batch.
            let data = Numbers {
                samples: 4 * world,
                broken: Some(world + 1),
            };
            let (mut optimizer, mut loader, _) = acc
                .prepare(
                    Sgd::default(),
                    DataLoader::new(data, 1),
                    sconce_core::schedule::ConstantSchedule,
                )
                .unwrap();
            let mut run = || -> sconce_core::Result<()> {
                for batch in &mut loader {
                    batch?;
                    let loss = (model.forward(&x)? - y)?.sqr()?.mean_all()?;
                    acc.backward(&loss)?;
                    optimizer.step()?;
                    optimizer.zero_grad()?;
                }
                Ok(())
            };
            (rank, run().unwrap_err().to_string())
        });
        for (rank, text) in texts {
            let own = text.contains("batch 1 of epoch 0") && text.contains("is unreadable");
            assert_eq!(own, rank == 1, "world {world}, rank {rank}: {text}");
        }
    }
}

#[test]
fn unused_parameters_are_an_error_unless_they_are_allowed() {
    for allow in [false, true] {
        on_ranks(2, |communicator| {
            let builder = AcceleratorBuilder::default()
                .communicator(communicator)
                .find_unused_parameters(allow);
            let acc = build(builder);
            let vb = acc.var_builder(Weights::Random { seed: 4 }).unwrap();
            let used = candle_nn::linear(FEATURES, 1, vb.pp("used")).unwrap();
            let _unused = candle_nn::linear(FEATURES, 1, vb.pp("unused")).unwrap();
            let mut optimizer = acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
            let (x, y) = (
                Tensor::ones((2, FEATURES), candle_core::DType::F32, &Device::Cpu).unwrap(),
                1.0,
            );
            let loss = (used.forward(&x).unwrap() - y)
                .unwrap()
                .sqr()
                .unwrap()
                .mean_all()
                .unwrap();
            match acc.backward(&loss) {
                Ok(()) => {
                    assert!(allow);
                    optimizer.step().unwrap();
                }
                Err(error) => {
                    let text = error.to_string();
                    assert!(
                        !allow && text.contains("unused.weight") && text.contains("unused.bias"),
                        "{text}"
                    );
                }
            }
        });
    }
}

/// What training from one batch is told by `misuse`.
fn told(
    builder: AcceleratorBuilder,
    misuse: impl Fn(&dyn Accelerator, &mut sconce_core::Optimizer, &Linear, &[Tensor]),
) {
    let acc = build(builder.communicator(sconce_collectives::single()));
    let model = model(&*acc);
    let (mut optimizer, mut loader, _) = acc
        .prepare(
            Sgd::default(),
            DataLoader::new(dataset(4).2, 4),
            sconce_core::schedule::ConstantSchedule,
        )
        .unwrap();
    let batch = (&mut loader).into_iter().next().unwrap().unwrap();
    misuse(&*acc, &mut optimizer, &model, &batch);
}

#[track_caller]
fn assert_says<T>(outcome: sconce_core::Result<T>, parts: &[&str]) {
    let text = outcome.err().expect("an error was expected").to_string();
    parts
        .iter()
        .for_each(|part| assert!(text.contains(part), "{part:?} in {text:?}"));
}

#[test]
fn a_loss_is_back_propagated_once_before_and_after_a_step() {
    let again = ["back-propagated already", "forward again"];
    told(AcceleratorBuilder::default(), |acc, optimizer, model, batch| {
        let first = loss(model, batch);
        acc.backward(&first).unwrap();
        let norm = acc.engine().grad_norm().unwrap();
        assert_says(acc.backward(&first), &again);
        assert_says(acc.backward_weighted(&first, 1.0), &again);
        // Nothing has been added, and the loop can go on.
        assert_eq!(acc.engine().grad_norm().unwrap(), norm);
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        assert_says(acc.backward(&first), &again);
        acc.backward(&loss(model, batch)).unwrap();
        optimizer.step().unwrap();
    });
}

#[test]
fn a_loss_of_several_numbers_is_an_error_that_says_what_to_do_and_spends_nothing() {
    told(AcceleratorBuilder::default(), |acc, _, model, batch| {
        let several = model.forward(&batch[0]).unwrap();
        assert_says(acc.backward(&several), &["[4, 1]", "mean_all"]);
        assert_says(acc.backward_weighted(&several, 1.0), &["[4, 1]", "mean_all"]);
        acc.backward(&loss(model, batch)).unwrap();
    });
}

#[test]
fn an_optimizer_of_a_model_that_was_not_built_by_the_accelerator_is_refused() {
    let acc = accelerator(sconce_collectives::single());
    let variables = candle_nn::VarMap::new();
    let vb = candle_nn::VarBuilder::from_varmap(&variables, candle_core::DType::F32, acc.device());
    let _model = candle_nn::linear(FEATURES, 1, vb).unwrap();
    assert_says(
        acc.prepare_optimizer(Box::new(Sgd::default())),
        &["no parameters", "var_builder"],
    );
}

#[test]
fn what_is_not_finite_is_found_when_it_is_looked_for() {
    told(
        AcceleratorBuilder::default().detect_anomaly(true),
        |acc, _, model, batch| {
            let broken = (loss(model, batch) * f64::NAN).unwrap();
            assert_says(acc.backward(&broken), &["the loss is NaN"]);
        },
    );
    told(
        AcceleratorBuilder::default().detect_anomaly(true),
        |acc, _, model, batch| {
            // The derivative of a root of zero.
            let root = (model.weight() - model.weight())
                .unwrap()
                .sqrt()
                .unwrap()
                .sum_all()
                .unwrap();
            let broken = (loss(model, batch) + root).unwrap();
            assert_says(acc.backward(&broken), &["\"weight\" is the first", "3 NaN"]);
        },
    );
}
