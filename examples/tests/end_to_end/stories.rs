//! The small programs run on any number of ranks, and learn.

use crate::{example, sconce, text, train_with};
use std::path::Path;
use std::process::Command;

/// Runs an example, the launcher with these flags, and returns what rank 0 prints.
fn lines(name: &str, ranks: &str, flags: &[&str]) -> Vec<String> {
    let mut command = Command::new(sconce());
    command
        .args(["launch", "--num_processes", ranks])
        .args(flags)
        .arg(example(name));
    let output = command.output().expect("sconce runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines = text(&output.stdout);
    Vec::from_iter(
        lines
            .lines()
            .map(|line| line.trim_start_matches("[rank 0] ").to_owned()),
    )
}

/// Runs an example and returns the losses that it prints.
fn losses(name: &str, ranks: usize) -> Vec<f64> {
    let loss = |line: &String| {
        line.split_once("loss ")
            .map(|(_, loss)| loss.trim().parse().expect("a number"))
    };
    lines(name, &ranks.to_string(), &[]).iter().filter_map(loss).collect()
}

#[test]
fn quickstart_learns_on_any_number_of_ranks() {
    for ranks in [1, 2, 3] {
        let losses = losses("quickstart", ranks);
        assert!(
            losses.len() > 3 && losses[losses.len() - 1] < 0.5 * losses[0],
            "{ranks} ranks: {losses:?}"
        );
    }
}

#[test]
fn a_custom_strategy_trains_to_the_numbers_of_data_parallelism() {
    for ranks in [1, 2, 3] {
        let losses = losses("custom_strategy", ranks);
        let (parallel, mixed) = losses.split_at(losses.len() / 2);
        assert!(
            parallel.len() == 5 && parallel[4] < 0.5 * parallel[0],
            "{ranks} ranks: {losses:?}"
        );
        assert_eq!(parallel, mixed, "{ranks} ranks");
    }
}

#[test]
fn two_models_in_one_loop_learn_alike_on_any_number_of_ranks_and_however_they_are_sharded() {
    let lines = |ranks: &str, flags: &[&str]| lines("gan", ranks, flags);
    // Losses of both models, and the middle of the points drawn.
    let numbers = |line: &String| -> Vec<f64> {
        let words = line.split_whitespace();
        words
            .filter(|word| word.contains('.'))
            .map(|word| word.parse().expect("a number"))
            .collect()
    };
    let one = lines("1", &[]);
    let middle = &numbers(&one[one.len() - 1])[2..];
    assert!(
        (middle[0] - 1.0).abs() < 0.25 && (middle[1] + 0.5).abs() < 0.25,
        "{one:?}"
    );
    for ranks in ["2", "3"] {
        let found = lines(ranks, &[]);
        // The first 20 steps: later on two models that chase each other magnify how sums over ranks were rounded.
        let pairs = numbers(&found[0]).into_iter().zip(numbers(&one[0]));
        assert!(
            pairs.clone().all(|(found, one)| (found - one).abs() < 1e-4),
            "{} {}",
            found[0],
            one[0]
        );
        assert_eq!(
            lines(ranks, &["--use_deepspeed", "--zero_stage", "3"]),
            found,
            "{ranks} ranks"
        );
        assert_eq!(lines(ranks, &["--use_fsdp"]), found, "{ranks} ranks");
    }
}

#[test]
fn every_held_out_sample_counts_once_on_any_number_of_ranks() {
    let lines = |ranks: &str| lines("evaluate", ranks, &[]);
    let one = lines("1");
    assert!(
        one.len() == 8 && one.iter().all(|line| line.contains("samples 103")),
        "{one:?}"
    );
    let accuracy = one[7].split("accuracy ").nth(1).and_then(|rest| rest.split(' ').next());
    assert!(
        accuracy.is_some_and(|text| text.parse::<f64>().is_ok_and(|value| value > 0.9)),
        "{one:?}"
    );
    assert_eq!(lines("2"), one);
    assert_eq!(lines("3"), one);
}

#[test]
fn an_offload_that_moves_nothing_is_said_once() {
    let flags = ["--use_deepspeed", "--offload_optimizer_device", "cpu"];
    let output = train_with(&flags, 3, &["--steps", "1"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let note = "note: optimizer state offloaded to the CPU: the ranks compute on the CPU, so that nothing has to move";
    assert_eq!(text(&output.stderr), format!("[rank 0] {note}\n"));
}

#[test]
fn what_the_flags_and_the_program_say_differently_is_told_once() {
    let flags = ["--use_deepspeed", "--gradient_clipping", "0.5"];
    let output = train_with(&flags, 3, &["--steps", "1"]);
    assert!(!output.status.success());
    let message = "error: clip_grad_norm max_norm=\"1\": ACCELERATE_GRADIENT_CLIPPING is 0.5; make them equal";
    let stderr = text(&output.stderr);
    let told = stderr.lines().filter(|line| line.starts_with("[rank "));
    assert_eq!(told.filter(|line| line.contains(message)).count(), 1, "{stderr}");
    let output = train_with(&flags, 3, &["--steps", "1", "--max_grad_norm", "0.5"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn the_fine_tuning_program_trains_under_every_sample_that_leaves_it_its_optimizer() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    for name in [
        "zero2.json",
        "zero2_bf16_offload_cpu.json",
        "zero3.json",
        "zero3_offload_nvme.json",
    ] {
        let text = std::fs::read_to_string(configs.join(name)).expect("the sample is there");
        let config = folder.path().join(name);
        let folder_on_disk = folder.path().to_str().expect("the path is text");
        std::fs::write(&config, text.replace("/local_nvme", folder_on_disk)).expect("the folder takes files");
        let flags = [
            "--use_deepspeed",
            "--deepspeed_config_file",
            config.to_str().expect("the path is text"),
        ];
        let output = train_with(&flags, 2, &["--steps", "1"]);
        assert!(output.status.success(), "{name}: {output:?}");
    }
}

#[test]
fn a_profile_shows_where_the_time_of_every_rank_goes() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().to_str().expect("a path of text");
    let flags = ["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"];
    let output = train_with(&flags, 2, &["--steps", "3", "--profile", path]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for rank in [0, 1] {
        let file = std::fs::read_to_string(folder.path().join(format!("trace-rank-{rank}.json"))).expect("a trace");
        let events: Vec<serde_json::Value> = serde_json::from_str(&file).expect("the trace is JSON");
        let spans = Vec::from_iter(events.iter().filter(|event| event["ph"] == "X"));
        assert!(
            spans
                .iter()
                .all(|span| span["pid"] == rank && span["dur"].as_f64().is_some_and(|time| time >= 0.0))
        );
        let count = |name: &str| {
            let named = |span: &&&serde_json::Value| span["name"].as_str().is_some_and(|other| other.starts_with(name));
            spans.iter().filter(named).count()
        };
        assert_eq!((count("backward"), count("optimizer step")), (3, 3));
        assert!(
            count("forward model.layers.0") >= 3 && count("gather model.layers.1") >= 6,
            "{file}"
        );
        assert!(count("reduce bucket 0") == 3 && count("collective all_reduce") >= 3);
        // Reductions run behind the backward, in a thread of their own.
        let thread = |name: &str| {
            let mut named = spans
                .iter()
                .filter(|span| span["name"].as_str().is_some_and(|other| other.starts_with(name)));
            named.next().map(|span| span["tid"].clone())
        };
        assert_ne!(thread("reduce bucket"), thread("backward"));
    }
}
