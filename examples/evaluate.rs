//! Classification with metrics over a data set that does not divide among the ranks: every sample counts once.
//!
//! ```text
//! sconce launch --num_processes 2 --example evaluate
//! ```
//!
//! 103 samples on two or three ranks leave a last batch that is filled up with samples that were seen before.
//! `gather_for_metrics` leaves those out, so that accuracy and F1 are those of one process.

use candle_core::{D, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear, loss::cross_entropy};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{AdamW, DataLoader, TensorDataset, Weights};

const CLASSES: usize = 3;
/// Samples of a training step on all ranks together.
const BATCH: usize = 48;

fn main() -> anyhow::Result<()> {
    let acc = sconce_core::accelerator()?;
    let world = acc.world().size;
    let model = Mlp::new(acc.var_builder(Weights::Random { seed: 1 })?)?;
    let training = DataLoader::new(rings(0, 960)?, BATCH / world).shuffle(true);
    let rule = AdamW {
        learning_rate: 1e-2,
        ..AdamW::default()
    };
    let (mut optimizer, mut training, _) = acc.prepare(rule, training, ConstantSchedule)?;
    let mut held_out = acc.prepare_loader(DataLoader::new(rings(960, 103)?, 10))?;

    for epoch in 0..8 {
        for batch in &mut training {
            let batch = batch?;
            acc.backward(&cross_entropy(&model.forward(&batch[0])?, &batch[1])?)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        // Rows are the true classes, columns those that the model tells.
        let mut confusion = [[0u32; CLASSES]; CLASSES];
        for batch in &mut held_out {
            let batch = batch?;
            let told = model.forward(&batch[0])?.argmax(D::Minus1)?;
            let (told, true_ones) = acc.gather_for_metrics(&(told, batch[1].clone()))?;
            let pairs = true_ones.to_vec1::<u32>()?.into_iter().zip(told.to_vec1::<u32>()?);
            pairs.for_each(|(class, told)| confusion[class as usize][told as usize] += 1);
        }
        acc.print(format_args!(
            "epoch {}  samples {}  accuracy {:.4}  macro F1 {:.4}",
            epoch + 1,
            confusion.as_flattened().iter().sum::<u32>(),
            accuracy(&confusion),
            macro_f1(&confusion)
        ));
    }
    Ok(())
}

fn accuracy(confusion: &[[u32; CLASSES]; CLASSES]) -> f64 {
    let right: u32 = (0..CLASSES).map(|class| confusion[class][class]).sum();
    f64::from(right) / f64::from(confusion.as_flattened().iter().sum::<u32>())
}

/// The mean over the classes of 2 * right / (told + true).
fn macro_f1(confusion: &[[u32; CLASSES]; CLASSES]) -> f64 {
    let of_class = |class: usize| {
        let right = f64::from(confusion[class][class]);
        let told: u32 = confusion.iter().map(|row| row[class]).sum();
        let there: u32 = confusion[class].iter().sum();
        2.0 * right / f64::from((told + there).max(1))
    };
    (0..CLASSES).map(of_class).sum::<f64>() / CLASSES as f64
}

/// Two hidden layers.
struct Mlp([Linear; 3]);

impl Mlp {
    fn new(vb: VarBuilder) -> Result<Self> {
        let [first, second, third] = ["first", "second", "third"].map(|name| vb.pp(name));
        Ok(Self([
            linear(2, 32, first)?,
            linear(32, 32, second)?,
            linear(32, CLASSES, third)?,
        ]))
    }
}

impl Module for Mlp {
    fn forward(&self, points: &Tensor) -> Result<Tensor> {
        let [first, second, third] = &self.0;
        third.forward(&second.forward(&first.forward(points)?.relu()?)?.relu()?)
    }
}

/// Returns `count` points [2] on rings around the origin, from number `first` on, and which ring each is on: more on the
/// outer ones.
fn rings(first: usize, count: usize) -> Result<TensorDataset> {
    let wave = |number: usize, step: f64| (number as f64 * step).fract() as f32;
    let class = |number: usize| [0, 1, 1, 2, 2, 2][number % 6];
    let point = |number: usize| {
        let radius = class(number) as f32 + 0.6 * wave(number, 0.754_877_666);
        let angle = std::f32::consts::TAU * wave(number, 0.569_840_291);
        [radius * angle.cos(), radius * angle.sin()]
    };
    let numbers = first..first + count;
    let points: Vec<f32> = numbers.clone().flat_map(point).collect();
    let classes: Vec<u32> = numbers.map(class).collect();
    TensorDataset::new(vec![
        Tensor::from_vec(points, (count, 2), &Device::Cpu)?,
        Tensor::from_vec(classes, count, &Device::Cpu)?,
    ])
}
