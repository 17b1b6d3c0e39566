//! Builds an example or binary with cargo, once, and learns from cargo where the executable lies.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::arguments::{CargoTarget, CargoTargetKind};
use crate::command_error::CommandError;

/// Builds `target` and returns the path of its executable. Cargo's progress and diagnostics go to stderr.
///
/// # Errors
/// When cargo cannot be started or the build fails (cargo has then said why on stderr), or when several packages have
/// a target of that name.
pub(super) fn build(target: &CargoTarget) -> Result<PathBuf, CommandError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(&cargo);
    command
        .args(cargo_arguments(target))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let cannot_run = |reason| {
        CommandError::failure(format!("cannot run {}: {reason}", cargo.display()))
            .hint("building needs cargo in PATH; a program that is built already is started by its path")
    };
    let mut child = command.spawn().map_err(cannot_run)?;
    let messages = child.stdout.take().expect("cargo's stdout was asked to be a pipe");

    let mut executables = Vec::new();
    // What is not text in cargo's output comes from build tools that write past it, and is no message.
    for line in BufReader::new(messages).split(b'\n').map_while(Result::ok) {
        executables.extend(executable_of(&line, target));
    }
    let status = child.wait().map_err(cannot_run)?;

    let CargoTarget { kind, name, .. } = target;
    if !status.success() {
        return Err(CommandError::failure(format!(
            "cargo could not build {kind} {name} (see its messages above)"
        )));
    }
    match executables.as_slice() {
        [executable] => Ok(executable.clone()),
        [] => Err(CommandError::failure(format!(
            "cargo built {kind} {name} but named no executable for it"
        ))),
        several => Err(
            CommandError::usage(format!("{} packages have a {kind} {name}", several.len()))
                .hint("choose one with --package PKG"),
        ),
    }
}

fn cargo_arguments(target: &CargoTarget) -> Vec<String> {
    let mut arguments = ["build", "--message-format=json-render-diagnostics", "--profile"]
        .map(String::from)
        .to_vec();
    arguments.push(target.profile.clone());
    arguments.push(format!("--{}", target.kind));
    arguments.push(target.name.clone());
    if let Some(package) = &target.package {
        arguments.extend(["--package".to_owned(), package.clone()]);
    }
    for features in &target.features {
        arguments.extend(["--features".to_owned(), features.clone()]);
    }
    arguments
}

/// The executable that one line of cargo's JSON messages names, if it is the artifact of `target`.
fn executable_of(line: &[u8], target: &CargoTarget) -> Option<PathBuf> {
    let kind = match target.kind {
        CargoTargetKind::Example => "example",
        CargoTargetKind::Bin => "bin",
    };
    let message: Value = serde_json::from_slice(line).ok()?;
    let is_target = message["reason"] == "compiler-artifact"
        && message["target"]["name"] == target.name.as_str()
        && message["target"]["kind"].as_array()?.iter().any(|of| of == kind);
    if is_target {
        message["executable"].as_str().map(PathBuf::from)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> CargoTarget {
        CargoTarget {
            kind: CargoTargetKind::Example,
            name: "llama".to_owned(),
            package: Some("models".to_owned()),
            features: vec!["cuda".to_owned(), "nccl,shm".to_owned()],
            profile: "release".to_owned(),
        }
    }

    #[test]
    fn cargo_is_told_target_package_features_and_profile() {
        assert_eq!(
            cargo_arguments(&target()).join(" "),
            "build --message-format=json-render-diagnostics --profile release --example llama --package models \
             --features cuda --features nccl,shm"
        );
    }

    #[test]
    fn only_the_artifact_of_the_target_names_the_executable() {
        let artifact = |kind: &str, name: &str| {
            let message = serde_json::json!({
                "reason": "compiler-artifact",
                "target": {"kind": [kind], "name": name},
                "executable": "/target/release/examples/llama",
            });
            executable_of(message.to_string().as_bytes(), &target())
        };
        assert_eq!(
            artifact("example", "llama"),
            Some("/target/release/examples/llama".into())
        );
        assert_eq!(artifact("bin", "llama"), None);
        assert_eq!(artifact("example", "other"), None);
        assert_eq!(executable_of(b"not a message", &target()), None);
        assert_eq!(
            executable_of(br#"{"reason":"build-finished","success":true}"#, &target()),
            None
        );
    }
}
