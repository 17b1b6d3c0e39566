//! The gated activation, for whole tensors and halves of one projection.

use candle_core::{DType, Device, Tensor};
use sconce_core::nn::swiglu;

use crate::oracle::{check, check_large, error, numbers, values};

fn closed_form(inputs: &[Vec<f64>]) -> Vec<f64> {
    inputs[0]
        .iter()
        .zip(&inputs[1])
        .map(|(a, b)| a / (1.0 + (-a).exp()) * b)
        .collect()
}

#[test]
fn swiglu_agrees_with_its_definition_and_its_differences() {
    for shape in [&[][..], &[1usize], &[19], &[5, 1], &[2, 3, 37]] {
        let inputs = [values(shape, 1), values(shape, 2)];
        check(
            &format!("swiglu {shape:?}"),
            &inputs,
            |x| swiglu(&x[0], &x[1]),
            closed_form,
        );
    }
}

#[test]
fn swiglu_takes_the_two_halves_of_one_projection() {
    let inputs = [values(&[3, 10], 3)];
    let layer = |x: &[Tensor]| swiglu(&x[0].narrow(1, 0, 5)?, &x[0].narrow(1, 5, 5)?);
    check("swiglu of views", &inputs, layer, |inputs| {
        let half = |start: usize| -> Vec<f64> {
            inputs[0]
                .chunks(10)
                .flat_map(|row| row[start..start + 5].to_vec())
                .collect()
        };
        closed_form(&[half(0), half(5)])
    });
}

#[test]
fn swiglu_agrees_with_candle_and_on_any_number_of_threads() {
    let inputs = [values(&[70, 701], 4), values(&[70, 701], 5)];
    check_large("swiglu", &inputs, |x| swiglu(&x[0], &x[1]), |x| x[0].silu()? * &x[1]);
}

#[test]
fn a_saturated_gate_gives_no_nan() {
    let gate = Tensor::new(&[-1e30f32, -100.0, 100.0, 1e30], &Device::Cpu).unwrap();
    let up = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
    let got = numbers(&swiglu(&gate, &up).unwrap());
    assert_eq!(got[..3], [0.0, 0.0, 100.0]);
    assert!(got[3] > 9e29);
}

#[test]
fn swiglu_names_the_shapes_that_differ() {
    let message = error(swiglu(&values(&[2, 3], 1), &values(&[2, 4], 1)));
    assert!(
        message.contains("swiglu: expected up of shape [2, 3], got [2, 4]"),
        "{message}"
    );
}
