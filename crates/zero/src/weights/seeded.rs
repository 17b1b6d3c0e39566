//! Random initial values that depend on the seed and the parameter's name alone.
//!
//! candle's CPU generator cannot be seeded; and values drawn in order of creation would change with the model's code.

use crate::Result;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};

/// Draws a parameter's initial values as `init` says.
pub(super) fn draw(seed: u64, name: &str, shape: &Shape, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
    let mut generator = generator(seed, name);
    let count = shape.elem_count();
    let mut sample = |distribution: Spread| -> Result<Vec<f32>> {
        let invalid = |error: &dyn std::fmt::Display| candle_core::Error::msg(format!("init of {name:?}: {error}"));
        match distribution {
            Spread::Uniform(low, high) if low == high => Ok(vec![low as f32; count]),
            Spread::Uniform(low, high) => {
                let uniform = Uniform::new(low, high).map_err(|e| invalid(&e))?;
                Ok((0..count).map(|_| uniform.sample(&mut generator) as f32).collect())
            }
            Spread::Normal(mean, deviation) => {
                let normal = Normal::new(mean, deviation).map_err(|e| invalid(&e))?;
                Ok((0..count).map(|_| normal.sample(&mut generator) as f32).collect())
            }
        }
    };
    let values = match init {
        Init::Const(value) => vec![value as f32; count],
        Init::Uniform { lo, up } => sample(Spread::Uniform(lo, up))?,
        Init::Randn { mean, stdev } => sample(Spread::Normal(mean, stdev))?,
        Init::Kaiming {
            dist,
            fan,
            non_linearity,
        } => {
            // He et al. 2015: deviation gain / sqrt(fan); a uniform distribution of that deviation has bound sqrt(3) * it.
            let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            let bound = 3f64.sqrt() * deviation;
            match dist {
                NormalOrUniform::Normal => sample(Spread::Normal(0.0, deviation))?,
                NormalOrUniform::Uniform => sample(Spread::Uniform(-bound, bound))?,
            }
        }
    };
    Ok(Tensor::from_vec(values, shape, device)?.to_dtype(dtype)?)
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
        draw(seed, name, &Shape::from((200, 100)), init, DType::F32, &Device::Cpu)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1()
            .unwrap()
    }

    #[test]
    fn values_depend_on_seed_and_name_alone() {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        assert_eq!(values(1, "a", init), values(1, "a", init));
        assert_ne!(values(1, "a", init), values(2, "a", init));
        assert_ne!(values(1, "a", init), values(1, "b", init));
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
