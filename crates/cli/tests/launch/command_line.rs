//! What is started, with which arguments, and what is refused.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::*;

#[test]
fn arguments_reach_the_program_unchanged() {
    let mut launch = Launch::new(&["-n", "1"], r#"for argument; do printf '%s\n' "<$argument>"; done"#);
    launch
        .command
        .args(["a b", "--num_processes", "5", "-x", "--", "", "*", "$HOME", "--help"]);
    let expected = "<a b>\n<--num_processes>\n<5>\n<-x>\n<-->\n<>\n<*>\n<$HOME>\n<--help>\n";
    assert_eq!(text(&launch.output().stdout), expected);
}

#[test]
fn a_missing_program_is_one_error_before_anything_starts() {
    let output = launcher().args(["-n", "3", "./no-such-program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    assert!(
        stderr.starts_with("error: there is no program at ./no-such-program\nhint: "),
        "{stderr}"
    );
    assert_eq!(stderr.matches("no-such-program").count(), 1, "{stderr}");

    let output = launcher().arg("no-such-program").output().unwrap();
    assert!(
        text(&output.stderr).starts_with("error: no program no-such-program in PATH\nhint: "),
        "{output:?}"
    );
}

#[test]
fn a_file_that_is_no_program_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("data"), "no program").unwrap();
    let output = launcher().arg("./data").current_dir(&folder).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("./data may not be executed\nhint: "),
        "{output:?}"
    );
}

#[test]
fn where_ranks_run_is_among_the_options_that_help_shows() {
    let output = launcher().arg("--help").output().unwrap();
    let help = text(&output.stdout);
    for option in [
        "--gpu_ids <IDS>",
        "--enable_cpu_affinity",
        "--num_cpu_threads_per_process <N>",
        "--backend",
    ] {
        assert!(help.contains(option), "{option}: {help}");
    }
}

#[test]
fn zero_processes_and_unknown_flags_are_usage_errors() {
    for (flags, message) in [
        (vec!["--num_processes", "0", "true"], "at least 1 is needed"),
        (vec!["--num_proceses", "2", "true"], "--num_proceses"),
        (vec!["--mixed_precision", "int3", "true"], "int3"),
        (vec![], "nothing to launch"),
    ] {
        let output = launcher().args(&flags).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        let stderr = text(&output.stderr);
        assert!(
            stderr.starts_with("error: ") && stderr.contains(message),
            "{flags:?}: {stderr}"
        );
    }
}

#[test]
fn an_example_is_built_once_and_started_per_rank() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
    };
    write(
        "Cargo.toml",
        "[package]\nname = \"story\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n",
    );
    write("src/lib.rs", "");
    write(
        "examples/teller.rs",
        r#"fn main() { println!("{:?}", std::env::args().skip(1).collect::<Vec<_>>()); }"#,
    );

    let launch = |words: &[&str]| {
        let mut command = launcher();
        command
            .args(["-n", "2", "--profile", "dev"])
            .args(words)
            .current_dir(&folder)
            .env_remove("CARGO_TARGET_DIR");
        command.output().unwrap()
    };
    let output = launch(&["--example", "teller", "--", "--lr", "1e-3"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        sorted(&output.stdout),
        [0, 1].map(|rank| format!("[rank {rank}] [\"--lr\", \"1e-3\"]"))
    );
    assert_eq!(text(&output.stderr).matches("Compiling story").count(), 1);

    let output = launch(&["--example", "tellr"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("teller") && stderr.contains("error: cargo could not build example tellr"),
        "{stderr}"
    );
}

#[test]
fn more_ranks_than_any_host_has_cores_for_are_refused_before_one_starts() {
    let output = launcher().args(["-n", "99999", "/bin/true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let told = text(&output.stderr);
    assert!(told.contains("--num_processes 99999: at most 1024 ranks"), "{told}");
}

#[test]
fn a_variable_that_is_not_unicode_is_an_error_and_not_passed_over() {
    let cases = [(&[][..], "SCONCE_BACKEND"), (&["--use_fsdp"], "FSDP_SHARDING_STRATEGY")];
    for (flags, name) in cases {
        let mut launch = launcher();
        launch
            .args(flags)
            .arg("/bin/true")
            .env(name, OsStr::from_bytes(b"shm\xff"));
        let output = launch.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {output:?}");
        assert!(text(&output.stderr).contains(name), "{output:?}");
    }
}

#[test]
fn the_rank_that_has_the_message_is_told_last_whichever_failed_first() {
    let script = "if [ $RANK = 1 ]; then echo 'stopped with the other ranks; rank 0 has the message'; \
                  else echo 'error: no such file'; fi >&2; exit 1";
    let output = launcher().args(["-n", "2", "sh", "-c", script]).output().unwrap();
    let told = text(&output.stderr);
    let end = told.rsplit("the end of").next().unwrap();
    assert!(end.contains("error: no such file"), "{told}");
}
