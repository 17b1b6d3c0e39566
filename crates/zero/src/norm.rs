//! The global norm of gradients.
//!
//! Squares are summed in f64 over blocks of fixed size and the blocks in order, so the result does not depend on the
//! number of threads, and f32 overflow cannot happen.

use rayon::prelude::*;

/// Elements summed by one task.
const BLOCK: usize = 1 << 15;

/// Returns the sum of squares of all slices.
pub(crate) fn sum_of_squares(slices: &[&[f32]]) -> f64 {
    let blocks: Vec<&[f32]> = slices.iter().flat_map(|slice| slice.chunks(BLOCK)).collect();
    let sums: Vec<f64> = blocks.par_iter().map(|block| of_block(block)).collect();
    sums.iter().sum()
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
fn of_block(block: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut lanes = [0f64; LANES];
    let chunks = block.chunks_exact(LANES);
    let rest: f64 = chunks
        .remainder()
        .iter()
        .map(|value| f64::from(*value) * f64::from(*value))
        .sum();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let value = f64::from(*value);
            *lane += value * value;
        }
    }
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_equals_a_plain_f64_sum_and_does_not_depend_on_threads() {
        let values: Vec<f32> = (0..100_003).map(|i| (i as f32).sin() * 1e3).collect();
        let plain: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        let slices = [&values[..17], &values[17..17], &values[17..]];
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| sum_of_squares(&slices))
        };
        assert!((with(1) / plain - 1.0).abs() < 1e-12);
        assert_eq!(with(1).to_bits(), with(3).to_bits());
    }

    #[test]
    fn large_values_do_not_overflow_and_nan_shows() {
        assert!((sum_of_squares(&[&[3e30, 4e30]]).sqrt() / 5e30 - 1.0).abs() < 1e-6);
        assert!(sum_of_squares(&[&[1.0, f32::NAN]]).is_nan());
        assert_eq!(sum_of_squares(&[]), 0.0);
    }
}
