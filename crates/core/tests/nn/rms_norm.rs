//! Root-mean-square normalisation; what holds for any op with parameters is tested here too.

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use sconce_core::nn::{RmsNorm, rms_norm};

use crate::oracle::{check, check_large, error, numbers, values};

const EPS: f64 = 1e-3;

fn closed_form(inputs: &[Vec<f64>]) -> Vec<f64> {
    let (xs, weight) = (&inputs[0], &inputs[1]);
    let row = |row: &[f64]| -> Vec<f64> {
        let mean_square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        row.iter()
            .zip(weight)
            .map(|(x, w)| x / (mean_square + EPS).sqrt() * w)
            .collect()
    };
    xs.chunks(weight.len()).flat_map(row).collect()
}

#[test]
fn rms_norm_agrees_with_its_definition_and_its_differences() {
    for shape in [&[1usize][..], &[1, 1], &[5, 1], &[1, 19], &[3, 16], &[2, 3, 37]] {
        let width = *shape.last().unwrap();
        let inputs = [values(shape, 1), values(&[width], 2)];
        let layer = |x: &[Tensor]| RmsNorm::new(x[1].clone(), EPS).forward(&x[0]);
        check(&format!("rms_norm {shape:?}"), &inputs, layer, closed_form);
    }
}

#[test]
fn rms_norm_of_a_transposed_view_goes_along_its_last_dimension() {
    let inputs = [values(&[4, 6], 3), values(&[4], 4)];
    let layer = |x: &[Tensor]| RmsNorm::new(x[1].clone(), EPS).forward(&x[0].t()?);
    check("rms_norm of a view", &inputs, layer, |inputs| {
        let transposed = (0..24).map(|i| inputs[0][i % 4 * 6 + i / 4]).collect();
        closed_form(&[transposed, inputs[1].clone()])
    });
}

#[test]
fn rms_norm_agrees_with_candle_and_on_any_number_of_threads() {
    let inputs = [values(&[300, 515], 5), values(&[515], 6)];
    check_large(
        "rms_norm",
        &inputs,
        |x| RmsNorm::new(x[1].clone(), EPS).forward(&x[0]),
        |x| candle_nn::ops::rms_norm_slow(&x[0], &x[1], EPS as f32),
    );
}

#[test]
fn a_frozen_weight_and_a_frozen_input_get_no_gradient() {
    let xs = Var::from_tensor(&values(&[3, 4], 7).to_dtype(DType::F32).unwrap()).unwrap();
    let weight = values(&[4], 8).to_dtype(DType::F32).unwrap();
    let layer = RmsNorm::new(weight.clone(), EPS);
    let gradients = layer.forward(&xs).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(gradients.get(&xs).is_some() && gradients.get(&weight).is_none());

    let (xs, weight) = (xs.as_detached_tensor(), Var::from_tensor(&weight).unwrap());
    let layer = RmsNorm::new(weight.as_tensor().clone(), EPS);
    let gradients = layer.forward(&xs).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(gradients.get(&xs).is_none() && gradients.get(&weight).is_some());
}

#[test]
fn rms_norm_registers_a_weight_of_ones() {
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let layer = rms_norm(3, EPS, builder.pp("norm")).unwrap();
    assert_eq!(numbers(layer.weight()), [1.0; 3]);
    assert!(vars.data().lock().unwrap().contains_key("norm.weight"));
}

#[test]
fn rms_norm_names_the_shape_or_dtype_that_does_not_fit() {
    let layer = RmsNorm::new(values(&[4], 9), EPS);
    let message = error(layer.forward(&values(&[2, 3], 9)));
    assert!(
        message.contains("rms_norm: expected weight of shape [3], got [4]"),
        "{message}"
    );
    let message = error(layer.forward(&values(&[2, 4], 9).to_dtype(DType::F32).unwrap()));
    assert!(message.contains("dtype of weight, F64, got F32"), "{message}");
}

/// Takes the elements away, as sharding does between uses of a parameter.
struct Release;

impl InplaceOp1 for Release {
    fn name(&self) -> &'static str {
        "release"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        *storage = CpuStorage::F32(Vec::new());
        Ok(())
    }
}

#[test]
fn a_released_parameter_is_an_error_not_a_wrong_result() {
    let weight = values(&[4], 10).to_dtype(DType::F32).unwrap();
    let xs = values(&[2, 4], 11).to_dtype(DType::F32).unwrap();
    let layer = RmsNorm::new(weight.clone(), EPS);
    weight.inplace_op1(&Release).unwrap();
    let message = error(layer.forward(&xs));
    assert!(
        message.contains("rms_norm: expected a storage of at least 4 elements"),
        "{message}"
    );
}
