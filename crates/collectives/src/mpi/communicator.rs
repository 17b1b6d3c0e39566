//! The MPI backend as a [`Communicator`].

use super::group::Group;
use super::waiting::Patience;
use crate::collective::{Kind, Signature};
use crate::private::Private;
use crate::queued::{Behind, Queued};
use crate::{Buffer, Collective, Communicator, Job, Result, Traffic};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A group of ranks of the job, seen by one of them.
#[derive(Debug)]
struct MpiGroup {
    group: Group,
    /// How a caller waits, who has nothing else to do.
    patience: Patience,
}

/// The groups of this process, so that those still there at its end can be left.
static GROUPS: Mutex<Vec<Weak<MpiGroup>>> = Mutex::new(Vec::new());

/// Makes the communicator of a group.
pub(super) fn communicator(group: Group) -> Arc<dyn Communicator> {
    let patience = Patience::of_caller(group.local_ranks);
    let group = Arc::new(MpiGroup { group, patience });
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|group| group.strong_count() > 0);
    groups.push(Arc::downgrade(&group));
    Arc::new(Queued::new(group))
}

/// Tells the others that this rank will come no more in any group, as a process that ends without dropping them must.
pub(super) fn leave_all() {
    let groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.iter().filter_map(Weak::upgrade).for_each(|group| group.leave());
}

impl Communicator for MpiGroup {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn backend(&self) -> &'static str {
        "mpi"
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.group.run(collective, Patience::behind())
    }

    fn start(&self, job: Job) {
        job(self);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let signature = Signature::of_kind(Kind::Allocate, bytes as u64);
        self.group.pass(signature, Patience::behind(), |passage| {
            passage.enter(|_| Private::of(&[])).map(drop)
        })?;
        Ok(Buffer::on_heap(bytes))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        let share = self.group.split(color, key)?;
        Ok(share.map(|share| share.communicator(&self.group, &self.group.options)))
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.group.traffic()
    }

    fn abort(&self, reason: &str) {
        self.group.fail(self.group.rank, reason);
    }
}

impl Behind for MpiGroup {
    fn execute_for_caller(&self, collective: Collective<'_>) -> Result<()> {
        self.group.run(collective, self.patience)
    }

    fn leave(&self) {
        self.group.leave();
    }
}
