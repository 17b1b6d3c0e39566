//! How a layer is compared with independent sources.

use candle_core::{DType, Device, Result, Tensor, Var};
use sconce_core::nn::as_compositions;

/// Returns a tensor of reproducible values in -2..2, each exact in bf16, so that every dtype starts
/// from the same numbers.
pub(crate) fn values(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let count = shape.iter().product();
    let numbers: Vec<f64> = (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let unit = (state >> 11) as f64 / (1u64 << 53) as f64;
            half::bf16::from_f64(4.0 * unit - 2.0).to_f64()
        })
        .collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
}

pub(crate) fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// A result and the gradients of `Σ upstream · result` with respect to the inputs.
pub(crate) struct Outcome {
    pub(crate) result: Tensor,
    pub(crate) gradients: Vec<Tensor>,
}

/// Runs a layer forward and backward in a dtype.
pub(crate) fn run(layer: impl Fn(&[Tensor]) -> Result<Tensor>, inputs: &[Tensor], dtype: DType) -> Outcome {
    let vars: Vec<Var> = inputs
        .iter()
        .map(|x| Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap())
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let result = layer(&tensors).unwrap();
    let upstream = values(result.dims(), 99).to_dtype(result.dtype()).unwrap();
    let gradients = (&result * upstream).unwrap().sum_all().unwrap().backward().unwrap();
    let gradients = vars
        .iter()
        .map(|var| gradients.get(var).expect("a gradient").clone())
        .collect();
    Outcome {
        result: result.detach(),
        gradients,
    }
}

/// Compares within an absolute tolerance, which scales with the largest value, and a relative one.
pub(crate) fn assert_close(what: &str, got: &[f64], expected: &[f64], absolute: f64, relative: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: number of elements");
    let scale = expected.iter().fold(1f64, |scale, x| scale.max(x.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let allowed = absolute * scale + relative * expected.abs();
        assert!(
            (got - expected).abs() <= allowed,
            "{what}, element {i}: got {got}, expected {expected} within {allowed:e}"
        );
    }
}

/// The relative error of one rounding to bf16 and f16, and some slack for the arithmetic in f32.
const BF16_ROUNDED_ONCE: f64 = 1.001 / 256.0;
const F16_ROUNDED_ONCE: f64 = 1.001 / 2048.0;

/// Checks a layer in every dtype, forward against a closed form and backward against the closed form's
/// central differences.
pub(crate) fn check(
    case: &str,
    inputs: &[Tensor],
    layer: impl Fn(&[Tensor]) -> Result<Tensor>,
    closed_form: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    let points: Vec<Vec<f64>> = inputs.iter().map(numbers).collect();
    let expected = closed_form(&points);
    let outcome = run(&layer, inputs, DType::F64);
    let upstream = numbers(&values(outcome.result.dims(), 99));
    let slopes: Vec<Vec<f64>> = (0..inputs.len())
        .map(|input| central_differences(&points, input, &upstream, &closed_form))
        .collect();
    for (dtype, absolute, relative, is_composed) in [
        (DType::F64, 1e-7, 0.0, false),
        (DType::F32, 1e-5, 0.0, false),
        (DType::BF16, 1e-5, BF16_ROUNDED_ONCE, false),
        (DType::F16, 1e-5, F16_ROUNDED_ONCE, false),
        // As on a GPU, where some layers round between their ops.
        (DType::F32, 1e-5, 0.0, true),
        (DType::BF16, 4.0 * BF16_ROUNDED_ONCE, 4.0 * BF16_ROUNDED_ONCE, true),
        (DType::F16, 4.0 * F16_ROUNDED_ONCE, 4.0 * F16_ROUNDED_ONCE, true),
    ] {
        let outcome = if is_composed {
            as_compositions(|| run(&layer, inputs, dtype))
        } else {
            run(&layer, inputs, dtype)
        };
        let rounded = if outcome.result.dtype() == dtype { relative } else { 0.0 };
        let composed = if is_composed { ", composed" } else { "" };
        let what = format!("{case}, {dtype:?}{composed}");
        assert_close(&what, &numbers(&outcome.result), &expected, absolute, rounded);
        for (input, gradient) in outcome.gradients.iter().enumerate() {
            assert_eq!(gradient.dims(), inputs[input].dims(), "{what}");
            assert_eq!(gradient.dtype(), dtype, "{what}");
            let what = format!("{what}, gradient of input {input}");
            assert_close(&what, &numbers(gradient), &slopes[input], absolute, relative);
        }
    }
}

fn central_differences(
    points: &[Vec<f64>],
    input: usize,
    upstream: &[f64],
    function: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) -> Vec<f64> {
    let step = 1e-5;
    let value = |points: &[Vec<f64>]| -> f64 { function(points).iter().zip(upstream).map(|(y, g)| y * g).sum() };
    let mut points = points.to_vec();
    (0..points[input].len())
        .map(|i| {
            let centre = points[input][i];
            points[input][i] = centre + step;
            let above = value(&points);
            points[input][i] = centre - step;
            let below = value(&points);
            points[input][i] = centre;
            (above - below) / (2.0 * step)
        })
        .collect()
}

/// Compares a layer in `f32` with a composition of candle ops, on sizes that fill several blocks, and
/// then its bits on one thread with those on two, in `f32` and `bf16`.
pub(crate) fn check_large(
    case: &str,
    inputs: &[Tensor],
    layer: impl Fn(&[Tensor]) -> Result<Tensor> + Sync,
    composition: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let ours = run(&layer, inputs, DType::F32);
    let candle = run(&composition, inputs, DType::F32);
    assert_close(case, &numbers(&ours.result), &numbers(&candle.result), 1e-5, 0.0);
    for (input, (ours, candle)) in ours.gradients.iter().zip(&candle.gradients).enumerate() {
        let what = format!("{case}, gradient of input {input}");
        assert_close(&what, &numbers(ours), &numbers(candle), 1e-5, 0.0);
    }
    let composed = as_compositions(|| run(&layer, inputs, DType::F32));
    let pairs = ours.gradients.iter().zip(&composed.gradients);
    for (ours, composed) in pairs.chain([(&ours.result, &composed.result)]) {
        assert_close(
            &format!("{case}, composed"),
            &numbers(composed),
            &numbers(ours),
            1e-5,
            0.0,
        );
    }
    for dtype in [DType::F32, DType::BF16] {
        let on_threads = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(&layer, inputs, dtype))
        };
        let (one, two) = (on_threads(1), on_threads(2));
        let bits = |tensor: &Tensor| numbers(tensor).into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(&one.result), bits(&two.result), "{case}, {dtype:?}");
        for (one, two) in one.gradients.iter().zip(&two.gradients) {
            assert_eq!(bits(one), bits(two), "{case}, {dtype:?}, gradients");
        }
    }
}

/// Returns the message of the error that a call must give.
pub(crate) fn error<T: std::fmt::Debug>(outcome: Result<T>) -> String {
    outcome.expect_err("an error").to_string()
}
