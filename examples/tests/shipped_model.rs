//! The shipped model: how it is made, and that it is as made.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha20Rng;
use sconce_examples::huggingface::{ModelFolder, write_model_folder};
use sconce_examples::models::{Llama, LlamaConfig};
use sconce_examples::text::TokenRows;

const SEED: u64 = 1776;
const INITIALIZER_RANGE: f64 = 0.02;

#[test]
fn the_shipped_weights_are_as_generated() -> Result<()> {
    let folder = ModelFolder::open(&assets().join("tiny-llama"))?;
    let shipped = candle_core::safetensors::load(&folder.weights[0], &Device::Cpu)?;
    let generated = generate(&LlamaConfig::from_model_folder(&folder)?)?;
    assert_eq!(shipped.len(), generated.len());
    for (name, expected) in generated {
        assert_eq!(shipped[&name].dims(), expected.dims(), "{name}");
        let furthest = (&shipped[&name] - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        // Not 0: `ln` and `cos` may differ in the last bit from one platform to another.
        assert!(
            furthest <= 1e-8,
            "{name} differs by {furthest}; run the ignored test of this file to write it anew"
        );
    }
    Ok(())
}

#[test]
fn the_shipped_weights_are_exactly_the_parameters_of_the_model() -> Result<()> {
    let folder = ModelFolder::open(&assets().join("tiny-llama"))?;
    let shipped = candle_core::safetensors::load(&folder.weights[0], &Device::Cpu)?;
    let variables = VarMap::new();
    let config = LlamaConfig::from_model_folder(&folder)?;
    Llama::new(&config, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let variables = variables.data().lock().expect("no test thread panics with the lock");
    let dims = |name: &String| shipped.get(name).map(|tensor| tensor.dims().to_vec());
    assert_eq!(variables.len(), shipped.len());
    assert!(
        variables
            .iter()
            .all(|(name, variable)| dims(name) == Some(variable.dims().to_vec()))
    );
    Ok(())
}

#[test]
fn an_untrained_model_predicts_every_byte_of_the_shipped_text_alike() -> Result<()> {
    let folder = ModelFolder::open(&assets().join("tiny-llama"))?;
    let config = LlamaConfig::from_model_folder(&folder)?;
    let weights = candle_core::safetensors::load(&folder.weights[0], &Device::Cpu)?;
    let model = Llama::new(&config, VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu))?;
    for file in ["declaration_of_independence.txt", "lincoln.txt", "sonnets.txt"] {
        let path = assets().join("text").join(file);
        let rows = TokenRows::read(&path, folder.tokenizer.as_deref(), config.vocab_size, None)?;
        let tokens = Tensor::from_slice(&rows.tokens, (rows.rows, rows.sequence_length), &Device::Cpu)?;
        let loss = model
            .loss(&tokens.narrow(0, 0, 8)?, &tokens.narrow(0, 0, 8)?)?
            .to_scalar::<f32>()?;
        assert!((loss - 256f32.ln()).abs() < 0.05, "{file}: {loss}");
    }
    Ok(())
}

#[test]
#[ignore = "writes assets/tiny-llama/model.safetensors; run it after changing the model"]
fn write_the_shipped_weights() -> Result<()> {
    let directory = assets().join("tiny-llama");
    let config = std::fs::read_to_string(directory.join("config.json"))?;
    // The folder has no weights yet, or old ones: describe it without opening it.
    let source = ModelFolder {
        directory: directory.clone(),
        config,
        weights: Vec::new(),
        tokenizer: None,
    };
    let generated = generate(&LlamaConfig::from_model_folder(&source)?)?;
    let written = tempfile::tempdir()?;
    write_model_folder(written.path(), &source, generated)?;
    std::fs::copy(
        written.path().join("model.safetensors"),
        directory.join("model.safetensors"),
    )?;
    Ok(())
}

/// Random weights as transformers initialises a Llama: matrices normal with `initializer_range`, norms 1.
fn generate(config: &LlamaConfig) -> Result<Vec<(String, Tensor)>> {
    let variables = VarMap::new();
    Llama::new(config, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let variables = variables.data().lock().expect("no test thread panics with the lock");
    let shapes: HashMap<_, _> = variables
        .iter()
        .map(|(name, variable)| (name.clone(), variable.shape()))
        .collect();
    let mut names: Vec<_> = shapes.keys().cloned().collect();
    names.sort();
    let mut random = ChaCha20Rng::seed_from_u64(SEED);
    let mut tensors = Vec::new();
    for name in names {
        let shape = shapes[&name];
        let values: Vec<f32> = match shape.rank() {
            1 => vec![1.0; shape.elem_count()],
            _ => (0..shape.elem_count())
                .map(|_| (INITIALIZER_RANGE * normal(&mut random)) as f32)
                .collect(),
        };
        tensors.push((name, Tensor::from_vec(values, shape.clone(), &Device::Cpu)?));
    }
    Ok(tensors)
}

/// A standard normal number by the method of Box and Muller (1958).
fn normal(random: &mut impl Rng) -> f64 {
    let radius = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.random::<f64>()).cos()
}

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets")
}
