//! A model of three units, and the same training by plain candle on one rank.

use super::{CheckError, SelfTest};
use crate::{Accelerator, AcceleratorBuilder, AdamW, DataParallel, Unit, Weights, unit_of_class};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::optim::{AdamW as PlainAdamW, Optimizer as _, ParamsAdamW};
use candle_nn::{Linear, Module, VarBuilder, VarMap};

const INPUTS: usize = 6;
const INNER: usize = 24;
const OUTPUTS: usize = 4;
const SEED: u64 = 7;
const RATE: f64 = 0.02;
pub(super) const STEPS: usize = 6;
/// Rows of each rank's batch.
pub(super) const ROWS: usize = 4;

/// Three linear layers, each a unit.
pub(super) struct SmallModel(Vec<Unit<Linear>>);

impl SmallModel {
    pub(super) fn new(vb: &VarBuilder<'_>) -> Result<Self> {
        let sizes = [(INPUTS, INNER), (INNER, INNER), (INNER, OUTPUTS)];
        let layer = |(number, (from, to)): (usize, (usize, usize))| {
            let build = |vb: VarBuilder<'_>| candle_nn::linear(from, to, vb);
            unit_of_class(vb.clone(), &format!("layer{number}"), "Layer", build)
        };
        sizes
            .into_iter()
            .enumerate()
            .map(layer)
            .collect::<Result<_>>()
            .map(Self)
    }

    /// Computes the mean squared error on rows `rows` of a step's batch.
    pub(super) fn loss(
        &self,
        step: usize,
        rows: std::ops::Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let count = rows.len();
        let value =
            |row: usize, column: usize, salt: f32| ((step * 1000 + row * 31 + column) as f32 * 0.7 + salt).sin();
        let table = |columns: usize, salt: f32| {
            let values = rows
                .clone()
                .flat_map(|row| (0..columns).map(move |column| value(row, column, salt)));
            Tensor::from_vec(values.collect::<Vec<f32>>(), (count, columns), &Device::Cpu)
        };
        let mut hidden = table(INPUTS, 0.0)?.to_dtype(dtype)?.to_device(device)?;
        for (number, layer) in self.0.iter().enumerate() {
            hidden = layer.forward(&hidden)?;
            if number + 1 < self.0.len() {
                hidden = hidden.tanh()?;
            }
        }
        let targets = table(OUTPUTS, 0.3)?.to_device(device)?;
        (hidden.to_dtype(DType::F32)? - targets)?.sqr()?.mean_all()
    }
}

/// The update rule of all runs.
pub(super) fn rule() -> AdamW {
    AdamW {
        learning_rate: RATE,
        weight_decay: 0.1,
        ..AdamW::default()
    }
}

/// Returns all parameters in order of name, on every rank.
pub(super) fn weights(acc: &dyn Accelerator) -> std::result::Result<Vec<f32>, CheckError> {
    let mut named = Vec::new();
    for (name, tensor) in acc.state_dict()? {
        named.push((name, flat(&tensor)?));
    }
    named.sort_by(|a, b| a.0.cmp(&b.0));
    let own = named.into_iter().flat_map(|(_, values)| values).collect::<Vec<_>>();
    Ok(acc.broadcast_object(&own, 0)?)
}

fn flat(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1()
}

/// Makes the model by an accelerator.
pub(super) fn managed(acc: &dyn Accelerator) -> std::result::Result<SmallModel, CheckError> {
    Ok(SmallModel::new(&acc.var_builder(Weights::Random { seed: SEED })?)?)
}

/// Trains by an accelerator of all ranks; `micro_batches` make a step. Returns the parameters.
pub(super) fn train(
    test: &SelfTest<'_>,
    builder: AcceleratorBuilder,
    micro_batches: usize,
) -> std::result::Result<Vec<f32>, CheckError> {
    let acc = test.new_accelerator(builder.gradient_accumulation_steps(micro_batches as u64))?;
    let model = managed(&*acc)?;
    let mut optimizer = acc.prepare_optimizer(Box::new(rule()))?;
    let dtype = acc.settings().parameter_dtype();
    for step in 0..STEPS {
        for micro in 0..micro_batches {
            acc.accumulate();
            let first = (test.rank() * micro_batches + micro) * ROWS / micro_batches;
            acc.backward(&model.loss(step, first..first + ROWS / micro_batches, dtype, acc.device())?)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
    }
    weights(&*acc)
}

/// Trains by plain candle for `steps` on the rows of all ranks.
pub(super) fn plain(ranks: usize, steps: usize) -> std::result::Result<Vec<f32>, CheckError> {
    let acc = AcceleratorBuilder::default()
        .communicator(sconce_collectives::single())
        .strategy(DataParallel);
    let acc = acc.build_with(|_| None)?;
    managed(&*acc)?;
    let initial = acc.state_dict()?;
    let variables = VarMap::new();
    for (name, tensor) in initial {
        let variable = Var::from_tensor(&tensor.copy()?.detach())?;
        variables
            .data()
            .lock()
            .map_err(|_| "a lock is poisoned")?
            .insert(name, variable);
    }
    let model = SmallModel::new(&VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let params = ParamsAdamW {
        lr: RATE,
        weight_decay: 0.1,
        ..ParamsAdamW::default()
    };
    let mut optimizer = PlainAdamW::new(variables.all_vars(), params)?;
    for step in 0..steps {
        optimizer.backward_step(&model.loss(step, 0..ranks * ROWS, DType::F32, &Device::Cpu)?)?;
    }
    let variables = variables.data().lock().map_err(|_| "a lock is poisoned")?;
    let mut named = Vec::from_iter(variables.iter());
    named.sort_by(|a, b| a.0.cmp(b.0));
    let mut values = Vec::new();
    for (_, variable) in named {
        values.extend(flat(variable)?);
    }
    Ok(values)
}
