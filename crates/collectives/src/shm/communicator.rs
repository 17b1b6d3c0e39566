//! The shared-memory backend as a [`Communicator`].

use super::group::Group;
use super::waiting::Patience;
use crate::collective::{Kind, Signature};
use crate::queued::{Behind, Queued};
use crate::{Buffer, Collective, Communicator, Job, Result, Traffic};
use std::sync::Arc;

/// A group of ranks on one host, seen by one of them.
#[derive(Debug)]
struct ShmGroup {
    group: Group,
    /// How a caller waits, who has nothing else to do.
    patience: Patience,
}

/// Makes the communicator of a group.
pub(super) fn communicator(group: Group) -> Arc<dyn Communicator> {
    let patience = Patience::of_caller(group.size);
    Arc::new(Queued::new(Arc::new(ShmGroup { group, patience })))
}

impl Communicator for ShmGroup {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn backend(&self) -> &'static str {
        "shm"
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.group.run(collective, Patience::behind())
    }

    fn start(&self, job: Job) {
        job(self);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let signature = Signature::of_kind(Kind::Allocate, bytes as u64);
        self.group
            .pass(signature, Patience::behind(), |passage| passage.allocate(bytes))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        let signature = Signature::of_kind(Kind::Split, 0);
        let share = self
            .group
            .pass(signature, Patience::behind(), |passage| passage.split(color, key))?;
        share.map(|share| share.attach(&self.group.options)).transpose()
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.group.traffic()
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}

impl Behind for ShmGroup {
    fn execute_for_caller(&self, collective: Collective<'_>) -> Result<()> {
        self.group.run(collective, self.patience)
    }

    fn leave(&self) {
        self.group.leave();
    }
}
