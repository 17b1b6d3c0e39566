//! What the README says must be what the code does.

use super::finding::Finding;
use super::repository::{Repository, TextFile};
use crate::ci::TEST_COMMAND;

const README: &str = "README.md";

/// Checks that the README's test command is the one that CI runs.
pub(super) fn check_test_command(repository: &Repository) -> Vec<Finding> {
    let is_named = |file: &TextFile| file.text.lines().any(|line| line.trim() == TEST_COMMAND);
    if repository.file(README).is_some_and(is_named) {
        Vec::new()
    } else {
        let message = format!("has no line `{TEST_COMMAND}`, which is what `cargo xtask ci` runs");
        vec![Finding::of_file(README, message)]
    }
}

/// Checks that the README has every environment variable of Sconce's own, and of those it shares with Accelerate.
pub(super) fn check_variables(repository: &Repository) -> Vec<Finding> {
    let readme = repository.file(README).map_or("", |file| &file.text);
    let modules = repository
        .files()
        .filter(|file| file.path.ends_with("src/environment.rs"));
    let mut findings = Vec::new();
    for file in modules {
        for (index, line) in file.text.lines().enumerate() {
            if let Some(name) = variable(line)
                && !readme.contains(&format!("`{name}`"))
            {
                let message = format!("{name} is missing in the README's table of environment variables");
                findings.push(Finding::of_line(&file.path, index, message));
            }
        }
    }
    findings
}

/// The variable that a line like `pub const NAME: &str = "NAME";` declares.
fn variable(line: &str) -> Option<&str> {
    let (name, value) = line.strip_prefix("pub const ")?.split_once(": &str = ")?;
    let is_own = ["SCONCE_", "ACCELERATE_", "FSDP_"]
        .iter()
        .any(|start| name.starts_with(start));
    (is_own && value.starts_with('"')).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::super::finding::texts;
    use super::*;

    #[test]
    fn the_readme_has_the_test_command_on_a_line_of_its_own() {
        let found = |text: &str| check_test_command(&Repository::of(&[(README, text)])).len();
        assert_eq!(found(&format!("```\n{TEST_COMMAND}\n```\n")), 0);
        assert_eq!(found(&format!("Run {TEST_COMMAND} often.\n")), 1);
        assert_eq!(check_test_command(&Repository::of(&[])).len(), 1);
    }

    #[test]
    fn variables_without_a_word_in_the_readme_are_found() {
        let module = "pub const SCONCE_A: &str = \"SCONCE_A\";\npub const SCONCE_B: &str = \"SCONCE_B\";\n\
                      pub const OTHER: &str = \"OTHER\";\n";
        let files = [
            ("crates/core/src/environment.rs", module),
            (README, "| `SCONCE_A` | what |\n"),
        ];
        let found = texts(&check_variables(&Repository::of(&files)));
        assert!(
            found.len() == 1 && found[0].contains("environment.rs:2: error: SCONCE_B"),
            "{found:?}"
        );
    }
}
