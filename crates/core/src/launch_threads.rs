//! Ranks as threads of one process: for tests and notebooks, where no launcher is.

use crate::{AcceleratorBuilder, Error, Result};
use sconce_collectives::{Communicator, Options, shm};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Runs `rank` on each of `size` ranks, which are threads; returns what they returned, in rank order.
///
/// Each gets a builder whose group is that of the threads, whatever a launcher's environment says of ranks; other settings
/// come from code and environment as ever. A rank that fails or panics ends the group, so that the
/// others do not wait for it.
///
/// ```
/// use sconce_core::{ReduceOp, launch_threads};
/// use candle_core::{Device, Tensor};
///
/// let sums = launch_threads(3, |builder| {
///     let acc = builder.build()?;
///     let rank = Tensor::new(acc.world().rank as f32, &Device::Cpu)?;
///     Ok::<_, sconce_core::Error>(acc.reduce(&rank, ReduceOp::Sum)?.to_scalar::<f32>()?)
/// })?;
/// assert_eq!(sums, [3.0, 3.0, 3.0]);
/// # Ok::<(), sconce_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::Rank`] with the failure of the rank that failed first; [`Error::Collectives`] for a world of 0 ranks, and when
/// the system refuses threads or memory.
pub fn launch_threads<R: Send, E>(
    size: usize,
    rank: impl Fn(AcceleratorBuilder) -> std::result::Result<R, E> + Sync,
) -> Result<Vec<R>>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let communicators = shm::threads(size, &Options::default())?;
    let failed = AtomicUsize::new(0);
    let run = |communicator: Arc<dyn Communicator>| {
        let number = communicator.rank();
        let builder = AcceleratorBuilder::default().communicator(Arc::clone(&communicator));
        let outcome = catch_unwind(AssertUnwindSafe(|| rank(builder).map_err(Into::into)));
        let outcome = outcome.unwrap_or_else(|panic| Err(written(&*panic).into()));
        outcome.map_err(|source| {
            let position = failed.fetch_add(1, Relaxed);
            communicator.abort(&format!("rank {number}: {source}"));
            Failure {
                position,
                rank: number,
                source,
            }
        })
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = communicators
            .into_iter()
            .map(|communicator| scope.spawn(|| run(communicator)))
            .collect();
        let outcomes = threads.into_iter().map(|thread| thread.join());
        outcomes
            .map(|outcome| outcome.expect("a panic is caught in the thread"))
            .collect()
    });
    let (mut results, mut first) = (Vec::new(), None::<Failure>);
    for outcome in outcomes {
        match outcome {
            Ok(result) => results.push(result),
            Err(failure) if first.as_ref().is_none_or(|first| failure.position < first.position) => {
                first = Some(failure);
            }
            Err(_) => {}
        }
    }
    match first {
        Some(Failure { rank, source, .. }) => Err(Error::Rank { rank, source }),
        None => Ok(results),
    }
}

struct Failure {
    /// How many ranks failed before.
    position: usize,
    rank: usize,
    source: Box<dyn std::error::Error + Send + Sync>,
}

fn written(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.unwrap_or_else(|| "with no message".into()))
}
