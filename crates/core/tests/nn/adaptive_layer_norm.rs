//! Layer normalisation with a scale and a shift of each sample.

use candle_core::{DType, Module, Result, Tensor};
use sconce_core::nn::{LayerNorm, adaptive_layer_norm};

use crate::oracle::{assert_close, check, check_large, error, numbers, run, values};

const EPS: f64 = 1e-5;

/// Input, weight, bias, scale and shift.
fn inputs(batch: usize, sequence: usize, size: usize) -> [Tensor; 5] {
    [
        values(&[batch, sequence, size], 1),
        values(&[size], 2),
        values(&[size], 3),
        values(&[batch, size], 4),
        values(&[batch, size], 5),
    ]
}

fn layer(x: &[Tensor]) -> Result<Tensor> {
    let norm = LayerNorm::new(x[1].clone(), Some(x[2].clone()), EPS);
    adaptive_layer_norm(&norm, &x[0], &x[3], &x[4])
}

fn closed_form(x: &[Vec<f64>], sequence: usize, size: usize) -> Vec<f64> {
    let row = |(number, row): (usize, &[f64])| -> Vec<f64> {
        let sample = number / sequence * size;
        let mean = row.iter().sum::<f64>() / size as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / size as f64;
        let normal = |i: usize| (row[i] - mean) / (variance + EPS).sqrt() * x[1][i] + x[2][i];
        (0..size)
            .map(|i| normal(i) * (1.0 + x[3][sample + i]) + x[4][sample + i])
            .collect()
    };
    x[0].chunks(size).enumerate().flat_map(row).collect()
}

#[test]
fn adaptive_norm_agrees_with_its_definition_and_its_differences() {
    for (batch, sequence, size) in [(1, 1, 3), (2, 3, 5), (3, 1, 4), (1, 4, 19)] {
        let case = format!("adaptive norm {batch} {sequence} {size}");
        check(&case, &inputs(batch, sequence, size), layer, |x| {
            closed_form(x, sequence, size)
        });
    }
}

#[test]
fn adaptive_norm_agrees_with_candle_and_on_any_number_of_threads() {
    check_large("adaptive norm", &inputs(2, 150, 301), layer, |x| {
        let centred = x[0].broadcast_sub(&x[0].mean_keepdim(2)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(2)? + EPS)?.sqrt()?;
        let normal = centred
            .broadcast_div(&deviation)?
            .broadcast_mul(&x[1])?
            .broadcast_add(&x[2])?;
        let scale = (&x[3] + 1.0)?.unsqueeze(1)?;
        normal.broadcast_mul(&scale)?.broadcast_add(&x[4].unsqueeze(1)?)
    });
}

#[test]
fn without_scale_and_shift_it_is_the_norm_and_parameters_may_be_kept_in_f32() {
    let [xs, weight, bias, scale, _] = inputs(2, 3, 5);
    let zeros = scale.zeros_like().unwrap();
    for (dtype, kept) in [
        (DType::F32, DType::F32),
        (DType::BF16, DType::F32),
        (DType::BF16, DType::BF16),
    ] {
        let cast = |tensor: &Tensor, dtype| tensor.to_dtype(dtype).unwrap();
        let norm = LayerNorm::new(cast(&weight, kept), Some(cast(&bias, kept)), EPS);
        let (xs, zeros) = (cast(&xs, dtype), cast(&zeros, dtype));
        let found = adaptive_layer_norm(&norm, &xs, &zeros, &zeros).unwrap();
        assert_eq!(found.dtype(), dtype);
        assert_eq!(numbers(&found), numbers(&norm.forward(&xs).unwrap()));
    }
}

#[test]
fn a_norm_without_bias_is_shifted_all_the_same() {
    let [xs, weight, _, scale, shift] = inputs(2, 3, 5);
    let without = |x: &[Tensor]| adaptive_layer_norm(&LayerNorm::new(x[1].clone(), None, EPS), &x[0], &x[2], &x[3]);
    let outcome = run(
        without,
        &[xs.clone(), weight.clone(), scale.clone(), shift.clone()],
        DType::F32,
    );
    let points = [
        xs,
        weight,
        Tensor::zeros(5, DType::F64, &candle_core::Device::Cpu).unwrap(),
        scale,
        shift,
    ];
    let expected = closed_form(&points.map(|x| numbers(&x)), 3, 5);
    assert_close("without bias", &numbers(&outcome.result), &expected, 1e-5, 0.0);
}

#[test]
fn adaptive_norm_names_the_shapes_that_do_not_fit() {
    let [xs, weight, bias, scale, shift] = inputs(2, 3, 5);
    let norm = LayerNorm::new(weight, Some(bias), EPS);
    let message = error(adaptive_layer_norm(&norm, &xs, &scale.narrow(0, 0, 1).unwrap(), &shift));
    assert!(
        message.contains("expected scale of shape [2, 5], got [1, 5]"),
        "{message}"
    );
    let message = error(adaptive_layer_norm(&norm, &xs.get(0).unwrap(), &scale, &shift));
    assert!(
        message.contains("expected xs of shape [batch, sequence, size], got [3, 5]"),
        "{message}"
    );
}
