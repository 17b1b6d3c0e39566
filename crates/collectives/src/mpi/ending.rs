//! The end of a process: MPI must be finalised by all ranks together.
//!
//! A library cannot know when its user is done with MPI, but C can: the work is done by a function that runs when the
//! process exits. A process that is killed, or whose operations are still under way, does not finalise, and `mpirun` ends
//! the others.

use super::ALL;
use super::communicator::leave_all;
use super::group::Group;
use super::library::call_at_exit;
use super::waiting::Patience;
use crate::collective::{Kind, Signature};
use crate::private::Private;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// How long a process that knows of a failure waits for the others to end too.
const AFTER_FAILURE: Duration = Duration::from_secs(5);

/// Whether any group has failed.
static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// Notes that some group of this process has failed.
pub(super) fn note_failure() {
    HAS_FAILED.store(true, SeqCst);
}

/// Has MPI finalised when the process ends.
pub(super) fn finalise_at_exit() {
    call_at_exit(at_exit);
}

extern "C" fn at_exit() {
    let Some(all) = ALL.get() else { return };
    leave_all();
    if all.library.under_way.load(SeqCst) == 0 && all.ends_together() {
        // The process is ending: there is nobody to tell, and mpirun sees for itself.
        let _ = all.library.finalise();
    }
}

impl Group {
    /// Waits until all ranks are ending; says whether they are.
    fn ends_together(&self) -> bool {
        let timeout = if HAS_FAILED.load(SeqCst) {
            AFTER_FAILURE.min(self.options.timeout)
        } else {
            self.options.timeout
        };
        let signature = Signature::of_kind(Kind::Barrier, 0);
        let entered = self.pass(signature, Patience::behind(), |passage| {
            passage.timeout = timeout;
            passage.enter(|_| Private::of(&[])).map(drop)
        });
        entered.is_ok()
    }
}
