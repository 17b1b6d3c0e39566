//! The loss of a projection against its definition, and against the layer and the loss apart.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use sconce_core::nn::{Linear, cross_entropy, linear_cross_entropy};

use crate::oracle::{assert_close, check, check_large, error, numbers, run, values};

const IGNORED: i64 = -100;

fn layer(x: &[Tensor], labels: &Tensor) -> Result<Tensor> {
    linear_cross_entropy(&Linear::new(x[1].clone(), None), &x[0], labels, IGNORED)
}

fn apart(x: &[Tensor], labels: &Tensor) -> Result<Tensor> {
    cross_entropy(&Linear::new(x[1].clone(), None).forward(&x[0])?, labels, IGNORED)
}

fn closed_form(xs: &[f64], weight: &[f64], labels: &[i64]) -> f64 {
    let width = xs.len() / labels.len();
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    let losses = xs.chunks(width).zip(labels).filter(|&(_, &label)| label != IGNORED);
    let losses = losses.map(|(x, &label)| {
        let logits: Vec<f64> = weight.chunks(width).map(|w| dot(x, w)).collect();
        logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[label as usize]
    });
    let losses: Vec<f64> = losses.collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn it_agrees_with_its_definition_and_its_differences() {
    for (width, vocab, labels) in [
        (1, 1, vec![0]),
        (3, 7, vec![6]),
        (5, 4, vec![IGNORED, 3, 1, 0, IGNORED]),
        (2, 19, vec![18, 0, 7]),
    ] {
        let tensor = Tensor::new(labels.clone(), &Device::Cpu).unwrap();
        check(
            &format!("linear_cross_entropy {width} {vocab}"),
            &[values(&[labels.len(), width], 1), values(&[vocab, width], 2)],
            |x| layer(x, &tensor),
            |x| vec![closed_form(&x[0], &x[1], &labels)],
        );
    }
}

#[test]
fn it_agrees_with_layer_and_loss_apart_over_several_blocks_and_on_any_number_of_threads() {
    // 8200 classes make blocks of 128 rows.
    let labels: Vec<i64> = (0..301)
        .map(|i| if i % 7 == 3 { IGNORED } else { i * 31 % 8200 })
        .collect();
    let labels = Tensor::new(labels, &Device::Cpu).unwrap();
    let inputs = [values(&[301, 24], 3), values(&[8200, 24], 4)];
    check_large(
        "linear_cross_entropy",
        &inputs,
        |x| layer(x, &labels),
        |x| apart(x, &labels),
    );
}

#[test]
fn gradients_are_those_of_a_loss_that_is_scaled_afterwards() -> Result<()> {
    let labels = Tensor::new(&[1u32, 0], &Device::Cpu)?;
    let gradients = |layer: fn(&[Tensor], &Tensor) -> Result<Tensor>| {
        let vars = [values(&[2, 3], 5), values(&[4, 3], 6)];
        let vars = vars.map(|x| Var::from_tensor(&x.to_dtype(DType::F32).unwrap()).unwrap());
        let tensors = vars.clone().map(|var| var.as_tensor().clone());
        let gradients = (layer(&tensors, &labels)? * 0.25)?.backward()?;
        Result::Ok(vars.map(|var| numbers(gradients.get(&var).expect("a gradient"))))
    };
    for (fused, apart) in gradients(layer)?.iter().zip(&gradients(apart)?) {
        assert_close("gradient", fused, apart, 1e-6, 0.0);
    }
    Ok(())
}

#[test]
fn what_is_frozen_gets_no_gradient_and_the_other_side_keeps_its_own() -> Result<()> {
    let labels = Tensor::new(&[1u32, 0], &Device::Cpu)?;
    let [xs, weight] = [values(&[2, 3], 7), values(&[4, 3], 8)].map(|x| x.to_dtype(DType::F32).unwrap());
    for is_weight_frozen in [true, false] {
        let (x, w) = (Var::from_tensor(&xs)?, Var::from_tensor(&weight)?);
        let inputs = match is_weight_frozen {
            true => [x.as_tensor().clone(), weight.clone()],
            false => [xs.clone(), w.as_tensor().clone()],
        };
        let (fused, apart) = (
            layer(&inputs, &labels)?.backward()?,
            apart(&inputs, &labels)?.backward()?,
        );
        let (trained, frozen) = if is_weight_frozen { (x, &weight) } else { (w, &xs) };
        let [fused_trained, apart_trained] =
            [&fused, &apart].map(|all| numbers(all.get(&trained).expect("a gradient")));
        assert_close("gradient", &fused_trained, &apart_trained, 1e-6, 0.0);
        assert!(fused.get(frozen).is_none());
    }
    Ok(())
}

#[test]
fn when_no_label_counts_loss_and_gradients_are_zero() {
    let labels = Tensor::new(&[IGNORED, IGNORED], &Device::Cpu).unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let outcome = run(|x| layer(x, &labels), &[values(&[2, 3], 5), values(&[4, 3], 6)], dtype);
        assert_eq!(numbers(&outcome.result), [0.0]);
        assert_eq!(numbers(&outcome.gradients[0]), [0.0; 6]);
        assert_eq!(numbers(&outcome.gradients[1]), [0.0; 12]);
    }
}

#[test]
fn it_names_shapes_and_labels_that_do_not_fit() {
    let inputs = [values(&[2, 3], 7), values(&[4, 3], 8)].map(|x| x.to_dtype(DType::F32).unwrap());
    let labels = |labels: &[i64]| Tensor::new(labels, &Device::Cpu).unwrap();
    let message = error(layer(&inputs, &labels(&[0, 4])));
    assert!(message.contains("got 4 at position 1"), "{message}");
    let message = error(layer(&inputs, &labels(&[0])));
    assert!(message.contains("expected labels of shape [2], got [1]"), "{message}");
    let narrow = [values(&[2, 2], 9).to_dtype(DType::F32).unwrap(), inputs[1].clone()];
    let message = error(layer(&narrow, &labels(&[0, 1])));
    assert!(
        message.contains("expected weight of shape [4, 2], got [4, 3]"),
        "{message}"
    );
}
