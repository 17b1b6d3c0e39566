//! The parameters that a model created, and the parts of it that it created them in.

use crate::device::{ManagedTensor, Staging};
use crate::gradients::Gradients;
use crate::hook::{GradientHook, anchor};
use crate::parameter::{Home, Parameter, ParameterInfo, chunk_of};
use crate::shard::{Chunk, Shard};
use crate::storage::{is_managed_dtype, zeros};
use crate::units::Units;
use crate::weights::Initial;
use crate::{Error, ParameterSet, Placement, Residence, Result, ShardingStrategy, Tier, UnitCandidate, UnitPolicy};
use candle_core::backend::BackendDevice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor, TensorId};
use half::{bf16, f16};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// All parameters of a model, in order of creation.
#[derive(Debug)]
pub(crate) struct Parameters {
    strategy: Arc<dyn ShardingStrategy>,
    frozen: ParameterSet,
    kept_in_f32: ParameterSet,
    chosen: UnitPolicy,
    recomputed: UnitPolicy,
    rank: usize,
    world: usize,
    staging: Arc<Staging>,
    registered: Mutex<Registered>,
}

#[derive(Debug, Default)]
struct Registered {
    parameters: Vec<Parameter>,
    by_name: BTreeMap<String, usize>,
    units: Vec<DeclaredPart>,
    shards: Vec<Arc<Shard>>,
    /// Parts being built, the innermost last.
    open: Vec<OpenPart>,
    /// Set when places and state have been given to the parameters there are.
    sealed: bool,
}

/// A part of the model that is being built, and the shares of it that have no shard yet.
#[derive(Debug)]
struct OpenPart {
    number: usize,
    shares: Vec<(Chunk, Initial)>,
}

/// What a part is, known when it has been built.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PartKind {
    pub(crate) is_unit: bool,
    pub(crate) is_recomputed: bool,
    /// The dtype of its first parameter that is not kept in f32.
    pub(crate) dtype: Option<DType>,
}

/// A part as the model declared it; a unit if it is chosen.
#[derive(Debug, Clone)]
pub(crate) struct DeclaredPart {
    pub(crate) name: String,
    pub(crate) class: String,
    /// The parameters asked for while it was built, those of units inside it excepted.
    pub(crate) parameters: Vec<usize>,
    /// The part in which it was built.
    pub(crate) outer: Option<usize>,
    /// Set at its end; the parameters of a part that is no unit belong to the part around it, too.
    pub(crate) kind: PartKind,
}

/// Who takes what happens in a backward.
#[derive(Debug, Clone)]
pub(crate) struct Receivers {
    pub(crate) gradients: Arc<Gradients>,
    /// Weak, because units know the parameters.
    pub(crate) units: Weak<Units>,
}

impl Parameters {
    pub(crate) fn new(
        strategy: Arc<dyn ShardingStrategy>,
        (frozen, kept_in_f32): (ParameterSet, ParameterSet),
        (chosen, recomputed): (UnitPolicy, UnitPolicy),
        (rank, world): (usize, usize),
        staging: Arc<Staging>,
    ) -> Self {
        Self {
            strategy,
            frozen,
            kept_in_f32,
            chosen,
            recomputed,
            rank,
            world,
            staging,
            registered: Mutex::default(),
        }
    }

    /// Puts data under management and returns the tensor for the model; asked again, returns the same tensor.
    pub(crate) fn register(
        &self,
        name: &str,
        shape: &Shape,
        dtype: DType,
        device: &Device,
        receivers: &Receivers,
        initial: Initial,
    ) -> Result<Tensor> {
        let info = ParameterInfo {
            name: name.into(),
            shape: shape.dims().to_vec(),
        };
        let is_kept = is_managed_dtype(dtype) && self.kept_in_f32.contains(&info);
        let dtype = if is_kept { DType::F32 } else { dtype };
        let mut registered = self.lock();
        let registered = &mut *registered;
        if let Some(number) = registered.by_name.get(name) {
            let known = &*registered.parameters[*number].tensor;
            if known.shape() != shape || known.dtype() != dtype {
                return Err(Error::Redefined {
                    name: name.into(),
                    first: format!("{} {:?}", known.dtype().as_str(), known.dims()),
                    second: format!("{} {:?}", dtype.as_str(), shape.dims()),
                });
            }
            if registered.open.is_empty() && registered.parameters[*number].placement.parameter == Residence::Sharded {
                return Err(Error::OutsideUnit { name: name.into() });
            }
            let known = known.clone();
            registered.enter_into_unit(*number);
            return Ok(known);
        }
        if registered.sealed {
            return Err(Error::LateParameter { name: name.into() });
        }
        if !is_managed_dtype(dtype) {
            return Err(Error::UnsupportedDtype {
                name: name.into(),
                dtype: dtype.as_str(),
            });
        }
        self.staging.open(device)?;
        let number = registered.parameters.len();
        let info = Arc::new(info);
        let is_trained = !self.frozen.contains(&info);
        let mut placement = self.strategy.place(&info);
        if registered.open.is_empty() {
            // Nobody says when it is used, so it has to be there always.
            placement.parameter = Residence::Replicated;
            placement.parameter_tier = Tier::Device;
        }
        let is_sharded = placement.parameter == Residence::Sharded;
        let elements = info.elements();
        let own = if is_sharded {
            chunk_of(elements, self.rank, self.world)
        } else {
            0..elements
        };
        let values = initial.load(name, shape, own)?;
        let is_apart = self.staging.serves(device);
        let data = match device {
            Device::Cuda(device) => Storage::Cuda(device.zeros_impl(&Shape::from(1), dtype)?),
            _ if is_apart => Storage::Cpu(zeros(dtype, 1)?),
            _ if is_sharded => Storage::Cpu(zeros(dtype, elements)?),
            _ => Storage::Cpu(rounded(dtype, &values)),
        };
        let tensor = if is_trained {
            let hook = GradientHook::new(number, shape.clone(), data, receivers.clone());
            anchor(shape, device)?.apply_op1(hook)?
        } else {
            Tensor::from_storage(data, shape.clone(), BackpropOp::none(), false)
        };
        let managed = ManagedTensor::new(tensor.clone(), &self.staging);
        if is_apart && !is_sharded {
            managed.fill_with(|whole| whole.round_from(&values))?;
        }
        let home = if is_sharded {
            managed.release()?;
            Home::Unbuilt
        } else {
            Home::of_whole(dtype, is_trained, &values, managed.gpu(placement.optimizer_state_tier))?
        };
        registered.parameters.push(Parameter {
            info,
            tensor: managed.clone(),
            placement,
            is_trained,
            is_kept_in_f32: is_kept,
            home,
            origin: initial.source.describe(),
        });
        registered.by_name.insert(name.into(), number);
        registered.enter_into_unit(number);
        if let Some(part) = registered.open.last_mut().filter(|_| is_sharded) {
            let chunk = Chunk {
                parameter: number,
                tensor: managed,
                elements,
                values,
            };
            part.shares.push((chunk, initial));
        }
        Ok(tensor)
    }

    /// Begins a part; parameters that are asked for until it is closed belong to it. Returns its number.
    pub(crate) fn open_part(&self, name: &str, class: &str) -> usize {
        let mut registered = self.lock();
        let number = registered.units.len();
        let outer = registered.open.last().map(|part| part.number);
        registered.units.push(DeclaredPart {
            name: name.into(),
            class: class.into(),
            parameters: Vec::new(),
            outer,
            kind: PartKind::default(),
        });
        registered.open.push(OpenPart {
            number,
            shares: Vec::new(),
        });
        number
    }

    /// Ends the innermost part and says what it is. A unit's sharded parameters are laid out; those of another
    /// part go to the part around it, and where there is none they are whole from now on.
    pub(crate) fn close_part(&self) -> Result<PartKind> {
        let mut registered = self.lock();
        let registered = &mut *registered;
        let Some(OpenPart { number, shares }) = registered.open.pop() else {
            return Ok(PartKind::default());
        };
        let DeclaredPart {
            name,
            class,
            parameters,
            ..
        } = &registered.units[number];
        let all = &registered.parameters;
        let candidate = UnitCandidate {
            name,
            class,
            elements: parameters.iter().map(|number| all[*number].info.elements()).sum(),
        };
        let is_in_shard = |number: &usize| matches!(all[*number].home, Home::Shard { .. });
        // With nothing around it, a part that shares a unit's parameters needs them gathered, too.
        let must_gather = registered.open.is_empty() && parameters.iter().any(is_in_shard);
        let mut computing = parameters
            .iter()
            .map(|number| &all[*number])
            .filter(|parameter| !parameter.is_kept_in_f32);
        let kind = PartKind {
            is_unit: self.chosen.chooses(&candidate) || must_gather,
            is_recomputed: self.recomputed.chooses(&candidate),
            dtype: computing.next().map(|parameter| parameter.tensor.dtype()),
        };
        let parameters = parameters.clone();
        registered.units[number].kind = kind;
        if kind.is_unit {
            registered.lay_out(number, shares, (self.rank, self.world))?;
            return Ok(kind);
        }
        match registered.open.last_mut() {
            Some(outer) => {
                outer.shares.extend(shares);
                parameters.iter().for_each(|number| registered.enter_into_unit(*number));
            }
            None => shares
                .into_iter()
                .try_for_each(|(chunk, initial)| registered.parameters[chunk.parameter].make_whole(&initial))?,
        }
        Ok(kind)
    }

    /// Refuses further parameters; those there are can still be asked for. Fails while a unit is being built.
    pub(crate) fn seal(&self) -> Result<()> {
        let mut registered = self.lock();
        if registered.open.is_empty() {
            registered.sealed = true;
            return Ok(());
        }
        Err(Error::Order {
            what: "use of the model while one of its units is being built",
            hint: "build the whole model first, then run it",
        })
    }

    /// Says whether parts may be computed again.
    pub(crate) fn may_recompute(&self) -> bool {
        !self.recomputed.is_none()
    }

    /// Says whether any parameter is sharded.
    pub(crate) fn has_shards(&self) -> bool {
        !self.lock().shards.is_empty()
    }

    /// Returns the number of units declared so far.
    pub(crate) fn unit_count(&self) -> usize {
        self.lock().units.len()
    }

    /// Returns the parameters created so far.
    pub(crate) fn all(&self) -> Vec<Parameter> {
        self.lock().parameters.clone()
    }

    /// Returns the units declared so far, and all shards.
    pub(crate) fn units(&self) -> (Vec<DeclaredPart>, Vec<Arc<Shard>>) {
        let registered = self.lock();
        (registered.units.clone(), registered.shards.clone())
    }

    /// Returns the number of each trained parameter by its tensor; for look-ups only, the order of the map means nothing.
    pub(crate) fn numbers(&self) -> HashMap<TensorId, usize> {
        let registered = self.lock();
        registered
            .parameters
            .iter()
            .enumerate()
            .filter(|(_, p)| p.is_trained)
            .map(|(number, p)| (p.tensor.id(), number))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Registered> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    /// Makes shards of a unit's shares: one for each dtype, for what is trained and what is not, and for each placement.
    fn lay_out(&mut self, unit: usize, shares: Vec<(Chunk, Initial)>, place: (usize, usize)) -> Result<()> {
        let mut groups: Vec<(DType, bool, Placement, Vec<Chunk>)> = Vec::new();
        for (chunk, _) in shares {
            let parameter = &self.parameters[chunk.parameter];
            let key = (parameter.tensor.dtype(), parameter.is_trained, parameter.placement);
            match groups.iter_mut().find(|group| (group.0, group.1, group.2) == key) {
                Some(group) => group.3.push(chunk),
                None => groups.push((key.0, key.1, key.2, vec![chunk])),
            }
        }
        for (dtype, is_trained, placement, chunks) in groups {
            let numbers: Vec<_> = chunks.iter().map(|chunk| chunk.parameter).collect();
            let name = &self.units[unit].name;
            let shard = Arc::new(Shard::new(name, placement, dtype, is_trained, chunks, place)?);
            for (slot, number) in numbers.into_iter().enumerate() {
                self.parameters[number].home = Home::Shard {
                    shard: Arc::clone(&shard),
                    slot,
                };
            }
            self.shards.push(shard);
        }
        Ok(())
    }

    fn enter_into_unit(&mut self, parameter: usize) {
        if let Some(part) = self.open.last() {
            let parameters = &mut self.units[part.number].parameters;
            if !parameters.contains(&parameter) {
                parameters.push(parameter);
            }
        }
    }
}

fn rounded(dtype: DType, values: &[f32]) -> CpuStorage {
    match dtype {
        DType::BF16 => CpuStorage::BF16(values.iter().map(|value| bf16::from_f32(*value)).collect()),
        DType::F16 => CpuStorage::F16(values.iter().map(|value| f16::from_f32(*value)).collect()),
        _ => CpuStorage::F32(values.to_vec()),
    }
}
