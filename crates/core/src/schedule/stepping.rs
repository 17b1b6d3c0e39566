//! How far a call of [`Scheduler::step`](super::Scheduler::step) takes a schedule.

/// How a scheduler counts.
///
/// By default it counts optimizer steps, one each, on any number of ranks: the rates of a run do not depend on how many
/// ranks share its batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduleStepping {
    /// Whether only optimizer steps that took place count; otherwise every call does. Accelerate's
    /// `step_scheduler_with_optimizer`.
    pub with_optimizer: bool,
    /// How far an optimizer step takes the schedule.
    pub advance: ScheduleAdvance,
}

/// How far an optimizer step takes a schedule that is tied to the optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ScheduleAdvance {
    /// By one step.
    #[default]
    One,
    /// By as many steps as there are ranks: Accelerate's rule where `split_batches` is off, for schedules that are written
    /// for the number of batches that one process would see. With `split_batches` Accelerate's rule is
    /// [`ScheduleAdvance::One`].
    WorldSize,
}

impl Default for ScheduleStepping {
    fn default() -> Self {
        Self {
            with_optimizer: true,
            advance: ScheduleAdvance::One,
        }
    }
}

impl ScheduleStepping {
    /// Returns the steps of one call, given whether the optimizer has stepped.
    pub(super) fn steps(self, has_stepped: bool, world_size: usize) -> u64 {
        match (self.with_optimizer, self.advance) {
            // Accelerate's rule, too: a scheduler on its own advances by one.
            (false, _) => 1,
            (true, _) if !has_stepped => 0,
            (true, ScheduleAdvance::One) => 1,
            (true, ScheduleAdvance::WorldSize) => world_size as u64,
        }
    }
}
