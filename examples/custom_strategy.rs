//! A sharding strategy of one's own: only what is large is sharded, here a model's embedding.
//!
//! ```text
//! sconce launch --num_processes 2 --example custom_strategy
//! ```
//!
//! Large tensors cost the most memory. The strategy says per parameter what is sharded, and the engine carries it out:
//! each rank keeps its share of the embedding's gradient and optimizer state. The numbers are those of data parallelism.

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use sconce_core::nn::{Embedding, cross_entropy, embedding};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{
    AcceleratorBuilder, AdamW, DataLoader, DataParallel, ParameterInfo, Placement, ReduceOp, ShardingStrategy,
    TensorDataset, Weights, ZeroStage,
};

/// Shards the gradient and the optimizer state of parameters with at least this many elements.
#[derive(Debug)]
struct ShardLarge {
    elements: usize,
}

impl ShardingStrategy for ShardLarge {
    fn name(&self) -> &str {
        "shard_large"
    }

    fn place(&self, parameter: &ParameterInfo) -> Placement {
        if parameter.elements() >= self.elements {
            ZeroStage::Two.place(parameter)
        } else {
            DataParallel.place(parameter)
        }
    }
}

fn main() -> anyhow::Result<()> {
    let parallel = train(AcceleratorBuilder::default().strategy(DataParallel))?;
    let mixed = train(AcceleratorBuilder::default().strategy(ShardLarge { elements: 10_000 }))?;
    anyhow::ensure!(parallel == mixed, "losses differ: {parallel:?} and {mixed:?}");
    Ok(())
}

/// Learns to tell the next of four numbers of a sequence; returns the loss of every epoch.
fn train(builder: AcceleratorBuilder) -> anyhow::Result<Vec<f32>> {
    let acc = builder.build()?;
    let model = Model::new(acc.var_builder(Weights::Random { seed: 1 })?)?;
    let (numbers, next) = sequences(600)?;
    let data = DataLoader::new(TensorDataset::new(vec![numbers, next])?, 20).shuffle(true);
    let rule = AdamW {
        learning_rate: 1e-2,
        ..AdamW::default()
    };
    let (mut optimizer, mut loader, _) = acc.prepare(rule, data, ConstantSchedule)?;
    let mut losses = Vec::new();
    for epoch in 0..5 {
        let mut sum = Tensor::zeros((), candle_core::DType::F32, acc.device())?;
        for batch in &mut loader {
            let batch = batch?;
            let loss = cross_entropy(&model.forward(&batch[0])?, &batch[1], -100)?;
            acc.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            sum = (sum + loss.detach())?;
        }
        losses.push(acc.reduce(&sum, ReduceOp::Mean)?.to_scalar::<f32>()? / loader.len() as f32);
        acc.print(format_args!("epoch {epoch}  loss {:.6}", losses[epoch]));
    }
    Ok(losses)
}

/// An embedding of 1000 numbers, joined over four positions, and a linear layer.
struct Model(Embedding, Linear);

impl Model {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self(
            embedding(1000, 16, vb.pp("embedding"))?,
            linear(64, 1000, vb.pp("output"))?,
        ))
    }

    fn forward(&self, numbers: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(numbers)?.flatten_from(1)?)
    }
}

/// Returns sequences [count, 4] of numbers that grow by one step each, and what comes next [count].
fn sequences(count: usize) -> Result<(Tensor, Tensor)> {
    let at = |sequence: usize, position: usize| ((sequence * 37 + position * (1 + sequence % 3)) % 1000) as u32;
    let numbers: Vec<u32> = (0..count * 4).map(|i| at(i / 4, i % 4)).collect();
    let next: Vec<u32> = (0..count).map(|sequence| at(sequence, 4)).collect();
    Ok((
        Tensor::from_vec(numbers, (count, 4), &Device::Cpu)?,
        Tensor::from_vec(next, count, &Device::Cpu)?,
    ))
}
