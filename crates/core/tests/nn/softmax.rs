//! Softmax over the last dimension, to the ends of the range.

use candle_core::{D, DType, Device, Tensor};
use sconce_core::nn::softmax;

use crate::oracle::{check, check_large, error, numbers, values};

fn closed_form(width: usize) -> impl Fn(&[Vec<f64>]) -> Vec<f64> {
    move |inputs| {
        let row = |row: &[f64]| -> Vec<f64> {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(|x| x.exp() / sum).collect()
        };
        inputs[0].chunks(width).flat_map(row).collect()
    }
}

#[test]
fn softmax_agrees_with_its_definition_and_its_differences() {
    for shape in [&[1usize][..], &[7], &[1, 1], &[5, 1], &[1, 19], &[3, 16], &[2, 3, 37]] {
        let inputs = [values(shape, 1)];
        let width = *shape.last().unwrap();
        check(
            &format!("softmax {shape:?}"),
            &inputs,
            |x| softmax(&x[0]),
            closed_form(width),
        );
    }
}

#[test]
fn softmax_of_a_transposed_view_goes_along_its_last_dimension() {
    let inputs = [values(&[4, 6], 2)];
    check(
        "softmax of a view",
        &inputs,
        |x| softmax(&x[0].t()?),
        |inputs| {
            let transposed = (0..24).map(|i| inputs[0][i % 4 * 6 + i / 4]).collect();
            closed_form(4)(&[transposed])
        },
    );
}

#[test]
fn softmax_agrees_with_candle_and_on_any_number_of_threads() {
    let inputs = [values(&[70, 515], 3)];
    check_large(
        "softmax",
        &inputs,
        |x| softmax(&x[0]),
        |x| candle_nn::ops::softmax(&x[0], D::Minus1),
    );
}

#[test]
fn masked_entries_get_exactly_zero_and_far_rows_lose_nothing() {
    let xs = Tensor::new(&[f32::NEG_INFINITY, 1000.0, 1000.0, -1e30], &Device::Cpu).unwrap();
    assert_eq!(numbers(&softmax(&xs).unwrap()), [0.0, 0.5, 0.5, 0.0]);
}

#[test]
fn softmax_of_untracked_input_is_untracked_and_empty_input_stays_empty() {
    let xs = values(&[2, 3], 4).to_dtype(DType::F32).unwrap();
    assert!(!softmax(&xs).unwrap().track_op());
    for shape in [[0usize, 3], [3, 0]] {
        let xs = Tensor::zeros(&shape, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(softmax(&xs).unwrap().dims(), shape);
    }
}

#[test]
fn softmax_refuses_scalars_and_integers_by_name() {
    let scalar = Tensor::new(1f32, &Device::Cpu).unwrap();
    assert!(error(softmax(&scalar)).contains("softmax: expected xs with at least one dimension"));
    let integers = Tensor::new(&[1u32, 2], &Device::Cpu).unwrap();
    assert!(error(softmax(&integers)).contains("got U32 [2]"));
}
