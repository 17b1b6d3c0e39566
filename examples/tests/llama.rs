//! The Llama model against what transformers computes, on plain candle variables.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{Llama, LlamaConfig};
use sconce_examples::text::TokenRows;
use serde_json::Value;

#[test]
fn logits_loss_and_every_gradient_of_the_first_step_are_those_of_transformers() -> Result<()> {
    let (model, variables) = fixture_model()?;
    let expected = load("step0.safetensors")?;
    let batches = batches()?;
    let tokens = rows(&batches.tokens, &batches, 0..8)?;

    assert_near("logits", &model.forward(&tokens)?, &expected["logits"])?;
    let loss = model.loss(&tokens, &tokens)?;
    assert_near("loss", &loss.reshape(1)?, &expected["loss"])?;

    let gradients = loss.backward()?;
    let variables = sorted(&variables);
    for (name, variable) in &variables {
        let gradient = gradients
            .get(variable)
            .with_context(|| format!("{name} has no gradient"))?;
        assert_near(name, gradient, &expected[&format!("grad.{name}")])?;
    }
    assert_eq!(variables.len() + 2, expected.len());

    let recorded = json("step0.json")?;
    let norm = global_norm(&gradients, &variables)?;
    let expected = recorded["grad_norm"].as_f64().expect("the fixture holds numbers");
    assert!((norm - expected).abs() <= 1e-4 * expected, "{norm} against {expected}");
    Ok(())
}

#[test]
fn a_bf16_model_computes_in_bf16_what_the_f32_model_computes() -> Result<()> {
    let batches = batches()?;
    let tokens = rows(&batches.tokens, &batches, 0..8)?;
    let weights = load("model/model.safetensors")?;
    let model = Llama::new(
        &fixture_config()?,
        VarBuilder::from_tensors(weights, DType::BF16, &Device::Cpu),
    )?;
    let logits = model.forward(&tokens)?;
    assert_eq!(logits.dtype(), DType::BF16);
    let furthest = (logits.to_dtype(DType::F32)? - &load("step0.safetensors")?["logits"])?
        .abs()?
        .max_all()?;
    // bf16 has 8 bits: rounded once, logits of size 1 are off by up to 0.004.
    assert!(furthest.to_scalar::<f32>()? < 0.02, "{furthest}");
    Ok(())
}

#[test]
fn twenty_steps_of_training_follow_those_of_transformers() -> Result<()> {
    let (model, variables) = fixture_model()?;
    let recorded = json("train_single.json")?;
    let series = |name: &str| -> Vec<f64> {
        let values = recorded[name].as_array().expect("the fixture holds series");
        values
            .iter()
            .map(|value| value.as_f64().expect("the fixture holds numbers"))
            .collect()
    };
    let (rates, losses, norms) = (series("lr"), series("loss"), series("grad_norm"));
    let batches = batches()?;
    let variables = sorted(&variables);
    let parameters = ParamsAdamW {
        lr: 0.0,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
    };
    let mut optimizer = AdamW::new(
        variables.iter().map(|(_, variable)| variable.clone()).collect(),
        parameters,
    )?;
    for step in 0..20 {
        let tokens = rows(&batches.tokens, &batches, 8 * step..8 * step + 8)?;
        let loss = model.loss(&tokens, &tokens)?;
        let value = f64::from(loss.to_scalar::<f32>()?);
        assert!(
            (value - losses[step]).abs() <= 2e-5,
            "loss of step {step}: {value} against {}",
            losses[step]
        );
        let mut gradients = loss.backward()?;
        let norm = global_norm(&gradients, &variables)?;
        assert!(
            (norm - norms[step]).abs() <= 1e-4 * norms[step],
            "norm of step {step}: {norm}"
        );
        for (_, variable) in &variables {
            let gradient = gradients.remove(variable).expect("every parameter is used");
            gradients.insert(variable, (gradient * (1.0 / (norm + 1e-6)).min(1.0))?);
        }
        optimizer.set_learning_rate(rates[step]);
        optimizer.step(&gradients)?;
    }
    let trained = load("final_single.safetensors")?;
    for (name, variable) in &variables {
        let furthest = (variable.as_tensor() - &trained[name])?
            .abs()?
            .max_all()?
            .to_scalar::<f32>()?;
        assert!(furthest <= 2e-5, "{name} differs by {furthest}");
    }
    Ok(())
}

#[test]
fn ignored_labels_do_not_count_in_the_loss() -> Result<()> {
    let (model, _) = fixture_model()?;
    let batches = batches()?;
    // Recorded as the mean over two processes and two micro-batches, each a mean over its own labels.
    let mut sum = 0.0;
    for first in [0, 2, 4, 6] {
        let tokens = rows(&batches.tokens, &batches, first..first + 2)?;
        let labels = rows(
            batches.labels.as_ref().expect("the fixture has labels"),
            &batches,
            first..first + 2,
        )?;
        sum += f64::from(model.loss(&tokens, &labels)?.to_scalar::<f32>()?);
    }
    let expected = json("train_ddp_hot_masked.json")?["loss"][0]
        .as_f64()
        .expect("the fixture holds numbers");
    assert!((sum / 4.0 - expected).abs() <= 2e-5, "{} against {expected}", sum / 4.0);
    Ok(())
}

#[test]
fn the_logits_of_a_position_depend_on_no_later_token() -> Result<()> {
    let (model, _) = fixture_model()?;
    let long = Tensor::new(&[[1u32, 2, 3, 4, 5, 6]], &Device::Cpu)?;
    let short = Tensor::new(&[[1i64, 2, 3]], &Device::Cpu)?;
    assert_near(
        "prefix",
        &model.forward(&long)?.narrow(1, 0, 3)?,
        &model.forward(&short)?,
    )
}

#[test]
fn tied_embeddings_are_one_parameter_with_the_sum_of_both_gradients() -> Result<()> {
    // One model with two tables of equal values against one with a single table.
    let untied = LlamaConfig {
        tie_word_embeddings: false,
        ..fixture_config()?
    };
    let tied = LlamaConfig {
        tie_word_embeddings: true,
        ..untied.clone()
    };
    let tied_variables = VarMap::new();
    let tied_model = Llama::new(
        &tied,
        VarBuilder::from_varmap(&tied_variables, DType::F32, &Device::Cpu),
    )?;
    let tied_variables: HashMap<_, _> = sorted(&tied_variables).into_iter().collect();
    assert!(!tied_variables.contains_key("lm_head.weight"));

    let mut values: HashMap<String, Tensor> = tied_variables
        .iter()
        .map(|(name, variable)| (name.clone(), variable.as_tensor().clone()))
        .collect();
    values.insert("lm_head.weight".to_owned(), values["model.embed_tokens.weight"].clone());
    let (untied_model, untied_variables) = model_of(&untied, values)?;
    let untied_variables: HashMap<_, _> = sorted(&untied_variables).into_iter().collect();

    let tokens = Tensor::new(&[[5i64, 9, 200, 5, 31], [0, 255, 9, 8, 7]], &Device::Cpu)?;
    let tied_loss = tied_model.loss(&tokens, &tokens)?;
    let untied_loss = untied_model.loss(&tokens, &tokens)?;
    assert_near("loss", &tied_loss, &untied_loss)?;
    let (tied_gradients, untied_gradients) = (tied_loss.backward()?, untied_loss.backward()?);
    let untied_gradient = |name: &str| {
        untied_gradients
            .get(&untied_variables[name])
            .expect("it is used")
            .clone()
    };
    let sum = (untied_gradient("model.embed_tokens.weight") + untied_gradient("lm_head.weight"))?;
    let found = tied_gradients
        .get(&tied_variables["model.embed_tokens.weight"])
        .expect("it is used");
    assert_near("embedding", found, &sum)
}

#[test]
fn every_head_layout_and_bias_setting_uses_every_parameter() -> Result<()> {
    for (heads, key_value_heads, head_dim, attention_bias, mlp_bias) in [
        (4, 4, 16, false, false),
        (4, 1, 16, true, false),
        (4, 2, 8, false, true),
        (2, 2, 32, true, true),
    ] {
        let config = LlamaConfig {
            num_attention_heads: heads,
            num_key_value_heads: key_value_heads,
            head_dim,
            attention_bias,
            attention_output_bias: attention_bias,
            mlp_bias,
            ..fixture_config()?
        };
        let variables = VarMap::new();
        let model = Llama::new(&config, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
        let tokens = Tensor::new(&[[1i64, 2, 3, 4, 5, 6, 7]], &Device::Cpu)?;
        let gradients = model.loss(&tokens, &tokens)?.backward()?;
        let variables = sorted(&variables);
        let biases = 2 * (4 * usize::from(attention_bias) + 3 * usize::from(mlp_bias));
        assert_eq!(variables.len(), 21 + biases, "{config:?}");
        for (name, variable) in &variables {
            let gradient = gradients
                .get(variable)
                .with_context(|| format!("{name} has no gradient"))?;
            let size = gradient.abs()?.sum_all()?.to_scalar::<f32>()?;
            assert!(size.is_finite(), "{name}");
            // A bias of the keys adds the same to all scores of a query: its gradient is 0 but for rounding.
            assert!(size > 0.0 || name.ends_with("k_proj.bias"), "{name}");
        }
    }
    Ok(())
}

#[test]
fn a_missing_parameter_is_an_error_with_its_full_name() -> Result<()> {
    let mut values = load("model/model.safetensors")?;
    values.remove("model.layers.1.mlp.up_proj.weight");
    let error = Llama::new(
        &fixture_config()?,
        VarBuilder::from_tensors(values, DType::F32, &Device::Cpu),
    )
    .unwrap_err();
    assert!(
        error.to_string().contains("model.layers.1.mlp.up_proj.weight"),
        "{error}"
    );
    Ok(())
}

#[test]
fn inputs_that_are_no_batch_of_sequences_are_errors() -> Result<()> {
    let (model, _) = fixture_model()?;
    let flat = Tensor::new(&[1i64, 2, 3], &Device::Cpu)?;
    assert!(model.forward(&flat).is_err());
    let single = Tensor::new(&[[1i64]], &Device::Cpu)?;
    assert!(
        model
            .loss(&single, &single)
            .unwrap_err()
            .to_string()
            .contains("at least 2")
    );
    let three = Tensor::new(&[[1i64, 2, 3]], &Device::Cpu)?;
    let two = Tensor::new(&[[1i64, 2]], &Device::Cpu)?;
    assert!(
        model
            .loss(&three, &two)
            .unwrap_err()
            .to_string()
            .contains("expected that of the tokens")
    );
    let too_long = Tensor::zeros((1, 129), DType::I64, &Device::Cpu)?;
    assert!(model.forward(&too_long).is_err());
    let unknown = Tensor::new(&[[1i64, 256]], &Device::Cpu)?;
    assert!(model.forward(&unknown).is_err());
    Ok(())
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/tiny-llama")
        .join(name)
}

fn load(name: &str) -> Result<HashMap<String, Tensor>> {
    Ok(candle_core::safetensors::load(fixture(name), &Device::Cpu)?)
}

fn json(name: &str) -> Result<Value> {
    Ok(serde_json::from_str(&std::fs::read_to_string(fixture(name))?)?)
}

fn batches() -> Result<TokenRows> {
    TokenRows::read(&fixture("batches.safetensors"), None, 256, None)
}

fn rows(ids: &[i64], batches: &TokenRows, rows: std::ops::Range<usize>) -> Result<Tensor> {
    let length = batches.sequence_length;
    Ok(Tensor::from_slice(
        &ids[rows.start * length..rows.end * length],
        (rows.len(), length),
        &Device::Cpu,
    )?)
}

fn fixture_config() -> Result<LlamaConfig> {
    LlamaConfig::from_model_folder(&ModelFolder::open(&fixture("model"))?)
}

fn fixture_model() -> Result<(Llama, VarMap)> {
    model_of(&fixture_config()?, load("model/model.safetensors")?)
}

fn model_of(config: &LlamaConfig, values: HashMap<String, Tensor>) -> Result<(Llama, VarMap)> {
    let mut variables = VarMap::new();
    let model = Llama::new(config, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    variables.set(values.into_iter())?;
    Ok((model, variables))
}

fn sorted(variables: &VarMap) -> Vec<(String, Var)> {
    let variables = variables.data().lock().expect("no test thread panics with the lock");
    let mut sorted: Vec<_> = variables
        .iter()
        .map(|(name, variable)| (name.clone(), variable.clone()))
        .collect();
    sorted.sort_by(|left, right| left.0.cmp(&right.0));
    sorted
}

fn global_norm(gradients: &GradStore, variables: &[(String, Var)]) -> Result<f64> {
    let mut squares = 0.0;
    for (name, variable) in variables {
        let gradient = gradients
            .get(variable)
            .with_context(|| format!("{name} has no gradient"))?;
        squares += gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
    }
    Ok(squares.sqrt())
}

/// Tolerance of f32 logits and gradients: 1e-5 absolute plus 1e-4 relative.
fn assert_near(name: &str, found: &Tensor, expected: &Tensor) -> Result<()> {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let found = found.flatten_all()?.to_vec1::<f32>()?;
    let expected = expected.flatten_all()?.to_vec1::<f32>()?;
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(
            (found - expected).abs() <= 1e-5 + 1e-4 * expected.abs(),
            "{name}[{index}]: {found} against {expected}"
        );
    }
    Ok(())
}
