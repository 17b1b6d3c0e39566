//! The linear layer against candle's, bit for bit, with its parameters trained and frozen.

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use sconce_core::nn::{Linear, linear, linear_b, linear_no_bias};

use crate::oracle::{check, error, numbers, values};

const WIDTH: usize = 37;
const HEIGHT: usize = 19;

/// A parameter as a model holds it: a variable if it is trained.
fn parameter(shape: &[usize], seed: u64, dtype: DType, trained: bool) -> Tensor {
    let tensor = values(shape, seed).to_dtype(dtype).unwrap();
    if trained {
        Var::from_tensor(&tensor).unwrap().into_inner()
    } else {
        tensor
    }
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    numbers(tensor).into_iter().map(f64::to_bits).collect()
}

/// Back-propagates `Σ upstream · result`.
fn backward(result: &Tensor) -> Result<GradStore> {
    let upstream = values(result.dims(), 99).to_dtype(result.dtype())?;
    (result * upstream)?.sum_all()?.backward()
}

/// What a layer is made of and given: input, weight, bias.
type Parts = (Tensor, Tensor, Option<Tensor>);

/// Compares our layer with candle's on views of leaves: the result and the leaves' gradients. Candle's gets a copy of the
/// input, because it multiplies transposed views wrongly.
fn check_bits(what: &str, leaves: &Parts, views: impl Fn(&Parts) -> Parts) {
    let run = |layer: &dyn Fn(&Parts) -> Result<Tensor>| {
        let result = layer(&views(leaves)).unwrap();
        let gradients = result.track_op().then(|| backward(&result).unwrap());
        (result, gradients)
    };
    let ours = run(&|(xs, weight, bias)| Linear::new(weight.clone(), bias.clone()).forward(xs));
    let candles =
        run(&|(xs, weight, bias)| candle_nn::Linear::new(weight.clone(), bias.clone()).forward(&xs.contiguous()?));
    assert_eq!(ours.0.dims(), candles.0.dims(), "{what}");
    assert_eq!(ours.0.dtype(), candles.0.dtype(), "{what}");
    assert_eq!(bits(&ours.0), bits(&candles.0), "{what}: result");
    let (Some(ours), Some(candles)) = (ours.1, candles.1) else {
        assert!(!ours.0.track_op() && !candles.0.track_op(), "{what}");
        return;
    };
    let tracked = [Some(&leaves.0), Some(&leaves.1), leaves.2.as_ref()];
    for leaf in tracked.into_iter().flatten().filter(|leaf| leaf.is_variable()) {
        let expected = candles.get(leaf).expect("candle's gradient");
        let found = ours.get(leaf).expect("a gradient");
        assert_eq!(found.dims(), expected.dims(), "{what}");
        assert_eq!(bits(found), bits(expected), "{what}: gradient of {:?}", leaf.dims());
    }
}

#[test]
fn linear_agrees_with_its_definition_and_its_differences() {
    for (lead, transposed) in [
        (&[4][..], false),
        (&[4], true),
        (&[3, 4], false),
        (&[3, 4], true),
        (&[2, 3, 4], true),
    ] {
        let (rows, width) = (4, 5);
        let closed_form = |inputs: &[Vec<f64>]| -> Vec<f64> {
            let element = |batch: &[f64], row: usize, column: usize| {
                let (from, by) = if transposed { (row, rows) } else { (row * width, 1) };
                batch[from + column * by]
            };
            let mut results = Vec::new();
            for batch in inputs[0].chunks(rows * width) {
                for row in 0..rows {
                    results.extend(inputs[1].chunks(width).map(|weight| {
                        let products = weight.iter().enumerate();
                        products.map(|(column, w)| w * element(batch, row, column)).sum::<f64>()
                    }));
                }
            }
            results
        };
        let view = |xs: &Tensor| if transposed { xs.t() } else { Ok(xs.clone()) };
        let mut shape = [lead, &[width]].concat();
        if transposed {
            let last = lead.len();
            shape.swap(last - 1, last);
        }
        let what = format!("linear {lead:?}, transposed: {transposed}");
        let inputs = [values(&shape, 1), values(&[3, width], 2)];
        let trained = |x: &[Tensor]| Linear::new(x[1].clone(), None).forward(&view(&x[0])?);
        check(&what, &inputs, trained, closed_form);
        let frozen = |x: &[Tensor]| Linear::new(inputs[1].to_dtype(x[0].dtype())?, None).forward(&view(&x[0])?);
        check(&format!("{what}, frozen"), &inputs[..1], frozen, |x| {
            closed_form(&[x[0].clone(), numbers(&inputs[1])])
        });
    }
}

#[test]
fn results_and_gradients_are_candles_to_the_bit() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for lead in [&[5][..], &[1], &[3, 5], &[2, 3, 5], &[2, 3, 1]] {
            for case in 0..16 {
                let [trained_xs, trained_weight, trained_bias, has_bias] = [1, 2, 4, 8].map(|bit| case & bit != 0);
                let leaves = (
                    parameter(&[lead, &[WIDTH]].concat(), 1, dtype, trained_xs),
                    parameter(&[HEIGHT, WIDTH], 2, dtype, trained_weight),
                    has_bias.then(|| parameter(&[HEIGHT], 3, dtype, trained_bias)),
                );
                let what = format!("{dtype:?} {lead:?}, trained: {trained_xs} {trained_weight} {trained_bias}");
                check_bits(&what, &leaves, Clone::clone);
            }
        }
    }
}

#[test]
fn views_are_multiplied_as_candle_multiplies_copies() {
    for trained in [false, true] {
        for lead in [&[][..], &[3], &[2, 3]] {
            let leaves = (
                parameter(&[lead, &[WIDTH, 5]].concat(), 1, DType::F32, true),
                parameter(&[WIDTH, HEIGHT], 2, DType::F32, trained),
                Some(parameter(&[2, HEIGHT], 3, DType::F32, trained)),
            );
            check_bits(&format!("transposed {lead:?}"), &leaves, |(xs, weight, bias)| {
                let bias = bias.as_ref().map(|bias| bias.get(1).unwrap());
                (xs.t().unwrap(), weight.t().unwrap(), bias)
            });
            // In order, but not from the first element on.
            let leaves = (
                parameter(&[&[4], lead, &[5, WIDTH]].concat(), 1, DType::F32, true),
                parameter(&[3, HEIGHT, WIDTH], 2, DType::F32, trained),
                None,
            );
            check_bits(&format!("narrowed {lead:?}"), &leaves, |(xs, weight, _)| {
                (xs.get(2).unwrap(), weight.get(1).unwrap(), None)
            });
        }
    }
}

#[test]
fn nothing_is_multiplied_as_candle_does() {
    for (shape, weight) in [([0, 4], [3, 4]), ([2, 0], [3, 0]), ([2, 4], [0, 4])] {
        let xs = parameter(&shape, 1, DType::F32, true);
        let weight = parameter(&weight, 2, DType::F32, false);
        check_bits(&format!("{shape:?}"), &(xs, weight, None), Clone::clone);
    }
}

#[test]
fn frozen_parameters_leave_no_gradients_behind() {
    let xs = parameter(&[4, 3, WIDTH], 1, DType::F32, true);
    let frozen = [&[HEIGHT, WIDTH][..], &[HEIGHT]].map(|shape| parameter(shape, 2, DType::F32, false));
    let [weight, bias] = frozen;
    let left = |layer: &dyn Module| {
        let gradients = layer.forward(&xs).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(gradients.get(&xs).is_some());
        gradients.get_ids().count()
    };
    assert_eq!(left(&Linear::new(weight.clone(), Some(bias.clone()))), 1);
    // Candle's keeps those of the transposed weight and of the broadcast bias.
    assert_eq!(left(&candle_nn::Linear::new(weight, Some(bias))), 3);
}

/// Puts another type's storage in the place of a tensor's, so that every further use is an error.
struct Spoil;

impl InplaceOp1 for Spoil {
    fn name(&self) -> &'static str {
        "spoil"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        *storage = CpuStorage::I64(Vec::new());
        Ok(())
    }
}

#[test]
fn the_gradient_of_a_frozen_weight_is_not_computed() {
    // It is the only one that the input is needed for: an input that cannot be read any more shows who computes it.
    let run = |layer: &dyn Module| {
        let xs = parameter(&[4, WIDTH], 1, DType::F32, true);
        let input = xs.affine(2.0, 0.0).unwrap();
        let result = layer.forward(&input).unwrap();
        input.inplace_op1(&Spoil).unwrap();
        backward(&result).map(|gradients| numbers(gradients.get(&xs).unwrap()))
    };
    let frozen = parameter(&[HEIGHT, WIDTH], 2, DType::F32, false);
    let bias = parameter(&[HEIGHT], 3, DType::F32, true);
    assert!(run(&Linear::new(frozen.clone(), None)).is_ok());
    assert!(run(&Linear::new(frozen.clone(), Some(bias))).is_ok());
    let candles = error(run(&candle_nn::Linear::new(frozen.clone(), None)));
    assert!(candles.contains("matmul"), "{candles}");
    let trained = Var::from_tensor(&frozen).unwrap().into_inner();
    let trained = error(run(&Linear::new(trained, None)));
    assert!(trained.contains("matmul"), "{trained}");
}

#[test]
fn parameters_have_the_names_shapes_and_spread_of_candles() {
    let register = |build: &dyn Fn(VarBuilder) -> Option<Tensor>| {
        let vars = VarMap::new();
        let bias = build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("layer"));
        let vars = vars.data().lock().unwrap();
        let mut shapes: Vec<_> = vars
            .iter()
            .map(|(name, var)| (name.clone(), var.dims().to_vec()))
            .collect();
        shapes.sort();
        let weight = numbers(&vars["layer.weight"]);
        let deviation = (weight.iter().map(|w| w * w).sum::<f64>() / weight.len() as f64).sqrt();
        (shapes, bias.is_some(), deviation)
    };
    let candles = register(&|vb| candle_nn::linear(300, 200, vb).unwrap().bias().cloned());
    for ours in [
        register(&|vb| linear(300, 200, vb).unwrap().bias().cloned()),
        register(&|vb| linear_b(300, 200, true, vb).unwrap().bias().cloned()),
    ] {
        assert_eq!((&ours.0, ours.1), (&candles.0, candles.1));
        assert!((ours.2 / candles.2 - 1.0).abs() < 0.05, "{} {}", ours.2, candles.2);
    }
    for ours in [
        register(&|vb| linear_no_bias(300, 200, vb).unwrap().bias().cloned()),
        register(&|vb| linear_b(300, 200, false, vb).unwrap().bias().cloned()),
    ] {
        assert_eq!((&ours.0[..], ours.1), (&candles.0[1..], false));
    }
}

#[test]
fn a_shape_or_dtype_that_does_not_fit_is_named() {
    let layer = Linear::new(values(&[3, 4], 1), Some(values(&[3], 2)));
    let message = error(layer.forward(&values(&[2, 5], 3)));
    assert!(
        message.contains("linear: expected weight of shape [3, 5], got [3, 4]"),
        "{message}"
    );
    let message = error(layer.forward(&values(&[4], 3)));
    assert!(
        message.contains("linear: expected xs with two to four dimensions, got [4]"),
        "{message}"
    );
    let message = error(layer.forward(&values(&[2, 4], 3).to_dtype(DType::F32).unwrap()));
    assert!(message.contains("dtype of weight, F64, got F32"), "{message}");
    let layer = Linear::new(values(&[3, 4], 1), Some(values(&[4], 2)));
    let message = error(layer.forward(&values(&[2, 4], 3)));
    assert!(
        message.contains("linear: expected bias of shape [3], got [4]"),
        "{message}"
    );
}
