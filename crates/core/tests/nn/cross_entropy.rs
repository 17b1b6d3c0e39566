//! The loss against its definition, and its treatment of labels that do not count or do not exist.

use candle_core::{DType, Device, Result, Tensor, Var};
use sconce_core::nn::cross_entropy;

use crate::oracle::{check, check_large, error, numbers, run, values};

const IGNORED: i64 = -100;

fn closed_form(logits: &[f64], labels: &[i64]) -> f64 {
    let width = logits.len() / labels.len();
    let losses: Vec<f64> = logits
        .chunks(width)
        .zip(labels)
        .filter(|&(_, &label)| label != IGNORED)
        .map(|(row, &label)| row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[label as usize])
        .collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn cross_entropy_agrees_with_its_definition_and_its_differences() {
    for (rows, vocab, labels) in [
        (1, 1, vec![0]),
        (1, 19, vec![18]),
        (4, 1, vec![0, IGNORED, 0, 0]),
        (5, 16, vec![IGNORED, 3, 15, 0, IGNORED]),
        (3, 37, vec![36, 0, 20]),
    ] {
        let tensor = Tensor::new(labels.clone(), &Device::Cpu).unwrap();
        let layer = |x: &[Tensor]| cross_entropy(&x[0], &tensor, IGNORED);
        check(
            &format!("cross_entropy {rows} {vocab}"),
            &[values(&[rows, vocab], 1)],
            layer,
            |x| vec![closed_form(&x[0], &labels)],
        );
    }
}

#[test]
fn labels_may_be_u32_and_logits_a_view() {
    let labels = Tensor::new(&[2u32, 0, 7], &Device::Cpu).unwrap();
    let layer = |x: &[Tensor]| cross_entropy(&x[0].t()?, &labels, 7);
    check("cross_entropy of a view", &[values(&[4, 3], 2)], layer, |x| {
        let transposed: Vec<f64> = (0..12).map(|i| x[0][i % 4 * 3 + i / 4]).collect();
        vec![closed_form(&transposed, &[2, 0, IGNORED])]
    });
}

#[test]
fn cross_entropy_agrees_with_candle_and_on_any_number_of_threads() {
    let labels: Vec<u32> = (0..90).map(|i| i * 31 % 1003).collect();
    let labels = Tensor::new(labels, &Device::Cpu).unwrap();
    check_large(
        "cross_entropy",
        &[values(&[90, 1003], 3)],
        |x| cross_entropy(&x[0], &labels, IGNORED),
        |x| candle_nn::loss::cross_entropy(&x[0], &labels),
    );
}

#[test]
fn the_loss_is_an_f32_scalar_for_every_trained_dtype() {
    let labels = Tensor::new(&[1u32], &Device::Cpu).unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let logits = values(&[1, 3], 4).to_dtype(dtype).unwrap();
        let loss = cross_entropy(&logits, &labels, IGNORED).unwrap();
        assert_eq!((loss.dtype(), loss.dims()), (DType::F32, &[][..]));
    }
}

#[test]
fn when_no_label_counts_loss_and_gradient_are_zero() {
    let labels = Tensor::new(&[IGNORED, IGNORED], &Device::Cpu).unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F64, DType::F16] {
        let logits = [values(&[2, 3], 5)];
        let outcome = run(|x| cross_entropy(&x[0], &labels, IGNORED), &logits, dtype);
        assert_eq!(numbers(&outcome.result), [0.0]);
        assert_eq!(numbers(&outcome.gradients[0]), [0.0; 6]);
    }
}

#[test]
fn excluded_classes_and_large_logits_give_finite_loss_and_gradient() -> Result<()> {
    let logits = [
        [f32::NEG_INFINITY, 1000.0, 998.0],
        [-1000.0, f32::NEG_INFINITY, -1000.0],
    ];
    let logits = Var::from_tensor(&Tensor::new(&logits, &Device::Cpu)?)?;
    let labels = Tensor::new(&[1u32, 2], &Device::Cpu)?;
    let loss = cross_entropy(&logits, &labels, IGNORED)?;
    let expected = ((1.0 + (-2f64).exp()).ln() + 2f64.ln()) / 2.0;
    assert!((numbers(&loss)[0] - expected).abs() < 1e-6);
    let gradients = loss.backward()?;
    let gradient = numbers(gradients.get(&logits).expect("a gradient"));
    let second = 0.5 / (1.0 + 2f64.exp());
    let expected = [0.0, -second, second, 0.25, 0.0, -0.25];
    crate::oracle::assert_close("gradient", &gradient, &expected, 1e-6, 0.0);
    Ok(())
}

#[test]
fn a_label_out_of_range_is_named_with_its_position() {
    for dtype in [DType::F32, DType::F64] {
        let logits = values(&[2, 3], 6).to_dtype(dtype).unwrap();
        for label in [3i64, -1] {
            let labels = Tensor::new(&[0, label], &Device::Cpu).unwrap();
            let message = error(cross_entropy(&logits, &labels, IGNORED));
            assert!(message.contains(&format!("got {label} at position 1")), "{message}");
        }
    }
}

#[test]
fn cross_entropy_names_shapes_and_dtypes_that_do_not_fit() {
    let (logits, labels) = (values(&[2, 3], 7), Tensor::new(&[0u32], &Device::Cpu).unwrap());
    let message = error(cross_entropy(&logits, &labels, IGNORED));
    assert!(
        message.contains("cross_entropy: expected labels of shape [2], got [1]"),
        "{message}"
    );
    let message = error(cross_entropy(&values(&[2, 3, 4], 7), &labels, IGNORED));
    assert!(
        message.contains("expected logits of shape [n, vocab], got [2, 3, 4]"),
        "{message}"
    );
    let message = error(cross_entropy(&logits, &values(&[2], 7), IGNORED));
    assert!(
        message.contains("expected labels of dtype U32 or I64, got F64"),
        "{message}"
    );
}
