//! What one run has logged, read from JSON lines.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::trace::{self, RankTime};
use crate::command_error::CommandError;

/// A run: its values by name and step, and where its time went.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) label: String,
    pub(super) values: BTreeMap<String, BTreeMap<u64, f64>>,
    /// Seconds since 1970 of each step, where they are logged.
    pub(super) wall_times: BTreeMap<u64, f64>,
    pub(super) times: Vec<RankTime>,
    /// What was left out.
    pub(super) notes: Vec<String>,
}

/// Reads all runs; their labels differ.
///
/// # Errors
/// Names the file, and the line of what is no record of a step.
pub(super) fn read_all(paths: &[PathBuf]) -> Result<Vec<Run>, CommandError> {
    let mut runs = Vec::new();
    // A trace is of one training, whose files of values may be several: it is drawn once, with the first.
    let mut traced = BTreeSet::new();
    let mut times_of = |folder: &Path, run: &mut Run| -> Result<(), CommandError> {
        if traced.insert(fs::canonicalize(folder).unwrap_or_else(|_| folder.into())) {
            run.times = trace::read_folder(folder, &mut run.notes)?;
        }
        Ok(())
    };
    for path in paths {
        let is_folder = path.is_dir();
        let files = if is_folder { files_of(path)? } else { vec![path.clone()] };
        let several = files.len() > 1;
        for file in files {
            let mut run = read(&file)?;
            run.label = match (is_folder, several) {
                (true, false) => name_of(path),
                _ => label_of(&file),
            };
            let beside = file.parent().filter(|folder| !folder.as_os_str().is_empty());
            times_of(beside.unwrap_or(Path::new(".")), &mut run)?;
            if run.times.is_empty() && is_folder && !several {
                times_of(path, &mut run)?;
            }
            runs.push((file, run));
        }
    }
    let labels = Vec::from_iter(runs.iter().map(|(_, run)| run.label.clone()));
    let is_alone = |label: &String| labels.iter().filter(|other| *other == label).count() == 1;
    let runs = runs.into_iter().map(|(file, mut run)| {
        if !is_alone(&run.label) {
            run.label = file.display().to_string();
        }
        run
    });
    Ok(runs.collect())
}

/// The files of JSON lines in a folder, else in the folders in it.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>, CommandError> {
    let entries = |folder: &Path| -> Result<BTreeSet<PathBuf>, CommandError> {
        let failure = |error: std::io::Error| CommandError::failure(format!("{}: {error}", folder.display()));
        let entries = fs::read_dir(folder).map_err(failure)?;
        entries.map(|entry| Ok(entry.map_err(failure)?.path())).collect()
    };
    let is_lines = |path: &PathBuf| path.extension().is_some_and(|end| end == "jsonl") && path.is_file();
    let inside = entries(folder)?;
    let mut files = Vec::from_iter(inside.iter().filter(|path| is_lines(path)).cloned());
    if files.is_empty() {
        for inner in inside.iter().filter(|path| path.is_dir()) {
            files.extend(entries(inner)?.into_iter().filter(is_lines));
        }
    }
    if files.is_empty() {
        return Err(CommandError::failure(format!(
            "{}: no file NAME.jsonl in it, nor in a folder in it",
            folder.display()
        ))
        .hint("`finetune_llama --report_to jsonl` writes one, or give a file of JSON lines under any name"));
    }
    Ok(files)
}

fn name_of(path: &Path) -> String {
    let whole = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    whole
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

/// A file's name, or that of its folder, where all files have one name.
fn label_of(file: &Path) -> String {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    match file.parent() {
        Some(folder) if stem == "metrics" && !folder.as_os_str().is_empty() => name_of(folder),
        _ => stem.into_owned(),
    }
}

fn read(path: &Path) -> Result<Run, CommandError> {
    let failure = |reason: String| CommandError::failure(format!("{}{reason}", path.display()));
    let bytes = fs::read(path).map_err(|error| failure(format!(": {error}")))?;
    let mut run = Run::default();
    let mut lines = Vec::from_iter(bytes.split(|byte| *byte == b'\n').enumerate());
    let last = lines.pop();
    for (number, line) in lines {
        if !line.trim_ascii().is_empty() {
            let added = run.add(line);
            added.map_err(|reason| failure(format!(":{}: {reason}", number + 1)))?;
        }
    }
    // Only a line that does not end may be one that was being written; of a file's only line nothing is known.
    if let Some((number, line)) = last
        && !line.trim_ascii().is_empty()
        && let Err(reason) = run.add(line)
    {
        let place = format!(":{}: ", number + 1);
        if run.values.is_empty() {
            return Err(failure(place + &reason));
        }
        run.notes
            .push(format!("{}{place}the last line is cut off: left out", path.display()));
    }
    if run.values.is_empty() {
        return Err(failure(": no line in it has a number of a step".into()));
    }
    Ok(run)
}

impl Run {
    /// Takes the values of one line.
    fn add(&mut self, line: &[u8]) -> Result<(), String> {
        let expected = "expected a JSON object with `step` and numbers";
        let object = match serde_json::from_slice(line) {
            Ok(Value::Object(object)) => object,
            Ok(_) => return Err(format!("not an object; {expected}")),
            Err(error) => return Err(format!("not JSON ({error}); {expected}")),
        };
        let step = match object.get("step") {
            Some(step) => step
                .as_u64()
                .ok_or_else(|| format!("`step` is {step}, not a whole number; {expected}"))?,
            None if object.contains_key("config") => return Ok(()),
            None => return Err(format!("no `step`; {expected}")),
        };
        for (name, value) in &object {
            let value = match value {
                Value::Number(number) => number.as_f64(),
                Value::String(text) if ["NaN", "Infinity", "-Infinity"].contains(&text.as_str()) => text.parse().ok(),
                // How some write numbers that are none.
                Value::Null => Some(f64::NAN),
                _ => None,
            };
            let Some(value) = value else { continue };
            match name.as_str() {
                "step" => {}
                "wall_time" => put(&mut self.wall_times, step, value),
                name => put(self.values.entry(name.into()).or_default(), step, value),
            }
        }
        Ok(())
    }

    /// The value of a name in its last step, where it is finite.
    pub(super) fn last(&self, name: &str) -> Option<f64> {
        let (_, value) = self.values.get(name)?.last_key_value()?;
        Some(*value).filter(|value| value.is_finite())
    }
}

/// Takes a step's value; a run that goes on from an earlier step does the later ones again.
fn put(values: &mut BTreeMap<u64, f64>, step: u64, value: f64) {
    values.split_off(&step);
    values.insert(step, value);
}
