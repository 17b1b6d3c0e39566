//! The scales of one linear layer, and the amaxes that they follow from.

use super::grid::{Grid, amax};
use super::recipe::{Fp8Format, Fp8Recipe};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The state of one linear layer that computes in fp8.
#[derive(Debug)]
pub struct Fp8Layer {
    name: String,
    pub(crate) input: Quantity,
    pub(crate) weight: Quantity,
    pub(crate) gradient: Quantity,
}

/// A tensor that a layer rounds to fp8, over all its backwards.
#[derive(Debug)]
pub(crate) struct Quantity {
    grid: Grid,
    margin: i32,
    /// The amax of what has been differentiated since the last update, as bits.
    current: AtomicU32,
    history: Mutex<History>,
}

#[derive(Debug)]
struct History {
    scale: f32,
    /// The last one first; empty until something has been seen.
    amaxes: VecDeque<f32>,
}

/// What a checkpoint keeps of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fp8LayerState {
    /// The layer's name: that of its weight without `.weight`.
    pub name: String,
    /// Of its input.
    pub input: Fp8History,
    /// Of its weight.
    pub weight: Fp8History,
    /// Of its output's gradient.
    pub gradient: Fp8History,
}

/// A scale, and the amaxes seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fp8History {
    /// What values are multiplied with before they are rounded.
    pub scale: f32,
    /// The greatest magnitudes, the last one first.
    pub amaxes: Vec<f32>,
}

impl Fp8LayerState {
    /// Says whether all numbers are such as a run can have.
    pub(super) fn is_sound(&self) -> bool {
        let is_above_zero = |number: &f32| *number > 0.0 && number.is_finite();
        let histories = [&self.input, &self.weight, &self.gradient];
        let mut numbers = histories
            .into_iter()
            .flat_map(|history| history.amaxes.iter().chain([&history.scale]));
        numbers.all(is_above_zero)
    }
}

impl Fp8Layer {
    pub(super) fn new(name: String, recipe: &Fp8Recipe) -> Self {
        let of_gradient = match recipe.format {
            Fp8Format::Hybrid => Grid::E5m2,
            Fp8Format::E4m3 => Grid::E4m3,
        };
        let quantity = |grid| Quantity::new(grid, recipe.margin);
        Self {
            name,
            input: quantity(Grid::E4m3),
            weight: quantity(Grid::E4m3),
            gradient: quantity(of_gradient),
        }
    }

    /// Returns the layer's name: that of its weight without `.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn quantities(&self) -> [&Quantity; 3] {
        [&self.input, &self.weight, &self.gradient]
    }

    /// Returns scales and histories.
    pub fn state(&self) -> Fp8LayerState {
        let [input, weight, gradient] = self.quantities().map(Quantity::state);
        Fp8LayerState {
            name: self.name.clone(),
            input,
            weight,
            gradient,
        }
    }

    pub(super) fn restore(&self, state: &Fp8LayerState) {
        let states = [&state.input, &state.weight, &state.gradient];
        let pairs = self.quantities().into_iter().zip(states);
        pairs.for_each(|(quantity, state)| quantity.restore(state));
    }
}

/// How a tensor was rounded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rounded {
    /// What it was multiplied with before.
    pub(crate) scale: f32,
    /// Its greatest magnitude.
    pub(crate) amax: f32,
}

impl Quantity {
    fn new(grid: Grid, margin: i32) -> Self {
        Self {
            grid,
            margin,
            current: AtomicU32::new(0),
            history: Mutex::new(History {
                scale: 1.0,
                amaxes: VecDeque::new(),
            }),
        }
    }

    /// Multiplies values by the scale in force and rounds them.
    pub(crate) fn round(&self, values: &mut [f32]) -> Rounded {
        let amax = amax(values);
        let history = self.lock();
        let scale = match history.amaxes.is_empty() {
            true => self.scale_of(amax, history.scale),
            false => history.scale,
        };
        drop(history);
        self.round_with(values, scale);
        Rounded { scale, amax }
    }

    /// Multiplies values by a scale and rounds them.
    pub(crate) fn round_with(&self, values: &mut [f32], scale: f32) {
        self.grid.round_all(values, scale);
    }

    /// Takes note of the amax of a tensor that has been differentiated. In any order it comes to the same.
    pub(crate) fn record(&self, amax: f32) {
        self.current.fetch_max(amax.to_bits(), Relaxed);
    }

    /// Returns the amax since the last call; 0 if nothing came, infinity if something was not finite.
    pub(super) fn take_current(&self) -> f32 {
        let amax = f32::from_bits(self.current.swap(0, Relaxed));
        if amax.is_finite() { amax } else { f32::INFINITY }
    }

    /// Enters an amax into the history; with `rescale` the scale follows.
    pub(super) fn update(&self, amax: f32, recipe: &Fp8Recipe, rescale: bool) {
        let mut history = self.lock();
        let is_first = history.amaxes.is_empty();
        if amax > 0.0 && amax.is_finite() {
            history.amaxes.push_front(amax);
            history.amaxes.truncate(recipe.amax_history_len);
        }
        if rescale || is_first {
            let amax = recipe.amax(history.amaxes.iter());
            history.scale = self.scale_of(amax, history.scale);
        }
    }

    /// Transformer Engine's `_default_sf_compute`: takes `amax` to the largest number, below it by the margin.
    fn scale_of(&self, amax: f32, otherwise: f32) -> f32 {
        if !(amax > 0.0 && amax.is_finite()) {
            return otherwise;
        }
        ((self.grid.largest() / amax) / 2f32.powi(self.margin)).min(f32::MAX)
    }

    fn state(&self) -> Fp8History {
        let history = self.lock();
        Fp8History {
            scale: history.scale,
            amaxes: history.amaxes.iter().copied().collect(),
        }
    }

    fn restore(&self, state: &Fp8History) {
        self.current.store(0, Relaxed);
        let mut history = self.lock();
        history.scale = state.scale;
        history.amaxes = state.amaxes.iter().copied().collect();
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::recipe::AmaxCompute;
    use super::*;

    /// Transformer Engine's rules over a ring that is rolled, as its `recipe.py` has them; amaxes here are above 0 and finite.
    fn reference(amaxes: &[f32], recipe: &Fp8Recipe) -> Vec<f32> {
        let mut ring = vec![0f32; recipe.amax_history_len];
        let scale = |amax: f32| (448.0 / amax) / 2f32.powi(recipe.margin);
        let mut scales = Vec::new();
        for amax in amaxes {
            ring[0] = *amax;
            scales.push(scale(match recipe.amax_compute {
                AmaxCompute::Max => ring.iter().copied().fold(0.0, f32::max),
                AmaxCompute::MostRecent => ring[0],
            }));
            ring.rotate_left(1);
            ring[0] = 0.0;
        }
        scales
    }

    #[test]
    fn scales_follow_transformer_engines_history() {
        let amaxes: Vec<f32> = (1..200)
            .map(|i| (i as f32 * 0.7).sin().abs() * 10f32.powi(i % 5 - 3))
            .collect();
        for amax_history_len in [1, 2, 16, 1024] {
            for amax_compute in [AmaxCompute::Max, AmaxCompute::MostRecent] {
                for margin in [-1, 0, 3] {
                    let recipe = Fp8Recipe {
                        amax_history_len,
                        amax_compute,
                        margin,
                        ..Fp8Recipe::default()
                    };
                    let layer = Fp8Layer::new("layer".into(), &recipe);
                    let found: Vec<f32> = amaxes
                        .iter()
                        .map(|amax| {
                            // In parts, in any order.
                            layer.input.record(amax / 2.0);
                            layer.input.record(*amax);
                            layer.input.record(0.0);
                            layer.input.update(layer.input.take_current(), &recipe, true);
                            layer.state().input.scale
                        })
                        .collect();
                    assert_eq!(found, reference(&amaxes, &recipe), "{recipe:?}");
                }
            }
        }
    }

    #[test]
    fn a_tensor_without_a_history_is_scaled_by_itself_and_nothing_of_it_is_kept_until_it_counts() {
        let layer = Fp8Layer::new("layer".into(), &Fp8Recipe::default());
        let mut values = [0.5, -2.0];
        let rounded = layer.gradient.round(&mut values);
        assert_eq!((rounded.scale, rounded.amax), (28672.0, 2.0));
        assert_eq!(values, [14336.0, -57344.0]);
        assert_eq!(layer.state().gradient.scale, 1.0);
        layer.gradient.record(rounded.amax);
        layer
            .gradient
            .update(layer.gradient.take_current(), &Fp8Recipe::default(), true);
        // From now on what is larger saturates.
        let mut values = [4.0];
        assert_eq!(layer.gradient.round(&mut values).scale, 28672.0);
        assert_eq!(values, [57344.0]);
    }

    #[test]
    fn what_is_zero_or_not_finite_leaves_scale_and_history_as_they_are() {
        let recipe = Fp8Recipe::default();
        let layer = Fp8Layer::new("layer".into(), &recipe);
        layer.weight.update(7.0, &recipe, true);
        let before = layer.state();
        assert_eq!(before.weight.scale, 64.0);
        for amax in [0.0, f32::NAN, f32::INFINITY] {
            layer.weight.record(amax);
            layer.weight.update(layer.weight.take_current(), &recipe, true);
        }
        assert_eq!(layer.state(), before);
        // The smallest magnitudes have a scale that is finite.
        layer.input.update(f32::MIN_POSITIVE / 8.0, &recipe, true);
        assert_eq!(layer.state().input.scale, f32::MAX);
    }
}
