//! The layers: each crate may use only those before it.
//!
//! The order is what lets a user depend on one crate alone, and what keeps "collectives knows no model" true.

use toml::{Table, Value};

use super::finding::Finding;
use super::repository::{Repository, TextFile};

/// The crates in `crates/`, lowest layer first.
const ORDER: [&str; 5] = [
    "sconce-collectives",
    "sconce-zero",
    "sconce-fsdp",
    "sconce-core",
    "sconce-cli",
];
const EXAMPLES: &str = "sconce-examples";
/// Builds within seconds, and where the crates do not compile.
const AUTOMATION: &str = "xtask";
const DEPENDENCY_TABLES: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Checks that dependencies between the workspace's packages point to lower layers only.
pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    repository.package_manifests().flat_map(check_manifest).collect()
}

fn check_manifest(file: &TextFile) -> Vec<Finding> {
    let Ok(manifest) = file.text.parse::<Table>() else {
        return vec![Finding::of_file(&file.path, "not a manifest: cargo says why")];
    };
    let package = manifest.get("package").and_then(|package| package.get("name"));
    let package = package.and_then(Value::as_str).unwrap_or_default();
    let Some(layer) = layer(package) else {
        let message = format!("package {package:?} has no layer: give it one in xtask/src/tidy/crate_order.rs");
        return vec![Finding::of_file(&file.path, message)];
    };
    dependencies(&manifest)
        .into_iter()
        .filter_map(|dependency| {
            let reason = if package == AUTOMATION {
                let foreign = self::layer(&dependency).is_none() && !dependency.starts_with("candle");
                (!foreign).then(|| "automation must not need what it checks".to_owned())
            } else {
                let above = self::layer(&dependency).is_some_and(|of| of >= layer);
                above.then(|| format!("the order is {}, {EXAMPLES}", ORDER.join(", ")))
            };
            reason.map(|reason| Finding::of_file(&file.path, format!("{package} must not use {dependency}: {reason}")))
        })
        .collect()
}

/// The package's place in the order; `None` for packages from elsewhere.
fn layer(package: &str) -> Option<usize> {
    match package {
        EXAMPLES => Some(ORDER.len()),
        AUTOMATION => Some(ORDER.len() + 1),
        _ => ORDER.iter().position(|name| *name == package),
    }
}

/// The names of all packages that a manifest depends on, for whatever target and purpose.
fn dependencies(manifest: &Table) -> Vec<String> {
    let of_targets = manifest.get("target").and_then(Value::as_table);
    let of_targets = of_targets
        .into_iter()
        .flat_map(Table::values)
        .filter_map(Value::as_table);
    let tables = std::iter::once(manifest).chain(of_targets);
    let tables = tables.flat_map(|table| DEPENDENCY_TABLES.iter().filter_map(|name| table.get(*name)?.as_table()));
    let package = |(key, value): (&String, &Value)| {
        let renamed = value.get("package").and_then(Value::as_str);
        renamed.unwrap_or(key).to_owned()
    };
    tables.flat_map(|table| table.iter().map(package)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::finding::texts;
    use super::*;

    fn findings(package: &str, dependencies: &str) -> Vec<String> {
        let manifest = format!("[package]\nname = \"{package}\"\n{dependencies}");
        texts(&check(&Repository::of(&[("crates/some/Cargo.toml", &manifest)])))
    }

    #[test]
    fn lower_layers_and_foreign_packages_may_be_used() {
        let dependencies = "[dependencies]\nsconce-zero.workspace = true\nserde = \"1\"\n";
        assert_eq!(findings("sconce-core", dependencies), [""; 0]);
        assert_eq!(findings(EXAMPLES, "[dependencies]\nsconce-cli = {}\n"), [""; 0]);
    }

    #[test]
    fn an_upward_arrow_is_found_in_every_kind_of_dependency() {
        for dependencies in [
            "[dependencies]\nsconce-core.workspace = true",
            "[dev-dependencies]\nsconce-core = { path = \"../core\" }",
            "[build-dependencies]\nsconce-core = \"0.1\"",
            "[target.'cfg(unix)'.dependencies]\nsconce-core = \"0.1\"",
            "[dependencies]\ncore = { package = \"sconce-core\", version = \"0.1\" }",
        ] {
            let found = findings("sconce-zero", dependencies);
            assert_eq!(found.len(), 1, "{dependencies}");
            assert!(found[0].contains("sconce-zero must not use sconce-core"), "{found:?}");
        }
    }

    #[test]
    fn nothing_may_use_examples_and_automation_uses_no_candle() {
        assert_eq!(
            findings("sconce-cli", "[dependencies]\nsconce-examples = {}\n").len(),
            1
        );
        assert_eq!(findings(AUTOMATION, "[dependencies]\ncandle-core = {}\n").len(), 1);
        assert_eq!(
            findings(AUTOMATION, "[dependencies]\nsconce-zero = {}\nclap = \"4\"\n").len(),
            1
        );
    }

    #[test]
    fn a_package_without_a_layer_is_found() {
        assert!(findings("sconce-other", "")[0].contains("has no layer"));
    }
}
