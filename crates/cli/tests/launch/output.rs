//! How the ranks' input and output pass through the launcher.

use super::*;

#[test]
fn lines_stay_whole_and_carry_their_rank_under_heavy_output() {
    // Each rank writes 3000 lines to each stream, in pieces, both streams into one pipe.
    let script = r#"
        line() { printf '%s %s' "$1 $RANK" "$2"; printf ' abcdefghijklmnopqrstuvwxyz%s\n' " $2"; }
        i=0; while [ $i -lt 3000 ]; do line out $i; line err $i >&2; i=$((i + 1)); done"#;
    let mut launch = Launch::new(&["-n", "4"], script);
    let (mut reader, writer) = std::io::pipe().unwrap();
    launch.command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let child = launch.command.spawn().unwrap();
    drop(launch.command); // It holds the writing end too.
    let mut all = String::new();
    reader.read_to_string(&mut all).unwrap();
    assert!(wait_with_output(child).status.success());

    let mut next = BTreeMap::new();
    for line in all.lines() {
        let words = Vec::from_iter(line.split(' '));
        let &[
            "[rank",
            prefix,
            stream,
            rank,
            number,
            "abcdefghijklmnopqrstuvwxyz",
            again,
        ] = words.as_slice()
        else {
            panic!("torn line: {line}");
        };
        assert_eq!((prefix, number), (format!("{rank}]").as_str(), again), "{line}");
        let expected = next.entry((stream, rank)).or_insert(0);
        assert_eq!(number, expected.to_string(), "order of {stream} of rank {rank}");
        *expected += 1;
    }
    assert_eq!(next.len(), 8);
    assert!(next.values().all(|count| *count == 3000), "{next:?}");
}

#[test]
fn each_stream_goes_to_its_own() {
    let output = Launch::new(&["-n", "2"], "echo out; echo err >&2").output();
    assert_eq!(sorted(&output.stdout), ["[rank 0] out", "[rank 1] out"]);
    assert_eq!(sorted(&output.stderr), ["[rank 0] err", "[rank 1] err"]);
}

#[test]
fn a_last_line_without_an_end_is_shown_as_a_line() {
    let output = Launch::new(&["-n", "2"], "printf 'first\nlast'").output();
    assert_eq!(
        sorted(&output.stdout),
        ["[rank 0] first", "[rank 0] last", "[rank 1] first", "[rank 1] last"]
    );
}

#[test]
fn a_line_of_a_mebibyte_stays_one_line() {
    let output = Launch::new(&["-n", "2"], "head -c 1048576 /dev/zero | tr '\\0' x; echo").output();
    let long = "x".repeat(1 << 20);
    assert_eq!(
        sorted(&output.stdout),
        [format!("[rank 0] {long}"), format!("[rank 1] {long}")]
    );
}

#[test]
fn binary_output_passes_through() {
    let output = Launch::new(&["-n", "2"], r"[ $RANK = 1 ] || printf '\377\000\376\n'").output();
    assert_eq!(output.stdout, b"[rank 0] \xff\x00\xfe\n");
}

#[test]
fn a_single_rank_keeps_the_launchers_input_and_output() {
    let mut launch = Launch::new(&[], "cat; printf end");
    let mut child = launch
        .command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"input\n").unwrap();
    assert_eq!(text(&wait_with_output(child).stdout), "input\nend");
}

#[test]
fn several_ranks_find_their_input_empty() {
    let mut launch = Launch::new(&["-n", "2"], "cat; echo end");
    launch.command.stdin(Stdio::piped());
    let child = launch.command.stdout(Stdio::piped()).spawn().unwrap();
    assert_eq!(
        sorted(&wait_with_output(child).stdout),
        ["[rank 0] end", "[rank 1] end"]
    );
}

#[test]
fn a_reader_that_leaves_ends_the_run_as_in_any_pipeline() {
    let mut launch = Launch::new(&["-n", "2"], "while :; do echo line; done");
    let mut child = launch.spawn();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut first)
        .unwrap();
    let output = wait_with_output(child);
    assert!(first.ends_with("] line\n"), "{first}");
    assert_eq!(output.status.code(), Some(141), "{output:?}"); // 128 + SIGPIPE
    assert!(!text(&output.stderr).contains("panicked"), "{output:?}");
}

#[test]
fn output_that_cannot_be_written_is_not_lost_in_silence() {
    let mut launch = Launch::new(&["-n", "2"], "echo line");
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let child = launch.command.stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let output = wait_with_output(child);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        text(&output.stderr).contains("could not write the ranks' output to stdout: No space left"),
        "{output:?}"
    );
}
