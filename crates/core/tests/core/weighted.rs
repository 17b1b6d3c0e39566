//! Losses with weights: the mean over all tokens of a window, however they are spread, against a gradient by hand in f64.

use super::{bits, build, deviation, flat, on_ranks};
use candle_core::{Device, Module, Tensor};
use sconce_core::deepspeed::DeepSpeedConfig;
use sconce_core::nn::{Linear, cross_entropy, linear};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{
    Accelerator, AcceleratorBuilder, BackoffScaling, DataLoader, FsdpStrategy, FullyShardedOptions, LossScaling, Sgd,
    TensorDataset, Weights, ZeroStage, unit,
};

const WIDTH: usize = 3;
const CLASSES: usize = 4;
/// Rows of all ranks' micro-batches together; the last window has one of them, the others three.
const TOGETHER: usize = 12;
const ROWS: usize = 4 * TOGETHER;
const WINDOW: usize = 3;
const RATE: f64 = 0.7;
const IGNORED: i64 = -100;

fn features(row: usize) -> [f32; WIDTH] {
    std::array::from_fn(|column| ((row * WIDTH + column) as f32 * 0.7).sin())
}

/// Labels of which few count, differently many in every part: none of the first six rows, one of the next.
fn label(row: usize) -> i64 {
    let counts = row >= 6 && (row == 7 || row >= TOGETHER) && row % 5 < 1 + row / TOGETHER;
    if counts { (row * 7 % CLASSES) as i64 } else { IGNORED }
}

/// Weights and biases after every window, of the plain mean over the rows that count.
fn oracle(initial: &[f32]) -> Vec<f64> {
    let mut parameters: Vec<f64> = initial.iter().map(|value| f64::from(*value)).collect();
    for rows in [0..WINDOW * TOGETHER, WINDOW * TOGETHER..ROWS] {
        let rows: Vec<usize> = rows.filter(|row| label(*row) != IGNORED).collect();
        let mut gradient = vec![0.0; parameters.len()];
        for row in &rows {
            let x = features(*row).map(f64::from);
            let bias = CLASSES * WIDTH;
            let logit = |class: usize| {
                let products = (0..WIDTH).map(|column| parameters[class * WIDTH + column] * x[column]);
                (products.sum::<f64>() + parameters[bias + class]).exp()
            };
            let exponentials: Vec<f64> = (0..CLASSES).map(logit).collect();
            let sum: f64 = exponentials.iter().sum();
            for (class, exponential) in exponentials.iter().enumerate() {
                let is_label = f64::from(u8::from(class as i64 == label(*row)));
                let outer = (exponential / sum - is_label) / rows.len() as f64;
                (0..WIDTH).for_each(|column| gradient[class * WIDTH + column] += outer * x[column]);
                gradient[bias + class] += outer;
            }
        }
        parameters.iter_mut().zip(gradient).for_each(|(p, g)| *p -= RATE * g);
    }
    parameters
}

fn data() -> TensorDataset {
    let x: Vec<f32> = (0..ROWS).flat_map(features).collect();
    let labels: Vec<i64> = (0..ROWS).map(label).collect();
    let x = Tensor::from_vec(x, (ROWS, WIDTH), &Device::Cpu).unwrap();
    TensorDataset::new(vec![x, Tensor::from_vec(labels, ROWS, &Device::Cpu).unwrap()]).unwrap()
}

fn build_model(acc: &dyn Accelerator) -> sconce_core::Unit<Linear> {
    let vb = acc.var_builder(Weights::Random { seed: 4 }).unwrap();
    unit(vb, "layer", |vb| linear(WIDTH, CLASSES, vb)).unwrap()
}

/// The mean loss of a batch, and how many of its rows count.
fn loss(model: &sconce_core::Unit<Linear>, batch: &[Tensor]) -> (Tensor, f64) {
    let count = batch[1]
        .to_vec1::<i64>()
        .unwrap()
        .iter()
        .filter(|label| **label != IGNORED)
        .count();
    let loss = cross_entropy(&model.forward(&batch[0]).unwrap(), &batch[1], IGNORED).unwrap();
    (loss, count as f64)
}

/// Trains an epoch on `world` ranks; returns weights and biases before and after.
fn train(world: usize, weighted: bool, builder: &(dyn Fn() -> AcceleratorBuilder + Sync)) -> [Vec<f32>; 2] {
    let mut ranks = on_ranks(world, |communicator| {
        let acc = build(
            builder()
                .communicator(communicator)
                .gradient_accumulation_steps(WINDOW as u64),
        );
        let model = build_model(&*acc);
        let rule = Sgd {
            learning_rate: RATE,
            ..Sgd::default()
        };
        let loader = DataLoader::new(data(), TOGETHER / world);
        let (mut optimizer, mut loader, _) = acc.prepare(rule, loader, ConstantSchedule).unwrap();
        let values = || {
            let mut state = acc.state_dict().unwrap();
            state.reverse();
            state.iter().flat_map(|(_, tensor)| flat(tensor)).collect::<Vec<f32>>()
        };
        let before = values();
        for batch in &mut loader {
            acc.accumulate();
            let (loss, count) = loss(&model, &batch.unwrap());
            match weighted {
                true => acc.backward_weighted(&loss, count).unwrap(),
                false => acc.backward(&loss).unwrap(),
            }
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
        [before, values()]
    });
    ranks.swap_remove(0)
}

type Kind = (&'static str, fn() -> AcceleratorBuilder);

/// A builder of every kind of sharding.
fn kinds() -> Vec<Kind> {
    vec![
        ("data parallel", AcceleratorBuilder::default),
        ("each batch", || AcceleratorBuilder::default().sync_each_batch(true)),
        ("stage 1", || AcceleratorBuilder::default().strategy(ZeroStage::One)),
        ("stage 2", || AcceleratorBuilder::default().strategy(ZeroStage::Two)),
        ("stage 3", || {
            AcceleratorBuilder::default().strategy(ZeroStage::Three {
                persistence_threshold: 0,
            })
        }),
        ("full shard", || {
            AcceleratorBuilder::default().fully_sharded(FullyShardedOptions {
                sharding_strategy: Some(FsdpStrategy::FullShard),
                ..FullyShardedOptions::default()
            })
        }),
        ("scaled", || {
            AcceleratorBuilder::default().loss_scaling(LossScaling::Backoff(BackoffScaling::default()))
        }),
    ]
}

#[test]
fn weighted_losses_come_to_the_mean_over_all_tokens_of_a_window_on_any_number_of_ranks() {
    for world in 1..=4 {
        for (name, builder) in kinds() {
            let [before, found] = train(world, true, &builder);
            let expected = oracle(&before);
            let worst = deviation(&found, &expected);
            println!("{name}, {world} ranks: {worst:.1e}");
            assert!(worst < 1e-6, "{name}, {world} ranks: {worst:e}");
            assert_ne!(bits(&before), bits(&found));
        }
    }
    // Means of means are something else, and depend on the number of ranks.
    let plain = [1, 2].map(|world| train(world, false, &AcceleratorBuilder::default));
    assert!(deviation(&plain[0][1], &oracle(&plain[0][0])) > 1e-2);
    assert!(bits(&plain[0][1]) != bits(&plain[1][1]));
}

/// Runs `work` on the model of one rank and a batch of it.
fn with_one_batch(builder: AcceleratorBuilder, work: impl Fn(&dyn Accelerator, &Tensor)) {
    let acc = build(builder.communicator(sconce_collectives::single()));
    let model = build_model(&*acc);
    let (_, mut loader, _) = acc
        .prepare(Sgd::default(), DataLoader::new(data(), TOGETHER), ConstantSchedule)
        .unwrap();
    let batch = (&mut loader).into_iter().nth(1).unwrap().unwrap();
    work(&*acc, &loss(&model, &batch).0);
}

#[test]
fn a_window_without_weight_has_gradients_of_zero() {
    with_one_batch(AcceleratorBuilder::default(), |acc, loss| {
        acc.backward_weighted(loss, 0.0).unwrap();
        assert_eq!(acc.engine().grad_norm().unwrap(), 0.0);
    });
}

#[test]
fn a_weight_that_is_none_or_a_window_with_and_without_weights_is_an_error() {
    for weight in [-1.0, f64::NAN, f64::INFINITY] {
        with_one_batch(AcceleratorBuilder::default(), |acc, loss| {
            let text = acc.backward_weighted(loss, weight).unwrap_err().to_string();
            assert!(text.contains("weight is") && text.contains("0 or more"), "{text}");
            acc.backward(loss).unwrap();
        });
    }
    for weighted_first in [false, true] {
        with_one_batch(AcceleratorBuilder::default(), |acc, loss| {
            let again = (loss * 2.0).unwrap();
            let outcome = match weighted_first {
                true => acc.backward_weighted(loss, 2.0).and_then(|()| acc.backward(&again)),
                false => acc.backward(loss).and_then(|()| acc.backward_weighted(&again, 2.0)),
            };
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("for every micro-batch of a window or for none"), "{text}");
            acc.engine().zero_grad();
            acc.backward(&(loss * 3.0).unwrap()).unwrap();
        });
    }
    let sums = r#"{"gradient_allreduce_op": "sum", "train_micro_batch_size_per_gpu": 12}"#;
    let config = DeepSpeedConfig::parse(sums, "ds.json", Default::default()).unwrap();
    with_one_batch(AcceleratorBuilder::default().deepspeed(config), |acc, loss| {
        let text = acc.backward_weighted(loss, 2.0).unwrap_err().to_string();
        assert!(text.contains("gradient_allreduce_op"), "{text}");
    });
}
