//! What a user sees of a bug in `sconce` itself: one line, where to report it, and an exit code of its own.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe, Location};
use std::process::ExitCode;

use crate::terminal::{shown, tell_in_any_case};

/// The exit code after a panic; that of Rust programs.
const PANICKED: u8 = 101;

/// Does `work` and returns its exit code. A panic in it, on whatever thread, becomes one line on stderr.
pub(crate) fn reporting_panics(work: impl FnOnce() -> ExitCode) -> ExitCode {
    panic::set_hook(Box::new(|panicked| {
        let backtrace = std::backtrace::Backtrace::capture();
        let backtrace = match backtrace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("{backtrace}\n"),
            _ => String::new(),
        };
        tell_in_any_case(&format!(
            "{}\n{backtrace}",
            line(panicked.payload(), panicked.location())
        ));
    }));
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or(ExitCode::from(PANICKED))
}

fn line(payload: &dyn Any, location: Option<&Location<'_>>) -> String {
    let message = payload.downcast_ref::<&str>().copied();
    let message = message.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let place = location.map(|place| format!(" ({}:{})", place.file(), place.line()));
    format!(
        "error: a bug in sconce {}: {}{}. Please report this line and the command at {}/issues (RUST_BACKTRACE=1 tells more)",
        env!("CARGO_PKG_VERSION"),
        shown(message.unwrap_or("a panic without a message")).replace('\n', " "),
        place.unwrap_or_default(),
        env!("CARGO_PKG_REPOSITORY"),
    )
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Set in the process that panics.
    const PANICS: &str = "SCONCE_TEST_PANICS";

    #[test]
    fn a_panic_is_one_line_that_says_where_to_report_it() {
        if std::env::var_os(PANICS).is_some() {
            let code = reporting_panics(|| {
                let other = std::thread::spawn(|| panic!("two\nlines"));
                let _ = other.join();
                ExitCode::SUCCESS
            });
            assert_eq!(
                code,
                ExitCode::SUCCESS,
                "what another thread panics of is for its owner to judge"
            );
            let code = reporting_panics(|| panic!("in main"));
            assert_eq!(code, ExitCode::from(PANICKED));
            return;
        }
        let name = "panic_report::tests::a_panic_is_one_line_that_says_where_to_report_it";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(PANICS, "1")
            .env("RUST_BACKTRACE", "0")
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        let lines = Vec::from_iter(stderr.lines().filter(|line| line.contains("bug")));
        assert_eq!(lines.len(), 2, "{stderr}");
        assert!(
            lines[0].starts_with("error: a bug in sconce ") && lines[0].contains(": two lines ("),
            "{stderr}"
        );
        assert!(
            lines[1].contains("in main (") && lines[1].contains("/issues"),
            "{stderr}"
        );
        assert!(!stderr.contains("thread '"), "{stderr}");
    }
}
