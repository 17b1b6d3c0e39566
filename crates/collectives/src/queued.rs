//! A group as its callers see it: an operation comes after all that were started behind other work before it.

use crate::worker::Worker;
use crate::{Buffer, Collective, Communicator, Job, Result, Traffic};
use std::sync::Arc;

/// A backend's group as jobs see it: already behind everything that was started before.
pub(crate) trait Behind: Communicator + 'static {
    /// Runs a collective for which a caller waits, rather than a job behind other work.
    fn execute_for_caller(&self, collective: Collective<'_>) -> Result<()> {
        self.execute(collective)
    }

    /// Tells the others that this rank comes no more.
    fn leave(&self);
}

/// A backend's group with a thread for what runs behind other work; leaves the group when it is dropped.
#[derive(Debug)]
pub(crate) struct Queued<G: Behind> {
    group: Arc<G>,
    worker: Worker,
}

impl<G: Behind> Queued<G> {
    pub(crate) fn new(group: Arc<G>) -> Self {
        Self {
            group,
            worker: Worker::default(),
        }
    }
}

impl<G: Behind> Communicator for Queued<G> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn backend(&self) -> &'static str {
        self.group.backend()
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        let _span = tracing::debug_span!("collective", what = collective.kind().name()).entered();
        self.worker.drain();
        self.group.execute_for_caller(collective)
    }

    fn start(&self, job: Job) {
        if let Err(error) = self.worker.start(job, &self.group) {
            // The job is dropped, so its handle reports that it did not run; peers must not wait for it.
            self.abort(&error.to_string());
        }
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.worker.drain();
        self.group.allocate(bytes)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        self.worker.drain();
        self.group.split(color, key)
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.group.traffic()
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}

impl<G: Behind> Drop for Queued<G> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Jobs under way may wait for peers that wait for this rank: fail them first.
            self.abort(&format!("rank {} panicked", self.rank()));
        }
        self.worker.stop();
        self.group.leave();
    }
}
