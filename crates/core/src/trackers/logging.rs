//! Trackers as an accelerator has them.

use super::{Run, Trackers};
use crate::{Accelerator, Result};
use serde::Serialize;
use std::sync::{MutexGuard, PoisonError};

impl<'a> dyn Accelerator + 'a {
    /// Begins to log: `config` are the run's hyper-parameters, which serde writes as named values (or `()`), and `trackers`
    /// a list of [`Tracker`](crate::trackers::Tracker)s, or [`Trackers`] with more settings.
    ///
    /// It may come at any time; what is logged before goes nowhere. Trackers that were there before are finished. Off the
    /// main process it does nothing but check its arguments, and it waits for nobody.
    ///
    /// # Errors
    /// [`Error::Tracker`](crate::Error::Tracker): a project that cannot be a folder's name, a configuration that is no set
    /// of named values; and, for strict trackers on the main process, one that cannot start.
    pub fn init_trackers(&self, project: &str, config: &impl Serialize, trackers: impl Into<Trackers>) -> Result<()> {
        let run = Run::new(project, config)?;
        if !self.is_main_process() {
            return Ok(());
        }
        Ok(self.list_of_trackers().replace(trackers.into(), &run)?)
    }

    /// Logs the values of one step to all trackers; does nothing off the main process.
    ///
    /// # Errors
    /// [`Error::Tracker`](crate::Error::Tracker) of strict trackers, on the main process alone.
    pub fn log(&self, values: &[(&str, f64)], step: u64) -> Result<()> {
        Ok(self.list_of_trackers().log(values, step)?)
    }

    /// Logs a text.
    ///
    /// # Errors
    /// As [`log`](trait.Accelerator.html#method.log).
    pub fn log_text(&self, name: &str, text: &str, step: u64) -> Result<()> {
        Ok(self.list_of_trackers().log_text(name, text, step)?)
    }

    /// Logs an image, the bytes of a PNG file.
    ///
    /// # Errors
    /// As [`log`](trait.Accelerator.html#method.log).
    pub fn log_image(&self, name: &str, png: &[u8], step: u64) -> Result<()> {
        Ok(self.list_of_trackers().log_image(name, png, step)?)
    }

    /// Logs the distribution of some values; those that are not finite do not count.
    ///
    /// # Errors
    /// As [`log`](trait.Accelerator.html#method.log).
    pub fn log_histogram(&self, name: &str, values: &[f64], step: u64) -> Result<()> {
        Ok(self.list_of_trackers().log_histogram(name, values, step)?)
    }

    /// Ends the run for all trackers. A run that never gets here can be read, and looks like one that still runs.
    ///
    /// # Errors
    /// As [`log`](trait.Accelerator.html#method.log).
    pub fn end_training(&self) -> Result<()> {
        Ok(self.list_of_trackers().finish()?)
    }

    /// Returns the warnings since the last call, one for each tracker that failed and was left out.
    pub fn tracker_warnings(&self) -> Vec<String> {
        self.list_of_trackers().take_warnings()
    }

    fn list_of_trackers(&self) -> MutexGuard<'_, Trackers> {
        self.trackers().lock().unwrap_or_else(PoisonError::into_inner)
    }
}
