//! One parameter: its name, its tensor, and where the optimizer finds its values.

use crate::device::{DeviceStep, FlatMemory, Gpu, Intent, ManagedTensor, StepTarget};
use crate::mesh::Mesh;
use crate::shard::Shard;
use crate::storage::ElementsMut;
use crate::weights::Initial;
use crate::{Error, Placement, Residence, Result, Tier};
use candle_core::{DType, Shape};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What a strategy knows of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterInfo {
    /// The name, as the model asked for it, for example `model.layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// The full shape.
    pub shape: Vec<usize>,
}

impl ParameterInfo {
    /// Returns the number of elements of the full parameter.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A parameter under management.
#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub(crate) info: Arc<ParameterInfo>,
    /// What the model computes with: the data, recorded as the result of the hook if it is trained.
    pub(crate) tensor: ManagedTensor,
    pub(crate) placement: Placement,
    pub(crate) is_trained: bool,
    /// Whether it is f32 whatever dtype was asked for.
    pub(crate) is_kept_in_f32: bool,
    pub(crate) home: Home,
    /// Where the values came from; ranks may differ in it unless each has only its share.
    pub(crate) origin: String,
}

/// Where the values are that the optimizer updates.
#[derive(Debug, Clone)]
pub(crate) enum Home {
    /// In the tensor itself, or nowhere: it is not trained.
    Tensor,
    /// In f32, beside a tensor of another dtype.
    Beside(Arc<Mutex<Masters>>),
    /// In a unit that is still being built.
    Unbuilt,
    /// In a slot of a shard; the tensor is empty but for when it is gathered.
    Shard { shard: Arc<Shard>, slot: usize },
}

/// The f32 values behind a range of a tensor's elements.
#[derive(Debug)]
pub(crate) struct Masters {
    start: usize,
    values: FlatMemory,
}

/// Values that an optimizer updates.
#[derive(Debug)]
pub(crate) enum Master<'a> {
    /// The values that the model computes with.
    Itself(ElementsMut<'a>),
    /// f32 values; those that the model computes with are their copy.
    Apart {
        masters: &'a mut [f32],
        copy: ElementsMut<'a>,
    },
}

impl<'a> Master<'a> {
    /// Copies the values, or the masters if there are some.
    pub(crate) fn read_into(&self, wide: &mut [f32]) {
        match self {
            Self::Itself(values) => values.shared().copy_to(wide),
            Self::Apart { masters, .. } => wide.copy_from_slice(masters),
        }
    }

    /// Sets the values, and the masters if there are some.
    pub(crate) fn write(self, wide: &[f32]) {
        match self {
            Self::Itself(values) => values.round_from(wide),
            Self::Apart { masters, copy } => {
                masters.copy_from_slice(wide);
                copy.round_from(wide);
            }
        }
    }
}

impl Home {
    /// Returns the home of a parameter that is whole, of these values; `gpu` is where masters are to lie, if on one.
    pub(crate) fn of_whole(dtype: DType, is_trained: bool, values: &[f32], gpu: Option<&Gpu>) -> Result<Self> {
        if is_trained && dtype != DType::F32 {
            let values = FlatMemory::copied(gpu, values)?;
            return Ok(Self::Beside(Arc::new(Mutex::new(Masters { start: 0, values }))));
        }
        Ok(Self::Tensor)
    }
}

impl Parameter {
    /// Makes a parameter whole that lies in no unit after all.
    pub(crate) fn make_whole(&mut self, initial: &Initial) -> Result<()> {
        let ParameterInfo { name, shape } = &*self.info;
        let values = initial.load(name, &Shape::from(shape.as_slice()), 0..self.info.elements())?;
        self.tensor.fill_with(|whole| whole.round_from(&values))?;
        let gpu = self.tensor.gpu(self.placement.optimizer_state_tier);
        self.home = Home::of_whole(self.tensor.dtype(), self.is_trained, &values, gpu)?;
        (self.placement.parameter, self.placement.parameter_tier) = (Residence::Replicated, Tier::Device);
        Ok(())
    }

    /// Describes what all ranks must agree on.
    pub(crate) fn describe(&self) -> String {
        let ParameterInfo { name, shape } = &*self.info;
        let frozen = if self.is_trained { "" } else { " frozen" };
        let sharded = match self.placement.parameter {
            Residence::Replicated => String::new(),
            Residence::Sharded => format!(" sharded, from {}", self.origin),
        };
        match self.tensor.dtype() {
            DType::F32 => format!("{name:?} {shape:?}{frozen}{sharded}"),
            dtype => format!("{name:?} {shape:?} {}{frozen}{sharded}", dtype.as_str()),
        }
    }

    /// Runs `work` on elements `within` of elements `chunk` as the optimizer updates them; of a sharded parameter `chunk`
    /// is this rank's.
    ///
    /// Whoever changes values that have masters writes the copies of all of these.
    pub(crate) fn with_master<R>(
        &self,
        intent: Intent,
        chunk: &Range<usize>,
        within: Range<usize>,
        work: impl FnOnce(Master<'_>) -> R,
    ) -> Result<R> {
        let elements = chunk.start + within.start..chunk.start + within.end;
        match &self.home {
            Home::Shard { shard, slot } => shard.with_master(*slot, within, work),
            Home::Beside(masters) => {
                let mut masters = masters.lock().unwrap_or_else(PoisonError::into_inner);
                let Masters { start, values } = &mut *masters;
                let within = elements.start - *start..elements.end - *start;
                if within.end > values.len() {
                    return Ok(self
                        .tensor
                        .with_values(intent, elements, |copy| work(Master::Itself(copy)))?);
                }
                let masters = &mut values.as_mut_slice()[within];
                let intent = match intent {
                    Intent::Change => Intent::Overwrite,
                    other => other,
                };
                Ok(self
                    .tensor
                    .with_values(intent, elements, |copy| work(Master::Apart { masters, copy }))?)
            }
            Home::Tensor | Home::Unbuilt => Ok(self
                .tensor
                .with_values(intent, elements, |values| work(Master::Itself(values)))?),
        }
    }

    /// Has a kernel update elements `within` of elements `chunk`, as [`Parameter::with_master`] has the host; `false`, and
    /// nothing is done, where not all that it needs lies on the GPU.
    pub(crate) fn step_on_gpu(
        &self,
        gpu: &Gpu,
        chunk: &Range<usize>,
        within: Range<usize>,
        step: DeviceStep<'_>,
    ) -> Result<bool> {
        let elements = chunk.start + within.start..chunk.start + within.end;
        let target = match &self.home {
            Home::Shard { shard, slot } => return shard.step_on_gpu(gpu, *slot, within, step),
            _ if !gpu.reaches(&self.tensor) => return Ok(false),
            Home::Beside(masters) => {
                let mut masters = masters.lock().unwrap_or_else(PoisonError::into_inner);
                let within = elements.start - masters.start..elements.end - masters.start;
                let Some(masters) = masters.values.on_device_mut() else {
                    return Ok(false);
                };
                let target = StepTarget::Beside {
                    masters: (masters, within),
                    tensor: &self.tensor,
                    elements,
                };
                return gpu.step(step, target).map(|()| true);
            }
            Home::Tensor | Home::Unbuilt if self.tensor.dtype() == DType::F32 => {
                StepTarget::Tensor(&self.tensor, elements)
            }
            Home::Tensor | Home::Unbuilt => return Ok(false),
        };
        gpu.step(step, target).map(|()| true)
    }

    /// Gives a replicated parameter rank 0's values on all ranks, and drops masters that other ranks update.
    pub(crate) fn synchronise(&self, mesh: &Mesh) -> Result<()> {
        let group = &*mesh.world;
        match &self.home {
            Home::Shard { .. } | Home::Unbuilt => Ok(()),
            Home::Tensor => {
                let intent = match group.rank() {
                    0 => Intent::Read,
                    _ => Intent::Overwrite,
                };
                let broadcast = |values: ElementsMut<'_>| match values {
                    ElementsMut::F32(values) => group.broadcast(values, 0),
                    ElementsMut::Bf16(values) => group.broadcast(values, 0),
                    ElementsMut::F16(values) => group.broadcast(values, 0),
                };
                let outcome = self.tensor.with_values(intent, self.tensor.all(), broadcast)?;
                outcome.map_err(Error::from)
            }
            Home::Beside(masters) => {
                let mut masters = masters.lock().unwrap_or_else(PoisonError::into_inner);
                if masters.values.len() == self.info.elements() {
                    group.broadcast(masters.values.for_peers(), 0)?;
                    self.set_copy(masters.values.as_slice())?;
                }
                if self.placement.optimizer_state == Residence::Sharded {
                    let (rank, world) = mesh.place();
                    let chunk = chunk_of(self.info.elements(), rank, world);
                    let gpu = self.tensor.gpu(self.placement.optimizer_state_tier);
                    masters.values = FlatMemory::copied(gpu, &masters.values.as_slice()[chunk.clone()])?;
                    masters.start = chunk.start;
                }
                Ok(())
            }
        }
    }

    /// Replaces the values on this rank, wherever they are; a gathered copy of a sharded parameter stays as it was.
    pub(crate) fn assign(&self, values: &[f32], (rank, world): (usize, usize)) -> Result<()> {
        match &self.home {
            Home::Shard { .. } => self.assign_held(&values[chunk_of(values.len(), rank, world)]),
            Home::Tensor | Home::Beside(_) | Home::Unbuilt => self.assign_held(values),
        }
    }

    /// Does so with what this rank holds: its chunk of a sharded parameter, all of others.
    pub(crate) fn assign_held(&self, values: &[f32]) -> Result<()> {
        match &self.home {
            Home::Tensor | Home::Unbuilt => self.set_copy(values),
            Home::Beside(masters) => {
                let mut masters = masters.lock().unwrap_or_else(PoisonError::into_inner);
                let range = masters.start..masters.start + masters.values.len();
                masters.values.as_mut_slice().copy_from_slice(&values[range]);
                self.set_copy(values)
            }
            Home::Shard { shard, slot } => shard.with_master(*slot, 0..values.len(), |master| master.write(values)),
        }
    }

    /// Replaces the values that the model computes with.
    fn set_copy(&self, values: &[f32]) -> Result<()> {
        Ok(self
            .tensor
            .with_values(Intent::Overwrite, self.tensor.all(), |whole| whole.round_from(values))?)
    }

    /// Says whether the values that the optimizer updates are here, rather than in its state.
    pub(crate) fn has_its_values(&self) -> bool {
        let is_wide = self.tensor.dtype() == DType::F32 || !self.is_trained;
        is_wide
            || match &self.home {
                Home::Shard { shard, .. } => shard.bytes().1 > 0,
                Home::Beside(masters) => !masters.lock().unwrap_or_else(PoisonError::into_inner).values.is_empty(),
                Home::Tensor | Home::Unbuilt => true,
            }
    }

    /// Forgets the masters, which are kept elsewhere from now on.
    pub(crate) fn drop_masters(&self) {
        match &self.home {
            Home::Shard { shard, .. } => shard.drop_masters(),
            Home::Beside(masters) => {
                masters.lock().unwrap_or_else(PoisonError::into_inner).values = FlatMemory::default();
            }
            Home::Tensor | Home::Unbuilt => {}
        }
    }

    /// Returns the bytes held of the values that the model computes with while they are not gathered, and of masters.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let whole = self.info.elements() * self.tensor.dtype().size_in_bytes();
        match &self.home {
            Home::Tensor => (whole, 0),
            Home::Beside(masters) => {
                let masters = masters.lock().unwrap_or_else(PoisonError::into_inner);
                (whole, masters.values.len() * size_of::<f32>())
            }
            // Counted by shard, since padding belongs to the shard.
            Home::Shard { .. } | Home::Unbuilt => (0, 0),
        }
    }
}

/// Returns the elements of a parameter that belong to a rank.
pub(crate) fn chunk_of(elements: usize, rank: usize, world: usize) -> Range<usize> {
    let chunk = elements.div_ceil(world);
    (rank * chunk).min(elements)..((rank + 1) * chunk).min(elements)
}
