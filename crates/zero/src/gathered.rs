//! Parameters that are whole for a while, outside of any unit's forward: for reading and for editing.

use crate::mesh::Mesh;
use crate::parameter::Parameter;
use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The parameters of a scope that [`Engine::read`](crate::Engine::read) or [`Engine::edit`](crate::Engine::edit) opened.
#[derive(Debug)]
pub struct Gathered<'a> {
    by_name: BTreeMap<&'a str, &'a Parameter>,
    /// Names and values that were set, where that is allowed.
    edits: Option<Mutex<BTreeMap<String, Tensor>>>,
}

impl<'a> Gathered<'a> {
    pub(crate) fn new(parameters: impl Iterator<Item = &'a Parameter>, may_edit: bool) -> Self {
        Self {
            by_name: parameters.map(|parameter| (&*parameter.info.name, parameter)).collect(),
            edits: may_edit.then(Mutex::default),
        }
    }

    /// Returns the names of all parameters of the scope, in order.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.by_name.keys().copied()
    }

    /// Returns a copy of a parameter's values, in the dtype the model computes with.
    ///
    /// # Errors
    /// [`Error::NotGathered`] for a name that is not in the scope.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        Ok(self.find(name)?.tensor.copy()?.detach())
    }

    /// Replaces a parameter's values when the scope ends; in a scope of [`Engine::edit`](crate::Engine::edit), and there
    /// only what the rank sets that edits.
    ///
    /// # Errors
    /// [`Error::NotGathered`] for a name that is not in the scope, [`Error::Edit`] for another shape and in a scope for
    /// reading.
    pub fn set(&self, name: &str, values: &Tensor) -> Result<()> {
        let parameter = self.find(name)?;
        let refuse = |reason: String| {
            Err(Error::Edit {
                name: name.into(),
                reason,
            })
        };
        let Some(mut edits) = self.edits() else {
            return refuse("the scope is for reading; open one with Engine::edit".into());
        };
        if values.dims() != parameter.info.shape {
            let (found, expected) = (values.dims(), &parameter.info.shape);
            return refuse(format!("the values have shape {found:?}, expected {expected:?}"));
        }
        let values = values
            .detach()
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F32)?
            .contiguous()?;
        edits.insert(name.into(), values);
        Ok(())
    }

    /// Carries out on all ranks what rank `rank` has set.
    pub(crate) fn publish(&self, mesh: &Mesh, rank: usize) -> Result<()> {
        let Some(edits) = self.edits() else { return Ok(()) };
        let group = &*mesh.world;
        let mut edited: Vec<u8> = self.names().map(|name| u8::from(edits.contains_key(name))).collect();
        group.broadcast(&mut edited, rank)?;
        let edited = self.by_name.iter().zip(edited).filter(|(_, edited)| *edited != 0);
        for ((name, parameter), _) in edited {
            let mut values = vec![0f32; parameter.info.elements()];
            if group.rank() == rank {
                let (storage, layout) = edits[*name].storage_and_layout();
                if let Storage::Cpu(CpuStorage::F32(elements)) = &*storage {
                    values = elements[layout.start_offset()..][..values.len()].to_vec();
                }
            }
            group.broadcast(&mut values, rank)?;
            parameter.assign(&values, mesh.place())?;
        }
        Ok(())
    }

    fn edits(&self) -> Option<MutexGuard<'_, BTreeMap<String, Tensor>>> {
        let edits = self.edits.as_ref()?;
        Some(edits.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn find(&self, name: &str) -> Result<&'a Parameter> {
        self.by_name
            .get(name)
            .copied()
            .ok_or_else(|| Error::NotGathered { name: name.into() })
    }
}
