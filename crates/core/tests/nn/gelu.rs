//! The tanh approximation of GELU.

use candle_core::{DType, Device, Tensor};
use sconce_core::nn::gelu_tanh;

use crate::oracle::{check, check_large, error, numbers, run, values};

fn closed_form(inputs: &[Vec<f64>]) -> Vec<f64> {
    let gelu = |x: &f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    inputs[0].iter().map(gelu).collect()
}

#[test]
fn gelu_agrees_with_its_definition_and_its_differences() {
    for shape in [&[][..], &[1usize], &[19], &[5, 1], &[2, 3, 37]] {
        let inputs = [values(shape, 1)];
        check(&format!("gelu {shape:?}"), &inputs, |x| gelu_tanh(&x[0]), closed_form);
    }
}

#[test]
fn gelu_reads_views() {
    let inputs = [values(&[3, 10], 3)];
    check(
        "gelu of a view",
        &inputs,
        |x| gelu_tanh(&x[0].narrow(1, 4, 5)?),
        |x| {
            let columns = x[0].chunks(10).flat_map(|row| row[4..9].to_vec()).collect();
            closed_form(&[columns])
        },
    );
}

#[test]
fn gelu_agrees_with_candle_and_on_any_number_of_threads() {
    check_large("gelu", &[values(&[70, 701], 4)], |x| gelu_tanh(&x[0]), |x| x[0].gelu());
}

#[test]
fn gelu_far_out_is_the_identity_or_nothing_and_has_a_slope() {
    let xs = Tensor::new(&[-1e30f64, -100.0, 100.0, 1e30], &Device::Cpu).unwrap();
    let narrow = xs.to_dtype(DType::F32).unwrap();
    let signs = numbers(&gelu_tanh(&narrow).unwrap().sign().unwrap());
    assert_eq!(signs, [0.0, 0.0, 1.0, 1.0]);
    let outcome = run(|x| gelu_tanh(&x[0])?.sum_all(), &[xs], DType::F32);
    let slopes = numbers(&outcome.gradients[0]);
    assert_eq!(slopes[..2], [0.0, 0.0]);
    assert!(slopes[2] == slopes[3] && slopes[2] != 0.0, "{slopes:?}");
}

#[test]
fn gelu_refuses_integers() {
    let integers = Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap();
    assert!(error(gelu_tanh(&integers)).contains("gelu_tanh: expected xs to hold floating-point numbers"));
}
