//! The global norm of gradients.
//!
//! Powers are summed in f64 over blocks of fixed size and the blocks in order, so the result does not depend on the
//! number of threads, and f32 overflow cannot happen.

use rayon::prelude::*;

/// Elements summed by one task, and by one block of the kernel for GPUs.
const BLOCK: usize = 1 << 15;
/// Sums of a block that grow beside each other.
const LANES: usize = 16;

/// A vector norm, as in PyTorch's `clip_grad_norm_(norm_type=...)`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Norm {
    /// The sum of magnitudes.
    L1,
    /// The root of the sum of squares.
    #[default]
    L2,
    /// The cube root of the sum of cubed magnitudes.
    L3,
    /// The largest magnitude.
    Infinity,
}

impl Norm {
    /// Returns what parts of a vector contribute: the sum of powers, or the largest magnitude.
    pub(crate) fn of_part(self, slice: &[f32]) -> f64 {
        let blocks: Vec<&[f32]> = slice.chunks(BLOCK).collect();
        let parts: Vec<f64> = blocks.par_iter().map(|block| self.of_block(block)).collect();
        self.join(parts.into_iter())
    }

    /// Returns how many sums the kernel for GPUs makes of so many elements: those of every lane of every block, and of
    /// what is left of it.
    #[cfg(feature = "cuda")]
    pub(crate) fn sums(self, elements: usize) -> usize {
        elements.div_ceil(BLOCK) * (LANES + 1)
    }

    /// Returns the number by which that kernel knows the norm.
    #[cfg(feature = "cuda")]
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::L1 => 0,
            Self::L2 => 1,
            Self::L3 => 2,
            Self::Infinity => 3,
        }
    }

    /// Joins such sums, as [`Norm::of_part`] does: to the same bits.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_sums(self, sums: &[f64]) -> f64 {
        let of_block = |sums: &[f64]| match self {
            Self::Infinity => self.join(sums.iter().copied()),
            _ => sums[..LANES].iter().sum::<f64>() + sums[LANES],
        };
        self.join(sums.chunks_exact(LANES + 1).map(of_block))
    }

    /// Joins the contributions of parts, in their order.
    pub(crate) fn join(self, parts: impl Iterator<Item = f64>) -> f64 {
        match self {
            Self::Infinity => parts.fold(0.0, larger),
            _ => parts.sum(),
        }
    }

    /// Returns the norm of a vector from its contribution.
    pub(crate) fn finish(self, joined: f64) -> f64 {
        match self {
            Self::L1 | Self::Infinity => joined,
            Self::L2 => joined.sqrt(),
            Self::L3 => joined.cbrt(),
        }
    }

    fn of_block(self, block: &[f32]) -> f64 {
        match self {
            Self::L1 => magnitudes(block),
            Self::L2 => squares(block),
            Self::L3 => cubes(block),
            Self::Infinity => block
                .iter()
                .fold(0.0, |most, value| larger(most, f64::from(value.abs()))),
        }
    }
}

/// Returns the larger number; unlike `max`, keeps what is not a number.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

macro_rules! sums_of_powers {
    ($($name:ident: $power:expr;)*) => {$(
        #[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
        fn $name(block: &[f32]) -> f64 {
            let power: fn(f64) -> f64 = $power;
            let mut lanes = [0f64; LANES];
            let chunks = block.chunks_exact(LANES);
            let rest: f64 = chunks.remainder().iter().map(|value| power(f64::from(*value))).sum();
            for chunk in chunks {
                for (lane, value) in lanes.iter_mut().zip(chunk) {
                    *lane += power(f64::from(*value));
                }
            }
            lanes.iter().sum::<f64>() + rest
        }
    )*};
}
sums_of_powers! {
    magnitudes: |value| value.abs();
    squares: |value| value * value;
    cubes: |value| (value * value * value).abs();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_for_gpus_has_blocks_and_lanes_of_the_same_size() {
        // It writes as many sums as are allocated for these.
        let sizes = format!("BLOCK = 1 << {}, LANES = {LANES}", BLOCK.ilog2());
        assert!(include_str!("device/kernels.cu").contains(&sizes), "{sizes}");
    }

    const ALL: [Norm; 4] = [Norm::L1, Norm::L2, Norm::L3, Norm::Infinity];

    fn plain(norm: Norm, values: &[f32]) -> f64 {
        let magnitudes = values.iter().map(|value| f64::from(*value).abs());
        match norm {
            Norm::L1 => magnitudes.sum(),
            Norm::L2 => magnitudes.map(|value| value.powi(2)).sum::<f64>().sqrt(),
            Norm::L3 => magnitudes.map(|value| value.powi(3)).sum::<f64>().powf(1.0 / 3.0),
            Norm::Infinity => magnitudes.fold(0.0, f64::max),
        }
    }

    #[test]
    fn norms_equal_their_formulas_and_do_not_depend_on_threads() {
        let values: Vec<f32> = (0..100_003).map(|i| (i as f32).sin() * 1e3).collect();
        for norm in ALL {
            let with = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| norm.of_part(&values))
            };
            assert!(
                (norm.finish(with(1)) / plain(norm, &values) - 1.0).abs() < 1e-12,
                "{norm:?}"
            );
            assert_eq!(with(1).to_bits(), with(3).to_bits());
        }
    }

    #[test]
    fn large_values_do_not_overflow_what_is_not_a_number_shows_and_nothing_has_norm_0() {
        assert!((Norm::L2.finish(Norm::L2.of_part(&[3e30, 4e30])) / 5e30 - 1.0).abs() < 1e-6);
        for norm in ALL {
            assert!(norm.finish(norm.of_part(&[1.0, f32::NAN, 2.0])).is_nan(), "{norm:?}");
            assert!(
                norm.finish(norm.of_part(&[1.0, f32::INFINITY])).is_infinite(),
                "{norm:?}"
            );
            assert_eq!(norm.finish(norm.join(std::iter::empty())), 0.0);
        }
    }
}
