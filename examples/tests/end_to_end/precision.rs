//! The launcher's precision reaches the model, and losses follow those of f32.

use crate::{fixtures, text, train_with};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Trains the fixture's 20 steps on two ranks; returns what the metrics say of every step.
fn run(folder: &Path, flags: &[&str], recipe: &[&str]) -> Vec<Value> {
    let output = tempfile::tempdir_in(folder).unwrap();
    let (model, metrics) = (output.path().join("model"), output.path().join("metrics.jsonl"));
    let (source, data) = (fixtures().join("model"), fixtures().join("batches.safetensors"));
    let paths = [&source, &data, &model, &metrics].map(|path| path.to_str().unwrap());
    let mut arguments = vec![
        "--lr",
        "1e-3",
        "--warmup_steps",
        "5",
        "--model_dir",
        paths[0],
        "--data",
        paths[1],
    ];
    arguments.extend(["--output_dir", paths[2], "--metrics_out", paths[3]]);
    arguments.extend(recipe);
    let result = train_with(flags, 2, &arguments);
    assert!(result.status.success(), "{flags:?}: {}", text(&result.stderr));
    let lines = fs::read_to_string(metrics).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn series(metrics: &[Value], key: &str) -> Vec<f64> {
    metrics.iter().map(|line| line[key].as_f64().unwrap()).collect()
}

fn furthest(a: &[Value], b: &[Value], key: &str) -> f64 {
    let pairs = series(a, key).into_iter().zip(series(b, key));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn the_launchers_precision_reaches_the_model_and_losses_follow_f32() {
    let folder = tempfile::tempdir().unwrap();
    let expected = run(folder.path(), &[], &[]);
    for (precision, most) in [("bf16", 5e-3), ("fp16", 1e-3), ("fp8", 4e-2)] {
        for flags in [
            &["--mixed_precision", precision][..],
            &["--mixed_precision", precision, "--use_deepspeed"],
        ] {
            let found = run(folder.path(), flags, &[]);
            let off = furthest(&found, &expected, "loss");
            println!("{flags:?}: {off:.1e}");
            assert!(off < most && off > 0.0, "{flags:?}: {off}");
        }
    }
}

#[test]
fn token_means_do_not_depend_on_how_a_step_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run(folder.path(), &[], &["--token_mean"]);
    let cut = run(
        folder.path(),
        &[],
        &["--token_mean", "--gradient_accumulation_steps", "4"],
    );
    let means = run(folder.path(), &[], &["--gradient_accumulation_steps", "4"]);
    let (off, off_of_means) = (
        furthest(&cut, &whole, "grad_norm"),
        furthest(&means, &whole, "grad_norm"),
    );
    println!("norms of gradients are off by {off:.1e}; those of means of means by {off_of_means:.1e}");
    assert!(off < 1e-4 && off_of_means > 1e-2, "{off}, {off_of_means}");
}
