//! Two models, two optimizers, one loop: a generator learns to draw points like those of a data set, against a
//! discriminator that learns to tell them apart.
//!
//! ```text
//! sconce launch --num_processes 2 --example gan
//! ```
//!
//! Each model has an accelerator, of the same ranks. The generator's loss passes through the discriminator, whose
//! parameters get no gradients from it: `backward` trains the model whose accelerator it is called of.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{Adam, DataLoader, ParameterSet, ReduceOp, TensorDataset, Weights, unit};

/// Points of a step on all ranks together; the sums run in another order on another number of ranks.
const BATCH: usize = 48;
const NOISE: usize = 4;

fn main() -> anyhow::Result<()> {
    let generating = sconce_core::accelerator()?;
    let telling = generating.for_another_model(ParameterSet::none())?;
    // Units: sharded strategies gather their parameters where they run.
    let vb = generating.var_builder(Weights::Random { seed: 1 })?;
    let generator = unit(vb, "generator", |vb| Mlp::new(NOISE, 2, vb))?;
    let vb = telling.var_builder(Weights::Random { seed: 2 })?;
    let discriminator = unit(vb, "discriminator", |vb| Mlp::new(2, 1, vb))?;
    let rule = Adam {
        learning_rate: 2e-3,
        beta1: 0.5,
        ..Adam::default()
    };
    let (points, noise) = (points(960)?, noise(960)?);
    let data = DataLoader::new(
        TensorDataset::new(vec![points, noise])?,
        BATCH / generating.world().size,
    )
    .shuffle(true);
    let (mut artist, mut loader, _) = generating.prepare(rule.clone(), data, ConstantSchedule)?;
    let mut critic = telling.prepare_optimizer(Box::new(rule))?;

    for epoch in 0..30 {
        let mut sums = Tensor::zeros(4, DType::F32, generating.device())?;
        for batch in &mut loader {
            let batch = batch?;
            let drawn = generator.forward(&batch[1])?;

            let real = loss(&discriminator.forward(&batch[0])?.neg()?)?;
            let false_ones = loss(&discriminator.forward(&drawn.detach())?)?;
            let told_apart = (real + false_ones)?;
            telling.backward(&told_apart)?;
            critic.step()?;
            critic.zero_grad()?;

            let taken_for_real = loss(&discriminator.forward(&drawn)?.neg()?)?;
            generating.backward(&taken_for_real)?;
            artist.step()?;
            artist.zero_grad()?;

            let losses = Tensor::stack(&[told_apart.detach(), taken_for_real.detach()], 0)?;
            sums = (sums + Tensor::cat(&[losses, drawn.detach().mean(0)?], 0)?)?;
        }
        let means = generating.reduce(&(sums / loader.len() as f64)?, ReduceOp::Mean)?;
        let means = means.to_vec1::<f32>()?;
        if epoch == 0 || epoch % 5 == 4 {
            generating.print(format_args!(
                "epoch {:>2}  discriminator {:.6}  generator {:.6}  middle of the points drawn {:.2} {:.2}",
                epoch + 1,
                means[0],
                means[1],
                means[2],
                means[3]
            ));
        }
    }
    Ok(())
}

/// Returns the mean of log(1 + exp(x)), which is small where x is.
fn loss(scores: &Tensor) -> Result<Tensor> {
    let smooth = (scores.abs()?.neg()?.exp()? + 1.0)?.log()?;
    (scores.relu()? + smooth)?.mean_all()
}

/// Three layers.
struct Mlp([Linear; 3]);

impl Mlp {
    fn new(inputs: usize, outputs: usize, vb: VarBuilder) -> Result<Self> {
        let [first, second, third] = ["first", "second", "third"].map(|name| vb.pp(name));
        Ok(Self([
            linear(inputs, 32, first)?,
            linear(32, 32, second)?,
            linear(32, outputs, third)?,
        ]))
    }
}

impl Module for Mlp {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let [first, second, third] = &self.0;
        third.forward(&second.forward(&first.forward(input)?.relu()?)?.relu()?)
    }
}

/// Returns points [count, 2] on a small circle around (1, -0.5).
fn points(count: usize) -> Result<Tensor> {
    let point = |number: usize| {
        let angle = number as f32 * 2.399_963;
        [1.0 + 0.3 * angle.cos(), -0.5 + 0.3 * angle.sin()]
    };
    Tensor::from_vec(
        (0..count).flat_map(point).collect::<Vec<f32>>(),
        (count, 2),
        &Device::Cpu,
    )
}

/// Returns what the generator draws from, [count, NOISE] numbers between -1 and 1: part of the data, so that it does not
/// depend on the number of ranks.
fn noise(count: usize) -> Result<Tensor> {
    let number = |i: usize| ((i as f64 * 0.754_877_666).fract() * 2.0 - 1.0) as f32;
    Tensor::from_vec(
        (0..count * NOISE).map(number).collect::<Vec<f32>>(),
        (count, NOISE),
        &Device::Cpu,
    )
}
