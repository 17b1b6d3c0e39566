//! Local SGD: ranks step by themselves and average their parameters now and then (Stich 2019).

use crate::{Accelerator, Error, Result};
use sconce_zero::Engine;
use std::sync::Arc;

/// A stretch of training in which ranks exchange nothing but an average of their parameters every few steps.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use sconce_core::{Sgd, Weights};
/// # let acc = sconce_core::accelerator()?;
/// # let model = candle_nn::linear(3, 1, acc.var_builder(Weights::Random { seed: 1 })?)?;
/// # let mut optimizer = acc.prepare_optimizer(Box::new(Sgd::default()))?;
/// # let batches = [Tensor::ones((2, 3), DType::F32, &Device::Cpu)?];
/// let mut local_sgd = acc.local_sgd(8)?;
/// for batch in &batches {
///     acc.backward(&model.forward(batch)?.sqr()?.mean_all()?)?;
///     optimizer.step()?;
///     optimizer.zero_grad()?;
///     local_sgd.step()?;
/// }
/// local_sgd.finish()?;
/// # Ok::<(), sconce_core::Error>(())
/// ```
///
/// Dropped without [`LocalSgd::finish`], for example by `?`, it ends without a last average: parameters then differ by rank.
#[derive(Debug)]
#[must_use = "gradients are synchronised again when it is dropped"]
pub struct LocalSgd {
    engine: Arc<Engine>,
    every: u64,
    steps: u64,
}

impl<'a> dyn Accelerator + 'a {
    /// Begins a stretch of training in which ranks average their parameters every `every` optimizer steps instead of
    /// their gradients in every step; called by all ranks.
    ///
    /// # Errors
    /// [`Error::Setting`] for 0 steps; [`sconce_zero::Error::Order`] where state is sharded, or losses are scaled.
    pub fn local_sgd(&self, every: u64) -> Result<LocalSgd> {
        if every == 0 {
            return Err(Error::Setting {
                setting: "local_sgd every",
                value: "0".into(),
                expected: "at least 1 optimizer step between averages".into(),
            });
        }
        self.engine().step_locally(true)?;
        Ok(LocalSgd {
            engine: Arc::clone(self.engine()),
            every,
            steps: 0,
        })
    }
}

impl LocalSgd {
    /// Counts an optimizer step, and averages the parameters if it is time; call it after each `optimizer.step()`.
    ///
    /// # Errors
    /// Failures of candle and of the group.
    pub fn step(&mut self) -> Result<()> {
        self.steps += 1;
        if self.steps.is_multiple_of(self.every) {
            self.engine.average_parameters()?;
        }
        Ok(())
    }

    /// Averages the parameters a last time and lets ranks synchronise their gradients again.
    ///
    /// # Errors
    /// Failures of candle and of the group.
    pub fn finish(self) -> Result<()> {
        if !self.steps.is_multiple_of(self.every) {
            self.engine.average_parameters()?;
        }
        Ok(())
    }
}

impl Drop for LocalSgd {
    fn drop(&mut self) {
        // Only turning it on can be refused.
        let _ = self.engine.step_locally(false);
    }
}
