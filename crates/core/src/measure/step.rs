//! Time of a training step by strategy: all strategies train one model in turn.

use super::MeasureError;
use crate::nn::{Linear, RmsNorm, linear_no_bias, rms_norm, swiglu};
use crate::{
    Accelerator, AcceleratorBuilder, AdamW, DataParallel, FsdpStrategy, FullyShardedOptions, Optimizer, Unit, Weights,
    WrapPolicy, ZeroStage, unit,
};
use candle_core::{Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use sconce_collectives::measure::median;
use std::time::Instant;

/// Width of the model's blocks.
const WIDTH: usize = 256;
/// Blocks of 590 000 parameters each.
const BLOCKS: usize = 6;
/// Rows of each rank's batch.
const ROWS: usize = 256;

/// A feed-forward block of a decoder.
#[derive(Debug)]
struct Block {
    norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let inner = 3 * WIDTH;
        Ok(Self {
            norm: rms_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            gate: linear_no_bias(WIDTH, inner, vb.pp("gate"))?,
            up: linear_no_bias(WIDTH, inner, vb.pp("up"))?,
            down: linear_no_bias(inner, WIDTH, vb.pp("down"))?,
        })
    }
}

impl Module for Block {
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let normed = self.norm.forward(hidden)?;
        hidden
            + self
                .down
                .forward(&swiglu(&self.gate.forward(&normed)?, &self.up.forward(&normed)?)?)?
    }
}

/// A model that trains by one strategy.
struct Run {
    acc: Box<dyn Accelerator>,
    blocks: Vec<Unit<Block>>,
    optimizer: Optimizer,
    rows: Tensor,
}

impl Run {
    fn new(builder: AcceleratorBuilder) -> std::result::Result<Self, MeasureError> {
        let acc = builder.build()?;
        let vb = acc.var_builder(Weights::Random { seed: 1 })?;
        let blocks = (0..BLOCKS).map(|number| unit(vb.clone(), &format!("blocks.{number}"), Block::new));
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let optimizer = acc.prepare_optimizer(Box::new(AdamW::default()))?;
        let rank = acc.world().rank;
        let value = |place: usize| ((place * 7 + rank) as f32 * 0.37).sin();
        let rows = Tensor::from_vec((0..ROWS * WIDTH).map(value).collect(), (ROWS, WIDTH), &Device::Cpu)?;
        let rows = rows
            .to_device(acc.device())?
            .to_dtype(acc.settings().parameter_dtype())?;
        Ok(Self {
            acc,
            blocks,
            optimizer,
            rows,
        })
    }

    fn step(&mut self) -> std::result::Result<(), MeasureError> {
        self.acc.accumulate();
        let hidden = self
            .blocks
            .iter()
            .try_fold(self.rows.clone(), |hidden, block| block.forward(&hidden))?;
        self.acc.backward(&hidden.sqr()?.mean_all()?)?;
        self.optimizer.step()?;
        self.optimizer.zero_grad()?;
        Ok(())
    }
}

/// Times of one strategy's steps.
#[derive(Debug, Clone, PartialEq)]
pub struct StrategyTimes {
    /// Its name.
    pub strategy: &'static str,
    /// Seconds of a step, by round.
    pub seconds: Vec<f64>,
    /// Bytes of training state that the rank holds.
    pub held: u64,
}

/// Times of steps, by strategy; the first is data parallelism.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes(pub Vec<StrategyTimes>);

impl StepTimes {
    /// Times a step of every strategy in turn, over `rounds` after two that warm up; called by all ranks. `builder` makes a
    /// builder over the same group each time.
    ///
    /// # Errors
    /// Those of the group.
    pub fn measure(builder: impl Fn() -> AcceleratorBuilder, rounds: usize) -> std::result::Result<Self, MeasureError> {
        let fsdp = |strategy| {
            builder().fully_sharded(FullyShardedOptions {
                sharding_strategy: Some(strategy),
                auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
                ..FullyShardedOptions::default()
            })
        };
        let stage_3 = ZeroStage::Three {
            persistence_threshold: 0,
        };
        let builders = [
            ("data_parallel", builder().strategy(DataParallel)),
            ("zero_1", builder().strategy(ZeroStage::One)),
            ("zero_2", builder().strategy(ZeroStage::Two)),
            ("zero_3", builder().strategy(stage_3)),
            ("full_shard", fsdp(FsdpStrategy::FullShard)),
            ("shard_grad_op", fsdp(FsdpStrategy::ShardGradOp)),
        ];
        let mut times = Vec::new();
        let mut runs = Vec::new();
        for (strategy, builder) in builders {
            runs.push(Run::new(builder)?);
            times.push(StrategyTimes {
                strategy,
                seconds: Vec::new(),
                held: 0,
            });
        }
        for number in 0..rounds + 2 {
            for turn in 0..runs.len() {
                let case = (number + turn) % runs.len();
                let run = &mut runs[case];
                run.acc.wait_for_everyone()?;
                let start = Instant::now();
                run.step()?;
                run.acc.wait_for_everyone()?;
                times[case]
                    .seconds
                    .extend((number >= 2).then(|| start.elapsed().as_secs_f64()));
            }
        }
        for (times, run) in times.iter_mut().zip(&runs) {
            times.held = run.acc.memory().total();
        }
        Ok(Self(times))
    }

    /// Returns the median of the rounds' ratios of a strategy's step to data parallelism's.
    pub fn of_data_parallel(&self, number: usize) -> f64 {
        let pairs = self.0[number].seconds.iter().zip(&self.0[0].seconds);
        median(pairs.map(|(own, first)| own / first).collect())
    }
}
