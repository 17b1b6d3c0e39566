//! What a tracker is, and what it is told.

use super::TrackerError;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Debug;
use std::time::{SystemTime, UNIX_EPOCH};

/// Something that keeps a run's numbers. All calls come from the main process, one at a time.
///
/// What a tracker has no place for, it ignores: only scalars are asked of all.
pub trait Tracker: Send + Debug {
    /// Returns the name by which messages call it.
    fn name(&self) -> &str;

    /// Begins a run; comes once, before all else.
    ///
    /// # Errors
    /// When the tracker cannot write where it is to.
    fn start(&mut self, run: &Run) -> Result<(), TrackerError>;

    /// Takes the values of one step. What is returned from can be read by others, also after a crash.
    ///
    /// # Errors
    /// When they cannot be written; the tracker is not called again, unless the run is strict.
    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError>;

    /// Takes a text.
    ///
    /// # Errors
    /// As [`Tracker::log`].
    fn log_text(&mut self, name: &str, text: &str, at: Moment) -> Result<(), TrackerError> {
        let _ = (name, text, at);
        Ok(())
    }

    /// Takes an image, the bytes of a PNG file.
    ///
    /// # Errors
    /// As [`Tracker::log`], and when it is no PNG file.
    fn log_image(&mut self, name: &str, png: &[u8], at: Moment) -> Result<(), TrackerError> {
        let _ = (name, png, at);
        Ok(())
    }

    /// Takes values whose distribution is of interest; those that are not finite do not count.
    ///
    /// # Errors
    /// As [`Tracker::log`].
    fn log_histogram(&mut self, name: &str, values: &[f64], at: Moment) -> Result<(), TrackerError> {
        let _ = (name, values, at);
        Ok(())
    }

    /// Ends the run.
    ///
    /// # Errors
    /// As [`Tracker::log`].
    fn finish(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }
}

/// When something was logged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// The step, as the program counts.
    pub step: u64,
    /// Seconds since 1970 (Unix time).
    pub wall_time: f64,
}

impl Moment {
    /// Returns this moment.
    pub fn now(step: u64) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            step,
            wall_time: since.map_or(0.0, |time| time.as_secs_f64()),
        }
    }

    /// Returns milliseconds since 1970.
    pub(super) fn milliseconds(self) -> u64 {
        (self.wall_time * 1e3) as u64
    }
}

/// A run as trackers are told of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    project: String,
    config: Map<String, Value>,
}

impl Run {
    /// Makes a run of a project, with its configuration: anything that serde writes as named values, or `()`.
    ///
    /// # Errors
    /// [`TrackerError::Name`] for a project that cannot be a folder's name; [`TrackerError::Config`].
    pub fn new(project: &str, config: &impl Serialize) -> Result<Self, TrackerError> {
        if project.is_empty() || project.starts_with('.') || project.contains(['/', '\0', '\n']) {
            return Err(TrackerError::Name {
                name: project.into(),
                reason: "a project names a folder: not empty, no / and no line end in it, no dot before it",
            });
        }
        let config = match serde_json::to_value(config) {
            Ok(Value::Object(config)) => Ok(config),
            Ok(Value::Null) => Ok(Map::new()),
            Ok(other) => Err(format!("it is {other}")),
            Err(error) => Err(error.to_string()),
        };
        Ok(Self {
            project: project.into(),
            config: config.map_err(|reason| TrackerError::Config { reason })?,
        })
    }

    /// Returns the project's name.
    pub fn project(&self) -> &str {
        &self.project
    }

    /// Returns the configuration as it was given.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// Returns the configuration as a flat list: `{"model": {"layers": 2}}` is `model/layers` = `2`. Lists stay whole;
    /// text stands without quotes.
    pub fn hyper_parameters(&self) -> Vec<(String, String)> {
        let mut flat = Vec::new();
        flatten("", &self.config, &mut flat);
        flat
    }
}

fn flatten(above: &str, map: &Map<String, Value>, flat: &mut Vec<(String, String)>) {
    for (key, value) in map {
        let name = format!("{above}{key}");
        match value {
            Value::Object(inner) if !inner.is_empty() => flatten(&format!("{name}/"), inner, flat),
            Value::String(text) => flat.push((name, text.clone())),
            other => flat.push((name, other.to_string())),
        }
    }
}
