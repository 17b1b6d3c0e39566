//! All layers of a model that compute in fp8: their scales change together.

use super::layer::{Fp8Layer, Fp8LayerState};
use super::recipe::Fp8Recipe;
use crate::checkpoint::Stateful;
use crate::{Error, Result};
use sconce_collectives::{Communicator, ReduceOp};
use sconce_zero::ParameterInfo;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The delayed scaling of one model on one rank.
#[derive(Debug)]
pub struct Fp8Scaling {
    recipe: Fp8Recipe,
    /// In order of creation, which is the model's and so the same on all ranks.
    layers: Mutex<Vec<Arc<Fp8Layer>>>,
    updates: AtomicU64,
}

impl Fp8Scaling {
    pub(crate) fn new(recipe: Fp8Recipe) -> Self {
        Self {
            recipe,
            layers: Mutex::default(),
            updates: AtomicU64::new(0),
        }
    }

    /// Returns the settings.
    pub fn recipe(&self) -> &Fp8Recipe {
        &self.recipe
    }

    /// Returns the layers that compute in fp8, in order of creation.
    pub fn layers(&self) -> Vec<Arc<Fp8Layer>> {
        self.lock().clone()
    }

    /// Returns how often amaxes have been taken into the histories: once per backward.
    pub fn updates(&self) -> u64 {
        self.updates.load(Relaxed)
    }

    /// Returns what checkpoints keep, beside [`Fp8Scaling::updates`]. They do so by themselves; where ranks have scales of
    /// their own they go on with those of rank 0.
    pub fn state(&self) -> Vec<Fp8LayerState> {
        self.lock().iter().map(|layer| layer.state()).collect()
    }

    /// Goes on from a checkpoint.
    ///
    /// # Errors
    /// [`Error::Setting`] for the state of other layers than the model's, and for scales that no run can have.
    pub fn restore(&self, state: &[Fp8LayerState], updates: u64) -> Result<()> {
        let layers = self.lock();
        let names = |names: &mut dyn Iterator<Item = &str>| Vec::from_iter(names).join(", ");
        let (ours, theirs) = (
            names(&mut layers.iter().map(|layer| layer.name())),
            names(&mut state.iter().map(|layer| layer.name.as_str())),
        );
        if ours != theirs {
            return Err(Error::Setting {
                setting: "fp8 state of the layers",
                value: theirs,
                expected: format!("expected the state of {ours}: build the model that the checkpoint is of"),
            });
        }
        if let Some(layer) = state.iter().find(|layer| !layer.is_sound()) {
            return Err(Error::Setting {
                setting: "fp8 state of a layer",
                value: layer.name.clone(),
                expected: "expected scales and amaxes above 0 and finite".into(),
            });
        }
        layers.iter().zip(state).for_each(|(layer, state)| layer.restore(state));
        self.updates.store(updates, Relaxed);
        Ok(())
    }

    /// Returns the state of a layer of this name, whose weight has this shape; `None` if it does not compute in fp8.
    pub(super) fn layer(&self, name: &str, shape: &[usize]) -> Option<Arc<Fp8Layer>> {
        let weight = ParameterInfo {
            name: if name.is_empty() {
                "weight".into()
            } else {
                format!("{name}.weight")
            },
            shape: shape.to_vec(),
        };
        if !self.recipe.layers.contains(&weight) {
            return None;
        }
        let mut layers = self.lock();
        // One name is one weight, and so one layer.
        if let Some(layer) = layers.iter().find(|layer| layer.name() == name) {
            return Some(Arc::clone(layer));
        }
        let layer = Arc::new(Fp8Layer::new(name.into(), &self.recipe));
        layers.push(Arc::clone(&layer));
        Some(layer)
    }

    /// Takes the amaxes of a backward into the histories, and lets scales follow; called by all ranks.
    ///
    /// # Errors
    /// Failures of the group.
    pub(crate) fn update(&self, communicator: &dyn Communicator) -> Result<()> {
        let layers = self.lock();
        let quantities = layers.iter().flat_map(|layer| layer.quantities());
        let mut amaxes = Vec::from_iter(quantities.clone().map(|quantity| quantity.take_current()));
        if self.recipe.reduce_amax && communicator.size() > 1 && !amaxes.is_empty() {
            communicator.all_reduce(&mut amaxes, ReduceOp::Max)?;
        }
        let rescale = self.updates.fetch_add(1, Relaxed).is_multiple_of(self.recipe.interval);
        quantities
            .zip(amaxes)
            .for_each(|(quantity, amax)| quantity.update(amax, &self.recipe, rescale));
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Fp8Layer>>> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is written of a scaling.
#[derive(Serialize, Deserialize)]
struct Saved {
    updates: u64,
    layers: Vec<Fp8LayerState>,
}

impl Stateful for Fp8Scaling {
    fn state(&self) -> Result<serde_json::Value, Box<dyn std::error::Error + Send + Sync>> {
        let (updates, layers) = (self.updates(), self.state());
        Ok(serde_json::to_value(Saved { updates, layers })?)
    }

    fn restore(&self, state: serde_json::Value) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let saved: Saved = serde_json::from_value(state)?;
        Ok(self.restore(&saved.layers, saved.updates)?)
    }
}
