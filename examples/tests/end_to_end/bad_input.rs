//! Bad input gets one clear error: told once, exit code not 0, nothing written.

use crate::{fixtures, text, train, write_tokens};
use candle_core::{DType, Device, Tensor, safetensors};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Runs three ranks and returns the message, which must hold every one of `parts` and `once` exactly once.
fn check(model: &Path, data: &Path, extra: &[&str], once: &str, parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let (output, metrics) = (folder.path().join("model"), folder.path().join("metrics.jsonl"));
    let mut arguments = vec!["--model_dir", model.to_str().unwrap(), "--data", data.to_str().unwrap()];
    arguments.extend([
        "--output_dir",
        output.to_str().unwrap(),
        "--metrics_out",
        metrics.to_str().unwrap(),
    ]);
    arguments.extend(extra);
    let result = train(3, &arguments);
    let message = text(&result.stderr);
    assert!(!result.status.success(), "{message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is missing in:\n{message}");
    }
    // The launcher may repeat the last lines of the rank that failed first, indented; the message itself stands once.
    let mut lines = message.lines().filter(|line| line.starts_with("[rank "));
    let told = lines
        .by_ref()
        .filter(|line| line.contains("error: ") && line.contains(once));
    assert_eq!(told.count(), 1, "{message}");
    assert!(
        !output.exists() && text(&result.stdout).is_empty(),
        "nothing is written"
    );
    assert!(!metrics.exists() || fs::metadata(&metrics).unwrap().len() == 0);
}

fn model() -> PathBuf {
    fixtures().join("model")
}

fn data() -> PathBuf {
    fixtures().join("batches.safetensors")
}

/// A copy of the model folder whose weights went through `change`.
fn changed_weights(folder: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) -> PathBuf {
    let copy = folder.join("changed");
    fs::create_dir(&copy).unwrap();
    fs::copy(model().join("config.json"), copy.join("config.json")).unwrap();
    let mut weights = safetensors::load(model().join("model.safetensors"), &Device::Cpu).unwrap();
    change(&mut weights);
    safetensors::save(&weights, copy.join("model.safetensors")).unwrap();
    copy
}

#[test]
fn a_misspelt_tensor_is_named_with_its_nearest_name() {
    let folder = tempfile::tempdir().unwrap();
    let model = changed_weights(folder.path(), |weights| {
        let norm = weights.remove("model.norm.weight").unwrap();
        weights.insert("model.nrom.weight".into(), norm);
    });
    let tokens = folder.path().join("tokens.safetensors");
    write_tokens(&tokens, &Tensor::zeros((1, 3, 8), DType::I64, &Device::Cpu).unwrap());
    check(
        &model,
        &tokens,
        &[],
        "model.norm.weight",
        &["model.safetensors", "did you mean \"model.nrom.weight\""],
    );
}

#[test]
fn a_tensor_of_another_shape_is_named_with_both_shapes() {
    let folder = tempfile::tempdir().unwrap();
    let model = changed_weights(folder.path(), |weights| {
        weights.insert(
            "model.norm.weight".into(),
            Tensor::zeros(63, DType::F32, &Device::Cpu).unwrap(),
        );
    });
    let tokens = folder.path().join("tokens.safetensors");
    write_tokens(&tokens, &Tensor::zeros((1, 3, 8), DType::I64, &Device::Cpu).unwrap());
    check(
        &model,
        &tokens,
        &[],
        "model.norm.weight",
        &["[63]", "[64]", "model.safetensors"],
    );
}

#[test]
fn a_truncated_weight_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = changed_weights(folder.path(), |_| {});
    let file = model.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    check(&model, &data(), &[], "model.safetensors", &[]);
}

#[test]
fn another_architecture_is_named_with_what_is_supported() {
    let folder = tempfile::tempdir().unwrap();
    let model = changed_weights(folder.path(), |_| {});
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    fs::write(
        model.join("config.json"),
        config.replace("LlamaForCausalLM", "GPT2LMHeadModel"),
    )
    .unwrap();
    check(
        &model,
        &data(),
        &[],
        "GPT2LMHeadModel",
        &["config.json", "LlamaForCausalLM"],
    );
}

#[test]
fn a_batch_that_does_not_divide_names_file_and_numbers() {
    // Eight rows a step on three ranks.
    check(
        &model(),
        &data(),
        &[],
        "8 rows per step",
        &["batches.safetensors", "3 ranks", "multiple of 3"],
    );
}

#[test]
fn more_ranks_than_data_names_both_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("short.txt");
    fs::write(&text, "x".repeat(70)).unwrap();
    check(
        &model(),
        &text,
        &["--sequence_length", "32"],
        "2 rows of 32 tokens",
        &["short.txt", "3 ranks"],
    );
}

#[test]
fn missing_files_and_wrong_arguments_are_told_once() {
    check(&model(), Path::new("/nowhere/data.txt"), &[], "/nowhere/data.txt", &[]);
    check(Path::new("/nowhere/model"), &data(), &[], "/nowhere/model", &[]);
    check(&model(), &data(), &["--learning_rate", "1"], "--learning_rate", &[]);
}

#[test]
fn numbers_that_are_none_end_the_run_and_write_no_model() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    // Without epsilon an element whose gradient was always 0 is updated by 0 / 0.
    let arguments = [
        "--adam_epsilon",
        "0",
        "--steps",
        "5",
        "--output_dir",
        output.to_str().unwrap(),
    ];
    let result = train(2, &arguments);
    let message = text(&result.stderr);
    assert!(!result.status.success(), "{message}");
    assert!(
        message.contains("step 1: the loss is NaN") && message.contains("no model is written"),
        "{message}"
    );
    assert!(!output.exists());
}

#[test]
fn a_model_can_be_written_through_a_link_and_a_place_that_cannot_be_written_is_told_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let (target, link) = (folder.path().join("target"), folder.path().join("link"));
    fs::create_dir(&target).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let result = train(2, &["--steps", "1", "--output_dir", link.to_str().unwrap()]);
    assert!(result.status.success(), "{}", text(&result.stderr));
    assert!(target.join("model.safetensors").exists());

    let result = train(2, &["--steps", "1", "--output_dir", "/proc/sconce"]);
    assert!(!result.status.success());
    assert!(text(&result.stderr).contains("/proc"), "{}", text(&result.stderr));
    assert!(text(&result.stdout).is_empty(), "no step was made");
}

#[test]
fn sizes_beyond_all_reason_are_refused() {
    let huge = u64::MAX.to_string();
    check(
        &model(),
        &data(),
        &["--per_device_batch_size", &huge],
        "rows for each of 3 ranks",
        &[&huge],
    );
    check(
        &model(),
        &data(),
        &["--gradient_accumulation_steps", &huge],
        "cannot be divided",
        &[&huge],
    );
}
