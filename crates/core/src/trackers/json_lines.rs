//! One JSON object a line, which any program can read while the run goes on.

use super::append_file::AppendFile;
use super::{Moment, Run, Tracker, TrackerError};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Writes `PROJECT/metrics.jsonl`: for every step a line `{"step": .., "wall_time": .., "NAME": ..}`, with the wall time in
/// seconds since 1970; before them a line with `project` and `config`.
///
/// Values that are not finite, for which JSON has no numbers, are the texts `"NaN"`, `"Infinity"` and `"-Infinity"`. A run
/// that goes on in the same folder adds to the file.
#[derive(Debug)]
pub struct JsonLines {
    folder: PathBuf,
    file: Option<AppendFile>,
}

/// Keys that are not values' names.
const OWN_KEYS: [&str; 5] = ["step", "wall_time", "project", "config", "text"];

impl JsonLines {
    /// Makes a tracker that writes below `folder`.
    pub fn boxed(folder: impl Into<PathBuf>) -> Box<dyn Tracker> {
        Box::new(Self {
            folder: folder.into(),
            file: None,
        })
    }

    fn write(&mut self, line: &str) -> Result<(), TrackerError> {
        self.file.as_mut().map_or(Ok(()), |file| file.write(line))
    }
}

impl Tracker for JsonLines {
    fn name(&self) -> &str {
        "jsonl"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        let path = self.folder.join(run.project()).join("metrics.jsonl");
        self.file = Some(AppendFile::open(path)?);
        let wall_time = Moment::now(0).wall_time;
        let line = json!({"project": run.project(), "config": run.config(), "wall_time": wall_time});
        self.write(&format!("{line}\n"))
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        let mut line = beginning(at);
        for (name, value) in values {
            if OWN_KEYS.contains(name) {
                return Err(TrackerError::Name {
                    name: (*name).into(),
                    reason: "it is a key of every line's own; choose another",
                });
            }
            line += &format!(",{}:{}", Value::from(*name), number(*value));
        }
        self.write(&(line + "}\n"))
    }

    fn log_text(&mut self, name: &str, text: &str, at: Moment) -> Result<(), TrackerError> {
        let text = json!({ name: text });
        self.write(&format!("{},\"text\":{text}}}\n", beginning(at)))
    }
}

fn beginning(at: Moment) -> String {
    format!("{{\"step\":{},\"wall_time\":{}", at.step, number(at.wall_time))
}

/// Returns a number, or the text for one that JSON does not have.
pub(super) fn number(value: f64) -> Value {
    match value {
        finite if finite.is_finite() => finite.into(),
        none if none.is_nan() => "NaN".into(),
        above if above > 0.0 => "Infinity".into(),
        _ => "-Infinity".into(),
    }
}
