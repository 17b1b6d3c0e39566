//! Outputs, losses and gradients that diffusers recorded, within the tolerances of the fixtures' README.

use super::{VARIANTS, Variant};
use candle_core::{DType, Device, Tensor, Var, safetensors};
use candle_nn::VarBuilder;
use sconce_core::nn::as_compositions;
use sconce_examples::models::CogVideoXTransformer;
use serde_json::Value;
use std::collections::HashMap;

/// Variables of all parameters, and a model of them.
fn model(variant: &Variant, dtype: DType) -> (HashMap<String, Var>, CogVideoXTransformer) {
    let weights = safetensors::load(&variant.folder.weights[0], &Device::Cpu).unwrap();
    let variables: HashMap<String, Var> = weights
        .into_iter()
        .map(|(name, tensor)| (name, Var::from_tensor(&tensor.to_dtype(dtype).unwrap()).unwrap()))
        .collect();
    let tensors = variables
        .iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    let vb = VarBuilder::from_tensors(tensors.collect(), dtype, &Device::Cpu);
    (variables, CogVideoXTransformer::new(&variant.config, None, vb).unwrap())
}

fn furthest(a: &Tensor, b: &Tensor) -> f64 {
    let [a, b] = [a, b].map(|tensor| tensor.to_dtype(DType::F64).unwrap());
    let difference = (a - b).unwrap().abs().unwrap().max_all().unwrap();
    difference.to_scalar().unwrap()
}

fn norm(tensor: &Tensor) -> f64 {
    let wide = tensor.to_dtype(DType::F64).unwrap();
    wide.sqr()
        .unwrap()
        .sum_all()
        .unwrap()
        .to_scalar::<f64>()
        .unwrap()
        .sqrt()
}

/// Compares a variant in a dtype with what is recorded of it in that dtype.
fn check(name: &str, dtype: DType) {
    let (output_key, loss_key) = match dtype {
        DType::F64 => ("output_f64", "loss_f64"),
        _ => ("output", "loss"),
    };
    let variant = Variant::open(name);
    let (variables, model) = model(&variant, dtype);
    let input = |key: &str| Var::from_tensor(&variant.io[key].to_dtype(dtype).unwrap()).unwrap();
    let (latents, text) = (input("hidden_states"), input("encoder_hidden_states"));
    let output = variant.forward(&model, &latents, &text);
    let what = format!("{name}, {dtype:?}");
    let difference = furthest(&output, &variant.io[output_key]);
    assert!(difference <= 1e-5, "{what}: outputs differ by {difference:e}");

    let recorded = std::fs::read_to_string(variant.folder.directory.join("grads.json")).unwrap();
    let recorded: Value = serde_json::from_str(&recorded).unwrap();
    let loss = variant.loss(&output);
    let value = loss.to_dtype(DType::F64).unwrap().to_scalar::<f64>().unwrap();
    let expected = recorded[loss_key].as_f64().unwrap();
    assert!(
        (value / expected - 1.0).abs() <= 1e-5,
        "{what}: loss {value}, expected {expected}"
    );

    let gradients = loss.backward().unwrap();
    for (input, key) in [(&latents, "grad_hidden_states"), (&text, "grad_encoder_hidden_states")] {
        // What is recorded for inputs adds up over the two backward passes of the script, in f32 and in f64.
        let twice = (gradients.get(input).unwrap() * 2.0).unwrap();
        let difference = furthest(&twice, &variant.io[key]);
        assert!(difference <= 1e-6, "{what}: {key} differs by {difference:e}");
    }
    let mut compared = 0;
    for parameter in recorded["parameters"].as_array().unwrap() {
        let name = parameter["name"].as_str().unwrap();
        let gradient = gradients
            .get(&variables[name])
            .unwrap_or_else(|| panic!("{what}: {name}"));
        let expected = match dtype {
            DType::F64 => &recorded["grad_norm_f64"][name],
            _ => &parameter["grad_norm"],
        };
        let (found, expected) = (norm(gradient), expected.as_f64().unwrap());
        assert!(
            (found - expected).abs() <= 1e-4 * expected + 1e-6,
            "{what}, {name}: norm {found}, expected {expected}"
        );
        let wide = gradient.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
        let first = wide.to_vec1::<f64>().unwrap();
        for (found, expected) in first.iter().zip(parameter["grad_first"].as_array().unwrap()) {
            let expected = expected.as_f64().unwrap();
            assert!(
                (found - expected).abs() <= 1e-4 * expected.abs() + 1e-6,
                "{what}, {name}: {found}, expected {expected}"
            );
        }
        compared += 1;
    }
    let constants = usize::from(variant.config.use_learned_positional_embeddings);
    assert_eq!(compared + constants, variables.len(), "{what}");
}

#[test]
fn outputs_losses_and_gradients_are_those_of_diffusers() {
    for name in VARIANTS {
        check(name, DType::F32);
        check(name, DType::F64);
    }
}

#[test]
fn they_are_with_the_layers_as_they_are_on_a_gpu_too() {
    for name in VARIANTS {
        as_compositions(|| check(name, DType::F32));
    }
}
