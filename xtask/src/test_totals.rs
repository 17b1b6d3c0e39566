//! The totals over all test programs of one `cargo test`, which itself tells them only one by one.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::AddAssign;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result};

/// How many tests passed, failed and were skipped (`#[ignore]`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TestTotals {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl TestTotals {
    /// Reads the line with which a test program ends; `None` for any other line.
    fn of_line(line: &str) -> Option<Self> {
        let counts = line.strip_prefix("test result: ")?.split_once(". ")?.1;
        let mut totals = Self::default();
        for count in counts.split("; ") {
            let (number, what) = count.split_once(' ')?;
            let total = match what {
                "passed" => &mut totals.passed,
                "failed" => &mut totals.failed,
                "ignored" => &mut totals.skipped,
                _ => continue,
            };
            *total = number.parse().ok()?;
        }
        Some(totals)
    }
}

impl AddAssign for TestTotals {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for TestTotals {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        write!(formatter, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Runs `command`, words separated by blanks, in `folder`; passes its output on and adds up its tests.
///
/// # Errors
/// When it cannot be started or its output cannot be read. Failed tests are told by the totals and the status.
pub(crate) fn run_tests(command: &str, folder: &Path) -> Result<(TestTotals, ExitStatus)> {
    let mut words = command.split_whitespace();
    let program = words.next().context("the command is empty")?;
    let mut child = Command::new(program)
        .args(words)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let output = child.stdout.take().context("stdout is a pipe")?;
    let mut totals = pass_on(BufReader::new(output), std::io::stdout())?;
    let status = child.wait()?;
    if !status.success() && totals.failed == 0 {
        // A test program that does not compile, or is killed, tells no result.
        totals.failed = 1;
    }
    Ok((totals, status))
}

/// Copies the output of test programs and adds up what it tells.
fn pass_on(mut from: impl BufRead, mut to: impl Write) -> io::Result<TestTotals> {
    let mut totals = TestTotals::default();
    let mut line = Vec::new();
    // Tests may print what is not Unicode, so lines are bytes.
    while from.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        if let Some(of_line) = TestTotals::of_line(String::from_utf8_lossy(&line).trim_end()) {
            totals += of_line;
        }
        line.clear();
    }
    Ok(totals)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(passed: u64, failed: u64, skipped: u64) -> TestTotals {
        TestTotals {
            passed,
            failed,
            skipped,
        }
    }

    #[test]
    fn only_the_closing_line_of_a_test_program_counts() {
        let line = "test result: FAILED. 12 passed; 3 failed; 2 ignored; 0 measured; 7 filtered out; finished in 0.51s";
        assert_eq!(TestTotals::of_line(line), Some(totals(12, 3, 2)));
        for other in [
            "running 3 tests",
            "test a ... ok",
            "  test result: ok. 1 passed",
            "test result: ok",
        ] {
            assert_eq!(TestTotals::of_line(other), None, "{other}");
        }
    }

    #[test]
    fn totals_add_up_over_test_programs_and_everything_is_passed_on() {
        let output = b"test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured\n\xff is no text\n\
                       test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured\nlast";
        let mut passed_on = Vec::new();
        let sum = pass_on(&output[..], &mut passed_on).unwrap();
        assert_eq!(sum.to_string(), "7 passed, 0 failed, 1 skipped");
        assert_eq!(passed_on, output);
    }

    #[test]
    fn a_command_that_fails_without_a_result_is_one_failure() {
        let (sum, status) = run_tests("false", Path::new(".")).unwrap();
        assert_eq!(sum, totals(0, 1, 0));
        assert!(!status.success());
    }
}
