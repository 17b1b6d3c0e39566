//! Gradients averaged over ranks as products of thin matrices: PowerSGD.
//!
//! Algorithm 1 of Vogels, Karimireddy and Jaggi 2019, with the conventions of PyTorch's hook of that name: the gradient of
//! a parameter of shape [n, ...] is a matrix M of n rows. With Q from the step before, every rank sends `P = M Q`, makes the
//! columns of the mean orthonormal, and sends `Q = Mᵀ P`; the gradient is `P Qᵀ`. What a rank's M lacks in that, its error,
//! is added to its next gradient. Parameters that this would not make smaller are averaged as they are.

use crate::layout::BucketLayout;
use crate::optimizer::in_range;
use crate::overflow::is_finite;
use crate::{ParameterInfo, Result};
use candle_core::DType;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use sconce_collectives::Communicator;
use std::sync::Arc;

use super::Reduction;

mod checkpoint;

/// Columns of a matrix whose sums over rows one task adds up.
const BLOCK_COLUMNS: usize = 256;

/// Settings of PowerSGD; the defaults are those of PyTorch's hook.
///
/// Checkpoints keep what lies between steps, so that a run goes on with the bits of one that did not stop; on another number
/// of ranks it goes on with the mean of what ranks owe each other (see [`PowerSgd::use_error_feedback`]).
#[derive(Debug, Clone, PartialEq)]
pub struct PowerSgd {
    /// Columns of the thin matrices: more are nearer to the gradient and more to send.
    pub matrix_rank: usize,
    /// Synchronised backwards with plain averages before compression begins: gradients change most in the first ones.
    pub start_iteration: u64,
    /// A matrix is compressed if that makes it at least this many times smaller.
    pub min_compression_rate: f64,
    /// Adds what a step left out to the next one. Without it training may not converge.
    ///
    /// With gradients g and errors e of W ranks a step applies `a = P Qᵀ` and keeps `e' = g + e - a` on each rank: so
    /// `a + mean(e') = mean(g) + mean(e)`, and the mean of the errors is what training is still owed. A checkpoint that is
    /// loaded on W' ranks gives that mean E to each of them, and their mean is E again: nothing is lost, and nothing comes twice.
    pub use_error_feedback: bool,
    /// Begins with the matrices of the step before instead of random ones.
    pub warm_start: bool,
    /// Seed of the first matrices, the same on all ranks.
    pub seed: u64,
}

impl Default for PowerSgd {
    fn default() -> Self {
        Self {
            matrix_rank: 1,
            start_iteration: 1000,
            min_compression_rate: 2.0,
            use_error_feedback: true,
            warm_start: true,
            seed: 0,
        }
    }
}

impl PowerSgd {
    pub(crate) fn check(&self) -> Result<()> {
        let (columns, rate) = (self.matrix_rank, self.min_compression_rate);
        in_range("matrix_rank", columns as f64, "at least 1 column", columns > 0)?;
        let is_a_rate = rate > 0.0 && rate.is_finite();
        in_range("min_compression_rate", rate, "a number above 0", is_a_rate)
    }
}

/// How the gradients of one bucket are compressed, and what is kept of them between steps.
#[derive(Debug)]
pub(crate) struct Compression {
    settings: PowerSgd,
    layout: BucketLayout,
    matrices: Vec<Matrix>,
    /// Slots that are averaged as they are.
    plain: Vec<usize>,
    iterations: u64,
}

/// The gradient of one parameter as a matrix.
#[derive(Debug)]
struct Matrix {
    slot: usize,
    rows: usize,
    columns: usize,
    /// Row after row, what was left out of the last step, without a loss scale; empty without error feedback, and before
    /// compression begins.
    error: Vec<f32>,
    /// [columns, rank], row after row.
    q: Vec<f32>,
}

impl Compression {
    /// Makes the state of a bucket, of all `parameters` those in it.
    pub(crate) fn new(settings: &PowerSgd, layout: &BucketLayout, parameters: &[Arc<ParameterInfo>]) -> Self {
        let (mut matrices, mut plain) = (Vec::new(), Vec::new());
        for (slot, place) in layout.slots.iter().enumerate() {
            let shape = &parameters[place.parameter].shape;
            let rows = shape.first().copied().unwrap_or(1);
            let elements: usize = shape.iter().product();
            let columns = elements.checked_div(rows).unwrap_or(0);
            let sent = (rows + columns) * settings.matrix_rank;
            if shape.len() < 2 || sent as f64 * settings.min_compression_rate >= elements as f64 {
                plain.push(slot);
                continue;
            }
            matrices.push(Matrix {
                slot,
                rows,
                columns,
                error: Vec::new(),
                q: Vec::new(),
            });
        }
        Self {
            settings: settings.clone(),
            layout: layout.clone(),
            matrices,
            plain,
            iterations: 0,
        }
    }

    /// Returns the bytes kept between steps.
    pub(crate) fn bytes(&self) -> usize {
        let kept = self.matrices.iter().map(|matrix| matrix.error.len() + matrix.q.len());
        kept.sum::<usize>() * size_of::<f32>()
    }

    /// Replaces a bucket's gradients, which bear a loss scale, by (nearly) their mean over the group.
    ///
    /// Where a rank's are not finite, all ranks get what is no number and owe what they owed: such a step is left out.
    pub(crate) fn run(
        &mut self,
        gradients: &mut [f32],
        loss_scale: f64,
        dtype: DType,
        group: &dyn Communicator,
    ) -> sconce_collectives::Result<()> {
        let iteration = self.iterations;
        self.iterations += 1;
        if iteration < self.settings.start_iteration || self.matrices.is_empty() {
            return Reduction::All.run(gradients, dtype, group);
        }
        let plain = self.plain.iter().flat_map(|slot| self.layout.read(*slot, gradients));
        let mut rest = Vec::from_iter(plain);
        Reduction::All.run(&mut rest, dtype, group)?;

        let (columns, scale) = (self.settings.matrix_rank, loss_scale as f32);
        let mut originals = Vec::with_capacity(self.matrices.len());
        let (mut all_p, mut all_q) = (Vec::new(), Vec::new());
        for matrix in &mut self.matrices {
            let mut original = self.layout.read(matrix.slot, gradients);
            if self.settings.use_error_feedback && matrix.error.is_empty() {
                matrix.error = vec![0.0; original.len()];
            }
            original
                .iter_mut()
                .zip(&matrix.error)
                .for_each(|(value, error)| *value += error * scale);
            if matrix.q.is_empty() || !self.settings.warm_start {
                matrix.q = random(self.settings.seed, iteration, matrix.slot, matrix.columns * columns);
            }
            orthonormalise(&mut matrix.q, columns);
            all_p.extend(times(&original, matrix.columns, &matrix.q, columns));
            originals.push(original);
        }
        Reduction::All.run(&mut all_p, dtype, group)?;
        let mut rest_of_p = &mut all_p[..];
        let mut ps = Vec::with_capacity(self.matrices.len());
        for (matrix, original) in self.matrices.iter().zip(&originals) {
            let (p, rest) = rest_of_p.split_at_mut(matrix.rows * columns);
            rest_of_p = rest;
            orthonormalise(p, columns);
            all_q.extend(transposed_times(original, matrix.columns, p, columns));
            ps.push(&*p);
        }
        Reduction::All.run(&mut all_q, dtype, group)?;
        // The same on all ranks, of which everyone's has gone into every sum; dependent columns may have become 0.
        let came_whole = is_finite(&all_q) && ps.iter().all(|p| is_finite(p));
        let mut rest_of_q = &all_q[..];
        for ((matrix, original), p) in self.matrices.iter_mut().zip(&originals).zip(ps) {
            let (q, rest) = rest_of_q.split_at(matrix.columns * columns);
            rest_of_q = rest;
            let near = times_transposed(p, q, columns);
            let lacks = matrix.error.iter_mut().zip(original.iter().zip(&near));
            if came_whole {
                matrix.q.copy_from_slice(q);
                lacks.for_each(|(error, (original, near))| *error = (original - near) / scale);
            }
            self.layout.write(matrix.slot, &near, gradients);
        }
        let mut rest = &rest[..];
        for slot in &self.plain {
            let (values, others) = rest.split_at(self.layout.slots[*slot].elements);
            rest = others;
            self.layout.write(*slot, values, gradients);
        }
        Ok(())
    }
}

/// Returns standard normal numbers that are the same on all ranks.
fn random(seed: u64, iteration: u64, slot: usize, count: usize) -> Vec<f32> {
    let mut hasher = blake3::Hasher::new_derive_key("sconce PowerSGD 1");
    [seed, iteration, slot as u64, count as u64].iter().for_each(|word| {
        hasher.update(&word.to_le_bytes());
    });
    let mut generator = ChaCha8Rng::from_seed(*hasher.finalize().as_bytes());
    (0..count).map(|_| StandardNormal.sample(&mut generator)).collect()
}

/// Makes the columns of a matrix of so many columns orthonormal (Gram and Schmidt); those that depend on others become 0.
fn orthonormalise(matrix: &mut [f32], columns: usize) {
    for column in 0..columns {
        let dot = |matrix: &[f32], a: usize, b: usize| -> f64 {
            let rows = matrix.chunks(columns);
            rows.map(|row| f64::from(row[a]) * f64::from(row[b])).sum()
        };
        let before = dot(matrix, column, column);
        // Twice, against what rounding leaves.
        for earlier in (0..column).chain(0..column) {
            let along = dot(matrix, column, earlier) as f32;
            matrix
                .chunks_mut(columns)
                .for_each(|row| row[column] -= along * row[earlier]);
        }
        let square = dot(matrix, column, column);
        let scale = if square > before * 1e-12 {
            square.sqrt().recip() as f32
        } else {
            0.0
        };
        matrix.chunks_mut(columns).for_each(|row| row[column] *= scale);
    }
}

/// Returns M Q: M has rows of `width`, Q has `width` rows of `columns`.
fn times(matrix: &[f32], width: usize, q: &[f32], columns: usize) -> Vec<f32> {
    let rows = matrix.par_chunks(width).flat_map_iter(|row| {
        (0..columns).map(move |column| {
            let products = row.iter().zip(q.iter().skip(column).step_by(columns));
            products.map(|(value, q)| value * q).sum::<f32>()
        })
    });
    rows.collect()
}

/// Returns Mᵀ P: M has rows of `width`, P has as many rows, of `columns`.
fn transposed_times(matrix: &[f32], width: usize, p: &[f32], columns: usize) -> Vec<f32> {
    let mut product = vec![0.0; width * columns];
    // Rows are read in order, as much of each as a block has sums for.
    let blocks = product.par_chunks_mut(BLOCK_COLUMNS * columns).enumerate();
    blocks.for_each(|(block, sums)| {
        for (row, p) in matrix.chunks(width).zip(p.chunks(columns)) {
            for (sums, value) in sums.chunks_mut(columns).zip(&row[block * BLOCK_COLUMNS..]) {
                sums.iter_mut().zip(p).for_each(|(sum, p)| *sum += value * p);
            }
        }
    });
    product
}

/// Returns P Qᵀ.
fn times_transposed(p: &[f32], q: &[f32], columns: usize) -> Vec<f32> {
    let rows = p.par_chunks(columns).flat_map_iter(|p| {
        q.chunks(columns)
            .map(move |q| p.iter().zip(q).map(|(p, q)| p * q).sum::<f32>())
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_orthonormal_and_dependent_ones_vanish() {
        let mut matrix = random(1, 2, 3, 60);
        orthonormalise(&mut matrix, 3);
        let dot = |matrix: &[f32], a: usize, b: usize| matrix.chunks(3).map(|row| row[a] * row[b]).sum::<f32>();
        for (a, b) in [(0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)] {
            let expected = if a == b { 1.0 } else { 0.0 };
            assert!((dot(&matrix, a, b) - expected).abs() < 1e-6);
        }
        let mut dependent = vec![1.0, 2.0, 3.0, 6.0, -1.0, -2.0];
        orthonormalise(&mut dependent, 2);
        assert!(dependent.chunks(2).all(|row| row[1] == 0.0));
    }

    #[test]
    fn products_are_those_of_matrices() {
        let (m, q) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 0.0, 1.0, 1.0, -1.0]);
        assert_eq!(times(&m, 3, &q, 2), [4.0, -1.0, 10.0, -1.0]);
        let p = [1.0, 2.0, -1.0, 1.0];
        assert_eq!(transposed_times(&m, 3, &p, 2), [-3.0, 6.0, -3.0, 9.0, -3.0, 12.0]);
        assert_eq!(times_transposed(&p, &q, 2), [1.0, 2.0, -1.0, -1.0, 1.0, -2.0]);
    }
}
