//! `cargo xtask tidy`: the rules of the house that no other tool checks.
//!
//! Each rule is a function from the [`Repository`] to its [`Finding`]s, in the module that is named after what it
//! reads. All rules always run, so that one run tells everything.

mod book;
mod crate_order;
mod finding;
pub(crate) mod links;
mod manifests;
mod places;
mod readme;
mod repository;
mod rust_code;
mod sources;
mod text;
mod unsafe_code;

use std::path::Path;

use anyhow::{Result, bail};
use xshell::Shell;

use finding::{Finding, Severity};
use repository::Repository;

const RULES: &[fn(&Repository) -> Vec<Finding>] = &[
    crate_order::check,
    manifests::check,
    sources::check_length,
    sources::check_module_docs,
    sources::check_names,
    sources::check_calls,
    unsafe_code::check,
    text::check_blanks,
    text::check_words,
    places::check_paths,
    places::check_registries,
    readme::check_test_command,
    readme::check_variables,
    links::check,
    book::check,
];

/// Checks every rule on all files that git tracks or would track.
///
/// # Errors
/// When a rule is broken (the findings are on stdout), or the files cannot be read.
pub(crate) fn run(shell: &Shell, root: &Path) -> Result<()> {
    let repository = Repository::read(shell, root)?;
    let mut findings: Vec<_> = RULES.iter().flat_map(|rule| rule(&repository)).collect();
    findings.sort();
    for finding in &findings {
        println!("{finding}");
    }
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error);
    match errors.count() {
        0 => Ok(()),
        count => bail!("tidy: {count} rule(s) broken"),
    }
}
