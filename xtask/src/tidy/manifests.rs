//! What every manifest must say, and must not.

use toml::{Table, Value};

use super::finding::Finding;
use super::repository::{Repository, TextFile};

/// Fields that all packages share, so that the root decides them.
const INHERITED: [&str; 5] = ["version", "edition", "rust-version", "license", "repository"];

/// Words of descriptions that somebody meant to write later.
const PLACEHOLDERS: [&str; 4] = ["todo", "tbd", "placeholder", "description"];

/// Checks inherited fields, lints, descriptions, and that packages are named after their folders.
pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    let check = |file: &TextFile| {
        let Ok(manifest) = file.text.parse::<Table>() else {
            return Vec::new(); // told by `crate_order`
        };
        let messages = check_manifest(&file.path, &manifest).into_iter();
        messages.map(|message| Finding::of_file(&file.path, message)).collect()
    };
    repository.package_manifests().flat_map(check).collect()
}

fn check_manifest(path: &str, manifest: &Table) -> Vec<String> {
    let mut messages = Vec::new();
    let field = |name: &str| manifest.get("package").and_then(|package| package.get(name));
    for name in INHERITED {
        if !is_inherited(field(name)) {
            messages.push(format!(
                "package.{name} is not inherited: write `{name}.workspace = true`"
            ));
        }
    }
    if !is_inherited(manifest.get("lints")) {
        messages.push("lints are not inherited: write `[lints]` with `workspace = true`".to_owned());
    }

    let description = field("description").and_then(Value::as_str).unwrap_or_default().trim();
    let lower = description.to_lowercase();
    let mut words = lower.split(|character: char| !character.is_alphanumeric());
    if description.len() < 10 || words.any(|word| PLACEHOLDERS.contains(&word)) {
        messages.push(format!(
            "package.description is {description:?}: say what the package is for"
        ));
    }

    let package = field("name").and_then(Value::as_str).unwrap_or_default();
    let folder = path.split('/').rev().nth(1).unwrap_or_default();
    if package.strip_prefix("sconce-").unwrap_or(package) != folder {
        messages.push(format!(
            "package {package:?} lies in folder {folder:?}: name both alike"
        ));
    }
    messages
}

fn is_inherited(value: Option<&Value>) -> bool {
    value.and_then(|value| value.get("workspace")).and_then(Value::as_bool) == Some(true)
}

#[cfg(test)]
mod tests {
    use super::super::finding::texts;
    use super::*;

    const GOOD: &str = "\
[package]
name = \"sconce-zero\"
description = \"Partitioned state for candle\"
version.workspace = true
edition.workspace = true
rust-version.workspace = true
license.workspace = true
repository.workspace = true

[lints]
workspace = true
";

    fn findings(path: &str, manifest: &str) -> Vec<String> {
        texts(&check(&Repository::of(&[(path, manifest)])))
    }

    #[test]
    fn a_manifest_that_inherits_and_describes_is_good() {
        assert_eq!(findings("crates/zero/Cargo.toml", GOOD), [""; 0]);
    }

    #[test]
    fn every_field_must_be_inherited() {
        for line in GOOD.lines().filter(|line| line.contains("workspace = true")) {
            let found = findings("crates/zero/Cargo.toml", &GOOD.replace(&format!("\n{line}\n"), "\n"));
            assert!(
                found.iter().any(|text| text.contains("not inherited")),
                "{line}: {found:?}"
            );
        }
        let own = GOOD.replace("license.workspace = true", "license = \"MIT\"");
        assert!(findings("crates/zero/Cargo.toml", &own)[0].contains("package.license"));
    }

    #[test]
    fn descriptions_describe() {
        for description in ["", "todo: say what this is", "A package description"] {
            let manifest = GOOD.replace("Partitioned state for candle", description);
            let found = findings("crates/zero/Cargo.toml", &manifest);
            assert!(
                found.len() == 1 && found[0].contains("package.description"),
                "{found:?}"
            );
        }
    }

    #[test]
    fn packages_are_named_after_their_folders() {
        assert!(findings("crates/zeros/Cargo.toml", GOOD)[0].contains("name both alike"));
    }
}
