//! The NCCL backend as a [`Communicator`].

use super::group::Group;
use crate::collective::{Kind, Signature};
use crate::worker::Worker;
use crate::{Buffer, Collective, Communicator, Job, Result, Traffic, single};
use std::sync::Arc;

/// A group of ranks with a GPU each, seen by one of them.
#[derive(Debug)]
pub(super) struct NcclCommunicator {
    group: Arc<Behind>,
    worker: Worker,
}

/// The same group as jobs see it: already behind everything that was started before.
#[derive(Debug)]
struct Behind(Group);

impl NcclCommunicator {
    pub(super) fn new(group: Group) -> Self {
        Self {
            group: Arc::new(Behind(group)),
            worker: Worker::default(),
        }
    }
}

impl Communicator for NcclCommunicator {
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
        self.group.execute(collective)
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
        self.0.board.rank
    }

    fn size(&self) -> usize {
        self.0.board.size
    }

    fn backend(&self) -> &'static str {
        "nccl"
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.0.run(collective)
    }

    fn start(&self, job: Job) {
        job(self);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.0.meet(Signature::of_kind(Kind::Allocate, bytes as u64))?;
        Ok(Buffer::on_heap(bytes))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        Ok(match self.0.split(color, key)? {
            (Some(group), _) => Some(Arc::new(NcclCommunicator::new(group))),
            (None, is_alone) => is_alone.then(single),
        })
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.0.traffic()
    }

    fn abort(&self, reason: &str) {
        self.0.board.fail(self.0.board.rank, reason);
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Jobs under way may wait for peers that wait for this rank: fail them first.
            self.abort(&format!("rank {} panicked", self.group.rank()));
        }
        self.worker.stop();
        self.group.0.board.leave();
    }
}
