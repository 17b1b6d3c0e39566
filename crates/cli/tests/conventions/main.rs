//! What holds for every command: what goes to which stream and with which exit code, completions and manual pages.

use std::ffi::OsStr;
use std::fs;
use std::process::{Command, Output};

const SCONCE: &str = env!("CARGO_BIN_EXE_sconce");

fn sconce<Word: AsRef<OsStr>>(words: &[Word]) -> Output {
    Command::new(SCONCE).args(words).output().unwrap()
}

/// What a command prints that must succeed.
fn printed(words: &[&str]) -> String {
    let output = sconce(words);
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{words:?}: {output:?}"
    );
    String::from_utf8(output.stdout).unwrap()
}

/// The commands that `sconce --help` lists.
fn commands() -> Vec<String> {
    let help = printed(&["--help"]);
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let (commands, _) = commands.split_once("\n\n").unwrap();
    let names = commands.lines().filter_map(|line| line.split_whitespace().next());
    let names = Vec::from_iter(names.map(str::to_owned));
    assert!(names.iter().any(|name| name == "launch"), "{help}");
    names
}

/// What bash offers for the last of `words`, once it has the script.
fn completed_by_bash(words: &[&str]) -> Vec<String> {
    let script = r#"
        source <("$0" completions bash) || exit 1
        complete -p sconce >/dev/null || exit 1
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _sconce sconce "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    let output = Command::new("bash")
        .args(["--norc", "-c", script, SCONCE])
        .args(words)
        .output()
        .unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let offered = String::from_utf8(output.stdout).unwrap();
    offered.lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_flags() {
    assert_eq!(completed_by_bash(&["sconce", "lau"]), ["launch"]);
    assert_eq!(
        completed_by_bash(&["sconce", "launch", "--num_proc"]),
        ["--num_processes"]
    );
    assert_eq!(completed_by_bash(&["sconce", "launch", "--backend", "n"]), ["nccl"]);
    assert_eq!(completed_by_bash(&["sconce", "checkpoint", "ver"]), ["verify"]);
}

#[test]
fn every_shell_gets_a_script_with_all_commands() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = printed(&["completions", shell]);
        for command in commands() {
            assert!(script.contains(&command), "{shell} lacks {command}");
        }
    }
    let output = sconce(&["completions", "csh"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("elvish"), "{output:?}");
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man/man1");
    printed(&["man", "--out", pages.to_str().unwrap()]);
    for command in commands() {
        let page = fs::read_to_string(pages.join(format!("sconce-{command}.1"))).unwrap();
        assert!(page.contains(".TH sconce"), "{command}: {page}");
    }
    let launch = fs::read_to_string(pages.join("sconce-launch.1")).unwrap();
    assert!(
        launch.contains("num_processes") && launch.contains("Exit code"),
        "{launch}"
    );
    assert!(pages.join("sconce-checkpoint-verify.1").is_file());
    assert_eq!(printed(&["man", "launch"]), launch);
    assert_eq!(printed(&["man"]), fs::read_to_string(pages.join("sconce.1")).unwrap());
    let unknown = sconce(&["man", "lunch"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&unknown.stderr).contains("launch"),
        "{unknown:?}"
    );
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    for words in [
        &["--help"][..],
        &["launch", "--help"],
        &["env"],
        &["man"],
        &["completions", "bash"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(SCONCE).args(words).stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{words:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{words:?}: {output:?}");
    }
}

#[test]
fn a_wrong_command_line_is_told_on_stderr_with_code_2_and_without_colour() {
    for words in [
        &["lunch"][..],
        &["launch", "--num_process", "2"],
        &["env", "--jsno"],
        &[],
    ] {
        let output = sconce(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(output.stdout.is_empty(), "{words:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(
            stderr.contains("Usage: sconce") && !stderr.contains('\x1b'),
            "{words:?}: {stderr}"
        );
    }
}
