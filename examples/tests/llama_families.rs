//! Every family of models against what transformers computes, from the files that transformers writes.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use sconce_core::nn::LoraOptions;
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{Llama, LlamaAdapters, LlamaConfig, Reading};

const CASES: [&str; 10] = [
    "llama",
    "llama-biases",
    "llama-tied",
    "llama-linear",
    "llama-dynamic",
    "llama-yarn",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
];

#[test]
fn logits_losses_and_gradient_norms_of_every_family_are_those_of_transformers() -> Result<()> {
    for case in CASES {
        let (_, model, variables) = opened(case)?;
        let expected = candle_core::safetensors::load(folder(case).join("expected.safetensors"), &Device::Cpu)?;
        let (tokens, labels) = (&expected["tokens"], &expected["labels"]);
        assert_near(case, &model.forward(tokens)?, &expected["logits"])?;
        let loss = model.loss(tokens, labels)?;
        let recorded: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(folder(case).join("expected.json"))?)?;
        let found = f64::from(loss.to_scalar::<f32>()?);
        let wanted = recorded["loss"].as_f64().expect("a number");
        assert!(
            (found - wanted).abs() <= 2e-5,
            "{case}: loss {found}, expected {wanted}"
        );

        let gradients = loss.backward()?;
        let norms = recorded["grad_norms"].as_object().expect("a map");
        assert_eq!(norms.len(), variables.len(), "{case}");
        for (name, variable) in &variables {
            let gradient = gradients.get(variable).expect("every parameter is used");
            let norm = gradient
                .to_dtype(DType::F64)?
                .sqr()?
                .sum_all()?
                .to_scalar::<f64>()?
                .sqrt();
            let wanted = norms[name].as_f64().expect("a number");
            // Biases of keys have no influence: their gradient is rounding.
            assert!(
                (norm - wanted).abs() <= 1e-4 * wanted + 1e-6,
                "{case}, {name}: {norm}, expected {wanted}"
            );
        }
    }
    Ok(())
}

#[test]
fn documents_packed_into_one_row_are_read_as_if_each_had_a_row() -> Result<()> {
    // Positions begin anew in no document: rotary attention sees distances alone.
    for case in ["llama", "llama3", "mistral", "qwen2", "qwen3"] {
        let (_, model, _) = opened(case)?;
        let tokens = |range: std::ops::Range<i64>| Tensor::arange(range.start, range.end, &Device::Cpu)?.unsqueeze(0);
        let packed = Tensor::cat(&[&tokens(3..12)?, &tokens(40..50)?], 1)?;
        let reading = Reading {
            document_starts: Some([vec![0; 9], vec![9; 10]].concat()),
            ..Reading::default()
        };
        let together = model.read(&packed, &reading)?;
        assert_near(case, &together.narrow(1, 0, 9)?, &model.forward(&tokens(3..12)?)?)?;
        assert_near(case, &together.narrow(1, 9, 10)?, &model.forward(&tokens(40..50)?)?)?;
    }
    Ok(())
}

#[test]
fn the_mean_of_a_batch_is_that_of_its_rows_by_how_much_counts() -> Result<()> {
    let (_, model, _) = opened("qwen3")?;
    let expected = candle_core::safetensors::load(folder("qwen3").join("expected.safetensors"), &Device::Cpu)?;
    let (tokens, labels) = (&expected["tokens"], &expected["labels"]);
    let (sums, counts) = model.row_losses(tokens, labels, &Reading::default())?;
    assert_eq!(counts.to_vec1::<f32>()?, [23.0, 16.0]);
    let mean = (sums.sum_all()? / f64::from(counts.sum_all()?.to_scalar::<f32>()?))?;
    assert_near("loss", &mean, &model.loss(tokens, labels)?)
}

#[test]
fn merged_adapters_are_weights_of_a_model_that_computes_the_same() -> Result<()> {
    for rank_stabilized in [false, true] {
        let options = LoraOptions {
            rank: 4,
            alpha: 6.0,
            rank_stabilized,
            ..LoraOptions::default()
        };
        let adapters = LlamaAdapters::new(options, &["all-linear".to_owned()])?;
        let config = LlamaConfig::from_model_folder(&ModelFolder::open(&folder("qwen2").join("model"))?)?;
        let mut values = base("qwen2")?;
        for (name, tensor) in base("qwen2")? {
            let Some(layer) = name.strip_suffix("_proj.weight") else {
                continue;
            };
            let (rows, columns) = tensor.dims2()?;
            let half = |rows: usize, columns: usize| {
                let wave = |i: usize| (i as f32 * 0.7 + name.len() as f32).sin() * 0.3;
                Tensor::from_vec(
                    Vec::from_iter((0..rows * columns).map(wave)),
                    (rows, columns),
                    &Device::Cpu,
                )
            };
            values.insert(format!("{layer}_proj.lora_A.weight"), half(4, columns)?);
            values.insert(format!("{layer}_proj.lora_B.weight"), half(rows, 4)?);
        }
        let vb = |values| VarBuilder::from_tensors(values, DType::F32, &Device::Cpu);
        let adapted = Llama::with_adapters(&config, Some(&adapters), vb(values.clone()))?;
        let merged = HashMap::from_iter(adapters.merge(values.into_iter().collect())?);
        assert_eq!(merged.len(), base("qwen2")?.len());
        let tokens = Tensor::new(&[[5i64, 9, 60, 5, 31]], &Device::Cpu)?;
        let merged = Llama::new(&config, vb(merged))?.forward(&tokens)?;
        assert_near("merged", &adapted.forward(&tokens)?, &merged)?;
        let without = Llama::new(&config, vb(base("qwen2")?))?.forward(&tokens)?;
        assert!(are_far(&merged, &without)?);
    }
    Ok(())
}

#[test]
fn adapters_that_cannot_be_are_refused() {
    let refused = |options: LoraOptions, target: &str| {
        let targets = Vec::from_iter(target.split_whitespace().map(str::to_owned));
        LlamaAdapters::new(options, &targets).unwrap_err().to_string()
    };
    let options = LoraOptions::default();
    assert!(refused(options, "q_proj lm_head").contains("\"lm_head\" is no projection with an adapter"));
    assert!(refused(options, "").contains("no projections are named"));
    assert!(refused(LoraOptions { rank: 0, ..options }, "q_proj").contains("expected at least 1"));
    assert!(
        refused(
            LoraOptions {
                dropout: 1.0,
                ..options
            },
            "q_proj"
        )
        .contains("below 1")
    );
}

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/llama-families")
        .join(case)
}

fn base(case: &str) -> Result<HashMap<String, Tensor>> {
    Ok(candle_core::safetensors::load(
        folder(case).join("model/model.safetensors"),
        &Device::Cpu,
    )?)
}

fn opened(case: &str) -> Result<(LlamaConfig, Llama, BTreeMap<String, Var>)> {
    let config = LlamaConfig::from_model_folder(&ModelFolder::open(&folder(case).join("model"))?)?;
    let variables = base(case)?
        .into_iter()
        .map(|(name, tensor)| Ok((name, Var::from_tensor(&tensor)?)));
    let variables = variables.collect::<Result<BTreeMap<_, _>>>()?;
    let tensors = variables
        .iter()
        .map(|(name, variable)| (name.clone(), variable.as_tensor().clone()));
    let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu);
    let model = Llama::new(&config, vb)?;
    Ok((config, model, variables))
}

/// Says whether some element differs by more than rounding.
fn are_far(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok((a - b)?.abs()?.max_all()?.to_scalar::<f32>()? > 1e-2)
}

/// Tolerance of f32 logits: 1e-5 absolute plus 1e-4 relative.
fn assert_near(name: &str, found: &Tensor, expected: &Tensor) -> Result<()> {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let (found, expected) = (
        found.flatten_all()?.to_vec1::<f32>()?,
        expected.flatten_all()?.to_vec1::<f32>()?,
    );
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(
            (found - expected).abs() <= 1e-5 + 1e-4 * expected.abs(),
            "{name}[{index}]: {found} against {expected}"
        );
    }
    Ok(())
}
