//! Nothing in the repository may depend on the machine that it was written on.

use toml::Table;

use super::finding::Finding;
use super::repository::{Repository, TextFile};
use super::rust_code::{code_only, test_lines};

/// Starts of paths that exist on one machine only, written so that this file does not hold them.
const MACHINE_PATHS: [&str; 4] = [
    concat!("/", "work/"),
    concat!("/", "root/"),
    concat!("/", "home/"),
    TEMPORARY,
];
/// Tests may make up paths that are never touched.
const TEMPORARY: &str = concat!("/", "tmp/");
/// The one place that packages come from.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";
const CARGO_SETTINGS: &str = ".cargo/config.toml";

/// Checks for absolute paths of some machine.
pub(super) fn check_paths(repository: &Repository) -> Vec<Finding> {
    repository.files().flat_map(check_paths_of).collect()
}

fn check_paths_of(file: &TextFile) -> Vec<Finding> {
    let tests = if file.path.ends_with(".rs") {
        test_lines(&code_only(&file.text))
    } else {
        Vec::new()
    };
    let mut findings = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        let in_test = file.is_test() || tests.iter().any(|range| range.contains(&index));
        let allowed = |path: &str| path == TEMPORARY && in_test;
        let found = MACHINE_PATHS
            .iter()
            .find(|path| begins_a_path(line, path) && !allowed(path));
        if let Some(path) = found {
            let message = format!("{path} is a place on one machine: ask the system, or make the path relative");
            findings.push(Finding::of_line(&file.path, index, message));
        }
    }
    findings
}

/// Whether `path` occurs in `line` as the beginning of a path, not in its middle.
fn begins_a_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|character| character.is_alphanumeric() || "._-}~/".contains(character))
    })
}

/// Checks that packages come from crates.io, by whatever mirror this machine may reach it.
pub(super) fn check_registries(repository: &Repository) -> Vec<Finding> {
    let mut findings = Vec::new();
    let lock = repository.files().filter(|file| file.name() == "Cargo.lock");
    for file in lock {
        for (index, line) in file.text.lines().enumerate() {
            if line.starts_with("source = ") && !line.contains(REGISTRY) {
                let message = "a package from elsewhere than crates.io: publish it there, or do without";
                findings.push(Finding::of_line(&file.path, index, message));
            }
        }
    }
    if let Some(file) = repository.file(CARGO_SETTINGS) {
        let settings = file.text.parse::<Table>().unwrap_or_default();
        for section in settings.keys().filter(|key| *key != "alias") {
            let message = format!("[{section}]: settings of one machine belong into its own cargo configuration");
            findings.push(Finding::of_file(&file.path, message));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::finding::texts;
    use super::*;

    #[test]
    fn paths_of_one_machine_are_found() {
        let found = |path: &str, text: &str| check_paths(&Repository::of(&[(path, text)])).len();
        for start in MACHINE_PATHS {
            assert_eq!(found("README.md", &format!("see `{start}a`\n")), 1, "{start}");
            assert_eq!(found("README.md", &format!("see target{start}a\n")), 0, "{start}");
        }
    }

    #[test]
    fn tests_may_make_up_temporary_paths() {
        let text = format!("const A: &str = \"{TEMPORARY}a\";\n#[cfg(test)]\nconst B: &str = \"{TEMPORARY}b\";\n");
        let found = |path: &str| texts(&check_paths(&Repository::of(&[(path, &text)])));
        assert_eq!(found("crates/zero/tests/a.rs"), [""; 0]);
        let in_source = found("crates/zero/src/a.rs");
        assert!(
            in_source.len() == 1 && in_source[0].starts_with("crates/zero/src/a.rs:1: "),
            "{in_source:?}"
        );
    }

    #[test]
    fn packages_come_from_crates_io_and_settings_are_aliases() {
        let lock = format!("source = \"{REGISTRY}\"\nsource = \"git+https://example.org/a\"\n");
        let settings = "[alias]\na = \"b\"\n[source.crates-io]\nreplace-with = \"c\"\n";
        let repository = Repository::of(&[("Cargo.lock", &lock), (CARGO_SETTINGS, settings)]);
        let found = texts(&check_registries(&repository));
        assert_eq!(found.len(), 2);
        assert!(
            found[0].starts_with("Cargo.lock:2: ") && found[1].contains("[source]"),
            "{found:?}"
        );
    }
}
