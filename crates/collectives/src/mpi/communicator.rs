//! The MPI backend as a [`Communicator`].

use super::group::Group;
use super::waiting::Patience;
use crate::collective::{Kind, Signature};
use crate::private::Private;
use crate::worker::Worker;
use crate::{Buffer, Collective, Communicator, Job, Result, Traffic};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A group of ranks of the job, seen by one of them.
#[derive(Debug)]
pub(super) struct MpiCommunicator {
    group: Arc<Behind>,
    worker: Worker,
    patience: Patience,
}

/// The groups of this process, so that those still there at its end can be left.
static GROUPS: Mutex<Vec<Weak<Behind>>> = Mutex::new(Vec::new());

/// The same group as jobs see it: already behind everything that was started before.
#[derive(Debug)]
struct Behind(Group);

impl MpiCommunicator {
    pub(super) fn new(group: Group) -> Self {
        let patience = Patience::of_caller(group.local_ranks);
        let group = Arc::new(Behind(group));
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&group));
        Self {
            group,
            worker: Worker::default(),
            patience,
        }
    }
}

/// Tells the others that this rank will come no more in any group, as a process that ends without dropping them must.
pub(super) fn leave_all() {
    let groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups
        .iter()
        .filter_map(Weak::upgrade)
        .for_each(|group| group.0.leave());
}

impl Communicator for MpiCommunicator {
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
        "mpi"
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.0.run(collective, Patience::behind())
    }

    fn start(&self, job: Job) {
        job(self);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let signature = Signature::of_kind(Kind::Allocate, bytes as u64);
        self.0.pass(signature, Patience::behind(), |passage| {
            passage.enter(|_| Private::of(&[])).map(drop)
        })?;
        Ok(Buffer::on_heap(bytes))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        let share = self.0.split(color, key)?;
        Ok(share.map(|share| share.communicator(&self.0, &self.0.options)))
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.0.traffic()
    }

    fn abort(&self, reason: &str) {
        self.0.fail(self.0.rank, reason);
    }
}

impl Drop for MpiCommunicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Jobs under way may wait for peers that wait for this rank: fail them first.
            self.abort(&format!("rank {} panicked", self.group.0.rank));
        }
        self.worker.stop();
        self.group.0.leave();
    }
}
