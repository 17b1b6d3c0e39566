//! The smallest complete program: an MLP learns to tell two spirals apart, on any number of ranks.
//!
//! ```text
//! sconce launch --num_processes 2 --example quickstart
//! ```
//!
//! The lines marked `+` are what Sconce changes in a plain candle program; the plain line stands beside each.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear, loss::cross_entropy};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{AdamW, DataLoader, TensorDataset, Weights};

fn main() -> anyhow::Result<()> {
    let acc = sconce_core::accelerator()?; // + reads what `sconce launch` says
    let vb = acc.var_builder(Weights::Random { seed: 1 })?; // + was: VarBuilder::from_varmap(&VarMap::new(), ..)
    let model = Mlp::new(vb)?;
    let (points, classes) = spirals(1500)?;
    let data = DataLoader::new(TensorDataset::new(vec![points, classes])?, 50).shuffle(true);
    let rule = AdamW {
        learning_rate: 3e-3,
        ..AdamW::default()
    };
    let (mut optimizer, mut loader, _) = acc.prepare(rule, data, ConstantSchedule)?; // + was: AdamW::new(vars, ..)

    for epoch in 0..30 {
        let (mut sum, mut batches) = (0.0, 0);
        for batch in &mut loader {
            let batch = batch?;
            let loss = cross_entropy(&model.forward(&batch[0])?, &batch[1])?;
            acc.backward(&loss)?; // + was: let gradients = loss.backward()?
            optimizer.step()?; // was: optimizer.step(&gradients)?
            optimizer.zero_grad()?;
            sum += loss.to_scalar::<f32>()?;
            batches += 1;
        }
        if epoch % 5 == 4 {
            let loss = acc.reduce(
                &Tensor::new(sum / batches as f32, acc.device())?,
                sconce_core::ReduceOp::Mean,
            )?;
            acc.print(format_args!(
                "epoch {:>2}  loss {:.4}",
                epoch + 1,
                loss.to_scalar::<f32>()?
            ));
        }
    }
    Ok(())
}

/// Two hidden layers; nothing here knows that training is distributed.
struct Mlp([Linear; 3]);

impl Mlp {
    fn new(vb: VarBuilder) -> Result<Self> {
        let [first, second, third] = ["first", "second", "third"].map(|name| vb.pp(name));
        Ok(Self([
            linear(2, 64, first)?,
            linear(64, 64, second)?,
            linear(64, 2, third)?,
        ]))
    }
}

impl Module for Mlp {
    fn forward(&self, points: &Tensor) -> Result<Tensor> {
        let [first, second, third] = &self.0;
        third.forward(&second.forward(&first.forward(points)?.relu()?)?.relu()?)
    }
}

/// Returns points [count, 2] on two spirals and their classes [count], taking turns.
fn spirals(count: usize) -> Result<(Tensor, Tensor)> {
    let point = |number: usize| {
        let turn = 0.5 + 2.5 * number as f32 / count as f32;
        let angle = std::f32::consts::TAU * turn / 2.0
            + if number.is_multiple_of(2) {
                0.0
            } else {
                std::f32::consts::PI
            };
        [turn * angle.cos(), turn * angle.sin()]
    };
    let points: Vec<f32> = (0..count).flat_map(point).collect();
    let classes: Vec<u32> = (0..count as u32).map(|number| number % 2).collect();
    Ok((
        Tensor::from_vec(points, (count, 2), &Device::Cpu)?,
        Tensor::from_vec(classes, count, &Device::Cpu)?,
    ))
}
