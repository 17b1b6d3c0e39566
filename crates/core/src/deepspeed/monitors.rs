//! Where measurements go: the sections `tensorboard`, `csv_monitor` and `wandb`.

use super::error::ConfigError;
use super::section::{AutoRule, Section};

/// The three monitors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Monitors {
    /// Files for TensorBoard.
    pub tensorboard: FileMonitor,
    /// Files of comma-separated values.
    pub csv: FileMonitor,
    /// Weights & Biases.
    pub wandb: WandbMonitor,
}

/// A monitor that writes files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileMonitor {
    /// Whether it is on.
    pub enabled: bool,
    /// The folder.
    pub output_path: String,
    /// The folder's subfolder.
    pub job_name: String,
}

/// A monitor that sends to Weights & Biases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WandbMonitor {
    /// Whether it is on.
    pub enabled: bool,
    /// The group of runs.
    pub group: Option<String>,
    /// The team.
    pub team: Option<String>,
    /// The project.
    pub project: String,
}

impl Monitors {
    pub(super) fn read(top: &mut Section<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            tensorboard: FileMonitor::read(top, "tensorboard")?,
            csv: FileMonitor::read(top, "csv_monitor")?,
            wandb: WandbMonitor::read(top)?,
        })
    }
}

impl FileMonitor {
    fn read(top: &mut Section<'_>, key: &'static str) -> Result<Self, ConfigError> {
        let mut monitor = Self {
            enabled: false,
            output_path: String::new(),
            job_name: "DeepSpeedJobName".into(),
        };
        let Some(mut section) = top.child(key, AutoRule::MeansDefault)? else {
            return Ok(monitor);
        };
        monitor.enabled = section.value("enabled", false)?;
        monitor.output_path = section.value("output_path", monitor.output_path)?;
        monitor.job_name = section.value("job_name", monitor.job_name)?;
        section.finish()?;
        Ok(monitor)
    }
}

impl WandbMonitor {
    fn read(top: &mut Section<'_>) -> Result<Self, ConfigError> {
        let mut monitor = Self {
            enabled: false,
            group: None,
            team: None,
            project: "deepspeed".into(),
        };
        let Some(mut section) = top.child("wandb", AutoRule::MeansDefault)? else {
            return Ok(monitor);
        };
        monitor.enabled = section.value("enabled", false)?;
        monitor.group = section.optional("group")?;
        monitor.team = section.optional("team")?;
        monitor.project = section.value("project", monitor.project)?;
        section.finish()?;
        Ok(monitor)
    }
}
