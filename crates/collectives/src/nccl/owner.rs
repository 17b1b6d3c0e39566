//! The thread that owns a communicator: nothing else touches it, from its making to its end.

use super::plan::Plan;
use crate::private::Private;
use crate::{Error, Result};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Moves data between ranks by plans; NCCL does, and in tests what stands for it.
pub(super) trait Carrier: Send {
    /// Carries a plan out from `input` to `output`. While it waits it calls `watch`, and gives up for good if that fails.
    fn carry(&mut self, plan: &Plan, input: &[u8], output: &mut [u8], watch: Watch<'_>) -> Result<()>;

    /// Carries out a plan that is no exchange where the caller's memory lies, which the group has found that this can take.
    /// Input and output may lie in each other, at the places that NCCL calls in place.
    ///
    /// Whether it fails, panics or not: when it ends, nothing works with the memory any more.
    fn carry_in_place(&mut self, plan: &Plan, input: Private, output: Private, watch: Watch<'_>) -> Result<()>;

    /// Makes groups of the ranks with equal colors; called by all ranks. Returns `None` to those without a color.
    fn split(
        &mut self,
        color: Option<u32>,
        place: (usize, usize),
        watch: Watch<'_>,
    ) -> Result<Option<Box<dyn Carrier>>>;
}

/// Looks at the clock and at the other ranks.
pub(super) type Watch<'w> = &'w mut dyn FnMut() -> Result<()>;

type Task = Box<dyn FnOnce(&mut dyn Carrier) + Send>;

/// The handle of such a thread, which ends with it.
#[derive(Debug)]
pub(super) struct Owner {
    rank: usize,
    tasks: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
}

impl Owner {
    /// Starts a thread, in which `make` makes the communicator.
    ///
    /// # Errors
    /// That of `make`; [`Error::Io`] when there can be no thread.
    pub(super) fn start(rank: usize, make: impl FnOnce() -> Result<Box<dyn Carrier>> + Send + 'static) -> Result<Self> {
        let (tasks, received) = channel::<Task>();
        let (made, is_made) = channel();
        let thread = std::thread::Builder::new().name("sconce-nccl".into()).spawn(move || {
            let mut carrier = match make() {
                Ok(carrier) => carrier,
                Err(error) => return drop(made.send(Err(error))),
            };
            if made.send(Ok(())).is_ok() {
                received.into_iter().for_each(|task: Task| task(&mut *carrier));
            }
        });
        let thread = thread.map_err(|source| Error::Io {
            context: "starting the thread that owns the communicator".into(),
            source,
        })?;
        is_made.recv().unwrap_or_else(|_| Err(ended(rank)))?;
        Ok(Self {
            rank,
            tasks: Some(tasks),
            thread: Some(thread),
        })
    }

    /// Runs `work` in the thread and waits for its result.
    ///
    /// # Errors
    /// Those of `work`.
    pub(super) fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn Carrier) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        let (done, result) = channel();
        let task: Task = Box::new(move |carrier| drop(done.send(work(carrier))));
        let sent = self.tasks.as_ref().is_some_and(|tasks| tasks.send(task).is_ok());
        if !sent {
            return Err(ended(self.rank));
        }
        result.recv().unwrap_or_else(|_| Err(ended(self.rank)))
    }
}

fn ended(rank: usize) -> Error {
    Error::Nccl {
        rank,
        call: "the communicator's thread",
        reason: "it has ended by a panic; its message is above".into(),
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was told when it happened.
            let _ = thread.join();
        }
    }
}
