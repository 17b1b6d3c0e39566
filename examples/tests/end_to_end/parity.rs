//! Same numbers as PyTorch and transformers, on any number of ranks, with the same bits in every run.

use crate::{fixtures, text, train_with, write_tokens};
use candle_core::{Device, Tensor, safetensors};
use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::path::Path;

const BASE: &[&str] = &["--lr", "1e-3", "--weight_decay", "0.01", "--warmup_steps", "5"];
const HOT: &[&str] = &[
    "--lr",
    "1e-2",
    "--adam_beta1",
    "0.9",
    "--adam_beta2",
    "0.95",
    "--adam_epsilon",
    "1e-6",
    "--weight_decay",
    "0.1",
    "--max_grad_norm",
    "0.25",
    "--warmup_steps",
    "5",
];

struct Trained {
    metrics: Vec<Value>,
    weights: HashMap<String, Tensor>,
    bytes: Vec<u8>,
}

/// The launcher's flags for a ZeRO stage.
const STAGES: [&[&str]; 4] = [
    &["--use_deepspeed", "--zero_stage", "0"],
    &[
        "--use_deepspeed",
        "--zero_stage",
        "1",
        "--offload_optimizer_device",
        "cpu",
    ],
    &["--use_deepspeed"],
    &[
        "--use_deepspeed",
        "--deepspeed_config_file",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/zero2.json"),
    ],
];

/// The launcher's flags for FSDP, beside `--use_fsdp`.
const FSDP: [&[&str]; 5] = [
    &["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
    &[
        "--fsdp_version",
        "2",
        "--fsdp_reshard_after_forward",
        "false",
        "--fsdp_auto_wrap_policy",
        "TRANSFORMER_BASED_WRAP",
        "--fsdp_transformer_layer_cls_to_wrap",
        "LlamaDecoderLayer",
    ],
    &[
        "--fsdp_auto_wrap_policy",
        "SIZE_BASED_WRAP",
        "--fsdp_min_num_params",
        "20000",
        "--fsdp_backward_prefetch",
        "BACKWARD_PRE",
        "--fsdp_forward_prefetch",
        "true",
        "--fsdp_activation_checkpointing",
        "true",
    ],
    &["--fsdp_sharding_strategy", "NO_SHARD"],
    &[
        "--fsdp_sharding_strategy",
        "HYBRID_SHARD_ZERO2",
        "--fsdp_offload_params",
        "true",
    ],
];

fn run(folder: &Path, ranks: usize, accumulation: usize, data: &Path, recipe: &[&str]) -> Trained {
    run_with(&[], folder, ranks, accumulation, data, recipe)
}

fn run_with(flags: &[&str], folder: &Path, ranks: usize, accumulation: usize, data: &Path, recipe: &[&str]) -> Trained {
    let output = tempfile::tempdir_in(folder).unwrap();
    let (model, metrics) = (output.path().join("model"), output.path().join("metrics.jsonl"));
    let (source, accumulation) = (fixtures().join("model"), accumulation.to_string());
    let mut arguments = vec![
        "--model_dir",
        source.to_str().unwrap(),
        "--data",
        data.to_str().unwrap(),
    ];
    arguments.extend(["--gradient_accumulation_steps", &accumulation]);
    arguments.extend([
        "--output_dir",
        model.to_str().unwrap(),
        "--metrics_out",
        metrics.to_str().unwrap(),
    ]);
    arguments.extend(recipe);
    let result = train_with(flags, ranks, &arguments);
    assert!(result.status.success(), "{}", text(&result.stderr));
    let lines = fs::read_to_string(metrics).unwrap();
    let file = model.join("model.safetensors");
    Trained {
        metrics: lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
        weights: safetensors::load(&file, &Device::Cpu).unwrap(),
        bytes: fs::read(file).unwrap(),
    }
}

fn series(metrics: &[Value], key: &str) -> Vec<f64> {
    metrics.iter().map(|line| line[key].as_f64().unwrap()).collect()
}

fn largest_difference(a: &HashMap<String, Tensor>, b: &HashMap<String, Tensor>) -> f32 {
    assert_eq!(a.keys().collect::<std::collections::BTreeSet<_>>(), b.keys().collect());
    let difference = |(name, tensor): (&String, &Tensor)| {
        (tensor - &b[name])
            .unwrap()
            .abs()
            .unwrap()
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar::<f32>()
            .unwrap()
    };
    a.iter().map(difference).fold(0.0, f32::max)
}

/// Compares a run with a recorded one by the tolerances of the fixtures' README.
fn check(trained: &Trained, trace: &str, final_weights: &str, what: &str) {
    let trace: Value = serde_json::from_str(&fs::read_to_string(fixtures().join(trace)).unwrap()).unwrap();
    let recorded = |key: &str| -> Vec<f64> { serde_json::from_value(trace[key].clone()).unwrap() };
    assert_eq!(
        series(&trained.metrics, "step"),
        (0..20).map(f64::from).collect::<Vec<_>>()
    );
    let pairs = |key: &str| series(&trained.metrics, key).into_iter().zip(recorded(key)).enumerate();
    for (step, (ours, theirs)) in pairs("loss") {
        assert!(
            (ours - theirs).abs() <= 2e-5,
            "{what}, step {step}: loss {ours}, expected {theirs}"
        );
    }
    for (step, (ours, theirs)) in pairs("grad_norm") {
        assert!(
            (ours / theirs - 1.0).abs() <= 1e-4,
            "{what}, step {step}: norm {ours}, expected {theirs}"
        );
    }
    for (step, (ours, theirs)) in pairs("lr") {
        assert!(
            (ours - theirs).abs() <= 1e-12,
            "{what}, step {step}: lr {ours}, expected {theirs}"
        );
    }
    let expected = safetensors::load(fixtures().join(final_weights), &Device::Cpu).unwrap();
    let difference = largest_difference(&trained.weights, &expected);
    assert!(difference <= 2e-5, "{what}: weights differ by {difference:e}");
}

fn batches() -> HashMap<String, Tensor> {
    safetensors::load(fixtures().join("batches.safetensors"), &Device::Cpu).unwrap()
}

#[test]
fn worlds_of_1_2_and_4_follow_one_process_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("tokens.safetensors");
    write_tokens(&data, &batches()["tokens"]);
    for ranks in [1, 2, 4] {
        let base = run(folder.path(), ranks, 1, &data, BASE);
        check(
            &base,
            "train_single.json",
            "final_single.safetensors",
            &format!("base recipe, {ranks} ranks"),
        );
        let hot = run(folder.path(), ranks, 1, &data, HOT);
        check(
            &hot,
            "train_single_hot.json",
            "final_single_hot.safetensors",
            &format!("hot recipe, {ranks} ranks"),
        );
    }
}

#[test]
fn accumulation_and_masked_labels_follow_accelerate() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("tokens.safetensors");
    write_tokens(&data, &batches()["tokens"]);
    let accumulated = run(folder.path(), 2, 2, &data, BASE);
    check(
        &accumulated,
        "train_ddp_ga2.json",
        "final_ddp_ga2.safetensors",
        "accumulation 2",
    );
    let masked = run(folder.path(), 2, 2, &fixtures().join("batches.safetensors"), HOT);
    check(
        &masked,
        "train_ddp_hot_masked.json",
        "final_ddp_hot_masked.safetensors",
        "masked labels",
    );
}

#[test]
fn worlds_of_1_2_3_and_4_agree_and_runs_repeat_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("tokens.safetensors");
    // Twelve rows a step, which 1, 2, 3 and 4 divide.
    let tokens = batches()["tokens"]
        .reshape((160, 32))
        .unwrap()
        .narrow(0, 0, 156)
        .unwrap();
    write_tokens(&data, &tokens.reshape((13, 12, 32)).unwrap());
    let alone = run(folder.path(), 1, 1, &data, HOT);
    for ranks in 1..=4 {
        let first = run(folder.path(), ranks, 1, &data, HOT);
        let second = run(folder.path(), ranks, 1, &data, HOT);
        assert!(first.bytes == second.bytes, "two runs on {ranks} ranks differ");
        assert_eq!(series(&first.metrics, "loss"), series(&second.metrics, "loss"));
        let difference = largest_difference(&first.weights, &alone.weights);
        assert!(
            difference <= 2e-5,
            "weights of {ranks} ranks differ from one rank's by {difference:e}"
        );
        for (one, many) in series(&alone.metrics, "loss")
            .into_iter()
            .zip(series(&first.metrics, "loss"))
        {
            assert!(
                (one - many).abs() <= 2e-5,
                "loss of {ranks} ranks is {many}, of one rank {one}"
            );
        }
    }
}

#[test]
fn zero_stages_give_the_bits_of_data_parallelism() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("tokens.safetensors");
    write_tokens(&data, &batches()["tokens"]);
    for ranks in [1, 2, 4] {
        let parallel = run(folder.path(), ranks, 1, &data, HOT);
        for flags in STAGES {
            let sharded = run_with(flags, folder.path(), ranks, 1, &data, HOT);
            assert!(sharded.bytes == parallel.bytes, "{flags:?} on {ranks} ranks");
            for key in ["loss", "grad_norm"] {
                assert_eq!(
                    series(&sharded.metrics, key),
                    series(&parallel.metrics, key),
                    "{flags:?}, {key}"
                );
            }
        }
    }
    // Stage 2 reduces every micro-batch; PyTorch's numbers come out all the same.
    let accumulated = run_with(STAGES[2], folder.path(), 2, 2, &data, BASE);
    check(
        &accumulated,
        "train_ddp_ga2.json",
        "final_ddp_ga2.safetensors",
        "ZeRO 2, accumulation 2",
    );
}

#[test]
fn fsdp_gives_the_bits_of_data_parallelism() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("tokens.safetensors");
    write_tokens(&data, &batches()["tokens"]);
    let parallel = run(folder.path(), 2, 1, &data, HOT);
    for flags in FSDP {
        let flags = [&["--use_fsdp"][..], flags].concat();
        let sharded = run_with(&flags, folder.path(), 2, 1, &data, HOT);
        assert!(sharded.bytes == parallel.bytes, "{flags:?}");
        for key in ["loss", "grad_norm"] {
            assert_eq!(
                series(&sharded.metrics, key),
                series(&parallel.metrics, key),
                "{flags:?}, {key}"
            );
        }
    }
}
