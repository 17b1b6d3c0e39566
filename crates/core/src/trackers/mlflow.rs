//! MLflow's store of files, which `mlflow ui --backend-store-uri ./mlruns` shows; recent versions do so with
//! `MLFLOW_ALLOW_FILE_STORE=true` in its environment, or after `mlflow migrate-filestore`.

use super::append_file::{replace, write_file};
use super::files_by_name::FilesByName;
use super::name_path::path_of_name;
use super::{Moment, Run, Tracker, TrackerError, png, yaml};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Writes a run into `mlruns/EXPERIMENT/RUN`, in MLflow's layout: `meta.yaml`, and a file for each of `params`, `tags` and
/// `metrics`, whose lines are milliseconds since 1970, value and step; texts and images are artifacts.
///
/// The experiment is the one that has the project's name, or a new one. Hyper-parameters of more than 6000 bytes, which
/// MLflow refuses, are left out.
#[derive(Debug)]
pub struct MlflowFiles {
    store: PathBuf,
    open: Option<OpenRun>,
}

#[derive(Debug)]
struct OpenRun {
    folder: PathBuf,
    facts: Map<String, Value>,
    metrics: FilesByName,
}

/// MLflow's numbers of what becomes of a run.
const RUNNING: u64 = 1;
const FINISHED: u64 = 3;
/// The longest value of a parameter, in bytes.
const LONGEST_PARAMETER: usize = 6000;

impl MlflowFiles {
    /// Makes a tracker that writes into `folder`/mlruns.
    pub fn boxed(folder: impl AsRef<Path>) -> Box<dyn Tracker> {
        Box::new(Self {
            store: folder.as_ref().join("mlruns"),
            open: None,
        })
    }

    /// Returns the folder and the number of the experiment of this name, which is made if need be.
    fn experiment(&self, name: &str, at: Moment) -> Result<(PathBuf, String), TrackerError> {
        let named = format!("name: {}", Value::from(name));
        let plain = format!("name: {name}");
        for entry in fs::read_dir(&self.store).into_iter().flatten().flatten() {
            let facts = fs::read_to_string(entry.path().join("meta.yaml")).unwrap_or_default();
            let is_it = facts.lines().any(|line| line == named || line == plain);
            if is_it && let Ok(id) = entry.file_name().into_string() {
                return Ok((entry.path(), id));
            }
        }
        // A number of 18 digits, as MLflow's own.
        let id = (100_000_000_000_000_000 + number_of(name) % 900_000_000_000_000_000).to_string();
        let folder = self.store.join(&id);
        fs::create_dir_all(&folder).map_err(TrackerError::at(&folder))?;
        let facts = json!({
            "artifact_location": address(&folder)?, "creation_time": at.milliseconds(), "experiment_id": id,
            "last_update_time": at.milliseconds(), "lifecycle_stage": "active", "name": name,
        });
        write_facts(&folder, facts.as_object())?;
        Ok((folder, id))
    }
}

/// Returns the hyper-parameters of a run but for those that MLflow refuses, of which a warning tells.
pub(super) fn parameters(run: &Run) -> impl Iterator<Item = (String, String)> {
    run.hyper_parameters().into_iter().filter(|(name, value)| {
        let fits = value.len() <= LONGEST_PARAMETER;
        if !fits {
            tracing::warn!("mlflow: hyper-parameter {name} has {} bytes: left out", value.len());
        }
        fits
    })
}

impl Tracker for MlflowFiles {
    fn name(&self) -> &str {
        "mlflow"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        let at = Moment::now(0);
        let (experiment, experiment_id) = self.experiment(run.project(), at)?;
        let seed = format!("{} {} {}", run.project(), std::process::id(), at.wall_time);
        let id = format!("{:016x}{:016x}", number_of(&seed), number_of(&format!("{seed} again")));
        let folder = experiment.join(&id);
        for inner in ["artifacts", "metrics", "params", "tags"] {
            let inner = folder.join(inner);
            fs::create_dir_all(&inner).map_err(TrackerError::at(&inner))?;
        }
        let run_name = format!("{}-{}", run.project(), &id[..8]);
        let facts = json!({
            "artifact_uri": address(&folder.join("artifacts"))?, "end_time": null, "entry_point_name": "",
            "experiment_id": experiment_id, "lifecycle_stage": "active", "run_id": id, "run_name": run_name,
            "run_uuid": id, "source_name": "", "source_type": 4, "source_version": "",
            "start_time": at.milliseconds(), "status": RUNNING, "tags": [], "user_id": "",
        });
        write_facts(&folder, facts.as_object())?;
        write_file(&folder.join("tags/mlflow.runName"), run_name.as_bytes())?;
        write_file(&folder.join("tags/mlflow.source.type"), b"LOCAL")?;
        for (name, value) in parameters(run) {
            write_file(&folder.join("params").join(path_of_name(&name)?), value.as_bytes())?;
        }
        self.open = Some(OpenRun {
            metrics: FilesByName::new(folder.join("metrics"), ""),
            facts: facts.as_object().cloned().unwrap_or_default(),
            folder,
        });
        Ok(())
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        for (name, value) in values {
            let file = open.metrics.file(name)?;
            file.write(&format!("{} {value} {}\n", at.milliseconds(), at.step))?;
        }
        Ok(())
    }

    fn log_text(&mut self, name: &str, text: &str, at: Moment) -> Result<(), TrackerError> {
        self.artifact(name, "txt", text.as_bytes(), at)
    }

    fn log_image(&mut self, name: &str, image: &[u8], at: Moment) -> Result<(), TrackerError> {
        png::size(name, image)?;
        self.artifact(name, "png", image, at)
    }

    fn finish(&mut self) -> Result<(), TrackerError> {
        let Some(mut open) = self.open.take() else {
            return Ok(());
        };
        open.facts.insert("status".into(), FINISHED.into());
        open.facts
            .insert("end_time".into(), Moment::now(0).milliseconds().into());
        write_facts(&open.folder, Some(&open.facts))
    }
}

impl MlflowFiles {
    fn artifact(&self, name: &str, extension: &str, bytes: &[u8], at: Moment) -> Result<(), TrackerError> {
        let Some(open) = &self.open else { return Ok(()) };
        let folder = open.folder.join("artifacts").join(path_of_name(name)?);
        write_file(&folder.join(format!("step-{}.{extension}", at.step)), bytes)
    }
}

fn write_facts(folder: &Path, facts: Option<&Map<String, Value>>) -> Result<(), TrackerError> {
    let text = facts.map_or(String::new(), yaml::document);
    replace(&folder.join("meta.yaml"), &text)
}

/// Returns the `file:` address of a folder; what addresses give a meaning is escaped.
fn address(folder: &Path) -> Result<String, TrackerError> {
    let whole = std::path::absolute(folder).map_err(TrackerError::at(folder))?;
    let mut address = String::from("file://");
    for byte in whole.as_os_str().as_encoded_bytes() {
        match byte {
            b'/' | b'-' | b'_' | b'.' | b'~' => address.push(char::from(*byte)),
            letter if letter.is_ascii_alphanumeric() => address.push(char::from(*byte)),
            other => address += &format!("%{other:02X}"),
        }
    }
    Ok(address)
}

fn number_of(text: &str) -> u64 {
    let hash = blake3::hash(text.as_bytes());
    u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}
