//! A model written by others trains unmodified, as a single unit: the autoencoder of Stable Diffusion as
//! candle-transformers has it, of convolutions, group norms and attention.
//!
//! Its decoder is trained, its encoder frozen: what the encoder samples cannot be repeated. Every forward is of one image:
//! of several, candle's linear layer multiplies the transposed view that attention gives it wrongly (huggingface/candle
//! #3758).

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
use candle_transformers::models::bert::{BertModel, Config as BertConfig};
use candle_transformers::models::stable_diffusion::vae::{AutoEncoderKL, AutoEncoderKLConfig};
use sconce_collectives::{Communicator, Options, ReduceOp, shm, single};
use sconce_core::{
    Accelerator, AcceleratorBuilder, AdamW, FullyShardedOptions, ParameterSet, WeightFiles, Weights, WrapPolicy,
    ZeroStage, unit,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const STEPS: usize = 4;
const LEARNING_RATE: f64 = 3e-3;
const WEIGHT_DECAY: f64 = 0.01;
const MAX_NORM: f64 = 0.5;

fn autoencoder(vb: VarBuilder) -> Result<AutoEncoderKL> {
    let config = AutoEncoderKLConfig {
        block_out_channels: vec![8, 16],
        layers_per_block: 1,
        latent_channels: 4,
        norm_num_groups: 4,
        use_quant_conv: true,
        use_post_quant_conv: true,
    };
    AutoEncoderKL::new(vb, 3, 3, config)
}

fn is_trained(name: &str) -> bool {
    name.starts_with("model.decoder.") || name.starts_with("model.post_quant_conv.")
}

/// Returns reproducible numbers in -1..1.
fn waves(shape: &[usize], frequency: f64, phase: f64) -> Result<Tensor> {
    let count = shape.iter().product::<usize>() as u32;
    let phases = Tensor::arange(0, count, &Device::Cpu)?
        .to_dtype(DType::F64)?
        .affine(frequency, phase)?;
    phases.sin()?.to_dtype(DType::F32)?.reshape(shape)
}

/// The mean squared error of an image decoded from its latents.
fn loss(step: usize, image: usize, decode: impl Fn(Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let number = (10 * step + image) as f64;
    let decoded = decode(waves(&[1, 4, 6, 6], 0.37, number)?)?;
    (decoded - waves(&[1, 3, 12, 12], 0.11, number)?)?.sqr()?.mean_all()
}

/// What a run is compared by.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<(String, Vec<f32>)>,
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Makes the model of plain variables with reproducible values; returns them by name.
fn plain_model() -> Result<(AutoEncoderKL, Vec<(String, Var)>)> {
    let variables = VarMap::new();
    let model = autoencoder(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu).pp("model"))?;
    let mut named: Vec<(String, Var)> = variables.data().lock().unwrap().clone().into_iter().collect();
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (number, (name, variable)) in named.iter().enumerate() {
        if !name.contains("norm") {
            let inputs = variable.dims().iter().skip(1).product::<usize>();
            let spread = (1.0 / inputs as f64).sqrt();
            variable.set(&(waves(variable.dims(), 0.7, number as f64)? * spread)?)?;
        }
    }
    Ok((model, named))
}

/// Trains plain variables with candle's own backward and optimizer, on so many images per step.
fn train_plainly(images: usize) -> Result<Run> {
    let (model, named) = plain_model()?;
    let trained = named.iter().filter(|(name, _)| is_trained(name));
    let trained: Vec<Var> = trained.map(|(_, variable)| variable.clone()).collect();
    let parameters = ParamsAdamW {
        lr: LEARNING_RATE,
        weight_decay: WEIGHT_DECAY,
        ..ParamsAdamW::default()
    };
    let mut optimizer = candle_nn::AdamW::new(trained.clone(), parameters)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let each = (0..images).map(|image| loss(step, image, |latents| model.decode(&latents)));
        let loss = Tensor::stack(&each.collect::<Result<Vec<_>>>()?, 0)?.mean_all()?;
        let mut gradients = loss.backward()?;
        let mut squares = 0.0;
        for variable in &trained {
            let gradient = gradients.get(variable).expect("a gradient").to_dtype(DType::F64)?;
            squares += gradient.sqr()?.sum_all()?.to_scalar::<f64>()?;
        }
        for variable in &trained {
            let gradient = gradients.remove(variable).expect("a gradient");
            let factor = (MAX_NORM / (squares.sqrt() + 1e-6)).min(1.0);
            gradients.insert(variable, (gradient * factor)?);
        }
        optimizer.step(&gradients)?;
        losses.push(f64::from(loss.to_scalar::<f32>()?));
        norms.push(squares.sqrt());
    }
    let weights = named.into_iter().map(|(name, variable)| (name, values(&variable)));
    Ok(Run {
        losses,
        norms,
        weights: weights.collect(),
    })
}

/// Trains on one rank, which has one image per step.
fn train(acc: &dyn Accelerator, file: &Path) -> sconce_core::Result<Run> {
    let vb = acc.var_builder(Weights::Files(WeightFiles::open(&[file])?))?;
    let model = unit(vb, "model", |vb| autoencoder(vb))?;
    let rule = AdamW {
        learning_rate: LEARNING_RATE,
        weight_decay: WEIGHT_DECAY,
        ..AdamW::default()
    };
    let mut optimizer = acc.prepare_optimizer(Box::new(rule))?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let loss = loss(step, acc.world().rank, |latents| {
            model.run(latents, |model, latents| model.decode(&latents))
        })?;
        acc.backward(&loss)?;
        norms.extend(acc.clip_grad_norm(MAX_NORM)?);
        optimizer.step()?;
        optimizer.zero_grad()?;
        let mean = acc.reduce(&loss.reshape(1)?, ReduceOp::Mean)?;
        losses.push(f64::from(values(&mean)[0]));
    }
    let state = acc.state_dict()?.into_iter();
    Ok(Run {
        losses,
        norms,
        weights: state.map(|(name, tensor)| (name, values(&tensor))).collect(),
    })
}

/// Runs `work` on every rank of a world of threads; returns rank 0's result.
fn on_ranks<R: Send>(size: usize, work: impl Fn(Arc<dyn Communicator>) -> R + Sync) -> R {
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let ranks = shm::threads(size, &options).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| work(rank))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap())
            .reduce(|first, _| first)
            .unwrap()
    })
}

fn accelerator(builder: AcceleratorBuilder, communicator: Arc<dyn Communicator>) -> Box<dyn Accelerator> {
    builder.communicator(communicator).build_with(|_| None).unwrap()
}

fn stage_three() -> AcceleratorBuilder {
    AcceleratorBuilder::default().strategy(ZeroStage::Three {
        persistence_threshold: 0,
    })
}

fn full_shard() -> AcceleratorBuilder {
    AcceleratorBuilder::default().fully_sharded(FullyShardedOptions {
        auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
        ..FullyShardedOptions::default()
    })
}

fn file_of_weights(folder: &Path) -> std::path::PathBuf {
    let file = folder.join("model.safetensors");
    let tensors = plain_model().unwrap().1.into_iter();
    let tensors = tensors.map(|(name, variable)| (name, variable.into_inner())).collect();
    candle_core::safetensors::save(&tensors, &file).unwrap();
    file
}

#[test]
fn a_model_of_others_as_one_unit_trains_as_with_data_parallelism_and_as_plain_variables() {
    let folder = tempfile::tempdir().unwrap();
    let file = file_of_weights(folder.path());
    for ranks in 1..=3 {
        let run = |builder: fn() -> AcceleratorBuilder| {
            on_ranks(ranks, |communicator| {
                let frozen = ParameterSet::matching(|parameter| !is_trained(&parameter.name));
                train(&*accelerator(builder().frozen(frozen), communicator), &file).unwrap()
            })
        };
        let parallel = run(AcceleratorBuilder::default);
        assert!(run(stage_three) == parallel, "stage 3 on {ranks} ranks");
        assert!(run(full_shard) == parallel, "FULL_SHARD on {ranks} ranks");

        let plain = train_plainly(ranks).unwrap();
        let differ = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        let (losses, norms) = (
            differ(&parallel.losses, &plain.losses),
            differ(&parallel.norms, &plain.norms),
        );
        assert!(losses < 1e-6 && norms < 1e-6, "{ranks} ranks: {losses:e}, {norms:e}");
        assert!(plain.losses[STEPS - 1] < 0.5 * plain.losses[0], "{:?}", plain.losses);
        assert_eq!(parallel.weights.len(), plain.weights.len());
        for ((name, found), (expected_name, expected)) in parallel.weights.iter().zip(&plain.weights) {
            assert_eq!(name, expected_name);
            let pairs = found.iter().zip(expected);
            let furthest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // A bias of the keys adds the same to all scores of a query: its gradient is 0 but for rounding, and Adam
            // follows the sign.
            assert!(
                furthest < 1e-6 || name.ends_with("key.bias"),
                "{name} on {ranks} ranks: {furthest:e}"
            );
        }
    }
}

#[test]
fn parameters_that_no_gradient_reaches_are_named() {
    // The encoder, if nobody freezes it.
    let folder = tempfile::tempdir().unwrap();
    let file = file_of_weights(folder.path());
    let message = train(&*accelerator(stage_three(), single()), &file)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("got no gradient: model.encoder.conv_in.weight"),
        "{message}"
    );

    // All of a model that ends with a norm without backward.
    let config = BertConfig {
        vocab_size: 11,
        hidden_size: 8,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        intermediate_size: 16,
        max_position_embeddings: 4,
        ..BertConfig::default()
    };
    let acc = accelerator(stage_three(), single());
    let vb = acc.var_builder(Weights::Random { seed: 1 }).unwrap();
    let model = unit(vb, "model", |vb| BertModel::load(vb, &config)).unwrap();
    acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
    let tokens = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).unwrap();
    let run = |model: &BertModel, tokens: Tensor| model.forward(&tokens, &tokens.zeros_like()?, None);
    let hidden = model.run(tokens, run).unwrap();
    let message = acc
        .backward(&hidden.sqr().unwrap().mean_all().unwrap())
        .unwrap_err()
        .to_string();
    assert!(message.contains("embeddings.word_embeddings.weight"), "{message}");
    assert!(message.contains("a candle op without backward"), "{message}");
}
