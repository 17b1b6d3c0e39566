//! The parameters that a model created: names, tensors, and the anchors through which gradients are caught.

use crate::gradients::Gradients;
use crate::hook::GradientHook;
use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor, TensorId, Var, op::BackpropOp};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

    pub(crate) fn describe(&self) -> String {
        format!("{:?} {:?}", self.name, self.shape)
    }
}

/// A parameter under management.
#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub(crate) info: Arc<ParameterInfo>,
    /// What the model computes with: the data, recorded as the result of the hook.
    pub(crate) tensor: Tensor,
}

/// All parameters of a model, in order of creation.
#[derive(Debug, Default)]
pub(crate) struct Parameters {
    registered: Mutex<Registered>,
}

#[derive(Debug, Default)]
struct Registered {
    parameters: Vec<Parameter>,
    by_name: BTreeMap<String, usize>,
    /// Set when places and state have been given to the parameters there are.
    sealed: bool,
}

impl Parameters {
    /// Puts data under management and returns the tensor for the model; asked again, returns the same tensor.
    pub(crate) fn register(
        &self,
        name: &str,
        shape: &Shape,
        dtype: DType,
        device: &Device,
        gradients: &Arc<Gradients>,
        load: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut registered = self.lock();
        if let Some(number) = registered.by_name.get(name) {
            let known = &registered.parameters[*number].tensor;
            if known.shape() != shape || known.dtype() != dtype {
                return Err(Error::Redefined {
                    name: name.into(),
                    first: format!("{} {:?}", known.dtype().as_str(), known.dims()),
                    second: format!("{} {:?}", dtype.as_str(), shape.dims()),
                });
            }
            return Ok(known.clone());
        }
        if registered.sealed {
            return Err(Error::LateParameter { name: name.into() });
        }
        if dtype != DType::F32 {
            return Err(Error::UnsupportedDtype {
                name: name.into(),
                dtype: dtype.as_str(),
            });
        }
        let number = registered.parameters.len();
        let hook = GradientHook::new(number, load()?, Arc::clone(gradients))?;
        let tensor = anchor(shape, device)?.apply_op1(hook)?;
        let info = Arc::new(ParameterInfo {
            name: name.into(),
            shape: shape.dims().to_vec(),
        });
        registered.by_name.insert(name.into(), number);
        registered.parameters.push(Parameter {
            info,
            tensor: tensor.clone(),
        });
        Ok(tensor)
    }

    /// Refuses further parameters; those there are can still be asked for.
    pub(crate) fn seal(&self) {
        self.lock().sealed = true;
    }

    /// Returns the parameters created so far.
    pub(crate) fn all(&self) -> Vec<Parameter> {
        self.lock().parameters.clone()
    }

    /// Returns the number of each parameter by its tensor; for look-ups only, the order of the map means nothing.
    pub(crate) fn numbers(&self) -> HashMap<TensorId, usize> {
        let registered = self.lock();
        registered
            .parameters
            .iter()
            .enumerate()
            .map(|(number, p)| (p.tensor.id(), number))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Registered> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes the leaf that makes a parameter reachable for backward: shape and identity, no data.
///
/// The leaf is seen only by the hook, which ignores its storage.
fn anchor(shape: &Shape, device: &Device) -> Result<Tensor> {
    match device {
        Device::Cpu => {
            let empty = Storage::Cpu(CpuStorage::F32(Vec::new()));
            let leaf = Tensor::from_storage(empty, shape.clone(), BackpropOp::none(), true);
            Ok(Var::from_tensor(&leaf)?.into_inner())
        }
        other => Err(candle_core::Error::msg(format!(
            "managed parameters on {other:?}: this version trains on the CPU; build the model on Device::Cpu"
        ))
        .into()),
    }
}
