//! Random initial values that depend on the seed and the parameter's name alone.
//!
//! candle's CPU generator cannot be seeded; and values drawn in order of creation would change with the model's code.

use crate::Result;
use candle_core::Shape;
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};
use std::ops::Range;

/// Draws a parameter's initial values as `init` says and returns those in `range`.
///
/// All values up to the range's end are drawn, so that a value does not depend on the range it is drawn for.
pub(super) fn draw_range(seed: u64, name: &str, shape: &Shape, init: Init, range: Range<usize>) -> Result<Vec<f32>> {
    let spread = match init {
        Init::Const(value) => return Ok(vec![value as f32; range.len()]),
        Init::Uniform { lo, up } => Spread::Uniform(lo, up),
        Init::Randn { mean, stdev } => Spread::Normal(mean, stdev),
        Init::Kaiming {
            dist,
            fan,
            non_linearity,
        } => {
            // He et al. 2015: deviation gain / sqrt(fan); a uniform distribution of that deviation has bound sqrt(3) * it.
            let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            let bound = 3f64.sqrt() * deviation;
            match dist {
                NormalOrUniform::Normal => Spread::Normal(0.0, deviation),
                NormalOrUniform::Uniform => Spread::Uniform(-bound, bound),
            }
        }
    };
    let invalid = |error: &dyn std::fmt::Display| candle_core::Error::msg(format!("init of {name:?}: {error}"));
    match spread {
        Spread::Uniform(low, high) if low == high => Ok(vec![low as f32; range.len()]),
        Spread::Uniform(low, high) => {
            let uniform = Uniform::new(low, high).map_err(|e| invalid(&e))?;
            Ok(sample(&uniform, generator(seed, name), range))
        }
        Spread::Normal(mean, deviation) => {
            let normal = Normal::new(mean, deviation).map_err(|e| invalid(&e))?;
            Ok(sample(&normal, generator(seed, name), range))
        }
    }
}

fn sample(distribution: &impl Distribution<f64>, mut generator: ChaCha8Rng, range: Range<usize>) -> Vec<f32> {
    let mut values = distribution.sample_iter(&mut generator).map(|value| value as f32);
    let before = values.by_ref().take(range.start).count();
    debug_assert_eq!(before, range.start);
    values.take(range.len()).collect()
}

enum Spread {
    Uniform(f64, f64),
    Normal(f64, f64),
}

fn generator(seed: u64, name: &str) -> ChaCha8Rng {
    let mut hasher = blake3::Hasher::new_derive_key("sconce parameter initialisation 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(name.as_bytes());
    ChaCha8Rng::from_seed(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u64, name: &str, init: Init) -> Vec<f32> {
        draw_range(seed, name, &Shape::from((200, 100)), init, 0..20_000).unwrap()
    }

    #[test]
    fn values_depend_on_seed_and_name_alone() {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        assert_eq!(values(1, "a", init), values(1, "a", init));
        assert_ne!(values(1, "a", init), values(2, "a", init));
        assert_ne!(values(1, "a", init), values(1, "b", init));
    }

    #[test]
    fn a_value_does_not_depend_on_the_range_it_is_drawn_for() {
        for init in [
            Init::Randn { mean: 0.0, stdev: 1.0 },
            Init::Uniform { lo: -1.0, up: 1.0 },
            Init::Const(3.0),
        ] {
            let whole = values(1, "a", init);
            for range in [0..0, 0..7, 5..6, 19_990..20_000, 20_000..20_000] {
                let part = draw_range(1, "a", &Shape::from((200, 100)), init, range.clone()).unwrap();
                assert_eq!(part, whole[range]);
            }
        }
    }

    #[test]
    fn moments_are_those_asked_for() {
        let moments = |init| {
            let values = values(3, "w", init);
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / values.len() as f64;
            (mean, variance.sqrt())
        };
        let close = |(mean, deviation): (f64, f64), expected: (f64, f64)| {
            assert!((mean - expected.0).abs() < 0.03 * expected.1 && (deviation / expected.1 - 1.0).abs() < 0.02);
        };
        close(moments(Init::Randn { mean: 2.0, stdev: 0.5 }), (2.0, 0.5));
        close(moments(Init::Uniform { lo: -1.0, up: 3.0 }), (1.0, 4.0 / 12f64.sqrt()));
        // Kaiming uniform for ReLU with fan-in 100: deviation sqrt(2 / 100).
        close(moments(candle_nn::init::DEFAULT_KAIMING_UNIFORM), (0.0, 0.02f64.sqrt()));
        close(moments(candle_nn::init::DEFAULT_KAIMING_NORMAL), (0.0, 0.02f64.sqrt()));
    }
}
