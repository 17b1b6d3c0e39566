//! The thread that runs operations behind the caller's other work, in the order in which they were started.

use crate::{Communicator, Error, Job, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// A queue of jobs and the thread that runs them; the thread starts with the first job.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    running: Mutex<Option<(Sender<Job>, JoinHandle<()>)>>,
    outstanding: Arc<Outstanding>,
}

/// The number of jobs that have not ended.
#[derive(Debug, Default)]
struct Outstanding {
    jobs: AtomicUsize,
    lock: Mutex<()>,
    none_left: Condvar,
}

impl Worker {
    /// Queues a job; `group` is what it will see.
    ///
    /// # Errors
    /// [`Error::Io`] when the thread cannot be started.
    pub(crate) fn start(&self, job: Job, group: &Arc<impl Communicator + 'static>) -> Result<()> {
        let mut running = lock(&self.running);
        if running.is_none() {
            let (sender, receiver) = channel::<Job>();
            let (group, outstanding) = (Arc::clone(group), Arc::clone(&self.outstanding));
            let thread = std::thread::Builder::new()
                .name("sconce-collectives".into())
                .spawn(move || {
                    for job in receiver {
                        if catch_unwind(AssertUnwindSafe(|| job(&*group))).is_err() {
                            group.abort("an operation behind other work panicked");
                        }
                        outstanding.one_less();
                    }
                });
            let thread = thread.map_err(|source| Error::Io {
                context: "starting the communication thread".into(),
                source,
            })?;
            *running = Some((sender, thread));
        }
        if let Some((sender, _)) = running.as_ref() {
            self.outstanding.jobs.fetch_add(1, Ordering::SeqCst);
            if sender.send(job).is_err() {
                self.outstanding.one_less();
            }
        }
        Ok(())
    }

    /// Returns when every job started so far has ended.
    pub(crate) fn drain(&self) {
        if self.outstanding.jobs.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut guard = lock(&self.outstanding.lock);
        while self.outstanding.jobs.load(Ordering::SeqCst) != 0 {
            guard = self
                .outstanding
                .none_left
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs the queue to its end and stops the thread.
    pub(crate) fn stop(&self) {
        if let Some((sender, thread)) = lock(&self.running).take() {
            drop(sender);
            // Jobs' panics are caught, so the thread cannot have panicked.
            let _ = thread.join();
        }
    }
}

impl Outstanding {
    fn one_less(&self) {
        let _guard = lock(&self.lock);
        self.jobs.fetch_sub(1, Ordering::SeqCst);
        self.none_left.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing here panics while holding a lock; a poisoned one is still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
