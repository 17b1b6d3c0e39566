//! `sconce config`: the dialogue on a terminal and over a pipe, and the file that comes of it.

mod terminal;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use sconce_core::config::Configuration;
use terminal::{BACKSPACE, CTRL_C, DOWN, ENTER, ESCAPE, Terminal};

fn config(file: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command
        .arg("config")
        .arg("--config_file")
        .arg(file)
        .env_remove("NO_COLOR");
    command
}

/// A file that is not there yet, in a folder of its own.
fn new_file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    (folder, file)
}

/// Runs the dialogue with these lines as answers.
fn over_a_pipe(file: &Path, answers: &[&str]) -> Output {
    let mut command = config(file);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let lines = answers.iter().map(|answer| format!("{answer}\n"));
    // It may have ended before all is written.
    let _ = process
        .stdin
        .take()
        .unwrap()
        .write_all(String::from_iter(lines).as_bytes());
    process.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// What a file says of these settings, a word for each.
fn said(file: &Path, paths: &[&str]) -> Vec<String> {
    let configuration = Configuration::read(file).unwrap();
    assert_eq!(configuration.warnings(), []);
    let value = |path: &&str| configuration.value(path).map_or("-".to_owned(), ToString::to_string);
    paths.iter().map(value).collect()
}

/// The names of all that lies beside the file.
fn beside(file: &Path) -> Vec<String> {
    let entries = fs::read_dir(file.parent().unwrap()).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn menus_on_a_terminal_make_a_file() {
    let (_folder, file) = new_file();
    let mut terminal = Terminal::start(config(&file));
    terminal.answer("Where do the ranks run?", &[ENTER]);
    terminal.answer("What do the ranks compute on?", &[ENTER]);
    terminal.answer("How many ranks", &[BACKSPACE, "4x", ENTER]);
    terminal.wait_for("expected a whole number from 1");
    terminal.type_in(&[BACKSPACE, ENTER]);
    terminal.answer(
        "How are parameters, gradients and optimizer state kept?",
        &[DOWN, ENTER],
    );
    terminal.answer("Is there a DeepSpeed configuration?", &[ENTER]);
    terminal.answer("What is sharded?", &[DOWN, ENTER]);
    // Stage 3 is proposed when it is gone back to, and is what a plain Enter takes.
    terminal.answer("Where is optimizer state kept?", &[ESCAPE]);
    terminal.answer("What is sharded?", &[ENTER]);
    terminal.answer("Where is optimizer state kept?", &[DOWN, ENTER]);
    terminal.answer("Where are parameters kept", &[ENTER]);
    terminal.answer("To which norm", &[ENTER]);
    terminal.answer("Are whole weights gathered", &[ENTER]);
    terminal.answer("What does the model compute in?", &[DOWN, ENTER]);
    terminal.answer("How many micro-batches", &[BACKSPACE, "8", ENTER]);
    terminal.answer("Ask about restarts", &[ENTER]);
    assert!(!file.exists(), "nothing is written before the last question");
    terminal.answer("Write this file?", &[ENTER]);
    terminal.wait_for("sconce launch --config_file");
    let (status, is_usable) = terminal.ended();
    assert!(status.success() && is_usable, "{}", terminal.text());
    assert!(terminal.text().contains("\x1b[38;5;"), "a terminal has colours");

    let paths = [
        "distributed_type",
        "num_processes",
        "use_cpu",
        "mixed_precision",
        "deepspeed_config.zero_stage",
        "deepspeed_config.offload_optimizer_device",
        "deepspeed_config.offload_param_device",
        "sconce_config.gradient_accumulation_steps",
        "fsdp_config.fsdp_version",
    ];
    assert_eq!(
        said(&file, &paths),
        ["DEEPSPEED", "4", "true", "bf16", "3", "cpu", "none", "8", "-"]
    );
    assert_eq!(beside(&file), ["run.yaml"]);
    // Accelerate, which refuses sections that it does not know, is to read it too.
    assert!(!fs::read_to_string(&file).unwrap().contains("sconce_config"));
}

#[test]
fn ctrl_c_leaves_the_terminal_and_the_file_as_they_were() {
    let (_folder, file) = new_file();
    fs::write(&file, "num_processes: 3 # mine\n").unwrap();
    let mut command = config(&file);
    command.env("NO_COLOR", "1");
    let mut terminal = Terminal::start(command);
    terminal.answer("Where do the ranks run?", &[ENTER]);
    terminal.answer("What do the ranks compute on?", &[CTRL_C]);
    terminal.wait_for("nothing was written");
    let (status, is_usable) = terminal.ended();
    assert_eq!(status.code(), Some(1));
    assert!(is_usable, "{}", terminal.text());
    assert!(
        !terminal.text().contains("\x1b[38;5;"),
        "NO_COLOR: {:?}",
        terminal.text()
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), "num_processes: 3 # mine\n");
}

#[test]
fn lines_from_a_pipe_make_a_file() {
    let (_folder, file) = new_file();
    // By number, by name, with a wrong answer and a way back; empty lines take what is proposed.
    let answers = "1|cpu|two|2|3|back|fsdp|2||3|1||Block,Head|yes|n||bf16||no|yes";
    let answers = Vec::from_iter(answers.split('|'));
    let output = over_a_pipe(&file, &answers);
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(
        stderr.contains("\nWhere do the ranks run?\n  1) on this machine\n"),
        "{stderr}"
    );
    assert!(stderr.contains("\"two\": expected a whole number from 1\n"), "{stderr}");
    assert!(stderr.contains("\n  2) FSDP2's (version 2)\n"), "{stderr}");
    assert!(
        stderr.contains("2 ranks cannot be divided into 3 equal groups"),
        "{stderr}"
    );
    assert!(!stderr.contains('\x1b'), "{stderr}");
    assert!(
        text(&output.stdout).starts_with(&format!("wrote {}\n", file.display())),
        "{output:?}"
    );
    let paths = [
        "distributed_type",
        "num_processes",
        "mixed_precision",
        "fsdp_config.fsdp_version",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "fsdp_config.fsdp_activation_checkpointing",
        "fsdp_config.fsdp_offload_params",
    ];
    assert_eq!(
        said(&file, &paths),
        ["FSDP", "2", "bf16", "2", "Block,Head", "true", "false"]
    );
}

#[test]
fn what_a_file_says_is_proposed_and_what_is_not_asked_for_stays() {
    let (_folder, file) = new_file();
    let first = "\
distributed_type: FSDP
num_processes: 6
mixed_precision: bf16
use_cpu: true
num_machines: 1
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: SHARD_GRAD_OP
sconce_config:
  max_restarts: 2
  log_dir: logs
";
    fs::write(&file, first).unwrap();
    let output = over_a_pipe(&file, &[""; 40]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let paths = [
        "distributed_type",
        "num_processes",
        "mixed_precision",
        "fsdp_config.fsdp_sharding_strategy",
        "sconce_config.max_restarts",
        "sconce_config.log_dir",
    ];
    let before = ["FSDP", "6", "bf16", "SHARD_GRAD_OP", "2", "logs"];
    assert_eq!(said(&file, &paths), before);
    let once = fs::read_to_string(&file).unwrap();
    assert!(over_a_pipe(&file, &[""; 40]).status.success());
    assert_eq!(fs::read_to_string(&file).unwrap(), once);

    // What the answers no longer lead to goes.
    let mut answers = vec!["", "", "", "1"];
    answers.extend([""; 36]);
    assert!(over_a_pipe(&file, &answers).status.success());
    let replicated = ["MULTI_CPU", "6", "bf16", "-", "2", "logs"];
    assert_eq!(said(&file, &paths), replicated);
}

#[test]
fn an_input_that_ends_or_quits_writes_nothing() {
    let (_folder, file) = new_file();
    let ended = over_a_pipe(&file, &["1", "cpu"]);
    assert_eq!(ended.status.code(), Some(1));
    let message =
        "error: the input ended at the question \"How many ranks, over all machines?\"; nothing was written\n";
    assert!(text(&ended.stderr).contains(message), "{}", text(&ended.stderr));
    let quit = over_a_pipe(&file, &["1", "quit"]);
    assert_eq!(quit.status.code(), Some(1));
    assert!(
        text(&quit.stderr).ends_with("nothing was written\n"),
        "{}",
        text(&quit.stderr)
    );
    assert_eq!(beside(&file), [""; 0]);
}

#[test]
fn a_file_that_is_none_of_ours_is_left_alone() {
    let (_folder, file) = new_file();
    fs::write(&file, "no_such_key: 1\n").unwrap();
    let output = over_a_pipe(&file, &[""; 40]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("no_such_key") && stderr.contains("hint: "), "{stderr}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "no_such_key: 1\n");
}
