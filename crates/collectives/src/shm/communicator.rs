//! The shared-memory backend as a [`Communicator`].

use super::group::Group;
use super::waiting::Patience;
use crate::collective::{Kind, Signature};
use crate::worker::Worker;
use crate::{Buffer, Collective, Communicator, Job, Result, Traffic};
use std::sync::Arc;

/// A group of ranks on one host, seen by one of them.
#[derive(Debug)]
pub(super) struct ShmCommunicator {
    group: Arc<Behind>,
    worker: Worker,
    patience: Patience,
}

/// The same group as jobs see it: already behind everything that was started before.
#[derive(Debug)]
struct Behind(Group);

impl ShmCommunicator {
    pub(super) fn new(group: Group) -> Self {
        let patience = Patience::of_caller(group.size);
        Self {
            group: Arc::new(Behind(group)),
            worker: Worker::default(),
            patience,
        }
    }
}

impl Communicator for ShmCommunicator {
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
        self.worker.drain();
        self.group.0.run(collective, self.patience)
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

impl Communicator for Behind {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn size(&self) -> usize {
        self.0.size
    }

    fn backend(&self) -> &'static str {
        "shm"
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.0.run(collective, Patience::behind())
    }

    fn start(&self, job: Job) {
        job(self);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let signature = Signature::of_kind(Kind::Allocate, bytes as u64);
        self.0
            .pass(signature, Patience::behind(), |passage| passage.allocate(bytes))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        let signature = Signature::of_kind(Kind::Split, 0);
        let share = self
            .0
            .pass(signature, Patience::behind(), |passage| passage.split(color, key))?;
        share.map(|share| share.attach(&self.0.options)).transpose()
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.0.traffic()
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

impl Drop for ShmCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Jobs under way may wait for peers that wait for this rank: fail them first.
            self.abort(&format!("rank {} panicked", self.group.0.rank));
        }
        self.worker.stop();
        self.group.0.leave();
    }
}
