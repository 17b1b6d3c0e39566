//! Learning from questions and answers comes to the same evaluation loss on any number of ranks and under any strategy, for
//! adapters too, and in a run that is resumed in the middle.

use crate::{finetune_llama, sconce, text, train_with};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const ZERO_3: &[&str] = &["--use_deepspeed", "--zero_stage", "3"];
const FSDP: &[&str] = &["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"];
const LORA: &[&str] = &["--lora_r", "4", "--use_rslora", "--lora_target_modules", "all-linear"];

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets")
}

/// Arguments of a run whose steps have the same rows whatever the number of ranks.
fn arguments(ranks: usize, metrics: &Path, more: &[&str]) -> Vec<String> {
    let of_assets = |name: &str| assets().join(name).display().to_string();
    let (model, data) = (of_assets("tiny-instruct"), of_assets("instructions/sconce.jsonl"));
    let (batch, metrics) = ((4 / ranks).to_string(), metrics.display().to_string());
    let own = [
        "--model_dir",
        &model,
        "--data",
        &data,
        "--eval_fraction",
        "0.15",
        "--packing",
        "--sequence_length",
        "160",
        "--steps",
        "6",
        "--eval_steps",
        "2",
        "--lr",
        "1e-2",
        "--per_device_batch_size",
        &batch,
        "--metrics_out",
        &metrics,
    ];
    own.iter().chain(more).map(ToString::to_string).collect()
}

/// Runs and returns the lines of metrics.
fn run(flags: &[&str], ranks: usize, metrics: &Path, more: &[&str]) -> Vec<Value> {
    let arguments = arguments(ranks, metrics, more);
    let output = train_with(flags, ranks, &Vec::from_iter(arguments.iter().map(String::as_str)));
    assert!(output.status.success(), "{flags:?} {more:?}: {}", text(&output.stderr));
    lines(metrics)
}

fn lines(metrics: &Path) -> Vec<Value> {
    let file = fs::read_to_string(metrics).unwrap();
    file.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn series(lines: &[Value], key: &str) -> Vec<(u64, f64)> {
    let of_key = lines
        .iter()
        .filter_map(|line| Some((line["step"].as_u64()?, line[key].as_f64()?)));
    of_key.collect()
}

fn check_near(found: &[(u64, f64)], expected: &[(u64, f64)], furthest: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: {found:?}");
    for ((step, loss), (_, wanted)) in found.iter().zip(expected) {
        assert!(
            (loss - wanted).abs() <= furthest,
            "{what}, step {step}: {loss}, expected {wanted}"
        );
    }
}

#[test]
fn every_strategy_reaches_the_evaluation_loss_of_one_rank_with_adapters_too() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    for more in [&[][..], LORA] {
        let alone = run(&[], 1, &metrics, more);
        let evaluated = series(&alone, "eval_loss");
        assert_eq!(Vec::from_iter(evaluated.iter().map(|(step, _)| *step)), [1, 3, 5]);
        assert!(evaluated[2].1 < evaluated[0].1 - 0.02, "it learns: {evaluated:?}");
        for (step, perplexity) in series(&alone, "perplexity") {
            let loss = evaluated.iter().find(|(other, _)| *other == step).unwrap().1;
            assert!((perplexity - loss.exp()).abs() < 1e-9 * perplexity);
        }
        for (ranks, flags) in [(2, &[][..]), (2, ZERO_3), (2, FSDP), (4, FSDP)] {
            let together = run(flags, ranks, &metrics, more);
            let what = format!("{flags:?} {more:?} on {ranks}");
            check_near(&series(&together, "eval_loss"), &evaluated, 2e-5, &what);
            check_near(&series(&together, "loss"), &series(&alone, "loss"), 2e-5, &what);
        }
    }
}

#[test]
fn a_run_that_is_resumed_in_the_middle_ends_with_the_same_evaluation_loss() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    for (number, (flags, more)) in [(&[][..], &[][..]), (ZERO_3, &[]), (FSDP, LORA)]
        .into_iter()
        .enumerate()
    {
        let (whole, copy) = (place(&format!("whole{number}")), place(&format!("copy{number}")));
        let with = |checkpoints: &Path, metrics: &str| {
            let checkpoints = checkpoints.display().to_string();
            let saving = ["--checkpoints", &checkpoints, "--checkpointing_steps", "3"];
            let resuming = ["--resume_from_checkpoint", "latest", "--early_stopping_patience", "5"];
            let more = [&saving[..], &resuming, more].concat();
            run(flags, 2, &place(metrics), &more)
        };
        let uninterrupted = with(&whole, "whole.jsonl");
        fs::create_dir(&copy).unwrap();
        // As if the run had ended after its third step.
        let status = Command::new("cp")
            .arg("-r")
            .arg(whole.join("checkpoint_0"))
            .arg(&copy)
            .status();
        assert!(status.unwrap().success());
        let resumed = with(&copy, "resumed.jsonl");
        for key in ["loss", "eval_loss"] {
            let rest = Vec::from_iter(series(&uninterrupted, key).into_iter().filter(|(step, _)| *step >= 3));
            assert_eq!(series(&resumed, key), rest, "{flags:?} {more:?}: {key}");
            assert!(!rest.is_empty());
        }
    }
}

#[test]
fn adapters_are_a_folder_of_peft_and_merged_a_model_that_evaluates_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let path = |name: &str| place(name).display().to_string();
    let metrics = place("metrics.jsonl");
    let adapted = run(
        FSDP,
        2,
        &metrics,
        &[LORA, &["--output_dir", &path("adapters")]].concat(),
    );
    let config: Value = serde_json::from_slice(&fs::read(place("adapters/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&config["r"], &config["use_rslora"]), (&4.into(), &true.into()));
    assert_eq!(config["lora_alpha"], 8);
    let tensors =
        candle_core::safetensors::load(place("adapters/adapter_model.safetensors"), &candle_core::Device::Cpu).unwrap();
    assert_eq!(tensors.len(), 2 * 7 * 2);
    let name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight";
    assert_eq!(tensors[name].dims(), [48, 4]);

    let model = path("merged");
    let merged = [LORA, &["--merge_adapters", "--output_dir", &model]].concat();
    run(ZERO_3, 2, &metrics, &merged);
    // A step without a learning rate changes nothing.
    let still = ["--model_dir", &model, "--lr", "0", "--steps", "1"];
    let mut arguments = arguments(1, &metrics, &[]);
    for pair in still.chunks(2) {
        let place = arguments.iter().position(|argument| argument == pair[0]).unwrap();
        arguments[place + 1] = pair[1].to_owned();
    }
    let output = train_with(&[], 1, &Vec::from_iter(arguments.iter().map(String::as_str)));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let (of_merged, of_adapted) = (series(&lines(&metrics), "eval_loss"), series(&adapted, "eval_loss"));
    check_near(&of_merged, &of_adapted[2..], 2e-5, "merged");
}

#[test]
fn answers_are_the_same_on_any_number_of_ranks_and_end_early_where_told() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    let asked = ["--sample_prompt", "What is ZeRO?", "--sample_tokens", "8"];
    for temperature in ["0", "0.9"] {
        let warmth = ["--temperature", temperature];
        let more = [&asked[..], &warmth].concat();
        let answers = |flags: &[&str], ranks: usize| {
            let lines = run(flags, ranks, &metrics, &more);
            let of_line = |line: &Value| line["answer"].as_str().map(str::to_owned);
            Vec::from_iter(lines.iter().filter_map(of_line))
        };
        let alone = answers(&[], 1);
        assert_eq!(alone.len(), 3);
        assert_eq!(answers(ZERO_3, 2), alone, "temperature {temperature}");
    }
    // No evaluation is better by so much as the threshold: the second ends the run.
    let stopping = ["--early_stopping_patience", "1", "--early_stopping_threshold", "100"];
    assert_eq!(series(&run(FSDP, 2, &metrics, &stopping), "loss").len(), 4);
}

#[test]
fn a_configuration_file_is_all_that_changes_between_strategies() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    let expected = series(&run(&[], 2, &metrics, &[]), "eval_loss");
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let is_yaml = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "yaml");
    let files = fs::read_dir(configs)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(is_yaml);
    let mut files = Vec::from_iter(files);
    files.sort();
    assert!(files.len() >= 10, "{files:?}");
    for file in files {
        let name = file.file_name().unwrap().to_str().unwrap();
        let content = fs::read_to_string(&file).unwrap();
        // A folder that is there, in the place of the sample's.
        let own = folder.path().join(name);
        fs::write(&own, content.replace("/local_nvme", folder.path().to_str().unwrap())).unwrap();
        let output = Command::new(sconce())
            .args(["launch", "--config_file"])
            .arg(&own)
            .arg(finetune_llama())
            .args(arguments(2, &metrics, &[]))
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        // bf16 rounds to 8 bits.
        let furthest = if content.contains("mixed_precision: bf16") {
            0.05
        } else {
            2e-5
        };
        check_near(&series(&lines(&metrics), "eval_loss"), &expected, furthest, name);
    }
}
