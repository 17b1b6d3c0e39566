//! `sconce estimate-memory` says what runs take: estimates are compared with the allocator, hence a program of its own, and
//! with what ranks count. Ten percent is the limit.

use std::path::Path;
use std::sync::Mutex;

use candle_core::{Device, Tensor};
use peak_alloc::PeakAlloc;
use sconce_core::deepspeed::MixedPrecision;
use sconce_core::memory_estimate::{MemoryEstimate, ModelShape, RunChoice, RunStrategy, Workload, candidates};
use sconce_core::{Accelerator, AcceleratorBuilder, AdamW, FsdpStrategy, MemoryReport, Tier, Weights, launch_threads};
use sconce_examples::models::{Llama, LlamaConfig};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Measuring one process: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const LIMIT: f64 = 0.1;

/// The sizes of a small model.
struct Sizes {
    vocabulary: usize,
    hidden: usize,
    inner: usize,
    layers: usize,
    key_value_heads: usize,
    tied: bool,
}

impl Sizes {
    fn config(&self) -> String {
        serde_json::json!({
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": self.key_value_heads,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": self.tied,
        })
        .to_string()
    }
}

/// Trains for some steps; `measure` sees every step.
fn train(
    builder: AcceleratorBuilder,
    sizes: &Sizes,
    workload: &Workload,
    choice: RunChoice,
    mut measure: impl FnMut(&dyn Accelerator, &mut dyn FnMut()),
) {
    let variables = choice.variables(workload, "unused");
    let lookup = |name: &str| {
        let found = variables.iter().find(|(of, _)| *of == name);
        found.map(|(_, value)| value.clone())
    };
    let acc = builder.build_with(lookup).unwrap();
    let config = LlamaConfig::from_json(&sizes.config(), Path::new("config.json")).unwrap();
    let model = Llama::new(&config, acc.var_builder(Weights::Random { seed: 1 }).unwrap()).unwrap();
    acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
    let (batch, sequence) = (workload.batch, workload.sequence.unwrap());
    let token = |number: usize| (number * 7919 % sizes.vocabulary) as u32;
    let tokens = (0..batch * sequence).map(token).collect();
    let tokens = Tensor::from_vec(tokens, (batch, sequence), &Device::Cpu).unwrap();
    let mut step = || {
        let loss = model.loss(&tokens, &tokens).unwrap();
        acc.backward(&loss).unwrap();
        acc.engine().step(1e-3).unwrap();
        acc.engine().zero_grad();
    };
    for _ in 0..3 {
        measure(&*acc, &mut step);
    }
}

fn estimate(sizes: &Sizes, workload: &Workload, choice: RunChoice) -> MemoryEstimate {
    let model = ModelShape::from_config(&sizes.config(), Path::new("config.json")).unwrap();
    MemoryEstimate::new(&model, workload, choice).unwrap()
}

fn check(what: &str, estimated: u64, found: u64) {
    let ratio = estimated as f64 / found as f64;
    println!("{what}: {estimated} estimated, {found} found, {ratio:.3}");
    assert!(
        (ratio - 1.0).abs() <= LIMIT,
        "{what}: {estimated} estimated, {found} found"
    );
}

/// Models of which weights, activations and the vocabulary take most.
fn cases() -> [(&'static str, Sizes, usize, usize); 4] {
    let sizes = |vocabulary, hidden, inner, layers, key_value_heads, tied| Sizes {
        vocabulary,
        hidden,
        inner,
        layers,
        key_value_heads,
        tied,
    };
    [
        ("weights", sizes(1000, 256, 1024, 4, 4, false), 1, 32),
        ("activations", sizes(500, 128, 256, 6, 2, false), 4, 256),
        ("vocabulary", sizes(8000, 128, 256, 2, 4, false), 2, 128),
        ("tied", sizes(4000, 256, 512, 2, 4, true), 1, 128),
    ]
}

#[test]
fn peaks_of_whole_parameters_are_what_the_allocator_says() {
    let _alone = ONE_AT_A_TIME.lock();
    let recomputed = RunChoice {
        recompute: true,
        ..RunChoice::new(RunStrategy::Fsdp(FsdpStrategy::NoShard))
    };
    // What the first run of all takes for good: threads, and memory of products.
    let (_, sizes, batch, sequence) = cases().into_iter().next().unwrap();
    let workload = Workload {
        batch,
        sequence: Some(sequence),
        ..Workload::default()
    };
    let choice = RunChoice::new(RunStrategy::DataParallel);
    train(AcceleratorBuilder::default(), &sizes, &workload, choice, |_, step| {
        step();
    });
    for precision in [MixedPrecision::No, MixedPrecision::Bf16] {
        for (name, sizes, batch, sequence) in cases() {
            let workload = Workload {
                precision,
                batch,
                sequence: Some(sequence),
                ..Workload::default()
            };
            for choice in [
                RunChoice::new(RunStrategy::DataParallel),
                RunChoice::new(RunStrategy::Zero1),
                RunChoice::new(RunStrategy::Zero2),
                recomputed,
            ] {
                let before = MEMORY.current_usage();
                let mut peak = 0;
                train(AcceleratorBuilder::default(), &sizes, &workload, choice, |_, step| {
                    MEMORY.reset_peak_usage();
                    step();
                    peak = MEMORY.peak_usage() - before;
                });
                let estimated = estimate(&sizes, &workload, choice);
                let what = format!(
                    "{name}, {precision}, {}, recompute {}",
                    choice.strategy.name(),
                    choice.recompute
                );
                println!("{estimated:?}");
                check(&what, estimated.device_peak, peak as u64);
            }
        }
    }
}

#[test]
fn what_ranks_count_under_every_strategy_is_estimated() {
    let _alone = ONE_AT_A_TIME.lock();
    let (_, sizes, batch, sequence) = cases().into_iter().next().unwrap();
    let sizes = Sizes {
        hidden: 128,
        inner: 384,
        ..sizes
    };
    for ranks in [1, 2, 4] {
        let workload = Workload {
            ranks,
            ranks_per_host: ranks,
            precision: MixedPrecision::Bf16,
            batch,
            sequence: Some(sequence),
            ..Workload::default()
        };
        for choice in candidates(&workload)
            .into_iter()
            .filter(|choice| choice.optimizer != Tier::Disk)
        {
            let reports = launch_threads(ranks, |builder| {
                let mut report = MemoryReport::default();
                train(builder, &sizes, &workload, choice, |acc, step| {
                    step();
                    report = acc.memory();
                });
                Ok::<_, sconce_core::Error>(report)
            });
            let found = reports.unwrap()[0];
            let estimated = estimate(&sizes, &workload, choice);
            let what = |kind: &str| format!("{kind} of {} on {ranks} ranks", choice.strategy.name());
            check(&what("parameters"), estimated.parameters, found.parameters);
            check(&what("masters"), estimated.masters, found.masters);
            check(&what("gradients"), estimated.gradients, found.gradients);
            check(&what("optimizer state"), estimated.optimizer, found.optimizer_state);
            check(&what("buffers"), estimated.buffers + 1, found.buffers + 1);
            let gathered = found.gathered_peak.max(found.spare);
            assert!(
                (found.gathered_peak..=gathered * 2).contains(&estimated.gathered),
                "{estimated:?}, {found:?}"
            );
        }
    }
}
