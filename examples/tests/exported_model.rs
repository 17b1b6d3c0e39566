//! Models that ranks sharded and saved, exported as folders of transformers' and of diffusers'.
//!
//! With `SCONCE_EXPORTS` set to an absent folder, the Llama is left there for `xtask/peers/check_exports.py`, and the video
//! transformer in the folder of that name with `-diffusers` behind it, for `check_diffusers.py`: they load them with those
//! libraries themselves.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use sconce_core::checkpoint::ExportOptions;
use sconce_core::export::Library;
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

#[test]
fn a_video_transformer_is_read_and_exported_under_diffusers_names_with_all_its_bits() -> Result<()> {
    let place = tempfile::tempdir()?;
    let folder = match std::env::var_os("SCONCE_EXPORTS") {
        Some(mut folder) => {
            folder.push("-diffusers");
            PathBuf::from(folder)
        }
        None => place.path().join("exported"),
    };
    let original = fixtures().with_file_name("tiny-cogvideox").join("rotary");
    let source = ModelFolder::open(&original)?;
    let expected = tensors(&source)?;
    launch_threads(2, |builder| -> Result<(), anyhow::Error> {
        let acc = builder.strategy(ZeroStage::One).build_with(|_| None)?;
        let vb = acc.var_builder(Weights::Files(WeightFiles::open(&source.weights)?))?;
        for (name, tensor) in &expected {
            vb.get(tensor.dims(), name)?;
        }
        acc.prepare_optimizer(Box::new(AdamW::default()))?;
        acc.save_state(place.path().join("saved"))?;
        Ok(())
    })?;
    let options = ExportOptions {
        library: Library::Diffusers,
        max_shard_size: 50_000,
        ..ExportOptions::default()
    };
    let exported = Checkpoint::open(place.path().join("saved"))?.export_weights(&folder, &options)?;
    let (index, shards) = exported.files.split_last().expect("files");
    assert_eq!(index, "diffusion_pytorch_model.safetensors.index.json");
    for (number, shard) in shards.iter().enumerate() {
        let name = format!(
            "diffusion_pytorch_model-{:05}-of-{:05}.safetensors",
            number + 1,
            shards.len()
        );
        assert_eq!(*shard, name);
    }
    fs::copy(source.config_path(), folder.join("config.json"))?;
    fs::copy(original.join("io.safetensors"), folder.join("recorded.safetensors.io"))?;

    let found = tensors(&ModelFolder::open(&folder)?)?;
    assert!(found.keys().eq(expected.keys()), "{:?}", found.keys());
    for (name, tensor) in &found {
        let bits = |tensor: &Tensor| -> Result<Vec<u32>> {
            let values = tensor.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.into_iter().map(f32::to_bits).collect())
        };
        assert_eq!(tensor.dims(), expected[name].dims(), "{name}");
        assert_eq!(bits(tensor)?, bits(&expected[name])?, "{name}");
    }
    Ok(())
}

/// All tensors of a folder, by name.
fn tensors(folder: &ModelFolder) -> Result<BTreeMap<String, Tensor>> {
    let mut tensors = BTreeMap::new();
    for file in &folder.weights {
        tensors.extend(candle_core::safetensors::load(file, &Device::Cpu)?);
    }
    Ok(tensors)
}

fn furthest(found: &Tensor, expected: &Tensor) -> Result<f32> {
    Ok((found - expected)?.abs()?.max_all()?.to_scalar()?)
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama")
}
