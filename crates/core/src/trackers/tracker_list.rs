//! Several trackers at once, and what becomes of one that fails.

use super::{Moment, NAMES, Run, Tracker, TrackerError, tracker_from_name};
use std::path::Path;

/// The trackers of a run.
///
/// ```
/// use sconce_core::trackers::Trackers;
///
/// let trackers = Trackers::from_names("jsonl,tensorboard", "logs")?.strict(true);
/// assert!(Trackers::from_names("tensorbord", "logs").is_err());
/// # Ok::<(), sconce_core::trackers::TrackerError>(())
/// ```
#[derive(Debug, Default)]
pub struct Trackers {
    trackers: Vec<Box<dyn Tracker>>,
    strict: bool,
    warnings: Vec<String>,
}

impl From<Vec<Box<dyn Tracker>>> for Trackers {
    fn from(trackers: Vec<Box<dyn Tracker>>) -> Self {
        Self::new(trackers)
    }
}

impl Trackers {
    /// Makes a list of trackers.
    pub fn new(trackers: Vec<Box<dyn Tracker>>) -> Self {
        Self {
            trackers,
            ..Self::default()
        }
    }

    /// Makes trackers that are built in, by their names with commas between; `all` is every one of them.
    ///
    /// # Errors
    /// As [`tracker_from_name`].
    pub fn from_names(names: &str, folder: impl AsRef<Path>) -> Result<Self, TrackerError> {
        let mut asked = Vec::new();
        for name in names.split(',').map(str::trim) {
            match name {
                "all" => asked.extend(NAMES),
                name => asked.push(name),
            }
        }
        let mut trackers = Vec::new();
        for (index, name) in asked.iter().enumerate() {
            // Twice the same would write every file twice.
            if !asked[..index].contains(name) {
                trackers.push(tracker_from_name(name, folder.as_ref())?);
            }
        }
        Ok(Self::new(trackers))
    }

    /// Makes a tracker that fails an error of the call during which it does; by default it is left out, with a warning.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Begins a run.
    ///
    /// # Errors
    /// [`TrackerError::Failed`], if strict.
    pub fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        self.each(|tracker| tracker.start(run))
    }

    /// Logs the values of one step.
    ///
    /// # Errors
    /// [`TrackerError::Failed`], if strict.
    pub fn log(&mut self, values: &[(&str, f64)], step: u64) -> Result<(), TrackerError> {
        let at = Moment::now(step);
        self.each(|tracker| tracker.log(values, at))
    }

    /// Logs a text.
    ///
    /// # Errors
    /// [`TrackerError::Failed`], if strict.
    pub fn log_text(&mut self, name: &str, text: &str, step: u64) -> Result<(), TrackerError> {
        let at = Moment::now(step);
        self.each(|tracker| tracker.log_text(name, text, at))
    }

    /// Logs an image, the bytes of a PNG file.
    ///
    /// # Errors
    /// [`TrackerError::Failed`], if strict.
    pub fn log_image(&mut self, name: &str, png: &[u8], step: u64) -> Result<(), TrackerError> {
        let at = Moment::now(step);
        self.each(|tracker| tracker.log_image(name, png, at))
    }

    /// Logs the distribution of some values.
    ///
    /// # Errors
    /// [`TrackerError::Failed`], if strict.
    pub fn log_histogram(&mut self, name: &str, values: &[f64], step: u64) -> Result<(), TrackerError> {
        let at = Moment::now(step);
        self.each(|tracker| tracker.log_histogram(name, values, at))
    }

    /// Ends the run; nothing is logged after it.
    ///
    /// # Errors
    /// [`TrackerError::Failed`], if strict.
    pub fn finish(&mut self) -> Result<(), TrackerError> {
        let outcome = self.each(|tracker| tracker.finish());
        self.trackers.clear();
        outcome
    }

    /// Ends the run of these trackers and begins one with others; warnings that nobody has taken yet stay.
    ///
    /// # Errors
    /// [`TrackerError::Failed`], if strict: the first failure of the end by what these are, then of the start by what the
    /// others are. The others are started either way.
    pub(super) fn replace(&mut self, others: Self, run: &Run) -> Result<(), TrackerError> {
        let finished = self.finish();
        self.trackers = others.trackers;
        self.strict = others.strict;
        self.warnings.extend(others.warnings);
        finished.and(self.start(run))
    }

    /// Returns the warnings since the last call, one for each tracker that was left out. They are also logged through
    /// `tracing`.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Calls every tracker, also behind one that fails; returns the first failure, if strict.
    fn each(&mut self, mut call: impl FnMut(&mut dyn Tracker) -> Result<(), TrackerError>) -> Result<(), TrackerError> {
        let mut first = None;
        let (strict, warnings) = (self.strict, &mut self.warnings);
        self.trackers.retain_mut(|tracker| {
            let Err(error) = call(&mut **tracker) else { return true };
            let failed = TrackerError::Failed {
                tracker: tracker.name().into(),
                source: Box::new(error),
            };
            if strict {
                first.get_or_insert(failed);
                return true;
            }
            let warning = format!("{failed}; it gets nothing more in this run, and training goes on");
            tracing::warn!("{warning}");
            warnings.push(warning);
            false
        });
        first.map_or(Ok(()), Err)
    }
}
