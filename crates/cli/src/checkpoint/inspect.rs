//! `sconce checkpoint inspect`: what a checkpoint holds.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use sconce_core::Checkpoint;
use sconce_core::checkpoint::{SavedModel, SavedTensor};
use serde_json::json;

use super::open;
use super::table::table;
use crate::command_error::CommandError;
use crate::terminal::{print, shown};

/// Runs `sconce checkpoint inspect`.
pub(super) fn run(folder: &Path, json: bool) -> Result<ExitCode, CommandError> {
    let checkpoint = open(folder)?;
    print(&if json {
        as_json(&checkpoint)
    } else {
        as_text(&checkpoint)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn as_json(checkpoint: &Checkpoint) -> String {
    let object = json!({
        "folder": checkpoint.folder(),
        "skipped": checkpoint.skipped(),
        "world_size": checkpoint.world_size(),
        "models": checkpoint.models(),
        "objects": checkpoint.objects(),
        "settings": checkpoint.settings(),
    });
    format!("{object:#}\n")
}

fn as_text(checkpoint: &Checkpoint) -> String {
    let mut text = format!("checkpoint: {}\n", shown(&checkpoint.folder().display().to_string()));
    // Writing to a string cannot fail.
    let _ = writeln!(text, "saved by: {} ranks", checkpoint.world_size());
    let objects = Vec::from_iter(checkpoint.objects().keys().map(|name| shown(name)));
    let _ = writeln!(
        text,
        "objects: {}",
        if objects.is_empty() {
            "none".into()
        } else {
            objects.join(", ")
        }
    );
    for (number, model) in checkpoint.models().iter().enumerate() {
        text += &model_text(number, model);
    }
    text
}

fn model_text(number: usize, model: &SavedModel) -> String {
    let elements: u64 = model.parameters.iter().map(elements).fold(0, u64::saturating_add);
    let arrays = || model.parameters.iter().flat_map(|parameter| &parameter.arrays);
    let bytes = arrays().map(|array| array.bytes).fold(0, u64::saturating_add);
    let rule = model
        .rule
        .as_deref()
        .map_or_else(|| "no optimizer state".to_owned(), shown);
    let mut text = format!(
        "\nmodel {number}: {} parameters, {elements} elements, {bytes} bytes with optimizer state; {rule}, at step {}",
        model.parameters.len(),
        model.steps,
    );
    if let Some(scale) = model.loss_scale {
        let _ = write!(text, ", loss scale {scale}");
    }
    let rows = Vec::from_iter(model.parameters.iter().map(row));
    text + "\n" + &table(["NAME", "SHAPE", "DTYPE", "BYTES", "ARRAYS", "FILES"], &rows)
}

fn elements(parameter: &SavedTensor) -> u64 {
    parameter.shape.iter().product::<usize>() as u64
}

/// One parameter: the dtype of its values, and the bytes of all its arrays.
fn row(parameter: &SavedTensor) -> [String; 6] {
    let arrays = &parameter.arrays;
    let mut files = Vec::from_iter(arrays.iter().flat_map(|array| array.files.iter().map(String::as_str)));
    files.sort_unstable();
    files.dedup();
    let names = Vec::from_iter(arrays.iter().map(|array| array.name.as_str()));
    [
        parameter.name.clone(),
        format!("{:?}", parameter.shape),
        parameter
            .value()
            .map_or_else(|| "-".to_owned(), |value| value.dtype.clone()),
        arrays
            .iter()
            .map(|array| array.bytes)
            .fold(0, u64::saturating_add)
            .to_string(),
        names.join(","),
        match &files[..] {
            [] => "-".to_owned(),
            [first] => (*first).to_owned(),
            [first, .., last] => format!("{first} to {last} ({})", files.len()),
        },
    ]
}
