//! How Rust files look from outside: how long, how named, how introduced; and what library code must not call.

use super::finding::Finding;
use super::repository::{Repository, TextFile};
use super::rust_code::{code_only, test_lines};

/// A file of more lines is split by idea.
const MOST_LINES: usize = 800;
/// A file of more lines should be.
const MANY_LINES: usize = 600;

/// Names that say nothing about what a file or folder holds.
const EMPTY_NAMES: [&str; 12] = [
    "util",
    "utils",
    "utilities",
    "common",
    "base",
    "helper",
    "helpers",
    "manager",
    "managers",
    "misc",
    "shared",
    "stuff",
];

/// Checks that files are short enough to be read.
pub(super) fn check_length(repository: &Repository) -> Vec<Finding> {
    let check = |file: &TextFile| match file.text.lines().count() {
        lines if lines > MOST_LINES => {
            let message = format!("{lines} lines, at most {MOST_LINES} are allowed: split the file by idea");
            Some(Finding::of_file(&file.path, message))
        }
        lines if lines > MANY_LINES => {
            let message = format!("{lines} lines: split the file by idea before it has {MOST_LINES}");
            Some(Finding::of_file(&file.path, message).into_warning())
        }
        _ => None,
    };
    repository.rust_files().filter_map(check).collect()
}

/// Checks that every file begins with why it exists.
pub(super) fn check_module_docs(repository: &Repository) -> Vec<Finding> {
    let undocumented = repository.rust_files().filter(|file| !file.text.starts_with("//! "));
    undocumented
        .map(|file| Finding::of_file(&file.path, "begins without `//!`: say why the module exists"))
        .collect()
}

/// Checks that names say what files hold.
pub(super) fn check_names(repository: &Repository) -> Vec<Finding> {
    let check = |file: &TextFile| {
        let mut words = file.path.trim_end_matches(".rs").split(['/', '_', '-']);
        let empty = words.find(|word| EMPTY_NAMES.contains(word))?;
        let message = format!("`{empty}` in a name says nothing: name the file after what it holds");
        Some(Finding::of_file(&file.path, message))
    };
    repository.rust_files().filter_map(check).collect()
}

/// Checks that library code returns its errors, and leaves the process and its environment alone.
pub(super) fn check_calls(repository: &Repository) -> Vec<Finding> {
    let sources = repository.library_sources().filter(|file| !file.is_test());
    sources.flat_map(check_calls_of).collect()
}

fn check_calls_of(file: &TextFile) -> Vec<Finding> {
    let code = code_only(&file.text);
    let tests = test_lines(&code);
    let mut findings = Vec::new();
    for (index, line) in code.lines().enumerate() {
        if tests.iter().any(|range| range.contains(&index)) {
            continue;
        }
        let unfit = UNFIT_CALLS.iter().filter(|call| !call.is_allowed_in(file));
        for call in unfit.filter(|call| line.contains(call.text)) {
            let message = format!("`{}` in library code: {}", call.text, call.instead);
            findings.push(Finding::of_line(&file.path, index, message));
        }
    }
    findings
}

/// A call that library code must not make.
struct UnfitCall {
    text: &'static str,
    /// Starts or ends of the paths of files where it may stand.
    allowed_in: &'static [&'static str],
    instead: &'static str,
}

const UNFIT_CALLS: [UnfitCall; 3] = [
    UnfitCall {
        text: ".unwrap()",
        allowed_in: &[],
        instead: "return the error, or `expect` the invariant that excludes it",
    },
    UnfitCall {
        text: "env::var",
        allowed_in: &["crates/cli/", "/src/environment.rs"],
        instead: "document the variable in the crate's `environment` module and read it through that",
    },
    UnfitCall {
        text: "process::exit(",
        allowed_in: &["crates/cli/"],
        instead: "the program decides when it ends: return the error",
    },
];

impl UnfitCall {
    fn is_allowed_in(&self, file: &TextFile) -> bool {
        let mut places = self.allowed_in.iter();
        places.any(|place| file.path.starts_with(place) || file.path.ends_with(place))
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::{Severity, texts};
    use super::*;

    #[test]
    fn files_over_800_lines_fail_and_over_600_warn() {
        let severities = |lines: usize| {
            let text = "x\n".repeat(lines);
            let found = check_length(&Repository::of(&[("crates/zero/src/a.rs", &text)]));
            found.into_iter().map(|finding| finding.severity).collect::<Vec<_>>()
        };
        assert_eq!(severities(600), []);
        assert_eq!(severities(601), [Severity::Warning]);
        assert_eq!(severities(800), [Severity::Warning]);
        assert_eq!(severities(801), [Severity::Error]);
    }

    #[test]
    fn files_begin_with_module_docs() {
        let repository = Repository::of(&[
            ("crates/zero/src/good.rs", "//! Why.\n"),
            ("crates/zero/src/late.rs", "use a;\n//! Why.\n"),
            ("crates/zero/src/empty.rs", "//!\n"),
        ]);
        let found = texts(&check_module_docs(&repository));
        assert_eq!(found.len(), 2);
        assert!(found[0].starts_with("crates/zero/src/late.rs: ") && found[1].contains("empty.rs"));
    }

    #[test]
    fn names_that_say_nothing_are_found_in_files_and_folders() {
        let paths = [
            "crates/a/src/utils.rs",
            "crates/a/src/common/shard.rs",
            "xtask/src/file_helpers.rs",
        ];
        let files = paths.map(|path| (path, ""));
        assert_eq!(check_names(&Repository::of(&files)).len(), 3);
        let good = [("crates/a/src/database.rs", ""), ("crates/a/src/commonly.rs", "")];
        assert_eq!(check_names(&Repository::of(&good)), []);
    }

    #[test]
    fn unwraps_are_found_in_library_code_only() {
        let source = "//! a.unwrap()\nfn f() {\n    b.unwrap();\n}\n#[cfg(test)]\nmod tests {\n    c.unwrap();\n}\n";
        let files = [
            ("crates/zero/src/a.rs", source),
            ("crates/zero/tests/a.rs", source),
            ("xtask/src/a.rs", source),
        ];
        let found = texts(&check_calls(&Repository::of(&files)));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("crates/zero/src/a.rs:3: error: "), "{found:?}");
    }

    #[test]
    fn libraries_leave_process_and_environment_alone() {
        let source = "fn f() {\n    std::env::var_os(name);\n    std::process::exit(1);\n}\n";
        let count = |path: &str| check_calls(&Repository::of(&[(path, source)])).len();
        assert_eq!(count("crates/core/src/a.rs"), 2);
        assert_eq!(count("crates/core/src/environment.rs"), 1);
        assert_eq!(count("crates/cli/src/a.rs"), 0);
    }
}
