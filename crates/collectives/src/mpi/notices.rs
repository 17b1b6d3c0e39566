//! What ranks tell each other outside of operations: that they have failed, or left.

use super::ending::note_failure;
use super::group::Group;
use super::library::Requests;
use crate::private::Private;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Tag of a notice.
const NOTICE: i32 = 6;

/// Longest notice in bytes; longer reasons are cut.
const LONGEST: usize = 2048;

/// How often a sender of notices lets MPI make progress before it goes on.
const POLLS: usize = 1000;

/// What is known of a group's ranks.
#[derive(Debug)]
pub(super) struct Notices {
    /// The failure that this rank noticed first: who failed, and why.
    failure: OnceLock<(usize, String)>,
    has_told: AtomicBool,
    peers: Mutex<Vec<Peer>>,
}

/// What a rank has told of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    There,
    /// It has failed, and enters no operation any more.
    Failed,
    /// It has left the group, in an orderly way.
    Left,
}

impl Notices {
    pub(super) fn new(size: usize) -> Self {
        Self {
            failure: OnceLock::new(),
            has_told: AtomicBool::new(false),
            peers: Mutex::new(vec![Peer::There; size]),
        }
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group {
    /// Records a failure unless there is one, and tells the others, once.
    pub(super) fn fail(&self, by: usize, reason: &str) {
        note_failure();
        let (by, reason) = self.notices.failure.get_or_init(|| (by, reason.to_owned()));
        self.tell(Peer::Failed, *by, reason);
    }

    /// Tells the others that this rank will come no more, unless it has told of a failure.
    pub(super) fn leave(&self) {
        self.tell(Peer::Left, self.rank, "");
    }

    pub(super) fn failure(&self) -> Option<Error> {
        note_failure();
        let (by, reason) = self.notices.failure.get()?;
        Some(Error::Aborted {
            by: *by,
            reason: reason.clone(),
        })
    }

    /// Says whether `rank` has told that it is gone.
    pub(super) fn peer(&self, rank: usize) -> Peer {
        self.notices.peers()[rank]
    }

    /// Reads the notices that have come.
    pub(super) fn read_notices(&self) -> Result<()> {
        let mut bytes = [0; LONGEST];
        while let Some((from, length)) = self.library.take(self.channel, None, NOTICE, &mut bytes)? {
            let [kind, a, b, c, d, reason @ ..] = &bytes[..length] else {
                continue;
            };
            let by = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
            let peer = if *kind == 1 { Peer::Failed } else { Peer::Left };
            self.notices.peers()[from] = peer;
            if peer == Peer::Failed {
                let reason = String::from_utf8_lossy(reason).into_owned();
                self.notices.failure.get_or_init(|| (by, reason));
            }
        }
        Ok(())
    }

    fn tell(&self, what: Peer, by: usize, reason: &str) {
        if self.library.is_ended() || self.notices.has_told.swap(true, SeqCst) {
            return;
        }
        let mut end = reason.len().min(LONGEST - 5);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let mut notice = vec![u8::from(what == Peer::Failed)];
        notice.extend_from_slice(&(by as u32).to_le_bytes());
        notice.extend_from_slice(&reason.as_bytes()[..end]);
        // Nobody waits for these messages, so their memory is never given back; there is one for each rank and group.
        let notice: &'static [u8] = notice.leak();
        let mut requests = Requests::default();
        for peer in (0..self.size).filter(|peer| *peer != self.rank) {
            // Who cannot be told finds out by its deadline, or by the end of this process.
            let _ = requests.send(self.library, self.channel, Private::of(notice), peer, NOTICE);
        }
        let all = requests.len();
        (0..POLLS).any(|_| requests.have_ended(self.library, all).unwrap_or(true));
        std::mem::forget(requests);
    }
}
