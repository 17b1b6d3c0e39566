//! What the managed path costs: the same training step through Sconce at world 1 and in plain candle.
//!
//! The model is a Llama of 5.3 M parameters (hidden 256, 4 layers, 8 heads, vocabulary 4096) on batches of 4 rows of 256
//! tokens. Plain and managed steps take turns, the order within a pair alternating; `overhead` is the median of the
//! pairs' ratios less one. `RAYON_NUM_THREADS` sets the threads of both.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
use sconce_collectives::measure::median;
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{AcceleratorBuilder, AdamW, DataLoader, TensorDataset, Weights};
use sconce_examples::models::{Llama, LlamaConfig};

use super::round;

/// The model of this bench and of [`peers`](super::peers).
pub(crate) const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 256,
    "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 4096, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": false
}"#;

/// Measures over as many pairs.
pub(crate) fn run(pairs: usize) -> Result<()> {
    let config = LlamaConfig::from_json(CONFIG, Path::new("the bench's config"))?;
    let ids: Vec<i64> = (0..4 * 256).map(|at| (at * 7919 + at * at * 31) % 4096).collect();
    let tokens = Tensor::from_vec(ids, (4, 256), &Device::Cpu)?;
    let mut plain = plain_step(&config, &tokens)?;
    let mut managed = managed_step(&config, &tokens)?;
    let (mut times, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
    // The first two pairs warm up.
    for pair in 0..pairs + 2 {
        let order = if pair % 2 == 0 { [0, 1] } else { [1, 0] };
        let mut took = [0.0; 2];
        for which in order {
            let start = Instant::now();
            if which == 0 {
                plain()?;
            } else {
                managed()?;
            };
            took[which] = start.elapsed().as_secs_f64();
        }
        if pair >= 2 {
            times.iter_mut().zip(took).for_each(|(times, took)| times.push(took));
            ratios.push(took[1] / took[0]);
        }
    }
    let tokens_per_step = 4.0 * 256.0;
    for (name, times) in ["plain candle", "managed, world 1"].into_iter().zip(times) {
        let seconds = median(times);
        let line = serde_json::json!({
            "loop": name,
            "threads": rayon_threads(),
            "step_ms": round(seconds * 1e3),
            "tokens_per_second": round(tokens_per_step / seconds),
        });
        println!("{line}");
    }
    println!(
        "{}",
        serde_json::json!({ "pairs": pairs, "overhead": round(median(ratios) - 1.0) })
    );
    Ok(())
}

/// The loop as candle's own books write it.
fn plain_step(config: &LlamaConfig, tokens: &Tensor) -> Result<impl FnMut() -> Result<()>> {
    let variables = VarMap::new();
    let model = Llama::new(config, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    let settings = ParamsAdamW {
        lr: 1e-4,
        ..ParamsAdamW::default()
    };
    let mut optimizer = candle_nn::AdamW::new(variables.all_vars(), settings)?;
    let tokens = tokens.clone();
    Ok(move || {
        let loss = model.loss(&tokens, &tokens)?;
        let gradients = loss.backward()?;
        optimizer.step(&gradients)?;
        Ok(())
    })
}

/// The same loop with the four lines changed.
fn managed_step(config: &LlamaConfig, tokens: &Tensor) -> Result<impl FnMut() -> Result<()>> {
    let acc = AcceleratorBuilder::default()
        .communicator(sconce_collectives::single())
        .build()?;
    let model = Llama::new(config, acc.var_builder(Weights::Random { seed: 1 })?)?;
    let rule = AdamW {
        learning_rate: 1e-4,
        ..AdamW::default()
    };
    let loader = DataLoader::new(TensorDataset::new(vec![tokens.clone()])?, 4);
    let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rule, loader, ConstantSchedule)?;
    Ok(move || {
        for batch in &mut loader {
            let batch = batch?;
            let loss = model.loss(&batch[0], &batch[0])?;
            acc.backward(&loss)?;
            optimizer.step()?;
            scheduler.step()?;
            optimizer.zero_grad()?;
        }
        Ok(())
    })
}

fn rayon_threads() -> String {
    std::env::var("RAYON_NUM_THREADS").unwrap_or_else(|_| "all cores".into())
}
