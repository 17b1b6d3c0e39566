//! Saving behind the training: a copy of the state, and a thread that writes it.
//!
//! The thread has a group of ranks of its own, so that what it asks other ranks never waits for what training asks them.

use super::save;
use crate::{Error, Result};
use sconce_collectives::Communicator;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How much the thread that writes yields to those that train: it gets a tenth of a core that both want.
const YIELDING: i32 = 10;

/// The save under way, if there is one.
#[derive(Debug, Default)]
pub struct Background {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The thread's own group, made with the first save.
    group: Option<Arc<dyn Communicator>>,
    under_way: Option<JoinHandle<Result<PathBuf>>>,
    /// Memory for the copy, kept from one save to the next.
    copy: Arc<Mutex<Vec<u8>>>,
}

impl Background {
    /// Copies the state of this rank and starts to write it; called by all ranks, when nothing is under way.
    pub(super) fn start(&self, communicator: &dyn Communicator, saved: save::State) -> Result<()> {
        let save::State { facts, boxes, engines } = saved;
        let mut state = self.lock();
        let group = match &state.group {
            Some(group) => Arc::clone(group),
            None => {
                let group = communicator.split(Some(0), communicator.rank() as i64)?;
                let group = group.ok_or(Error::Order {
                    what: "a group of ranks for saving",
                    hint: "the communicator left this rank out of a group that it asked for".into(),
                })?;
                state.group = Some(Arc::clone(&group));
                group
            }
        };
        let copy = Arc::clone(&state.copy);
        let mut ends = Vec::new();
        {
            let mut copy = copy.lock().unwrap_or_else(PoisonError::into_inner);
            copy.clear();
            copy.reserve(boxes.bytes());
            boxes.for_each(&engines, |_, bytes| {
                copy.extend_from_slice(bytes);
                ends.push(copy.len());
                Ok(())
            })?;
        }
        let write = move || {
            // This thread alone, and those it starts: where no core is free, training goes first. It is right without, too.
            let _ = rustix::process::nice(YIELDING);
            let copy = copy.lock().unwrap_or_else(PoisonError::into_inner);
            save::write(&*group, facts, boxes, |_, take| {
                let mut start = 0;
                for (number, end) in ends.into_iter().enumerate() {
                    take(number, &copy[start..end])?;
                    start = end;
                }
                Ok(())
            })
        };
        let thread = std::thread::Builder::new().name("sconce-saving".into()).spawn(write);
        state.under_way = Some(thread.map_err(|source| Error::Order {
            what: "saving in the background",
            hint: format!("the thread cannot be started: {source}"),
        })?);
        Ok(())
    }

    /// Waits for what is under way, and returns how it went.
    pub(super) fn finish(&self) -> Result<()> {
        let Some(thread) = self.lock().under_way.take() else {
            return Ok(());
        };
        match thread.join() {
            Ok(outcome) => outcome.map(drop),
            Err(_) => Err(Error::Order {
                what: "saving in the background",
                hint: "the thread panicked".into(),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::warn!("a checkpoint was not saved: {error}");
        }
    }
}
