//! `sconce plan`: what fits, as a file that `sconce launch` reads.

use std::fs;

use super::{Model, error_of, llama_2_7b, sconce, text};
use serde_json::json;

/// What the ranks of `sconce launch --config_file FILE` find under some names.
fn variables(model: &Model, file: &str, names: &[&str]) -> Vec<String> {
    let print = names.iter().map(|name| format!("echo \"$RANK {name}=${name}\"\n"));
    let script = model.path("program");
    fs::write(&script, print.collect::<String>()).unwrap();
    let mut command = sconce("launch");
    command
        .args(["--no_prefix", "--config_file"])
        .arg(model.path(file))
        .arg("/bin/sh")
        .arg(script);
    let shown = text(&command.current_dir(model.folder.path()).output().unwrap());
    let mut lines = Vec::from_iter(shown.lines().map(str::to_owned));
    lines.sort();
    lines
}

#[test]
fn a_plan_is_what_the_ranks_are_told() {
    let model = Model::new(&llama_2_7b());
    let out = model.path("plan.yaml");
    let words = [
        "-n",
        "2",
        "--mixed_precision",
        "bf16",
        "--memory",
        "70GiB",
        "--sequence_length",
        "256",
        "--out",
        out.to_str().unwrap(),
    ];
    let written = model.run("plan", &words);
    assert!(written.status.success(), "{written:?}");
    let file = fs::read_to_string(&out).unwrap();
    println!("{file}");
    for words in [
        "# Chosen: ",
        "# Does not fit: data_parallel",
        "--memory is 70.00 GiB",
        "num_processes: 2",
    ] {
        assert!(file.contains(words), "{words} in\n{file}");
    }
    // The strategy that the comment names is the one that the ranks are told.
    let is_nvme = file.contains("nvme");
    if is_nvme {
        fs::create_dir(model.path("nvme")).unwrap();
    }
    let names = [
        "ACCELERATE_MIXED_PRECISION",
        "WORLD_SIZE",
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_FSDP",
    ];
    let found = variables(&model, "plan.yaml", &names);
    assert!(
        found.contains(&"0 ACCELERATE_MIXED_PRECISION=bf16".to_owned()),
        "{found:?}"
    );
    assert!(found.contains(&"1 WORLD_SIZE=2".to_owned()), "{found:?}");
    let chosen = file.lines().find_map(|line| line.strip_prefix("# Chosen: ")).unwrap();
    let kind = if chosen.starts_with("zero_") {
        "DEEPSPEED"
    } else {
        "FSDP"
    };
    let told = found
        .iter()
        .any(|line| line.eq_ignore_ascii_case(&format!("0 ACCELERATE_USE_{kind}=true")));
    assert!(told, "{chosen}: {found:?}");
}

#[test]
fn the_plan_of_a_small_model_shards_nothing() {
    let config = json!({
        "model_type": "llama", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    });
    let model = Model::new(&config);
    let file = text(&model.run("plan", &["-n", "2", "--memory", "1GiB"]));
    assert!(
        file.contains("distributed_type: MULTI_CPU") && file.contains("use_cpu: true"),
        "{file}"
    );
    let one = text(&model.run("plan", &["--memory", "1GiB", "--device", "cuda"]));
    assert!(
        one.contains("distributed_type: \"NO\"") && one.contains("use_cpu: false"),
        "{one}"
    );
}

#[test]
fn a_file_is_not_overwritten_unless_that_is_asked_for() {
    let model = Model::new(&llama_2_7b());
    let out = model.path("plan.toml");
    fs::write(&out, "mine").unwrap();
    let words = ["--memory", "1TiB", "--out", out.to_str().unwrap()];
    let error = error_of(&model.run("plan", &words), 1);
    assert!(
        error.contains("--overwrite") && fs::read_to_string(&out).unwrap() == "mine",
        "{error}"
    );
    let written = model.run("plan", &[&words[..], &["--overwrite"]].concat());
    assert!(written.status.success(), "{written:?}");
    assert!(fs::read_to_string(&out).unwrap().contains("num_processes = 1"));
}

#[test]
fn nothing_that_fits_is_a_failure_that_says_what_would() {
    let model = Model::new(&llama_2_7b());
    let error = error_of(&model.run("plan", &["--memory", "100MiB"]), 1);
    assert!(error.contains("nothing fits: the most sparing way takes"), "{error}");
    let error = error_of(&model.run("plan", &[]), 2);
    assert!(error.contains("give --memory SIZE"), "{error}");
}
