//! `finetune_cogvideox` as a user runs it: on ranks, under strategies, resumed, and refused.

use crate::{example, sconce, text};
use candle_core::{DType, Device, Tensor, safetensors};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-cogvideox")
}

fn tune(flags: &[&str], ranks: usize, arguments: &[&str]) -> Output {
    let mut command = Command::new(sconce());
    command
        .args(["launch", "--num_processes", &ranks.to_string()])
        .args(flags)
        .arg(example("finetune_cogvideox"))
        .args(arguments)
        .env(
            "SCONCE_FLIGHT_RECORDER",
            std::env::temp_dir().join("sconce-flight-tests"),
        );
    command.output().expect("sconce runs")
}

/// Runs that must succeed, in folders of their own.
struct Runs {
    folder: tempfile::TempDir,
}

impl Runs {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, name: &str, flags: &[&str], ranks: usize, arguments: &[&str]) -> PathBuf {
        let output = self.path(name);
        let mut all = vec![
            "--output_dir",
            output.to_str().expect("a path of text"),
            "--report_to",
            "jsonl",
        ];
        all.extend(arguments);
        let result = tune(flags, ranks, &all);
        assert!(result.status.success(), "{name}: {}", text(&result.stderr));
        output
    }
}

/// Losses and norms by step; where a step was trained again, its last.
fn metrics(output: &Path) -> BTreeMap<u64, [f64; 2]> {
    let path = output.join("logs/finetrainer-cogvideo/metrics.jsonl");
    let lines = fs::read_to_string(path).expect("metrics");
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let entry = |line: Value| {
        Some((
            line["step"].as_u64()?,
            ["loss", "grad_norm"].map(|key| line[key].as_f64().unwrap_or(f64::NAN)),
        ))
    };
    lines
        .filter_map(entry)
        .filter(|(_, values)| !values[0].is_nan())
        .collect()
}

fn weights(path: &Path) -> HashMap<String, Tensor> {
    safetensors::load(path, &Device::Cpu).expect("weights")
}

fn transformer(output: &Path) -> Vec<u8> {
    fs::read(output.join("transformer/diffusion_pytorch_model.safetensors")).expect("a transformer")
}

fn lora(output: &Path) -> Vec<u8> {
    fs::read(output.join("lora/pytorch_lora_weights.safetensors")).expect("adapters")
}

const SFT: &[&str] = &[
    "--training_type",
    "sft",
    "--train_steps",
    "6",
    "--lr_warmup_steps",
    "2",
    "--learning_rate",
    "1e-3",
    "--checkpointing_steps",
    "0",
];
const LORA: &[&str] = &[
    "--rank",
    "4",
    "--lora_alpha",
    "8",
    "--train_steps",
    "6",
    "--lr_warmup_steps",
    "0",
    "--learning_rate",
    "1e-2",
];

#[test]
fn it_runs_out_of_the_box_on_two_ranks_and_writes_nothing() {
    let output = tune(&[], 2, &["--train_steps", "2"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told = text(&output.stdout);
    assert!(
        told.contains("step    0/2  loss ") && told.contains("step    1/2  loss "),
        "{told}"
    );
}

#[test]
fn a_small_model_learns_which_way_waves_wander() {
    let runs = Runs::new();
    let arguments = [
        SFT,
        &[
            "--train_steps",
            "120",
            "--batch_size",
            "4",
            "--learning_rate",
            "1e-2",
            "--gradient_checkpointing",
            "false",
        ],
    ];
    let losses = metrics(&runs.run("sft", &[], 2, &arguments.concat()));
    let mean = |steps: std::ops::Range<u64>| steps.clone().map(|step| losses[&step][0]).sum::<f64>() / 20.0;
    let (first, last) = (mean(0..20), mean(100..120));
    assert!(last < 0.7 * first, "{first} to {last}");
}

#[test]
fn zero_3_fsdp_and_blocks_computed_again_give_the_bits_of_data_parallelism() {
    let runs = Runs::new();
    let parallel = runs.run("parallel", &[], 2, SFT);
    let fsdp = [
        "--use_fsdp",
        "--fsdp_auto_wrap_policy",
        "TRANSFORMER_BASED_WRAP",
        "--fsdp_transformer_layer_cls_to_wrap",
        "CogVideoXBlock",
    ];
    let zero3 = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/zero3.json");
    let kept = [SFT, &["--gradient_checkpointing", "false"]].concat();
    let cases: [(&str, &[&str], &[&str]); 4] = [
        ("zero1", &["--use_deepspeed", "--zero_stage", "1"], SFT),
        ("zero3", &["--use_deepspeed", "--deepspeed_config_file", zero3], SFT),
        ("fsdp", &fsdp, SFT),
        ("kept", &[], &kept),
    ];
    for (name, flags, arguments) in cases {
        let found = runs.run(name, flags, 2, arguments);
        assert_eq!(metrics(&found), metrics(&parallel), "{name}");
        assert!(transformer(&found) == transformer(&parallel), "{name}");
    }
    // The same samples are in a step, whatever the ranks, and each has its own noise.
    let one = metrics(&runs.run("one", &[], 1, &[SFT, &["--gradient_accumulation_steps", "2"]].concat()));
    for (step, values) in metrics(&parallel) {
        assert!(
            (one[&step][0] / values[0] - 1.0).abs() < 1e-5,
            "step {step}: {values:?}, alone {:?}",
            one[&step]
        );
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_was_not_interrupted() {
    for (kind, arguments, result) in [("sft", SFT, transformer as fn(&Path) -> Vec<u8>), ("lora", LORA, lora)] {
        let runs = Runs::new();
        let every = [arguments, &["--checkpointing_steps", "2", "--checkpointing_limit", "2"]].concat();
        let whole = runs.run("whole", &[], 2, &every);
        let kept = fs::read_dir(whole.join("checkpoints")).expect("checkpoints");
        let kept = kept.filter(|entry| {
            entry
                .as_ref()
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .starts_with("checkpoint_")
        });
        assert_eq!(kept.count(), 2, "{kind}");
        let first = [&every[..], &["--train_steps", "4"]].concat();
        let halves = runs.run("halves", &[], 2, &first);
        let done = if kind == "lora" { "lora" } else { "transformer" };
        fs::remove_dir_all(halves.join(done)).expect("a result");
        let second = [&every[..], &["--resume_from_checkpoint", "latest"]].concat();
        let zero3 = ["--use_deepspeed", "--zero_stage", "3"];
        runs.run("halves", &zero3, 2, &second);
        assert_eq!(metrics(&halves), metrics(&whole), "{kind}");
        assert!(result(&halves) == result(&whole), "{kind}");
    }
}

#[test]
fn adapters_are_written_in_the_pipelines_format_and_samples_are_the_same_on_any_number_of_ranks() {
    let runs = Runs::new();
    let assets = assets().join("validation");
    let validate = [
        "--do_validation",
        "--validation_dir",
        assets.to_str().expect("a path of text"),
        "--validation_prompts",
        "prompts.safetensors",
        "--validation_steps",
        "6",
        "--checkpointing_steps",
        "3",
        "--validation_inference_steps",
        "4",
    ];
    let arguments = [LORA, &validate].concat();
    let output = runs.run("two", &["--use_deepspeed", "--zero_stage", "3"], 2, &arguments);
    let bytes = lora(&output);
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("JSON");
    let settings = header["__metadata__"]["lora_adapter_metadata"]
        .as_str()
        .expect("settings");
    let settings: Value = serde_json::from_str(settings).expect("JSON");
    assert_eq!(
        (&settings["transformer.r"], &settings["transformer.lora_alpha"]),
        (&Value::from(4), &Value::from(8))
    );
    let tensors = weights(&output.join("lora/pytorch_lora_weights.safetensors"));
    assert_eq!(tensors.len(), 2 * 4 * 2);
    for block in 0..2 {
        for layer in ["to_q", "to_k", "to_v", "to_out.0"] {
            let half =
                |half: &str| &tensors[&format!("transformer.transformer_blocks.{block}.attn1.{layer}.{half}.weight")];
            assert_eq!(
                (half("lora_A").dims(), half("lora_B").dims()),
                (&[4, 32][..], &[32, 4][..])
            );
            let moved = half("lora_B")
                .abs()
                .unwrap()
                .sum_all()
                .unwrap()
                .to_scalar::<f32>()
                .unwrap();
            assert!(moved > 0.0, "{layer}");
        }
    }
    let saved = fs::read(output.join("checkpoints/checkpoint_1/pytorch_lora_weights.safetensors")).expect("adapters");
    assert!(saved == bytes);

    let sampled = |output: &Path| weights(&output.join("validation/step-6/latents.safetensors"))["latents"].clone();
    assert_eq!(sampled(&output).dims(), [3, 4, 3, 8, 8]);
    let picture = fs::read(output.join("validation/step-6/contact_sheet.png")).expect("a picture");
    assert!(picture.starts_with(b"\x89PNG"));
    let one = runs.run(
        "one",
        &[],
        1,
        &[&arguments[..], &["--gradient_accumulation_steps", "2"]].concat(),
    );
    let difference = (sampled(&output) - sampled(&one))
        .unwrap()
        .abs()
        .unwrap()
        .max_all()
        .unwrap();
    assert!(difference.to_scalar::<f32>().unwrap() < 1e-3, "{difference}");
}

/// A pipeline folder around a transformer of the fixtures.
fn pipeline(folder: &Path, variant: &str) -> PathBuf {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/tiny-cogvideox")
        .join(variant);
    let pipeline = folder.join(variant);
    for (name, source) in [("transformer", fixture), ("scheduler", assets().join("scheduler"))] {
        fs::create_dir_all(pipeline.join(name)).expect("a folder");
        for entry in fs::read_dir(source).expect("a folder") {
            let entry = entry.expect("an entry");
            if entry.file_name() != "io.safetensors" {
                fs::copy(entry.path(), pipeline.join(name).join(entry.file_name())).expect("a copy");
            }
        }
    }
    pipeline
}

#[test]
fn image_to_video_and_version_1_5_train_and_sample_in_every_precision() {
    let runs = Runs::new();
    let validation = assets().join("validation");
    for (variant, model_type) in [("i2v_learned", "i2v"), ("v15", "t2v"), ("sincos", "t2v")] {
        let model = pipeline(runs.folder.path(), variant);
        for (precision, training) in [("no", "sft"), ("bf16", "lora"), ("bf16", "sft"), ("fp16", "sft")] {
            if precision == "fp16" && variant != "sincos" {
                continue;
            }
            let arguments = [
                "--model_path",
                model.to_str().unwrap(),
                "--model_type",
                model_type,
                "--mixed_precision",
                precision,
                "--training_type",
                training,
                "--rank",
                "2",
                "--train_steps",
                "2",
                "--train_resolution",
                "9x64x64",
                "--do_validation",
                "--validation_dir",
                validation.to_str().unwrap(),
                "--validation_prompts",
                "prompts.safetensors",
                "--validation_steps",
                "2",
                "--checkpointing_steps",
                "2",
                "--validation_inference_steps",
                "2",
            ];
            let name = format!("{variant} {precision} {training}");
            let output = runs.run(&name, &["--use_deepspeed", "--zero_stage", "3"], 2, &arguments);
            assert!(
                metrics(&output).values().flatten().all(|value| value.is_finite()),
                "{name}"
            );
            let sampled = &weights(&output.join("validation/step-2/latents.safetensors"))["latents"];
            assert_eq!(sampled.dims(), [3, 4, 3, 8, 8], "{name}");
            // Adapters are f32 in every precision.
            if training == "lora" {
                let adapters = weights(&output.join("lora/pytorch_lora_weights.safetensors"));
                assert!(adapters.values().all(|adapter| adapter.dtype() == DType::F32), "{name}");
            }
        }
    }
}

#[test]
fn the_configuration_of_cogvideox_own_trainer_gives_optimizer_and_scheduler() {
    let runs = Runs::new();
    let config = runs.path("zero3.json");
    let section = serde_json::json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": true,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": true, "adam_w_mode": true}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true,
            "stage3_gather_16bit_weights_on_model_save": "auto"},
    });
    fs::write(&config, section.to_string()).expect("a file");
    let flags = [
        "--use_deepspeed",
        "--deepspeed_config_file",
        config.to_str().expect("a path of text"),
    ];
    let arguments = [
        "--train_steps",
        "8",
        "--lr_warmup_steps",
        "2",
        "--learning_rate",
        "1e-3",
        "--rank",
        "2",
    ];
    let output = runs.run("out", &flags, 2, &arguments);
    let lines = fs::read_to_string(output.join("logs/finetrainer-cogvideo/metrics.jsonl")).expect("metrics");
    let lines = lines
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let rates = Vec::from_iter(lines.filter_map(|line| line["lr"].as_f64()));
    assert_eq!(rates.len(), 8);
    let highest = rates.iter().fold(0.0, |a: f64, b| a.max(*b));
    assert!(
        rates[0] == 0.0 && highest == 1e-3 && rates[7] < 0.5 * highest,
        "{rates:?}"
    );
}

#[test]
fn what_cannot_work_is_refused_in_one_clear_line() {
    let runs = Runs::new();
    let folder = runs.folder.path();
    let (i2v, rotary) = (pipeline(folder, "i2v_learned"), pipeline(folder, "rotary"));
    let [i2v, rotary] = [&i2v, &rotary].map(|path| path.to_str().expect("a path of text"));
    let out = folder.join("out");
    let out = out.to_str().expect("a path of text");
    let cases: [(&[&str], &str); 17] = [
        (
            &["--do_validation", "--output_dir", out],
            "--do_validation needs --validation_steps",
        ),
        (
            &["--do_validation", "--output_dir", out, "--validation_steps", "200"],
            "--do_validation needs --validation_dir",
        ),
        (
            &[
                "--do_validation",
                "--output_dir",
                out,
                "--validation_steps",
                "200",
                "--validation_dir",
                ".",
            ],
            "--do_validation needs --validation_prompts",
        ),
        (
            &[
                "--do_validation",
                "--output_dir",
                out,
                "--validation_steps",
                "300",
                "--validation_dir",
                ".",
                "--validation_prompts",
                "p",
            ],
            "expected a multiple of --checkpointing_steps, 200",
        ),
        (
            &["--train_resolution", "48x480x720"],
            "expected 1 more than a multiple of 8",
        ),
        (&["--train_resolution", "480x720"], "expected FRAMESxHEIGHTxWIDTH"),
        (
            &["--train_resolution", "49x256x256", "--model_name", "cogvideox-5b-t2v"],
            "expected 480x720 for the 5B models",
        ),
        (&["--train_resolution", "17x64x64"], "makes latents of [5, 8, 8]"),
        (&["--model_type", "i2v"], "choose --model_type t2v"),
        (&["--model_path", i2v], "choose --model_type i2v"),
        (&["--model_path", rotary, "--mixed_precision", "fp16"], "Choose bf16"),
        (&["--target_modules", "to_q", "to_z"], "\"to_z\", expected some of"),
        (&["--rank", "0"], "--rank is 0"),
        (&["--resume_from_checkpoint", "latest"], "needs --output_dir"),
        (
            &["--data_root", folder.to_str().expect("a path of text")],
            "has no *.safetensors files",
        ),
        (&["--model_path", "/nowhere"], "/nowhere/transformer"),
        (&["--gradient_checkpointing", "perhaps"], "invalid value 'perhaps'"),
    ];
    for (arguments, words) in cases {
        let output = tune(&[], 2, arguments);
        let told = text(&output.stderr);
        assert!(
            !output.status.success() && told.contains(words),
            "{arguments:?}: {told}"
        );
        let lines = told.lines().filter(|line| line.contains(words));
        assert!(lines.count() <= 2, "{arguments:?}: {told}");
    }
}
