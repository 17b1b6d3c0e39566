//! Activation checkpointing: a part's graph is dropped after its forward and made again in the backward.
//!
//! In the graph of the loss such a part is a chain of ops without data, one for each input that has a gradient, and an op
//! for each result:
//!
//! ```text
//! leaf -- Begin -- Link(input 1) -- Link(input 2) -- Return(result 1)
//!                                                 \- Return(result 2)
//! ```
//!
//! candle's backward comes to the results first; their gradients are kept. The end of the chain comes after all of them: it
//! computes the part again, from the inputs as they were, and differentiates what it gets. Parameters take their gradients
//! in that backward within the backward, each link hands on the gradient of its input. What is random in a part is the same
//! as in its forward, from the [`RandomState`] that was then, and so is the dtype of products ([`Autocast`]).
//!
//! A parameter so delivers once for every such run, and once more for the graph of the loss if that uses it, too.
//! [`Gradients`](crate::gradients::Gradients) is told beforehand how often: a run counts once for each of its part's
//! parameters, and corrects that when its own graph is there.

use crate::hook::anchor;
use crate::unit::{Tensors, has_gradient};
use crate::units::Units;
use crate::{Autocast, RandomState};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Device, Layout, Result, Shape, Storage, Tensor, TensorId, Var,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Computes the results from the inputs, each of which is replaced first.
type Again = Box<dyn Fn(&mut Replace<'_>) -> Result<Vec<Tensor>> + Send + Sync>;
type Replace<'a> = dyn FnMut(Tensor) -> Result<Tensor> + 'a;

/// The runs that live in graphs: which part each is of, by the tensor at the end of its chain.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    /// Part and number of each.
    runs: Mutex<HashMap<TensorId, (usize, u64)>>,
    /// How many there have been.
    count: AtomicU64,
}

impl Runs {
    /// Returns the part of the run whose chain ends at a tensor.
    pub(crate) fn part(&self, end: TensorId) -> Option<usize> {
        self.lock().get(&end).map(|(part, _)| *part)
    }

    /// Returns how many runs there have been: the number of the next one.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Says whether a tensor is the end of a chain of a run with a smaller number.
    pub(crate) fn is_before(&self, end: TensorId, number: u64) -> bool {
        self.lock().get(&end).is_some_and(|run| run.1 < number)
    }

    fn insert(&self, end: TensorId, part: usize) {
        let number = self.count.fetch_add(1, Relaxed);
        self.lock().insert(end, (part, number));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TensorId, (usize, u64)>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One run of a part whose graph is not kept.
struct Run {
    units: Arc<Units>,
    part: usize,
    again: Again,
    /// Of every input, whether it has a gradient.
    has_gradient: Vec<bool>,
    end: OnceLock<TensorId>,
    gradients: Mutex<PassingGradients>,
}

/// Gradients of one backward.
#[derive(Default)]
struct PassingGradients {
    /// By result that has one.
    results: Vec<Option<Tensor>>,
    /// By input that has one, until it is handed on; there once the run has been differentiated.
    inputs: Option<Vec<Option<Tensor>>>,
}

/// Runs `forward` and keeps of it what computes it again.
pub(crate) fn run<I, O>(
    units: &Arc<Units>,
    part: usize,
    inputs: I,
    forward: impl Fn(I) -> Result<O> + Send + Sync + 'static,
) -> Result<O>
where
    I: Tensors + Clone + Send + Sync + 'static,
    O: Tensors,
{
    let (random, autocast) = (RandomState::current(), Autocast::current());
    let results = forward(inputs.clone())?;
    let (mut linked, mut flags) = (Vec::new(), Vec::new());
    let kept = inputs.map(&mut |input| {
        flags.push(has_gradient(&input));
        let kept = input.detach();
        linked.extend(has_gradient(&input).then_some(input));
        Ok(kept)
    })?;
    let again = move |replace: &mut Replace<'_>| {
        let mut list = Vec::new();
        let inputs = kept.clone().map(replace)?;
        random
            .during(|| autocast.during(|| forward(inputs)))?
            .map(&mut |result| {
                list.extend(has_gradient(&result).then(|| result.clone()));
                Ok(result)
            })?;
        Ok(list)
    };
    let run = Arc::new(Run {
        units: Arc::clone(units),
        part,
        again: Box::new(again),
        has_gradient: flags,
        end: OnceLock::new(),
        gradients: Mutex::default(),
    });
    let mut device = linked.first().map_or(Device::Cpu, |input| input.device().clone());
    let results = results.map(&mut |result| {
        device = result.device().clone();
        Ok(result)
    })?;
    let end = run.chain(&linked, &device)?;
    let mut number = 0;
    results.map(&mut |result| {
        if !has_gradient(&result) {
            return Ok(result);
        }
        let result = result.detach().contiguous()?;
        number += 1;
        end.apply_op1(Return {
            run: Arc::clone(&run),
            number: number - 1,
            result: Mutex::new(Some(result)),
        })
    })
}

impl Run {
    /// Makes the chain, where inputs and results are, and returns its end.
    fn chain(self: &Arc<Self>, inputs: &[Tensor], device: &Device) -> Result<Tensor> {
        let run = || Arc::clone(self);
        let mut end = anchor(&Shape::from(()), device)?.apply_op1(Begin {
            run: run(),
            is_end: inputs.is_empty(),
        })?;
        for (number, input) in inputs.iter().enumerate() {
            end = end.apply_op2(input, Link { run: run(), number })?;
        }
        self.end.get_or_init(|| end.id());
        self.units.runs().insert(end.id(), self.part);
        Ok(end)
    }

    fn gradients(&self) -> MutexGuard<'_, PassingGradients> {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a result's gradient for the end of the chain.
    fn take_gradient(&self, result: usize, gradient: &Tensor) {
        let mut gradients = self.gradients();
        let length = gradients.results.len().max(result + 1);
        gradients.results.resize(length, None);
        gradients.results[result] = Some(gradient.clone());
    }

    /// Returns the gradient of an input; the first one asked for computes all.
    fn gradient_of(&self, input: usize) -> Result<Option<Tensor>> {
        if self.gradients().inputs.is_none() {
            let results = std::mem::take(&mut self.gradients().results);
            let inputs = self.differentiate(results)?;
            self.gradients().inputs = Some(inputs);
        }
        let mut gradients = self.gradients();
        let gradient = gradients.inputs.as_mut().and_then(|all| all.get_mut(input));
        Ok(gradient.and_then(Option::take))
    }

    /// Computes the part again and returns the gradients of its inputs; its parameters get theirs.
    fn differentiate(&self, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        self.units.enter_again(self.part)?;
        let first = self.units.runs().count();
        let (mut number, mut leaves) = (0, Vec::new());
        let results = (self.again)(&mut |input| {
            number += 1;
            if !self.has_gradient[number - 1] {
                return Ok(input);
            }
            let leaf = Var::from_tensor(&input)?;
            let tensor = leaf.as_tensor().clone();
            leaves.push(leaf);
            Ok(tensor)
        })?;
        let differs = |(result, gradient): (&Tensor, &Option<Tensor>)| {
            gradient
                .as_ref()
                .is_some_and(|gradient| gradient.shape() != result.shape())
        };
        if results.len() < gradients.len() || results.iter().zip(&gradients).any(differs) {
            candle_core::bail!(
                "part {:?} came to other results when it computed again in the backward; what it computes must follow from its \
                 inputs and parameters alone (sconce_core::nn::Dropout repeats itself, candle_nn's does not)",
                self.units.name(self.part)
            );
        }
        let mut root: Option<Tensor> = None;
        for (result, gradient) in results.into_iter().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            let seed = result.contiguous()?.apply_op1(Seed { gradient })?;
            root = Some(match root {
                None => seed,
                Some(root) => (root + seed)?,
            });
        }
        let Some(root) = root else {
            self.units.leave_again(self.part)?;
            return leaves.iter().map(|leaf| leaf.zeros_like().map(Some)).collect();
        };
        if !self.units.expect_of(self.part, &root, first)? {
            candle_core::bail!(
                "part {:?} computes with a tensor that has a gradient and is none of its inputs: the forward given to \
                 Unit::run has captured it; let it come in as one of the inputs",
                self.units.name(self.part)
            );
        }
        let found = root.backward()?;
        self.units.leave_again(self.part)?;
        // candle's gradients know what they were made of; without that, it goes.
        let gradient = |leaf: &Var| {
            found
                .get(leaf)
                .map_or_else(|| leaf.zeros_like(), |found| Ok(found.detach()))
        };
        leaves.iter().map(|leaf| gradient(leaf).map(Some)).collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(end) = self.end.get() {
            self.units.runs().lock().remove(end);
        }
    }
}

/// The beginning of a chain.
struct Begin {
    run: Arc<Run>,
    is_end: bool,
}

impl CustomOp1 for Begin {
    fn name(&self) -> &'static str {
        "recomputed"
    }

    fn cpu_fwd(&self, _leaf: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        nothing()
    }

    fn cuda_fwd(&self, leaf: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        nothing_like(leaf)
    }

    fn bwd(&self, _leaf: &Tensor, _end: &Tensor, _gradient: &Tensor) -> Result<Option<Tensor>> {
        if self.is_end {
            self.run.gradient_of(0)?;
        }
        // A graph may be differentiated once more.
        self.run.gradients().inputs = None;
        Ok(None)
    }
}

/// A chain goes through an input.
struct Link {
    run: Arc<Run>,
    number: usize,
}

impl CustomOp2 for Link {
    fn name(&self) -> &'static str {
        "recomputed-input"
    }

    fn cpu_fwd(
        &self,
        _chain: &CpuStorage,
        _chain_layout: &Layout,
        _input: &CpuStorage,
        _input_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        nothing()
    }

    fn cuda_fwd(
        &self,
        chain: &CudaStorage,
        _chain_layout: &Layout,
        _input: &CudaStorage,
        _input_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        nothing_like(chain)
    }

    fn bwd(
        &self,
        chain: &Tensor,
        _input: &Tensor,
        _end: &Tensor,
        _gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = self.run.gradient_of(self.number)?;
        Ok((Some(chain.zeros_like()?), gradient))
    }
}

/// Hands a result on at the end of a chain.
struct Return {
    run: Arc<Run>,
    number: usize,
    /// The result, until the op has run.
    result: Mutex<Option<Tensor>>,
}

impl Return {
    fn result(&self) -> Result<Tensor> {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        result.ok_or_else(|| candle_core::Error::msg("a recomputed part's result is handed on once"))
    }
}

impl CustomOp1 for Return {
    fn name(&self) -> &'static str {
        "recomputed-result"
    }

    fn cpu_fwd(&self, _chain: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let result = self.result()?;
        let (storage, layout) = result.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            candle_core::bail!("a recomputed part's result is not on the CPU, where its inputs are");
        };
        crate::gates::copy(storage, layout)
    }

    fn cuda_fwd(&self, _chain: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let result = self.result()?;
        let (storage, layout) = result.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            candle_core::bail!("a recomputed part's result is not on the device of its inputs");
        };
        crate::gates::copy_on_device(storage, layout)
    }

    fn bwd(&self, chain: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.run.take_gradient(self.number, gradient);
        Ok(Some(chain.zeros_like()?))
    }
}

/// Gives a tensor a gradient that is known already.
struct Seed {
    gradient: Tensor,
}

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "known-gradient"
    }

    fn cpu_fwd(&self, _result: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        nothing()
    }

    fn cuda_fwd(&self, result: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        nothing_like(result)
    }

    fn bwd(&self, _result: &Tensor, _seed: &Tensor, _gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.gradient.clone()))
    }
}

/// Returns the data of an op that is there for its backward only.
fn nothing() -> Result<(CpuStorage, Shape)> {
    Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
}

/// Returns the same on the device of another op's data.
fn nothing_like(storage: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let shape = Shape::from(());
    Ok((storage.device().zeros_impl(&shape, DType::F32)?, shape))
}
