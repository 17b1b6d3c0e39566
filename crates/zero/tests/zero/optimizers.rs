//! Update rules, against 50-step traces of PyTorch and DeepSpeed (see `fixtures/optimizers/README.md`).

use super::{bits, deviation, engine, flat, linear_loss, parameters};
use candle_core::{DType, Device, Tensor};
use sconce_zero::{
    Adagrad, Adam, AdamW, EngineOptions, Lion, OptimizerRule, Sgd, StateSlices, Update, WeightFiles, Weights,
};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub(super) const SHAPES: [(&str, &[usize]); 3] = [("w", &[7, 5]), ("b", &[13]), ("x", &[3, 2, 4])];
pub(super) const STEPS: usize = 50;
pub(super) const KEPT: [usize; 6] = [1, 2, 3, 10, 25, 50];
pub(super) const TOLERANCE: f64 = 1e-5;

pub(super) fn fixture(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/optimizers")
        .join(file)
}

pub(super) fn tensors(file: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixture(file), &Device::Cpu).unwrap()
}

/// Returns all cases by name, as rules.
pub(super) fn cases() -> Vec<(String, Box<dyn OptimizerRule>)> {
    let cases: Value = serde_json::from_str(&std::fs::read_to_string(fixture("cases.json")).unwrap()).unwrap();
    let cases = cases["cases"].as_array().unwrap().iter();
    cases
        .map(|case| (case["name"].as_str().unwrap().to_owned(), rule(case)))
        .collect()
}

/// Builds a case's rule; what a case does not say is the peer's default, and so must be ours.
fn rule(case: &Value) -> Box<dyn OptimizerRule> {
    let arguments = &case["args"];
    let number = |name: &str, default: f64| arguments[name].as_f64().unwrap_or(default);
    let beta = |which: usize, default: f64| arguments["betas"][which].as_f64().unwrap_or(default);
    let flag = |name: &str, default: bool| arguments[name].as_bool().unwrap_or(default);
    match case["optimizer"].as_str().unwrap() {
        "AdamW" => {
            let default = AdamW::default();
            Box::new(AdamW {
                learning_rate: number("lr", default.learning_rate),
                beta1: beta(0, default.beta1),
                beta2: beta(1, default.beta2),
                epsilon: number("eps", default.epsilon),
                weight_decay: number("weight_decay", default.weight_decay),
                bias_correction: flag("bias_correction", default.bias_correction),
                amsgrad: flag("amsgrad", default.amsgrad),
            })
        }
        "Adam" => {
            let default = Adam::default();
            Box::new(Adam {
                learning_rate: number("lr", default.learning_rate),
                beta1: beta(0, default.beta1),
                beta2: beta(1, default.beta2),
                epsilon: number("eps", default.epsilon),
                weight_decay: number("weight_decay", default.weight_decay),
                bias_correction: flag("bias_correction", default.bias_correction),
                amsgrad: flag("amsgrad", default.amsgrad),
            })
        }
        "SGD" => {
            let default = Sgd::default();
            Box::new(Sgd {
                learning_rate: number("lr", default.learning_rate),
                momentum: number("momentum", default.momentum),
                dampening: number("dampening", default.dampening),
                weight_decay: number("weight_decay", default.weight_decay),
                nesterov: flag("nesterov", default.nesterov),
            })
        }
        "Adagrad" => {
            let default = Adagrad::default();
            let initial = number("initial_accumulator_value", default.initial_accumulator_value.into());
            Box::new(Adagrad {
                learning_rate: number("lr", default.learning_rate),
                learning_rate_decay: number("lr_decay", default.learning_rate_decay),
                weight_decay: number("weight_decay", default.weight_decay),
                initial_accumulator_value: initial as f32,
                epsilon: number("eps", default.epsilon),
            })
        }
        "Lion" => {
            let default = Lion::default();
            Box::new(Lion {
                learning_rate: number("lr", default.learning_rate),
                beta1: beta(0, default.beta1),
                beta2: beta(1, default.beta2),
                weight_decay: number("weight_decay", default.weight_decay),
            })
        }
        other => panic!("no rule for {other}"),
    }
}

pub(super) fn trace(traces: &HashMap<String, Tensor>, case: &str, name: &str, step: usize) -> Vec<f64> {
    traces[&format!("{case}.{name}.s{step}")]
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

#[test]
fn rules_through_the_engine_follow_the_peers_traces() {
    let (given, traces) = (tensors("grads.safetensors"), tensors("traces.safetensors"));
    for (case, rule) in cases() {
        let rate = rule.base_learning_rate();
        let engine = engine(&sconce_collectives::single(), EngineOptions::default());
        let files = WeightFiles::open(&[fixture("grads.safetensors")]).unwrap();
        let vb = engine
            .var_builder(Weights::Files(files), DType::F32, &Device::Cpu)
            .unwrap();
        let parameters = SHAPES.map(|(name, shape)| vb.pp("p0").get(shape, name).unwrap());
        engine.set_optimizer(rule).unwrap();
        let mut worst = 0f64;
        for step in 1..=STEPS {
            let loss_of = |number: usize| {
                let gradients = given[&format!("g.{}", SHAPES[number].0)].get(step - 1).unwrap();
                linear_loss(&parameters[number], &flat(&gradients))
            };
            let loss = ((loss_of(0) + loss_of(1)).unwrap() + loss_of(2)).unwrap();
            engine.backward(&loss, true).unwrap();
            engine.step(rate).unwrap();
            engine.zero_grad();
            if KEPT.contains(&step) {
                for ((name, _), parameter) in SHAPES.iter().zip(&parameters) {
                    worst = worst.max(deviation(&flat(parameter), &trace(&traces, &case, name, step)));
                }
            }
        }
        println!("{case}: {worst:.2e}");
        assert!(worst <= TOLERANCE, "{case}: {worst}");
    }
}

/// All three tensors, one after another.
fn joined(of: impl Fn(&str) -> Vec<f64>) -> Vec<f64> {
    SHAPES.iter().flat_map(|(name, _)| of(name)).collect()
}

fn as_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// Runs a rule on one piece of the joined tensors; returns the piece after each step.
fn run_piece(
    rule: &dyn OptimizerRule,
    initial: &[f32],
    gradients: &[Vec<f32>],
    at: usize,
    size: usize,
) -> Vec<Vec<f32>> {
    // The piece lies at an odd address within its array: kernels must not rely on alignment.
    let mut values = initial.to_vec();
    let kept = rule.state_names().len();
    let start = rule.initial_state();
    let mut state: [Vec<f32>; StateSlices::MOST] = std::array::from_fn(|number| {
        if number < kept {
            vec![start[number]; initial.len()]
        } else {
            Vec::new()
        }
    });
    let mut trace = Vec::new();
    for (step, gradients) in gradients.iter().enumerate() {
        let update = Update {
            learning_rate: rule.base_learning_rate(),
            step: step as u64 + 1,
            gradient_scale: 1.0,
        };
        let slices = state.each_mut().map(|state| {
            if state.is_empty() {
                &mut [][..]
            } else {
                &mut state[at..at + size]
            }
        });
        rule.update(
            &update,
            &mut values[at..at + size],
            &gradients[at..at + size],
            StateSlices(slices),
        );
        trace.push(values[at..at + size].to_vec());
    }
    trace
}

#[test]
fn rules_on_pieces_of_every_size_and_offset_follow_the_traces_and_give_the_bits_of_the_whole() {
    let (given, traces) = (tensors("grads.safetensors"), tensors("traces.safetensors"));
    let f64s = |tensor: &Tensor| flat(tensor).into_iter().map(f64::from).collect();
    let initial = as_f32(&joined(|name| f64s(&given[&format!("p0.{name}")])));
    let gradients: Vec<Vec<f32>> = (0..STEPS)
        .map(|step| as_f32(&joined(|name| f64s(&given[&format!("g.{name}")].get(step).unwrap()))))
        .collect();
    let cases = cases();
    assert_eq!(cases.len(), 19);
    for (case, rule) in cases {
        let expected = KEPT.map(|step| (step, joined(|name| trace(&traces, &case, name, step))));
        let whole = run_piece(&*rule, &initial, &gradients, 0, initial.len());
        let of_step = |(step, expected): &(usize, Vec<f64>)| deviation(&whole[step - 1], expected);
        println!("{case}: {:.2e}", expected.iter().map(of_step).fold(0.0, f64::max));
        for size in 1..=65 {
            for at in [0, 1, 3, 7].into_iter().filter(|at| at + size <= initial.len()) {
                let found = run_piece(&*rule, &initial, &gradients, at, size);
                for (step, expected) in &expected {
                    let found = &found[step - 1];
                    let worst = deviation(found, &expected[at..at + size]);
                    assert!(worst <= TOLERANCE, "{case}, {size} at {at}, step {step}: {worst}");
                    let of_whole = &whole[step - 1][at..at + size];
                    assert_eq!(bits(found), bits(of_whole), "{case}, {size} at {at}, step {step}");
                }
            }
        }
    }
}

#[test]
fn a_parameter_larger_than_one_task_is_updated_in_every_element() {
    let size = 3 * 32_768 + 17;
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let [p] = parameters(&engine, [("p", size)]);
    engine
        .set_optimizer(Box::new(Sgd {
            momentum: 0.5,
            ..Sgd::default()
        }))
        .unwrap();
    let before = flat(&p);
    let gradient = super::gradient(size, 5);
    for _ in 0..2 {
        engine.backward(&linear_loss(&p, &gradient), true).unwrap();
        engine.step(0.25).unwrap();
        engine.zero_grad();
    }
    // The buffers are g and 1.5 g.
    let expected: Vec<f64> = before
        .iter()
        .zip(&gradient)
        .map(|(p, g)| f64::from(*p) - 0.25 * 2.5 * f64::from(*g))
        .collect();
    assert!(deviation(&flat(&p), &expected) < 1e-6);
}

/// Every rule with every option that changes its loop.
fn every_loop() -> Vec<Box<dyn OptimizerRule>> {
    vec![
        Box::new(AdamW::default()),
        Box::new(AdamW {
            amsgrad: true,
            ..AdamW::default()
        }),
        Box::new(Adam::default()),
        Box::new(Adam {
            amsgrad: true,
            ..Adam::default()
        }),
        Box::new(Adagrad::default()),
        Box::new(Lion::default()),
        Box::new(Sgd::default()),
        Box::new(Sgd {
            momentum: 0.9,
            ..Sgd::default()
        }),
    ]
}

#[test]
fn a_gradient_that_is_not_a_number_shows_in_its_parameter_and_no_other() {
    for rule in every_loop() {
        let gradients = vec![
            vec![0.5; 40],
            [vec![0.5; 20], vec![f32::NAN], vec![0.5; 19]].concat(),
            vec![0.5; 40],
        ];
        for (step, values) in run_piece(&*rule, &[1.0; 40], &gradients, 0, 40).iter().enumerate() {
            for (number, value) in values.iter().enumerate() {
                let expected = step > 0 && number == 20;
                assert_eq!(value.is_nan(), expected, "{rule:?}, step {step}, element {number}");
            }
        }
    }
}

#[test]
fn gradients_are_multiplied_by_the_scale_before_all_else() {
    for rule in every_loop() {
        let once = |scale: f32, gradient: f32| {
            let update = Update {
                learning_rate: 0.01,
                step: 1,
                gradient_scale: scale,
            };
            let mut values = [1.0f32; 37];
            let mut state = [[0f32; 37]; StateSlices::MOST];
            let mut number = 0;
            let slices = state.each_mut().map(|state| {
                number += 1;
                if number <= rule.state_names().len() {
                    &mut state[..]
                } else {
                    &mut []
                }
            });
            rule.update(&update, &mut values, &[gradient; 37], StateSlices(slices));
            (bits(&values), state.map(|state| bits(&state)))
        };
        assert_eq!(once(0.25, 8.0), once(1.0, 2.0), "{rule:?}");
        assert_ne!(once(0.25, 8.0), once(1.0, 8.0), "{rule:?}");
    }
}

#[test]
fn lion_does_not_move_a_parameter_without_direction() {
    let rule = Lion::default();
    let trace = run_piece(&rule, &[3.0; 20], &[vec![0.0; 20], vec![-0.0; 20]], 0, 20);
    assert_eq!(trace, [[3.0; 20], [3.0; 20]]);
}

#[test]
fn a_bias_that_is_not_corrected_makes_the_first_step_longer_by_the_ratio_of_the_corrections() {
    let step_of = |bias_correction| {
        let rule = Adam {
            bias_correction,
            ..Adam::default()
        };
        1.0 - run_piece(&rule, &[1.0; 3], &[vec![2.0; 3]], 0, 3)[0][0]
    };
    // (1 - beta1) / sqrt(1 - beta2).
    let expected = 0.1 / 0.001f32.sqrt();
    assert!((step_of(false) / step_of(true) / expected - 1.0).abs() < 1e-3);
}

#[test]
fn amsgrad_divides_by_the_largest_second_moment_so_far() {
    // The traces' gradients are too even to show it. With these betas the moments are the gradient and a mean of squares:
    // 8, then 4 + 0.5; the step is divided by the root of 8, not of 4.5.
    let decoupled = AdamW {
        learning_rate: 1.0,
        beta1: 0.0,
        beta2: 0.5,
        epsilon: 0.0,
        weight_decay: 0.0,
        bias_correction: false,
        amsgrad: true,
    };
    let penalised = Adam {
        learning_rate: 1.0,
        beta1: 0.0,
        beta2: 0.5,
        epsilon: 0.0,
        bias_correction: false,
        amsgrad: true,
        ..Adam::default()
    };
    let expected = [1.0 - 4.0 / 8f64.sqrt(), 1.0 - 5.0 / 8f64.sqrt()];
    for rule in [&decoupled as &dyn OptimizerRule, &penalised] {
        let trace = run_piece(rule, &[1.0; 70], &[vec![4.0; 70], vec![1.0; 70]], 0, 70);
        for (found, expected) in trace.iter().zip(expected) {
            assert!(deviation(found, &[expected; 70]) < 1e-6, "{rule:?}: {found:?}");
        }
    }
}
