//! Units: parts of a model whose sharded parameters are gathered together.
//!
//! A model declares a unit around each of its blocks; without sharded parameters a unit costs nothing.

use crate::gates::{InputGate, OutputGate};
use crate::recompute;
use crate::units::{Invocation, Units};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use std::cell::RefCell;
use std::sync::Arc;

/// The name by which a unit asks a `VarBuilder` whether it is ours. No file has it: names there are text.
pub(crate) const QUESTION: &str = "\u{0}sconce-units";

thread_local! {
    /// The answer to a question just asked, on its way from the backend through candle's `VarBuilder` to the asker.
    static ANSWER: RefCell<Option<Arc<Units>>> = const { RefCell::new(None) };
}

/// Answers the question whose `VarBuilder` this is; called by its backend.
pub(crate) fn answer(units: &Arc<Units>) {
    ANSWER.with_borrow_mut(|answer| *answer = Some(Arc::clone(units)));
}

/// Builds a part of a model as a unit: when its parameters are sharded, they are gathered while it computes.
///
/// A unit's sharded parameters are whole only then, so a model needs memory for one block's, not for all of them. What
/// [`EngineOptions::units`](crate::EngineOptions::units) does not choose is no unit: its parameters belong to the unit
/// around it, or are whole on every rank where there is none.
///
/// `build` gets `vb.pp(name)` and makes the part from it. Units may lie within each other; a parameter belongs to the
/// innermost unit that is being built when it is asked for. One that several units ask for by one name (tied weights) is
/// there for each of them. Parameters outside of any unit are whole on every rank.
///
/// All ranks run the same units in the same order. A sharded parameter that is used outside of its unit's forward is
/// nonsense there: not a number in parts, zero in others; on a GPU it is an error.
///
/// With a `VarBuilder` that is not an engine's, the unit only computes.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use sconce_zero::{Engine, EngineOptions, Weights, ZeroStage, unit};
///
/// let strategy = Box::new(ZeroStage::Three { persistence_threshold: 0 });
/// let options = EngineOptions { strategy, ..EngineOptions::default() };
/// let engine = Engine::new(sconce_collectives::single(), options)?;
/// let vb = engine.var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)?;
/// let layer = unit(vb, "layer", |vb| candle_nn::linear(4, 4, vb))?;
/// assert_eq!(layer.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.dims(), [2, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of `build`.
pub fn unit<M>(vb: VarBuilder<'_>, name: &str, build: impl FnOnce(VarBuilder<'_>) -> Result<M>) -> Result<Unit<M>> {
    unit_of_class(vb, name, "", build)
}

/// Does what [`unit()`] does, and names the part's class, by which wrap policies choose units: that of the same part in
/// transformers, for example `LlamaDecoderLayer`.
///
/// # Errors
/// Those of `build`.
pub fn unit_of_class<M>(
    vb: VarBuilder<'_>,
    name: &str,
    class: &str,
    build: impl FnOnce(VarBuilder<'_>) -> Result<M>,
) -> Result<Unit<M>> {
    let vb = vb.pp(name);
    ANSWER.with_borrow_mut(Option::take);
    // Whatever comes back (an error, from most backends) means nothing; the answer is beside it.
    drop(vb.get_unchecked_dtype(QUESTION, DType::U8));
    let Some(units) = ANSWER.with_borrow_mut(Option::take) else {
        let module = Arc::new(build(vb)?);
        return Ok(Unit { module, place: None });
    };
    let number = units.parameters().open_part(&vb.prefix(), class);
    let module = build(vb);
    let end = units.parameters().close_part();
    let module = Arc::new(module?);
    let end = end?;
    let casts = units.casts(&end);
    let place = (end.is_unit || end.is_recomputed).then_some(Place {
        units,
        number,
        is_recomputed: end.is_recomputed,
        casts,
    });
    Ok(Unit { module, place })
}

/// A block of a model as [`unit()`] made it: computes as the block does, and sees to it that sharded parameters are there
/// while it does.
#[derive(Debug)]
pub struct Unit<M> {
    module: Arc<M>,
    place: Option<Place>,
}

#[derive(Debug, Clone)]
struct Place {
    units: Arc<Units>,
    number: usize,
    is_recomputed: bool,
    casts: Casts,
}

/// Dtypes at a unit's border.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Casts {
    pub(crate) inputs: Option<DType>,
    pub(crate) outputs: Option<DType>,
}

impl Casts {
    /// Converts what comes in, computes, and converts what goes out.
    fn around<I: Tensors, O: Tensors>(self, inputs: I, forward: impl FnOnce(I) -> Result<O>) -> Result<O> {
        cast(forward(cast(inputs, self.inputs)?)?, self.outputs)
    }
}

fn cast<T: Tensors>(tensors: T, dtype: Option<DType>) -> Result<T> {
    match dtype {
        Some(dtype) => tensors.map(&mut |tensor| match tensor.dtype().is_float() {
            true => tensor.to_dtype(dtype),
            false => Ok(tensor),
        }),
        None => Ok(tensors),
    }
}

impl<M> Clone for Unit<M> {
    fn clone(&self) -> Self {
        Self {
            module: Arc::clone(&self.module),
            place: self.place.clone(),
        }
    }
}

impl<M> Unit<M> {
    /// Runs `forward` on the part while its parameters are there.
    ///
    /// All tensors that `forward` uses and that have gradients come in as `inputs`, all that it makes go out as its
    /// result. They are tensors, pairs, arrays or vectors of them; see [`Tensors`].
    ///
    /// What [`EngineOptions::recompute`](crate::EngineOptions::recompute) chooses keeps its inputs for the backward, and
    /// nothing else: `forward` runs once more there and must come to the same result, from its inputs and the part alone.
    /// (candle_nn's `Dropout` does not come to the same; `sconce_core::nn::Dropout` does.) A tensor with a gradient that it
    /// captures instead is an error of the backward. That is why it is a function that can
    /// be kept and called again; [`Unit::run_once`] takes any other.
    ///
    /// # Errors
    /// Those of `forward`, and failures of the gather.
    pub fn run<I, O>(&self, inputs: I, forward: impl Fn(&M, I) -> Result<O> + Send + Sync + 'static) -> Result<O>
    where
        M: Send + Sync + 'static,
        I: Tensors + Clone + Send + Sync + 'static,
        O: Tensors,
    {
        let Some(place) = self.place.as_ref().filter(|place| place.is_recomputed) else {
            return self.run_once(inputs, forward);
        };
        let _span = place.forward_span();
        let invocation = place.units.enter_forward(place.number)?;
        let (module, casts) = (Arc::clone(&self.module), place.casts);
        let outcome = recompute::run(&place.units, place.number, inputs, move |inputs| {
            casts.around(inputs, |inputs| forward(&module, inputs))
        });
        let outcome = outcome.and_then(|outputs| place.keep_outputs(outputs));
        let left = invocation.map_or(Ok(()), |_| place.units.leave_forward(place.number));
        let outputs = outcome?;
        left?;
        Ok(outputs)
    }

    /// Does what [`Unit::run`] does, but never computes again in the backward.
    ///
    /// # Errors
    /// As there.
    pub fn run_once<I: Tensors, O: Tensors>(&self, inputs: I, forward: impl FnOnce(&M, I) -> Result<O>) -> Result<O> {
        let Some(place) = &self.place else {
            return forward(&self.module, inputs);
        };
        let _span = place.forward_span();
        let forward = |inputs| place.casts.around(inputs, |inputs| forward(&self.module, inputs));
        let Some(invocation) = place.units.enter_forward(place.number)? else {
            return forward(inputs);
        };
        let outcome = place
            .gate_inputs(&invocation, inputs)
            .and_then(forward)
            .and_then(|outputs| place.gate_outputs(&invocation, outputs));
        let left = place.units.leave_forward(place.number);
        let outputs = outcome?;
        left?;
        Ok(outputs)
    }

    /// Gathers the part's parameters and keeps them until [`Unit::reshard`], whatever runs meanwhile; called by all ranks.
    ///
    /// When it returns, the parameters are there. Does nothing for a part that is no unit. As long as it holds, no step can
    /// be taken.
    ///
    /// # Errors
    /// Failures of the group, and of an earlier gather.
    pub fn unshard(&self) -> Result<()> {
        match &self.place {
            Some(place) => Ok(place.units.hold(place.number)?),
            None => Ok(()),
        }
    }

    /// Gives up what [`Unit::unshard`] keeps.
    ///
    /// # Errors
    /// Failures of the gather.
    pub fn reshard(&self) -> Result<()> {
        match &self.place {
            Some(place) => Ok(place.units.let_go(place.number)?),
            None => Ok(()),
        }
    }

    /// Returns the part itself. Its sharded parameters are there only between [`Unit::unshard`] and [`Unit::reshard`].
    pub fn module(&self) -> &M {
        &self.module
    }
}

impl Place {
    /// Begins a span of the part's forward.
    fn forward_span(&self) -> tracing::span::EnteredSpan {
        tracing::debug_span!("forward", what = self.units.name(self.number)).entered()
    }

    fn gate_inputs<I: Tensors>(&self, invocation: &Arc<Invocation>, inputs: I) -> Result<I> {
        if !self.units.awaits_inputs(self.number) {
            return Ok(inputs);
        }
        inputs.map(&mut |input| {
            if !has_gradient(&input) {
                return Ok(input);
            }
            invocation.expect_input();
            input.contiguous()?.apply_op1(InputGate {
                units: Arc::clone(&self.units),
                unit: self.number,
                invocation: Arc::clone(invocation),
            })
        })
    }

    /// Gates a unit's results while its parameters are there: a result may be a parameter, or a view of one, and must be
    /// copied before it goes.
    fn gate_outputs<O: Tensors>(&self, invocation: &Arc<Invocation>, outputs: O) -> Result<O> {
        outputs.map(&mut |output| {
            if has_gradient(&output) {
                return output.contiguous()?.apply_op1(OutputGate {
                    units: Arc::clone(&self.units),
                    unit: self.number,
                    invocation: Arc::clone(invocation),
                });
            }
            self.keep(output)
        })
    }

    fn keep_outputs<O: Tensors>(&self, outputs: O) -> Result<O> {
        outputs.map(&mut |output| self.keep(output))
    }

    /// Copies a result that is a parameter, which goes.
    fn keep(&self, output: Tensor) -> Result<Tensor> {
        if self.units.holds(self.number, &output) {
            return output.force_contiguous();
        }
        Ok(output)
    }
}

/// Says whether a backward goes through a tensor; candle also records integers, but never differentiates them.
pub(crate) fn has_gradient(tensor: &Tensor) -> bool {
    tensor.dtype().is_float() && tensor.track_op()
}

impl<M: Module + Send + Sync + 'static> Module for Unit<M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.run(xs.clone(), |module, xs| module.forward(&xs))
    }
}

/// Tensors that go into a unit or come out of it together.
pub trait Tensors: Sized {
    /// Replaces every tensor by what `each` makes of it.
    ///
    /// # Errors
    /// Those of `each`.
    fn map(self, each: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Tensors for Tensor {
    fn map(self, each: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        each(self)
    }
}

impl<A: Tensors, B: Tensors> Tensors for (A, B) {
    fn map(self, each: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.map(each)?, self.1.map(each)?))
    }
}

impl<T: Tensors, const N: usize> Tensors for [T; N] {
    fn map(self, each: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        let mapped = self
            .into_iter()
            .map(|item| item.map(each))
            .collect::<Result<Vec<_>>>()?;
        mapped
            .try_into()
            .map_err(|_| candle_core::Error::msg("an array keeps its length"))
    }
}

impl<T: Tensors> Tensors for Vec<T> {
    fn map(self, each: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.into_iter().map(|item| item.map(each)).collect()
    }
}

impl<T: Tensors> Tensors for Option<T> {
    fn map(self, each: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.map(|item| item.map(each)).transpose()
    }
}
