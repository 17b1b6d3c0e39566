//! Update rules, against 50-step traces of PyTorch and DeepSpeed (see `fixtures/optimizers/README.md`).

use super::{bits, deviation, engine, flat, linear_loss, parameters};
use candle_core::{DType, Device, Tensor};
use sconce_zero::{AdamW, EngineOptions, OptimizerRule, Sgd, StateSlices, Update, WeightFiles, Weights};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const SHAPES: [(&str, &[usize]); 3] = [("w", &[7, 5]), ("b", &[13]), ("x", &[3, 2, 4])];
const STEPS: usize = 50;
const KEPT: [usize; 6] = [1, 2, 3, 10, 25, 50];
const TOLERANCE: f64 = 1e-5;

fn fixture(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/optimizers")
        .join(file)
}

fn tensors(file: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixture(file), &Device::Cpu).unwrap()
}

/// Returns the cases that our rules can express, with their rate.
fn cases() -> Vec<(String, Box<dyn OptimizerRule>)> {
    let cases: Value = serde_json::from_str(&std::fs::read_to_string(fixture("cases.json")).unwrap()).unwrap();
    let cases = cases["cases"].as_array().unwrap().iter();
    cases
        .filter_map(|case| Some((case["name"].as_str()?.to_owned(), rule(case)?)))
        .collect()
}

fn rule(case: &Value) -> Option<Box<dyn OptimizerRule>> {
    let arguments = &case["args"];
    let number = |name: &str| arguments[name].as_f64();
    let variant = ["amsgrad", "bias_correction"]
        .iter()
        .any(|name| !arguments[*name].is_null());
    match case["optimizer"].as_str()? {
        // Without decay Adam and AdamW are the same rule.
        name @ ("AdamW" | "Adam") if !variant && (name == "AdamW" || number("weight_decay") == Some(0.0)) => {
            Some(Box::new(AdamW {
                learning_rate: number("lr")?,
                beta1: arguments["betas"][0].as_f64()?,
                beta2: arguments["betas"][1].as_f64()?,
                epsilon: number("eps")?,
                weight_decay: number("weight_decay")?,
            }))
        }
        "SGD" => Some(Box::new(Sgd {
            learning_rate: number("lr")?,
            momentum: number("momentum").unwrap_or(0.0),
            dampening: number("dampening").unwrap_or(0.0),
            weight_decay: number("weight_decay").unwrap_or(0.0),
            nesterov: arguments["nesterov"].as_bool().unwrap_or(false),
        })),
        _ => None,
    }
}

fn trace(traces: &HashMap<String, Tensor>, case: &str, name: &str, step: usize) -> Vec<f64> {
    traces[&format!("{case}.{name}.s{step}")]
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

#[test]
fn the_expressible_cases_are_those_that_we_think() {
    let names: Vec<String> = cases().into_iter().map(|(name, _)| name).collect();
    let adamw = ["adamw", "adamw_ds", "adamw_nodecay", "adamw_hot", "adam"];
    let sgd = ["sgd", "sgd_wd", "sgd_momentum", "sgd_momentum_damp_wd", "sgd_nesterov"];
    assert_eq!(names, [adamw, sgd].concat());
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
    let mut state: [Vec<f32>; StateSlices::MOST] = std::array::from_fn(|number| {
        if number < kept {
            vec![0.0; initial.len()]
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
    for (case, rule) in cases() {
        let expected = KEPT.map(|step| (step, joined(|name| trace(&traces, &case, name, step))));
        let whole = run_piece(&*rule, &initial, &gradients, 0, initial.len());
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
