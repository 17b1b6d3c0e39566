//! `sconce report`: the page that comes of logged runs, and what is said of files that are none.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use sconce_core::ChromeTrace;
use tracing_subscriber::layer::SubscriberExt as _;

fn report(folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command.arg("report").args(words).current_dir(folder);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The page that is made of `words`.
fn page(folder: &Path, words: &[&str]) -> String {
    let output = report(folder, words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "wrote report.html\n");
    fs::read_to_string(folder.join("report.html")).unwrap()
}

/// Writes a run of 5 steps as `--report_to jsonl` does.
fn write_run(folder: &Path, name: &str) {
    let mut lines = String::from("{\"project\":\"p\",\"config\":{\"lr\":1},\"wall_time\":100.0}\n");
    for step in 0..5 {
        let loss = if step == 3 {
            "\"NaN\"".to_owned()
        } else {
            format!("{}.5", 5 - step)
        };
        lines +=
            &format!("{{\"step\":{step},\"wall_time\":10{step}.0,\"loss\":{loss},\"lr\":1e-3,\"<odd>\":{step}}}\n");
    }
    fs::create_dir_all(folder.join(name).join("p")).unwrap();
    fs::write(folder.join(name).join("p/metrics.jsonl"), lines).unwrap();
}

/// Writes a trace of 2 s of backward, as `--profile` does.
fn write_trace(folder: &Path, name: &str, rank: usize) {
    let trace = format!(
        "[\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{rank},\"tid\":0,\"args\":{{\"name\":\"main\"}}}},\n\
         {{\"name\":\"backward\",\"cat\":\"backward\",\"ph\":\"X\",\"pid\":{rank},\"tid\":0,\"ts\":0.0,\"dur\":2000000.0}},\n"
    );
    fs::write(folder.join(name).join(format!("trace-rank-{rank}.json")), trace).unwrap();
}

#[test]
fn a_page_has_a_line_for_every_run_and_needs_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), "first");
    write_run(folder.path(), "second");
    let html = page(folder.path(), &["first", "second/p/metrics.jsonl"]);
    assert!(html.contains("<h1>2 runs</h1>"));
    // The file's folder is its label, the file being named as all are.
    assert!(
        html.contains("</i>first</td><td>5</td><td>1.5000</td>") && html.contains("</i>p</td>"),
        "{html}"
    );
    // Loss has a gap in both runs: a stretch and a point each; the others are whole.
    assert_eq!(html.matches("<polyline").count(), 2 * 3);
    assert_eq!(html.matches("<circle").count(), 2);
    assert_eq!(html.matches("1 steps without a finite value").count(), 2);
    assert!(html.contains("&lt;odd&gt;") && !html.contains("<odd>"));
    for outside in ["http:", "https:", "<script", "<link", "url(", "@import"] {
        assert!(!html.contains(outside), "{outside}");
    }
}

#[test]
fn lines_of_one_colour_have_other_dashes_in_the_plot_and_in_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let names = Vec::from_iter((0..10).map(|number| format!("run-{number}")));
    names.iter().for_each(|name| write_run(folder.path(), name));
    let html = page(folder.path(), &Vec::from_iter(names.iter().map(String::as_str)));
    let samples = |name: &str| {
        let label = format!("</i>{name}<");
        let ends = html.match_indices(&label).map(|(end, _)| &html[..end]);
        let samples = ends.map(|before| before.rsplit_once("<i style=").unwrap().1);
        samples.collect::<std::collections::BTreeSet<_>>()
    };
    let (first, last) = (samples("run-0"), samples("run-9"));
    assert_eq!(
        (first.len(), last.len()),
        (1, 1),
        "the same in the table and the legends"
    );
    assert_eq!(first.first(), Some(&"\"background:#0072b2\">"));
    let dashed = "repeating-linear-gradient(90deg,#0072b2 0 7px,";
    assert!(last.first().unwrap().contains(dashed), "{last:?}");
    assert!(html.contains("stroke=\"#0072b2\" stroke-dasharray=\"7 3\""), "{html}");
}

#[test]
fn a_step_that_is_done_again_counts_with_what_follows_it() {
    let folder = tempfile::tempdir().unwrap();
    let line = |step: u64, loss: f64| format!("{{\"step\":{step},\"loss\":{loss}}}\n");
    let steps = [(0, 4.0), (1, 3.0), (2, 2.0), (1, 3.5)];
    let lines = String::from_iter(steps.map(|(step, loss)| line(step, loss)));
    fs::write(folder.path().join("run.jsonl"), lines).unwrap();
    let html = page(folder.path(), &["run.jsonl"]);
    assert!(
        html.contains("</i>run</td><td>2</td><td>3.5000</td><td>3.5000</td>"),
        "{html}"
    );
}

#[test]
fn a_torn_last_line_is_left_out_and_said() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("run.jsonl"),
        "{\"step\":0,\"loss\":4}\n{\"step\":1,\"lo",
    )
    .unwrap();
    let output = report(folder.path(), &["run.jsonl"]);
    assert!(output.status.success());
    assert_eq!(
        text(&output.stderr),
        "note: run.jsonl:2: the last line is cut off: left out\n"
    );
}

#[test]
fn files_that_are_no_runs_are_named_with_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&[u8], &str); 8] = [
        (b"{\"step\":0,\"loss\":4}\nstep,loss\n1,2\n", "run.jsonl:2: not JSON ("),
        (
            b"{\"step\":0,\"loss\":4}\n[1]\n",
            "run.jsonl:2: not an object; expected a JSON object with `step`",
        ),
        (b"{\"step\":0,\"loss\":4}\n{\"loss\":1}\n", "run.jsonl:2: no `step`; "),
        (
            b"{\"step\":-1,\"loss\":4}\n",
            "run.jsonl:1: `step` is -1, not a whole number; ",
        ),
        (b"\xff\xfe\x00", "run.jsonl:1: not JSON ("),
        (b"", "run.jsonl: no line in it has a number of a step"),
        (b"{\"step\":0}\n", "run.jsonl: no line in it has a number of a step"),
        (b"{\"step\":0,\"lo", "run.jsonl:1: not JSON ("),
    ];
    for (bytes, expected) in cases {
        fs::write(folder.path().join("run.jsonl"), bytes).unwrap();
        let output = report(folder.path(), &["run.jsonl"]);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(
            stderr.starts_with(&format!("error: {expected}")),
            "{expected}: {stderr}"
        );
        assert!(!folder.path().join("report.html").exists());
    }
}

#[test]
fn a_folder_without_a_run_and_a_page_that_cannot_be_written_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("empty")).unwrap();
    let said = |words: &[&str]| {
        let output = report(folder.path(), words);
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr).to_owned()
    };
    let message = said(&["empty"]);
    assert!(
        message.starts_with("error: empty: no file NAME.jsonl in it") && message.contains("\nhint: "),
        "{message}"
    );
    assert!(said(&["missing"]).starts_with("error: missing: No such file"));
    write_run(folder.path(), "run");
    assert!(said(&["run", "--out", "no/such/page.html"]).starts_with("error: no/such/page.html: No such file"));
}

#[test]
fn time_by_phase_is_drawn_for_every_rank_whose_trace_lies_in_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), "run");
    write_trace(folder.path(), "run", 0);
    write_trace(folder.path(), "run", 1);
    let html = page(folder.path(), &["run"]);
    assert!(
        html.contains("rank 0, main</text>") && html.contains("rank 1, main</text>"),
        "{html}"
    );
    assert!(html.contains("backward (2.000 s a rank)") && html.contains("<title>backward: 2.000 s</title>"));
    fs::write(folder.path().join("run/trace-rank-1.json"), "no trace\n[\n").unwrap();
    let output = report(folder.path(), &["run"]);
    let message = text(&output.stderr);
    assert!(
        message.starts_with("error: run/trace-rank-1.json:1: not an event of a trace"),
        "{message}"
    );
}

#[test]
fn a_trace_is_drawn_once_however_many_files_of_values_lie_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("run")).unwrap();
    for name in ["evaluation", "training"] {
        let file = folder.path().join("run").join(name).with_extension("jsonl");
        fs::write(file, "{\"step\":0,\"loss\":4}\n").unwrap();
    }
    write_trace(folder.path(), "run", 0);
    for words in [&["run"][..], &["run/training.jsonl", "./run/evaluation.jsonl", "run"]] {
        let html = page(folder.path(), words);
        assert_eq!(html.matches("rank 0, main</text>").count(), 1, "{words:?}: {html}");
    }
}

#[test]
fn a_reader_of_stdout_that_has_left_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), "run");
    let (_, stdout) = std::io::pipe().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command
        .args(["report", "run"])
        .current_dir(folder.path())
        .stdout(stdout);
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(folder.path().join("report.html").exists());
}

#[test]
fn spans_that_differ_in_what_they_were_for_are_one_phase() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), "run");
    let trace = ChromeTrace::default();
    trace.open(&folder.path().join("run"), 0).unwrap();
    tracing::subscriber::with_default(tracing_subscriber::registry().with(trace.clone()), || {
        for number in 0..2 {
            tracing::info_span!("wait for batch", what = number).in_scope(|| ());
            tracing::info_span!("of the user's own", what = format!("part {number}")).in_scope(|| ());
        }
    });
    trace.close().unwrap();
    let html = page(folder.path(), &["run"]);
    for phase in ["wait for batch", "of the user&#39;s own"] {
        assert_eq!(html.matches(&format!("</i>{phase} (")).count(), 1, "{html}");
        assert_eq!(html.matches(&format!("<title>{phase}: ")).count(), 1, "{html}");
    }
    assert_eq!(html.matches(" s a rank)</span>").count(), 2, "no phase besides: {html}");
}

/// Width and height of a PNG file whose pixels can be read, and whether some are of this colour.
fn pixels(path: &Path, colour: [u8; 3]) -> ([u32; 2], usize) {
    let picture = resvg::tiny_skia::Pixmap::load_png(path).unwrap();
    let is_it = |pixel: &&resvg::tiny_skia::PremultipliedColorU8| [pixel.red(), pixel.green(), pixel.blue()] == colour;
    let count = picture.pixels().iter().filter(is_it).count();
    ([picture.width(), picture.height()], count)
}

#[test]
fn every_plot_is_a_picture_too_with_text_whatever_fonts_there_are() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), "first");
    write_run(folder.path(), "second");
    let trace = "[\n{\"name\":\"backward\",\"ph\":\"X\",\"pid\":0,\"tid\":0,\"ts\":0.0,\"dur\":2000000.0}\n]\n";
    fs::write(folder.path().join("first/trace-rank-0.json"), trace).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command
        .args(["report", "first", "second", "--png", "plots/of runs"])
        .current_dir(folder.path());
    // Nowhere fonts could come from.
    command.env_clear().env("HOME", folder.path());
    let output = command.output().unwrap();
    assert_eq!(text(&output.stderr), "");
    assert_eq!(
        text(&output.stdout),
        "wrote report.html\nwrote PNG files into plots/of runs\n"
    );
    let plots = folder.path().join("plots/of runs");
    let mut files = Vec::from_iter(fs::read_dir(&plots).unwrap().map(|entry| entry.unwrap().file_name()));
    files.sort();
    assert_eq!(files, ["_odd_.png", "loss.png", "lr.png", "time_first.png"]);

    // The plot of 600 by 320 with a margin, and above it a title and a key of two rows; two pixels for each unit.
    let (size, blue) = pixels(&plots.join("loss.png"), [0, 0x72, 0xb2]);
    assert_eq!(size, [2 * 632, 2 * (34 + 2 * 19 + 8 + 320 + 16)]);
    assert!(
        blue > 400,
        "the first run's key, its line being under the other: {blue}"
    );
    let (_, orange) = pixels(&plots.join("loss.png"), [0xd5, 0x5e, 0]);
    assert!(orange > 500, "the second run's line: {orange}");
    // Text is the only thing that has its colour.
    let (_, ink) = pixels(&plots.join("loss.png"), [0x1a; 3]);
    assert!(ink > 1000, "{ink}");
    let (size, blue) = pixels(&plots.join("time_first.png"), [0, 0x72, 0xb2]);
    assert!(size[0] == 2 * 1232 && blue > 10_000, "{size:?}: {blue}");
}

#[test]
fn what_pictures_cannot_show_is_said() {
    let folder = tempfile::tempdir().unwrap();
    // A name that JSON can have, and neither XML nor a file.
    let odd = "{\"step\":0,\"../\\u0001\\uffff\":4}\n{\"step\":1,\"../\\u0001\\uffff\":3}\n";
    fs::write(folder.path().join("odd.jsonl"), odd).unwrap();
    let output = report(folder.path(), &["odd.jsonl", "--png", "odd"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(folder.path().join("odd/_..___.png").is_file());
    write_run(folder.path(), "\u{8bad}\u{7ec3}");
    write_run(folder.path(), "\u{3b2}-\u{416}");
    let output = report(
        folder.path(),
        &["\u{8bad}\u{7ec3}", "\u{3b2}-\u{416}", "--png", "plots"],
    );
    assert!(output.status.success());
    assert_eq!(
        text(&output.stderr),
        "note: plots: pictures have boxes for '\u{8bad}', '\u{7ec3}', which their font does not have; the page has all letters\n"
    );
    fs::write(folder.path().join("file"), "").unwrap();
    let output = report(folder.path(), &["\u{3b2}-\u{416}", "--png", "file"]);
    assert!(
        !output.status.success() && text(&output.stderr).starts_with("error: file: "),
        "{}",
        text(&output.stderr)
    );
}
