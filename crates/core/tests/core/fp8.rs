//! Linear layers in fp8, against sums in f64 of values that are rounded by search.

use super::{build, flat, on_ranks};
use candle_core::{DType, Device, Module, Tensor};
use sconce_collectives::single;
use sconce_core::deepspeed::{DeepSpeedConfig, MixedPrecision};
use sconce_core::fp8::{AmaxCompute, Fp8Format, Fp8Layer, Fp8LayerState, Fp8Recipe};
use sconce_core::nn::{Linear, linear};
use sconce_core::{
    Accelerator, AcceleratorBuilder, DeviceRequest, ParameterSet, RunSettings, Sgd, Unit, Weights, ZeroStage, unit,
};
use std::sync::Arc;

const INPUT: usize = 6;
const HIDDEN: usize = 5;
const OUTPUT: usize = 3;

/// The numbers of a format from 0 up, of so many bits of mantissa.
fn numbers(mantissa_bits: i32, bias: i32, count: usize) -> Vec<f64> {
    let steps = 1 << mantissa_bits;
    let number = |code: i32| {
        let (exponent, mantissa) = (code / steps, f64::from(code % steps) / f64::from(steps));
        match exponent {
            0 => mantissa * 2f64.powi(1 - bias),
            _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
        }
    };
    (0..count as i32).map(number).collect()
}

/// A matrix in f64, row by row.
#[derive(Debug, Clone)]
struct Matrix {
    rows: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn of(tensor: &Tensor) -> Self {
        let wide = tensor.to_dtype(DType::F32).unwrap();
        Self {
            rows: tensor.dims()[0],
            values: flat(&wide).into_iter().map(f64::from).collect(),
        }
    }

    fn columns(&self) -> usize {
        self.values.len() / self.rows
    }

    fn transposed(&self) -> Self {
        let (rows, columns) = (self.rows, self.columns());
        let values = (0..rows * columns).map(|i| self.values[i % rows * columns + i / rows]);
        Self {
            rows: columns,
            values: values.collect(),
        }
    }

    fn times(&self, other: &Self) -> Self {
        let (inner, columns) = (self.columns(), other.columns());
        assert_eq!(inner, other.rows);
        let cell = |i: usize| {
            let (row, column) = (i / columns, i % columns);
            (0..inner)
                .map(|k| self.values[row * inner + k] * other.values[k * columns + column])
                .sum()
        };
        Self {
            rows: self.rows,
            values: (0..self.rows * columns).map(cell).collect(),
        }
    }

    fn amax(&self) -> f64 {
        self.values.iter().fold(0.0, |most, value| value.abs().max(most))
    }

    /// Rounded to the nearest number after a multiplication by the scale for `amax`, and divided by it again.
    fn rounded(&self, numbers: &[f64], amax: f64) -> Self {
        let largest = numbers[numbers.len() - 1];
        let scale = f64::from(largest as f32 / amax as f32);
        let round = |value: &f64| {
            let scaled = f64::from(*value as f32 * scale as f32);
            let next = numbers
                .partition_point(|number| *number < scaled.abs())
                .min(numbers.len() - 1);
            let (low, high) = (numbers[next.saturating_sub(1)], numbers[next]);
            let middle = (low + high) / 2.0;
            let is_up = scaled.abs() > middle || (scaled.abs() == middle && next % 2 == 0);
            (if is_up { high } else { low }).copysign(scaled) / scale
        };
        Self {
            rows: self.rows,
            values: self.values.iter().map(round).collect(),
        }
    }
}

fn e4m3(matrix: &Matrix) -> Matrix {
    matrix.rounded(&numbers(3, 7, 127), matrix.amax())
}

fn e5m2(matrix: &Matrix) -> Matrix {
    matrix.rounded(&numbers(2, 15, 124), matrix.amax())
}

struct Model {
    first: Unit<Linear>,
    second: Unit<Linear>,
}

impl Model {
    fn new(acc: &dyn Accelerator) -> Self {
        let vb = acc.var_builder(Weights::Random { seed: 6 }).unwrap();
        let layer = |name: &str, inputs, outputs| unit(vb.clone(), name, |vb| linear(inputs, outputs, vb)).unwrap();
        Self {
            first: layer("first", INPUT, HIDDEN),
            second: layer("second", HIDDEN, OUTPUT),
        }
    }

    fn forward(&self, xs: &Tensor) -> Tensor {
        self.second.forward(&self.first.forward(xs).unwrap()).unwrap()
    }
}

fn fp8() -> AcceleratorBuilder {
    AcceleratorBuilder::default().mixed_precision(MixedPrecision::Fp8)
}

/// Rows of inputs of rank `rank`, over two decades.
fn inputs(rows: usize, rank: usize, dtype: DType) -> Tensor {
    let value =
        |i: usize| ((i * 7 + rank * 31 + 1) as f32 * 0.37).sin() * 10f32.powi((i % 3) as i32 - 1) * (rank + 1) as f32;
    let values: Vec<f32> = (0..rows * INPUT).map(value).collect();
    Tensor::from_vec(values, (rows, INPUT), &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

/// What the output's gradient is to be.
fn outer(rows: usize, dtype: DType) -> Tensor {
    let value = |i: usize| ((i * 5 + 2) as f32 * 0.71).cos() * 10f32.powi(-((i % 4) as i32));
    let values: Vec<f32> = (0..rows * OUTPUT).map(value).collect();
    Tensor::from_vec(values, (rows, OUTPUT), &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

fn loss(output: &Tensor) -> Tensor {
    let outer = outer(output.dims()[0], output.dtype());
    (output * outer)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .sum_all()
        .unwrap()
}

fn layers(acc: &dyn Accelerator) -> Vec<Arc<Fp8Layer>> {
    acc.fp8().unwrap().layers()
}

fn state(acc: &dyn Accelerator) -> Vec<Fp8LayerState> {
    acc.fp8().unwrap().state()
}

fn value_of(acc: &dyn Accelerator, name: &str) -> Matrix {
    let state = acc.state_dict().unwrap();
    let (_, tensor) = state.iter().find(|(found, _)| found == name).unwrap();
    let tensor = if tensor.rank() == 1 {
        tensor.unsqueeze(0).unwrap()
    } else {
        tensor.clone()
    };
    Matrix::of(&tensor)
}

#[track_caller]
fn assert_near(found: &Matrix, expected: &Matrix, tolerance: f64) {
    assert_eq!(found.values.len(), expected.values.len());
    for (found, wanted) in found.values.iter().zip(&expected.values) {
        let off = (found - wanted).abs();
        assert!(
            off <= tolerance * expected.amax(),
            "{found} where {wanted} was expected"
        );
    }
}

#[test]
fn products_and_gradients_are_those_of_values_on_the_grid() {
    // With f32 parameters, so that nothing else is rounded; steps by the negative gradient.
    let acc = build(fp8().autocast(true).communicator(single()));
    let model = Model::new(&*acc);
    let mut optimizer = acc
        .prepare_optimizer(Box::new(Sgd {
            learning_rate: 1.0,
            ..Sgd::default()
        }))
        .unwrap();
    let xs = inputs(4, 0, DType::F32);
    let names = ["first.weight", "first.bias", "second.weight", "second.bias"];
    let before = names.map(|name| value_of(&*acc, name));
    let output = acc.autocast(|| model.forward(&xs));
    acc.backward(&loss(&output)).unwrap();
    optimizer.step().unwrap();
    let after = names.map(|name| value_of(&*acc, name));

    let add_bias = |product: Matrix, bias: &Matrix| Matrix {
        values: product
            .values
            .iter()
            .enumerate()
            .map(|(i, value)| value + bias.values[i % bias.values.len()])
            .collect(),
        ..product
    };
    let [first, first_bias, second, second_bias] = &before;
    let input = e4m3(&Matrix::of(&xs));
    let hidden = add_bias(input.times(&e4m3(first).transposed()), first_bias);
    let hidden8 = e4m3(&hidden);
    let expected = add_bias(hidden8.times(&e4m3(second).transposed()), second_bias);
    assert_near(&Matrix::of(&output), &expected, 1e-6);

    let gradient = Matrix::of(&outer(4, DType::F32));
    let gradient8 = e5m2(&gradient);
    let of_second = gradient8.transposed().times(&hidden8);
    let of_hidden = gradient8.times(&e4m3(second));
    let of_first = e5m2(&of_hidden).transposed().times(&input);
    for (number, expected) in [(0, of_first), (2, of_second)] {
        let pairs = before[number].values.iter().zip(&after[number].values);
        let found = Matrix {
            rows: before[number].rows,
            values: pairs.map(|(before, after)| before - after).collect(),
        };
        assert_near(&found, &expected, 1e-5);
    }
    // In f32 the outputs are others.
    let plain = build(AcceleratorBuilder::default().communicator(single()));
    let wide = Matrix::of(&Model::new(&*plain).forward(&xs));
    let off = wide
        .values
        .iter()
        .zip(&expected.values)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max);
    assert!(off > 1e-3 * expected.amax(), "{off}");
}

#[test]
fn scales_follow_the_amaxes_of_what_was_differentiated_from_the_next_backward_on() {
    let recipe = Fp8Recipe {
        amax_history_len: 3,
        margin: 1,
        ..Fp8Recipe::default()
    };
    let acc = build(fp8().fp8(recipe).communicator(single()));
    let model = Model::new(&*acc);
    acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
    assert_eq!(
        layers(&*acc)
            .iter()
            .map(|layer| layer.name().to_owned())
            .collect::<Vec<_>>(),
        ["first", "second"]
    );
    let mut amaxes = Vec::new();
    for step in 0..5 {
        let xs = inputs(4, [0, 4, 1, 0, 0][step], DType::BF16);
        // What is only evaluated leaves no trace.
        model.forward(&(&xs * 1000.0).unwrap());
        acc.backward(&loss(&model.forward(&xs))).unwrap();
        amaxes.insert(0, Matrix::of(&xs).amax() as f32);
        let first = &state(&*acc)[0];
        let remembered = &amaxes[..amaxes.len().min(3)];
        assert_eq!(first.input.amaxes, remembered);
        let greatest = remembered.iter().copied().fold(0.0, f32::max);
        assert_eq!(first.input.scale, 448.0 / greatest / 2.0);
        assert_eq!(first.weight.amaxes[0], value_of(&*acc, "first.weight").amax() as f32);
    }
    let second = &state(&*acc)[1];
    let gradient = Matrix::of(&outer(4, DType::BF16)).amax() as f32;
    assert_eq!(
        (second.gradient.amaxes[0], second.gradient.scale),
        (gradient, 57344.0 / gradient / 2.0)
    );
    assert_eq!(acc.fp8().unwrap().updates(), 5);
}

#[test]
fn scales_change_at_the_interval_and_one_format_serves_gradients_too_if_it_is_to() {
    let recipe = Fp8Recipe {
        interval: 2,
        amax_compute: AmaxCompute::MostRecent,
        format: Fp8Format::E4m3,
        ..Fp8Recipe::default()
    };
    let acc = build(fp8().fp8(recipe).communicator(single()));
    let model = Model::new(&*acc);
    acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
    let scales = [0, 1, 2, 3].map(|rank| {
        let xs = inputs(4, rank, DType::BF16);
        acc.backward(&loss(&model.forward(&xs))).unwrap();
        (state(&*acc)[0].input.scale, 448.0 / Matrix::of(&xs).amax() as f32)
    });
    let [first, second, third, fourth] = scales;
    assert_eq!(
        (first.0, second.0, third.0, fourth.0),
        (first.1, first.1, third.1, third.1)
    );
    let gradient = Matrix::of(&outer(4, DType::BF16)).amax() as f32;
    assert_eq!(state(&*acc)[1].gradient.scale, 448.0 / gradient);
}

#[test]
fn ranks_agree_on_scales_for_weights_always_and_for_the_rest_if_they_are_to() {
    for strategy in [
        ZeroStage::One,
        ZeroStage::Three {
            persistence_threshold: 0,
        },
    ] {
        for reduce_amax in [false, true] {
            let states = on_ranks(3, |communicator| {
                let rank = communicator.rank();
                let recipe = Fp8Recipe {
                    reduce_amax,
                    ..Fp8Recipe::default()
                };
                let acc = build(fp8().fp8(recipe).strategy(strategy).communicator(communicator));
                let model = Model::new(&*acc);
                let mut optimizer = acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
                for _ in 0..2 {
                    acc.backward(&loss(&model.forward(&inputs(4, rank, DType::BF16))))
                        .unwrap();
                    optimizer.step().unwrap();
                    optimizer.zero_grad().unwrap();
                }
                state(&*acc)
            });
            for (rank, layers) in states.iter().enumerate() {
                for (layer, of_first_rank) in layers.iter().zip(&states[0]) {
                    assert_eq!(layer.weight, of_first_rank.weight, "{strategy:?}, rank {rank}");
                }
                let greatest = if reduce_amax { 2 } else { rank };
                let amax = Matrix::of(&inputs(4, greatest, DType::BF16)).amax() as f32;
                assert_eq!(layers[0].input.amaxes, [amax; 2], "{strategy:?}, rank {rank}");
                assert_eq!(*layers == states[0], reduce_amax || rank == 0);
            }
        }
    }
}

#[test]
fn a_restored_state_goes_on_with_the_same_bits_and_that_of_other_layers_is_refused() {
    let run = |acc: &dyn Accelerator, model: &Model, ranks: std::ops::Range<usize>| -> Vec<f32> {
        let outputs = ranks.map(|rank| {
            let output = model.forward(&inputs(4, rank, DType::BF16));
            acc.backward(&loss(&output)).unwrap();
            flat(&output.to_dtype(DType::F32).unwrap())
        });
        outputs.flatten().collect()
    };
    let start = || {
        let acc = build(fp8().communicator(single()));
        let model = Model::new(&*acc);
        acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
        (acc, model)
    };
    let (acc, model) = start();
    run(&*acc, &model, 3..6);
    let (kept, updates) = (state(&*acc), acc.fp8().unwrap().updates());
    let expected = run(&*acc, &model, 0..3);
    let (fresh, model) = start();
    fresh.fp8().unwrap().restore(&kept, updates).unwrap();
    assert_eq!(run(&*fresh, &model, 0..3), expected);
    let (other, model) = start();
    assert_ne!(run(&*other, &model, 0..3), expected);
    let error = other
        .fp8()
        .unwrap()
        .restore(&kept[..1], updates)
        .unwrap_err()
        .to_string();
    let mut broken = kept.clone();
    broken[1].weight.scale = f32::INFINITY;
    let text = other.fp8().unwrap().restore(&broken, updates).unwrap_err().to_string();
    assert!(text.contains("\"second\"") && text.contains("above 0"), "{text}");
    assert!(
        error.contains("\"first\"") && error.contains("first, second"),
        "{error}"
    );
}

#[test]
fn layers_outside_of_the_set_and_layers_made_of_tensors_compute_in_bf16() {
    let recipe = Fp8Recipe {
        layers: ParameterSet::matching(|parameter| {
            parameter.name == "second.weight" && parameter.shape == [OUTPUT, HIDDEN]
        }),
        ..Fp8Recipe::default()
    };
    let acc = build(fp8().fp8(recipe).communicator(single()));
    let model = Model::new(&*acc);
    let names: Vec<_> = layers(&*acc).iter().map(|layer| layer.name().to_owned()).collect();
    assert_eq!(names, ["second"]);
    assert!(model.first.module().fp8().is_none() && model.second.module().fp8().is_some());
    let plain = build(
        AcceleratorBuilder::default()
            .mixed_precision(MixedPrecision::Bf16)
            .communicator(single()),
    );
    assert!(plain.fp8().is_none());
    let xs = inputs(4, 0, DType::BF16);
    let [found, expected] = [&model, &Model::new(&*plain)]
        .map(|model| flat(&model.first.forward(&xs).unwrap().to_dtype(DType::F32).unwrap()));
    assert_eq!(found, expected);
    let tied = Linear::new(model.second.module().weight().clone(), None);
    assert!(tied.fp8().is_none());
}

#[test]
fn values_that_are_not_finite_stay_visible_and_do_not_spoil_the_scales() {
    let acc = build(fp8().communicator(single()));
    let model = Model::new(&*acc);
    acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
    acc.backward(&loss(&model.forward(&inputs(4, 0, DType::BF16)))).unwrap();
    let before = state(&*acc);
    let broken = (inputs(4, 0, DType::BF16) * f64::INFINITY).unwrap();
    let output = model.forward(&broken);
    assert!(
        flat(&output.to_dtype(DType::F32).unwrap())
            .iter()
            .all(|value| value.is_nan())
    );
    acc.backward(&loss(&output)).unwrap();
    assert_eq!(state(&*acc)[0].input, before[0].input);
}

fn settings(builder: &AcceleratorBuilder, variables: &[(&str, &str)]) -> sconce_core::Result<RunSettings> {
    builder.settings(2, |name| {
        let found = variables
            .iter()
            .find(|(known, _)| name == format!("ACCELERATE_{known}"));
        found.map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn the_recipe_comes_from_code_else_from_accelerates_variables() {
    let variables = [
        ("MIXED_PRECISION", "FP8"),
        ("FP8_FORMAT", "E4M3"),
        ("FP8_MARGIN", "-2"),
        ("FP8_INTERVAL", "3"),
        ("FP8_AMAX_HISTORY_LEN", "16"),
        ("FP8_AMAX_COMPUTE_ALGO", "most_recent"),
    ];
    let run = settings(&AcceleratorBuilder::default(), &variables).unwrap();
    assert_eq!((run.precision, run.compute_dtype()), (MixedPrecision::Fp8, DType::BF16));
    let recipe = run.fp8.clone().unwrap();
    assert_eq!(
        (recipe.format, recipe.margin, recipe.interval),
        (Fp8Format::E4m3, -2, 3)
    );
    assert_eq!(
        (recipe.amax_history_len, recipe.amax_compute),
        (16, AmaxCompute::MostRecent)
    );
    assert!(recipe.reduce_amax);
    let notices = run.notices(&Device::Cpu);
    assert!(
        notices.iter().any(|notice| notice.contains("emulated on the CPU")),
        "{notices:?}"
    );
    let of_code = settings(&fp8().fp8(Fp8Recipe::default()), &variables).unwrap();
    assert_eq!(of_code.fp8.unwrap().amax_history_len, 1024);
    assert!(
        settings(&AcceleratorBuilder::default(), &variables[1..])
            .unwrap()
            .fp8
            .is_none()
    );
    for (variable, value, expected) in [
        ("FP8_FORMAT", "E5M2", "HYBRID or E4M3"),
        ("FP8_MARGIN", "100", "-64 to 64"),
        ("FP8_INTERVAL", "0", "above 0"),
        ("FP8_AMAX_HISTORY_LEN", "0", "above 0"),
        ("FP8_AMAX_COMPUTE_ALGO", "mean", "max or most_recent"),
    ] {
        let error = settings(&fp8(), &[(variable, value)]).unwrap_err().to_string();
        assert!(error.contains(variable) && error.contains(expected), "{error}");
    }
    for (recipe, name) in [
        (
            Fp8Recipe {
                interval: 0,
                ..Fp8Recipe::default()
            },
            "interval",
        ),
        (
            Fp8Recipe {
                amax_history_len: 0,
                ..Fp8Recipe::default()
            },
            "amax_history_len",
        ),
        (
            Fp8Recipe {
                margin: 99,
                ..Fp8Recipe::default()
            },
            "margin",
        ),
    ] {
        let error = settings(&fp8().fp8(recipe), &[]).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn a_configuration_in_bf16_goes_together_with_fp8_and_one_in_fp16_does_not() {
    let config = |text: &str| DeepSpeedConfig::parse(text, "ds.json", Default::default()).unwrap();
    let with = |text: &str| settings(&fp8().deepspeed(config(text)), &[]);
    let run = with(r#"{"bf16": {"enabled": true}, "train_batch_size": 2}"#).unwrap();
    assert_eq!(run.precision, MixedPrecision::Fp8);
    let run = with(r#"{"bf16": {"enabled": "auto"}, "train_batch_size": 2}"#).unwrap();
    assert_eq!(
        (run.precision, run.deepspeed.unwrap().bf16.enabled.value()),
        (MixedPrecision::Fp8, Some(true))
    );
    let error = with(r#"{"fp16": {"enabled": true}, "train_batch_size": 2}"#)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("mixed_precision is fp8, `fp16.enabled` is true"),
        "{error}"
    );
}

#[test]
fn fp8_on_a_gpu_is_refused_by_name_before_anything_is_made() {
    let builder = fp8().device(DeviceRequest::Gpu(0)).communicator(single());
    let error = builder.build_with(|_| None).unwrap_err().to_string();
    assert!(error.contains("fp8 is emulated on the CPU only"), "{error}");
}

#[test]
fn a_run_goes_on_from_a_checkpoint_with_the_same_bits_on_another_number_of_ranks_too() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("checkpoint");
    let start = |communicator, strategy: ZeroStage| {
        let acc = build(fp8().strategy(strategy).communicator(communicator));
        let model = Model::new(&*acc);
        let optimizer = acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
        (acc, model, optimizer)
    };
    // Every rank has the same rows, so that the number of ranks changes nothing.
    let step = |acc: &dyn Accelerator, model: &Model, optimizer: &mut sconce_core::Optimizer, seed: usize| {
        let output = model.forward(&inputs(4, seed, DType::BF16));
        acc.backward(&loss(&output)).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        flat(&output.to_dtype(DType::F32).unwrap())
    };
    let expected = on_ranks(2, |communicator| {
        let (acc, model, mut optimizer) = start(communicator, ZeroStage::Two);
        (3..6).for_each(|seed| drop(step(&*acc, &model, &mut optimizer, seed)));
        acc.save_state(&target).unwrap();
        let outputs = Vec::from_iter((0..2).map(|seed| step(&*acc, &model, &mut optimizer, seed)));
        (outputs, state(&*acc))
    });
    for (world, strategy) in [
        (1, ZeroStage::One),
        (
            4,
            ZeroStage::Three {
                persistence_threshold: 0,
            },
        ),
    ] {
        let found = on_ranks(world, |communicator| {
            let (acc, model, mut optimizer) = start(communicator, strategy);
            acc.load_state(&target).unwrap();
            let outputs = Vec::from_iter((0..2).map(|seed| step(&*acc, &model, &mut optimizer, seed)));
            (outputs, state(&*acc))
        });
        found
            .iter()
            .for_each(|found| assert_eq!(*found, expected[0], "{world} ranks"));
    }
}
