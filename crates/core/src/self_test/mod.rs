//! Whether a world works: small checks of everything that training leans on, each against a closed form or against plain
//! candle on one rank. `sconce test` runs them where a user wants to train.
//!
//! All ranks run the same checks in the same order. A check that fails on some rank fails on all; the next one runs all the
//! same, unless the group of ranks is lost.
//!
//! ```
//! use sconce_core::self_test::{SelfTest, checks};
//!
//! let passed = sconce_core::launch_threads(2, |builder| {
//!     let acc = builder.build()?;
//!     let mut passed = 0;
//!     SelfTest::new(&*acc).run(checks(), |outcome| passed += usize::from(outcome.failure.is_none()))?;
//!     Ok::<_, sconce_core::Error>(passed)
//! })?;
//! assert_eq!(passed, [checks().len(); 2]);
//! # Ok::<(), sconce_core::Error>(())
//! ```

mod collectives;
mod loaders;
mod parity;
mod ranks;
mod saving;
mod small_model;

use crate::environment as variable;
use crate::{Accelerator, AcceleratorBuilder, Result};
use sconce_collectives::environment::of_process;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;

/// Why a check failed: in words, with the numbers.
pub type CheckError = Box<dyn std::error::Error + Send + Sync>;

/// What a check says when it holds: the numbers it was decided by.
pub type Checked = std::result::Result<String, CheckError>;

/// One check.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// A short name.
    pub name: &'static str,
    /// What holds where it passes.
    pub rule: &'static str,
    run: fn(&SelfTest<'_>) -> Checked,
}

impl Check {
    /// Makes a check of the program's own; all ranks run it together.
    pub const fn new(name: &'static str, rule: &'static str, run: fn(&SelfTest<'_>) -> Checked) -> Self {
        Self { name, rule, run }
    }
}

/// How a check went, on all ranks together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckOutcome {
    /// The check's name.
    pub name: String,
    /// What was to hold.
    pub rule: String,
    /// The numbers it was decided by, on rank 0.
    pub detail: String,
    /// The first rank's failure, if it does not hold.
    pub failure: Option<String>,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// All checks, in the order in which they run.
pub fn checks() -> &'static [Check] {
    const CHECKS: &[Check] = &[
        Check {
            name: "state",
            rule: "every rank has a place of its own in one world",
            run: ranks::places,
        },
        Check {
            name: "process order",
            rule: "rank 0 is done before the others begin; in order means one after another",
            run: ranks::order,
        },
        Check {
            name: "split between processes",
            rule: "lists, nested lists and tensors are dealt out whole, in order; padded parts have one length",
            run: ranks::split,
        },
        Check {
            name: "trigger",
            rule: "a flag that one rank raises is seen by all, once",
            run: ranks::trigger,
        },
        Check {
            name: "random state",
            rule: "after synchronising, all ranks draw what rank 0 draws; the same seed draws the same again",
            run: ranks::random_state,
        },
        Check {
            name: "objects",
            rule: "gathered and broadcast objects are those that were sent, in rank order",
            run: ranks::objects,
        },
        Check {
            name: "all-reduce",
            rule: "sum, least, most and mean over all ranks, in f32, f64, bf16, f16, i64, from one element to a mebibyte",
            run: collectives::all_reduce,
        },
        Check {
            name: "reduce, broadcast",
            rule: "any rank can be the root",
            run: collectives::roots,
        },
        Check {
            name: "reduce-scatter, all-gather",
            rule: "every rank has its part of the sum; all parts are gathered in rank order",
            run: collectives::parts,
        },
        Check {
            name: "all-to-all, send, receive",
            rule: "what one rank sends another is what it gets",
            run: collectives::point_to_point,
        },
        Check {
            name: "data loaders",
            rule: "all ranks' batches are the data set, each sample once: plain, shuffled, split, dispatched",
            run: loaders::union,
        },
        Check {
            name: "seeded shuffling",
            rule: "an epoch's order follows from seed and epoch, and is another with another of them",
            run: loaders::seeds,
        },
        Check {
            name: "metrics",
            rule: "gather_for_metrics leaves out what only fills up the last batch",
            run: loaders::metrics,
        },
        Check {
            name: "training",
            rule: "y = ax + b by SGD on all ranks is that on one rank, also with split batches",
            run: parity::linear_regression,
        },
        Check {
            name: "data parallel",
            rule: "weights are those of plain candle on one rank",
            run: parity::data_parallel,
        },
        Check {
            name: "zero 1",
            rule: "weights are those of plain candle on one rank",
            run: parity::zero_1,
        },
        Check {
            name: "zero 2",
            rule: "weights are those of plain candle on one rank",
            run: parity::zero_2,
        },
        Check {
            name: "zero 3",
            rule: "weights are those of plain candle on one rank",
            run: parity::zero_3,
        },
        Check {
            name: "fsdp full_shard",
            rule: "weights are those of plain candle on one rank",
            run: parity::full_shard,
        },
        Check {
            name: "fsdp shard_grad_op",
            rule: "weights are those of plain candle on one rank",
            run: parity::shard_grad_op,
        },
        Check {
            name: "accumulation",
            rule: "micro-batches add up to the batch, whole and sharded",
            run: parity::accumulation,
        },
        Check {
            name: "bf16, fp16",
            rule: "training in 16 bits stays near f32, whole and sharded",
            run: parity::half_precision,
        },
        Check {
            name: "checkpoint",
            rule: "a run that goes on from a checkpoint comes to the bits of the one that did not stop",
            run: saving::resume,
        },
    ];
    CHECKS
}

/// The checks at work on one rank.
#[derive(Debug)]
pub struct SelfTest<'a> {
    acc: &'a dyn Accelerator,
}

impl<'a> SelfTest<'a> {
    /// Makes the self-test of a world.
    pub fn new(acc: &'a dyn Accelerator) -> Self {
        Self { acc }
    }

    /// Runs checks; called by all ranks, with the same ones. `told` gets each outcome as soon as all ranks know it. Returns
    /// whether all hold.
    ///
    /// # Errors
    /// When the group of ranks is lost.
    pub fn run(&self, checks: &[Check], mut told: impl FnMut(&CheckOutcome)) -> Result<bool> {
        let mut all_hold = true;
        for check in checks {
            let start = Instant::now();
            let found = (check.run)(self);
            let own = match found {
                Ok(detail) => (detail, None),
                Err(failure) => (String::new(), Some(failure.to_string())),
            };
            let outcomes = self.acc.gather_objects(&[own])?;
            let numbered = outcomes.iter().enumerate();
            let mut failures = numbered.filter_map(|(rank, (_, failure))| Some((rank, failure.as_ref()?)));
            let outcome = CheckOutcome {
                name: check.name.to_owned(),
                rule: check.rule.to_owned(),
                failure: failures.next().map(|(rank, failure)| format!("rank {rank}: {failure}")),
                detail: outcomes
                    .into_iter()
                    .next()
                    .map(|(detail, _)| detail)
                    .unwrap_or_default(),
                seconds: start.elapsed().as_secs_f64(),
            };
            all_hold &= outcome.failure.is_none();
            told(&outcome);
        }
        Ok(all_hold)
    }

    /// Returns the accelerator whose world is tested.
    pub fn accelerator(&self) -> &'a dyn Accelerator {
        self.acc
    }

    fn ranks(&self) -> usize {
        self.acc.world().size
    }

    fn rank(&self) -> usize {
        self.acc.world().rank
    }

    /// Returns an accelerator of its own over the same ranks and device, which the environment's settings do not change.
    fn new_accelerator(&self, builder: AcceleratorBuilder) -> Result<Box<dyn Accelerator>> {
        let world = self.acc.world().clone();
        let builder = builder.communicator_of(world, Arc::clone(self.acc.communicator()));
        let of_device = [variable::SCONCE_DEVICE, variable::ACCELERATE_USE_CPU];
        builder.build_with(|name| of_device.contains(&name).then(|| of_process(name)).flatten())
    }
}

/// Fails with both sides if they differ.
fn expect<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, expected: &T) -> std::result::Result<(), CheckError> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: found {found:?}, expected {expected:?}").into())
}

/// Returns the largest difference.
fn deviation(found: &[f32], expected: &[f32]) -> f32 {
    let pairs = found.iter().zip(expected);
    // A difference that is not a number is the worst there is.
    let apart = pairs
        .map(|(a, b)| (a - b).abs())
        .map(|d| if d.is_nan() { f32::INFINITY } else { d });
    let longer = if found.len() == expected.len() {
        0.0
    } else {
        f32::INFINITY
    };
    apart.fold(longer, f32::max)
}

/// Fails unless values are near what was expected; says how near.
fn expect_near(what: &str, found: &[f32], expected: &[f32], limit: f32) -> Checked {
    let worst = deviation(found, expected);
    if worst <= limit {
        return Ok(format!("{what} differ by {worst:.1e} at most (limit {limit:.0e})"));
    }
    Err(format!("{what} differ by {worst:e}, expected {limit:e} at most").into())
}
