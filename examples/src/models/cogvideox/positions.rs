//! Positions in time, height and width: sinusoids that are added to patches, and angles by which attention turns them.
//!
//! Both are functions of the grid of patches alone, in the formulas of diffusers' `embeddings.py` (`get_3d_sincos_pos_embed`,
//! `get_3d_rotary_pos_embed`), computed in f64.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};
use sconce_core::nn::RotaryEmbedding;

use super::CogVideoXConfig;

/// How many patches there are along each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) frames: usize,
    pub(super) height: usize,
    pub(super) width: usize,
}

impl Grid {
    pub(super) fn patches(self) -> usize {
        self.frames * self.height * self.width
    }

    /// Frame, row and column of each patch, in order.
    fn places(self) -> impl Iterator<Item = [usize; 3]> {
        let Self { frames, height, width } = self;
        (0..frames).flat_map(move |t| (0..height).flat_map(move |y| (0..width).map(move |x| [t, y, x])))
    }
}

/// The positions of the last grid and length of text: videos of one run have one size, and the tables of a large one take a second.
#[derive(Debug)]
pub(super) struct Remembered<T>(Mutex<Option<((Grid, usize), T)>>);

impl<T> Default for Remembered<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Remembered<T> {
    /// Returns the positions of a grid behind a text, which `make` makes where they are others than the last.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn get(&self, grid: Grid, text: usize, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((key, positions)) = &*last
            && *key == (grid, text)
        {
            return Ok(positions.clone());
        }
        let positions = make()?;
        *last = Some(((grid, text), positions.clone()));
        Ok(positions)
    }
}

/// Returns what is added to the sequence, f32 of shape [1, text + patches, inner]: nothing to the text; to a patch a quarter of
/// sinusoids in time, then three eighths in width and in height.
pub(super) fn sinusoids(config: &CogVideoXConfig, grid: Grid, text: usize, device: &Device) -> Result<Tensor> {
    let inner = config.inner_dim();
    let (time, space) = (inner / 4, 3 * inner / 8);
    let mut table = vec![0f32; text * inner];
    for [t, y, x] in grid.places() {
        let spatial = |place: usize| place as f64 / config.spatial_interpolation_scale;
        push_waves(&mut table, t as f64 / config.temporal_interpolation_scale, time);
        push_waves(&mut table, spatial(x), space);
        push_waves(&mut table, spatial(y), space);
    }
    Tensor::from_vec(table, (1, text + grid.patches(), inner), &Device::Cpu)?.to_device(device)
}

fn push_waves(table: &mut Vec<f32>, position: f64, width: usize) {
    let half = width / 2;
    let angle = |i: usize| position / 10_000f64.powf(i as f64 / half as f64);
    table.extend((0..half).map(|i| angle(i).sin() as f32));
    table.extend((0..half).map(|i| angle(i).cos() as f32));
}

/// Returns the rotation of the sequence: by no angle for the text; for patches a quarter of a head turns by the place in time,
/// three eighths by that in height, three eighths by that in width.
pub(super) fn rotary(config: &CogVideoXConfig, grid: Grid, text: usize, device: &Device) -> Result<RotaryEmbedding> {
    let size = config.attention_head_dim;
    let (time, space) = (size / 4, size / 8 * 3);
    let (rows, columns) = spatial_positions(config, grid);
    let mut angles = vec![0f64; text * size / 2];
    for [t, y, x] in grid.places() {
        push_angles(&mut angles, t as f64, time);
        push_angles(&mut angles, rows[y], space);
        push_angles(&mut angles, columns[x], space);
    }
    let table = |function: fn(f64) -> f64| {
        let values = Vec::from_iter(angles.iter().map(|&angle| function(angle) as f32));
        Tensor::from_vec(values, (text + grid.patches(), size / 2), &Device::Cpu)?.to_device(device)
    };
    Ok(RotaryEmbedding::from_tables(table(f64::cos)?, table(f64::sin)?)?.of_neighbours())
}

fn push_angles(angles: &mut Vec<f64>, position: f64, width: usize) {
    angles.extend((0..width / 2).map(|i| position * 10_000f64.powf(-2.0 * i as f64 / width as f64)));
}

/// Returns the positions of rows and columns. Version 1.5 counts them ("slice"). Before, the grid is stretched over the region
/// that it would fill of the configured one, without a change of its proportions ("linspace"): at the configured size they
/// are counted, too.
fn spatial_positions(config: &CogVideoXConfig, grid: Grid) -> (Vec<f64>, Vec<f64>) {
    let counted = |count: usize| Vec::from_iter((0..count).map(|place| place as f64));
    if config.patch_size_t.is_some() {
        return (counted(grid.height), counted(grid.width));
    }
    let base_height = (config.sample_height / config.patch_size) as f64;
    let base_width = (config.sample_width / config.patch_size) as f64;
    let (height, width) = (grid.height as f64, grid.width as f64);
    // Python's `round`: to the even neighbour in the middle.
    let (resized_height, resized_width) = if height / width > base_height / base_width {
        (base_height, (base_height / height * width).round_ties_even())
    } else {
        ((base_width / width * height).round_ties_even(), base_width)
    };
    let top = ((base_height - resized_height) / 2.0).round_ties_even();
    let left = ((base_width - resized_width) / 2.0).round_ties_even();
    let stretched = |count: usize, start: f64, length: f64| {
        let stop = (start + length) * (count as f64 - 1.0) / count as f64;
        let step = if count > 1 {
            (stop - start) / (count as f64 - 1.0)
        } else {
            0.0
        };
        Vec::from_iter((0..count).map(|place| start + step * place as f64))
    };
    (
        stretched(grid.height, top, resized_height),
        stretched(grid.width, left, resized_width),
    )
}
