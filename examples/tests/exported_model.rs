//! A Llama that three ranks sharded and saved, exported as a folder of transformers': it computes what transformers computes.
//!
//! With `SCONCE_EXPORTS` set to an absent folder the same is left there for `xtask/peers/check_exports.py`, which loads it with
//! transformers itself.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use sconce_core::checkpoint::ExportOptions;
use sconce_core::{AdamW, Checkpoint, WeightFiles, Weights, ZeroStage, launch_threads};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{Llama, LlamaConfig};

#[test]
fn an_exported_llama_gives_the_logits_that_transformers_recorded() -> Result<()> {
    let place = tempfile::tempdir()?;
    let folder = match std::env::var_os("SCONCE_EXPORTS") {
        Some(folder) => PathBuf::from(folder),
        None => place.path().join("exported"),
    };
    let source = ModelFolder::open(&fixtures().join("model"))?;
    let config = LlamaConfig::from_model_folder(&source)?;
    launch_threads(3, |builder| -> Result<(), anyhow::Error> {
        let sharded = ZeroStage::Three {
            persistence_threshold: 0,
        };
        let acc = builder.strategy(sharded).build_with(|_| None)?;
        let weights = Weights::Files(WeightFiles::open(&source.weights)?);
        let _model = Llama::new(&config, acc.var_builder(weights)?)?;
        acc.prepare_optimizer(Box::new(AdamW::default()))?;
        acc.save_state(place.path().join("saved"))?;
        Ok(())
    })?;
    let options = ExportOptions {
        max_shard_size: 100_000,
        ..ExportOptions::default()
    };
    let exported = Checkpoint::open(place.path().join("saved"))?.export_weights(&folder, &options)?;
    assert!(exported.files.len() > 3, "{exported:?}");
    fs::copy(source.config_path(), folder.join("config.json"))?;

    let opened = ModelFolder::open(&folder)?;
    let mut weights = std::collections::HashMap::new();
    for file in &opened.weights {
        weights.extend(candle_core::safetensors::load(file, &Device::Cpu)?);
    }
    let model = Llama::new(&config, VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu))?;
    let batches = candle_core::safetensors::load(fixtures().join("batches.safetensors"), &Device::Cpu)?;
    let tokens = batches["tokens"].get(0)?;
    let logits = model.forward(&tokens.to_dtype(DType::U32)?)?;
    let recorded = candle_core::safetensors::load(fixtures().join("step0.safetensors"), &Device::Cpu)?;
    let furthest = furthest(&logits, &recorded["logits"])?;
    assert!(furthest <= 1e-5, "{furthest}");
    let io = std::collections::HashMap::from([("tokens", tokens), ("logits", logits)]);
    candle_core::safetensors::save(&io, folder.join("logits.safetensors.io"))?;
    Ok(())
}

fn furthest(found: &Tensor, expected: &Tensor) -> Result<f32> {
    Ok((found - expected)?.abs()?.max_all()?.to_scalar()?)
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama")
}
