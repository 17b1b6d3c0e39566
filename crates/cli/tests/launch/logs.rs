//! `--log_dir`, `--tee`, `--redirects`, and the files in which ranks leave their error.

use super::*;

const BOTH: &str = "echo out $RANK; echo err $RANK >&2";

/// The files below the only run's folder, by their path, with what they hold.
fn files(launch: &Launch) -> BTreeMap<String, String> {
    let mut run = fs::read_dir(launch.path("logs")).unwrap();
    let run = run.next().unwrap().unwrap().path();
    let mut found = BTreeMap::new();
    let mut folders = vec![run.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(&run).unwrap().display().to_string();
                found.insert(name, fs::read_to_string(path).unwrap());
            }
        }
    }
    found
}

fn expected<const N: usize>(files: [(&str, &str); N]) -> BTreeMap<String, String> {
    files
        .map(|(name, content)| (name.to_owned(), content.to_owned()))
        .into()
}

#[test]
fn tee_writes_to_files_besides() {
    let mut launch = Launch::new(&["-n", "2", "--log_dir", "logs", "--tee", "3"], BOTH);
    let output = launch.output();
    assert_eq!(sorted(&output.stdout), ["[rank 0] out 0", "[rank 1] out 1"]);
    assert_eq!(sorted(&output.stderr), ["[rank 0] err 0", "[rank 1] err 1"]);
    let expected = expected([
        ("attempt_0/0/stderr.log", "err 0\n"),
        ("attempt_0/0/stdout.log", "out 0\n"),
        ("attempt_0/1/stderr.log", "err 1\n"),
        ("attempt_0/1/stdout.log", "out 1\n"),
    ]);
    assert_eq!(files(&launch), expected);
}

#[test]
fn redirects_write_to_files_only_and_ranks_may_differ() {
    let mut launch = Launch::new(
        &["-n", "2", "--log-dir", "logs", "--redirects", "0:1,1:3", "-t", "0:2"],
        BOTH,
    );
    let output = launch.output();
    assert_eq!(text(&output.stdout), "");
    assert_eq!(text(&output.stderr), "[rank 0] err 0\n");
    let expected = expected([
        ("attempt_0/0/stderr.log", "err 0\n"),
        ("attempt_0/0/stdout.log", "out 0\n"),
        ("attempt_0/1/stderr.log", "err 1\n"),
        ("attempt_0/1/stdout.log", "out 1\n"),
    ]);
    assert_eq!(files(&launch), expected);
}

#[test]
fn a_redirected_rank_that_fails_is_still_told_with_its_last_words() {
    let script = "echo no data >&2; exit 3";
    let mut launch = Launch::new(&["--log_dir", "logs", "-r", "3", "--max_restarts", "1"], script);
    let output = launch.output();
    assert_eq!(output.status.code(), Some(3));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("  the end of its stderr:\n    no data\n"), "{stderr}");
    let expected = expected([
        ("attempt_0/0/stderr.log", "no data\n"),
        ("attempt_0/0/stdout.log", ""),
        ("attempt_1/0/stderr.log", "no data\n"),
        ("attempt_1/0/stdout.log", ""),
    ]);
    assert_eq!(files(&launch), expected);
}

#[test]
fn the_error_that_a_rank_leaves_in_its_file_is_told() {
    let script = r#"[ $RANK = 0 ] && exec sleep 600
        echo '{"message": {"message": "ValueError: no data", "extraInfo": {"timestamp": "1"}}}' > $TORCHELASTIC_ERROR_FILE
        echo $TORCHELASTIC_ERROR_FILE > file; exit 1"#;
    let mut launch = Launch::new(&["-n", "2"], script);
    let output = launch.output();
    let stderr = text(&output.stderr);
    let (first, rest) = stderr.split_once('\n').unwrap();
    assert!(first.starts_with("error: rank 1 (pid "), "{stderr}");
    assert!(rest.starts_with("  its error: ValueError: no data\n"), "{stderr}");
    let file = fs::read_to_string(launch.path("file")).unwrap();
    assert!(
        !Path::new(file.trim()).exists(),
        "the temporary folder goes with the launcher"
    );
}

#[test]
fn files_need_a_folder_that_can_be_written_to() {
    let error = |flags: &[&str]| {
        let output = Launch::new(flags, BOTH).output();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        text(&output.stderr)
    };
    assert!(error(&["--tee", "3"]).contains("--tee needs --log_dir"));
    assert!(error(&["--redirects", "0:1"]).contains("--redirects needs --log_dir"));
    assert!(error(&["--log_dir", "program/below"]).contains("--log_dir program/below: "));
    assert!(error(&["--tee", "5"]).contains("0 (none), 1 (stdout), 2 (stderr) or 3 (both)"));
    // As Accelerate's default says it.
    assert!(Launch::new(&["--tee", "0"], BOTH).output().status.success());
}
