//! Layer normalisation with and without a bias.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use sconce_core::nn::{LayerNorm, layer_norm};

use crate::oracle::{check, check_large, error, numbers, values};

const EPS: f64 = 1e-3;

fn closed_form(inputs: &[Vec<f64>]) -> Vec<f64> {
    let (xs, weight) = (&inputs[0], &inputs[1]);
    let bias = inputs.get(2).cloned().unwrap_or_else(|| vec![0.0; weight.len()]);
    let row = |row: &[f64]| -> Vec<f64> {
        let width = row.len() as f64;
        let mean = row.iter().sum::<f64>() / width;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / width;
        let normalized = row.iter().map(|x| (x - mean) / (variance + EPS).sqrt());
        normalized.zip(weight).zip(&bias).map(|((n, w), b)| n * w + b).collect()
    };
    xs.chunks(weight.len()).flat_map(row).collect()
}

fn apply(x: &[Tensor]) -> candle_core::Result<Tensor> {
    LayerNorm::new(x[1].clone(), x.get(2).cloned(), EPS).forward(&x[0])
}

#[test]
fn layer_norm_agrees_with_its_definition_and_its_differences() {
    for shape in [&[1usize][..], &[1, 1], &[5, 1], &[1, 19], &[3, 16], &[2, 3, 37]] {
        let width = *shape.last().unwrap();
        let inputs = [values(shape, 1), values(&[width], 2), values(&[width], 3)];
        check(&format!("layer_norm {shape:?}"), &inputs, apply, closed_form);
        check(
            &format!("layer_norm without bias {shape:?}"),
            &inputs[..2],
            apply,
            closed_form,
        );
    }
}

#[test]
fn layer_norm_of_a_transposed_view_goes_along_its_last_dimension() {
    let inputs = [values(&[4, 6], 4), values(&[4], 5), values(&[4], 6)];
    let layer = |x: &[Tensor]| apply(&[x[0].t()?, x[1].clone(), x[2].clone()]);
    check("layer_norm of a view", &inputs, layer, |inputs| {
        let transposed = (0..24).map(|i| inputs[0][i % 4 * 6 + i / 4]).collect();
        closed_form(&[transposed, inputs[1].clone(), inputs[2].clone()])
    });
}

#[test]
fn layer_norm_agrees_with_candle_and_on_any_number_of_threads() {
    let inputs = [values(&[300, 515], 7), values(&[515], 8), values(&[515], 9)];
    check_large("layer_norm", &inputs, apply, |x| {
        candle_nn::ops::layer_norm_slow(&x[0], &x[1], &x[2], EPS as f32)
    });
}

#[test]
fn a_row_far_from_zero_keeps_its_variance() {
    let xs = Tensor::new(&[[10_000f32, 10_001.0, 10_002.0, 10_003.0]], &Device::Cpu).unwrap();
    let ones = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
    let got = numbers(&LayerNorm::new(ones, None, 0.0).forward(&xs).unwrap());
    let expected = [-1.341_640_8, -0.447_213_6, 0.447_213_6, 1.341_640_8];
    crate::oracle::assert_close("far row", &got, &expected, 1e-6, 0.0);
}

#[test]
fn layer_norm_registers_a_weight_of_ones_and_a_bias_of_zeros() {
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let layer = layer_norm(3, EPS, builder.pp("norm")).unwrap();
    assert_eq!(numbers(layer.weight()), [1.0; 3]);
    assert_eq!(numbers(layer.bias().unwrap()), [0.0; 3]);
    let names = vars.data().lock().unwrap();
    assert!(names.contains_key("norm.weight") && names.contains_key("norm.bias"));
}

#[test]
fn layer_norm_names_the_parameter_that_does_not_fit() {
    let (weight, xs) = (values(&[4], 1), values(&[2, 4], 1));
    let message = error(LayerNorm::new(weight.clone(), Some(values(&[5], 1)), EPS).forward(&xs));
    assert!(
        message.contains("layer_norm: expected bias of shape [4], got [5]"),
        "{message}"
    );
    let message = error(LayerNorm::new(weight, None, EPS).forward(&values(&[2, 3], 1)));
    assert!(
        message.contains("layer_norm: expected weight of shape [3], got [4]"),
        "{message}"
    );
}
