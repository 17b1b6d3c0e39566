//! Clipping that is set for the run: a step clips what the program has not clipped itself.
//!
//! DeepSpeed clips inside its step, by the number in its configuration, and Accelerate's `clip_grad_norm_` does not look
//! at its argument then. Here the program's call clips, by the number that was decided: another one is an error, since one
//! of the two would have no effect.

use crate::settings::Clipping;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The clipping of a run, shared by accelerator and optimizer.
#[derive(Debug)]
pub(crate) struct StepClipping {
    setting: Clipping,
    /// Whether the program has clipped since the last step.
    is_done: AtomicBool,
}

impl StepClipping {
    pub(crate) fn new(setting: Clipping) -> Self {
        Self {
            setting,
            is_done: AtomicBool::new(false),
        }
    }

    /// Refuses another norm than the one that was decided.
    pub(crate) fn check(&self, max_norm: f64) -> Result<()> {
        let Some(decided_by) = &self.setting.decided_by else {
            return Ok(());
        };
        if self.setting.max_norm == Some(max_norm) {
            return Ok(());
        }
        let decided = match self.setting.max_norm {
            Some(norm) => norm.to_string(),
            None => "0, which turns clipping off".into(),
        };
        Err(Error::Setting {
            setting: "clip_grad_norm max_norm",
            value: max_norm.to_string(),
            expected: format!("{decided_by} is {decided}; make them equal, or leave one of the two out"),
        })
    }

    /// Notes that the program has clipped.
    pub(crate) fn note(&self) {
        self.is_done.store(true, Relaxed);
    }

    /// Returns the norm to which the step has to clip, and begins the next window.
    pub(crate) fn take_due(&self) -> Option<f64> {
        let is_done = self.is_done.swap(false, Relaxed);
        self.setting.max_norm.filter(|_| !is_done)
    }

    /// Forgets what was noted, together with the gradients.
    pub(crate) fn reset(&self) {
        self.is_done.store(false, Relaxed);
    }
}
