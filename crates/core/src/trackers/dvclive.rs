//! The files of DVCLive, which `dvc plots` and DVC's extensions of editors read.

use super::append_file::{replace, write_file};
use super::files_by_name::FilesByName;
use super::name_path::path_of_name;
use super::{Moment, Run, Tracker, TrackerError, png, yaml};
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// Writes `dvclive/params.yaml`, `dvclive/metrics.json` with the latest values, `dvclive/plots/metrics/NAME.tsv` with all of
/// them, and `dvclive/plots/images/NAME/STEP.png`; slashes in names make folders.
#[derive(Debug)]
pub struct DvcLive {
    folder: PathBuf,
    latest: Map<String, Value>,
    plots: FilesByName,
}

impl DvcLive {
    /// Makes a tracker that writes below `folder`.
    pub fn boxed(folder: impl AsRef<Path>) -> Box<dyn Tracker> {
        let folder = folder.as_ref().join("dvclive");
        Box::new(Self {
            plots: FilesByName::new(folder.join("plots/metrics"), ".tsv"),
            latest: Map::new(),
            folder,
        })
    }
}

impl Tracker for DvcLive {
    fn name(&self) -> &str {
        "dvclive"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        fs::create_dir_all(&self.folder).map_err(TrackerError::at(&self.folder))?;
        replace(&self.folder.join("params.yaml"), &yaml::document(run.config()))
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        for (name, value) in values {
            let plot = self.plots.file(name)?;
            if plot.is_empty()? {
                let column = plot.path().file_stem().unwrap_or_default();
                let header = format!("step\t{}\n", column.to_string_lossy());
                plot.write(&header)?;
            }
            plot.write(&format!("{}\t{value}\n", at.step))?;
            // DVCLive's own word for it; JSON has no such number.
            let value = if value.is_finite() {
                (*value).into()
            } else {
                value.to_string().into()
            };
            put(&mut self.latest, name, value);
        }
        self.latest.insert("step".into(), at.step.into());
        let text = format!("{:#}\n", Value::from(self.latest.clone()));
        replace(&self.folder.join("metrics.json"), &text)
    }

    fn log_image(&mut self, name: &str, image: &[u8], at: Moment) -> Result<(), TrackerError> {
        png::size(name, image)?;
        let folder = self.folder.join("plots/images").join(path_of_name(name)?);
        write_file(&folder.join(format!("{}.png", at.step)), image)
    }
}

/// Puts a value at `a/b` into the map `b` of `a`; where `a` is a value itself, under its whole name.
fn put(map: &mut Map<String, Value>, name: &str, value: Value) {
    let inner = name.split_once('/').and_then(|(first, rest)| {
        let inner = map.entry(first).or_insert_with(|| Map::new().into());
        Some((inner.as_object_mut()?, rest))
    });
    match inner {
        Some((inner, rest)) => put(inner, rest, value),
        None => drop(map.insert(name.into(), value)),
    }
}
