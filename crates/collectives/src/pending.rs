//! The handle of an operation that runs behind other work.

use crate::{Error, Result};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};

/// A result that is on its way.
///
/// Dropping the handle does not cancel the operation.
#[derive(Debug)]
#[must_use = "an operation's failure shows only when its handle is waited on"]
pub struct Pending<B> {
    receiver: Receiver<Result<B>>,
    early: Option<Result<B>>,
}

/// The side of a [`Pending`] that delivers the result.
#[derive(Debug)]
pub(crate) struct Completion<B>(SyncSender<Result<B>>);

impl<B> Pending<B> {
    pub(crate) fn new() -> (Self, Completion<B>) {
        let (sender, receiver) = sync_channel(1);
        (Self { receiver, early: None }, Completion(sender))
    }

    /// Waits for the operation and gives its buffer back.
    ///
    /// # Errors
    /// The operation's error; the buffer is lost then.
    pub fn wait(mut self) -> Result<B> {
        match self.early.take() {
            Some(result) => result,
            None => self.receiver.recv().unwrap_or_else(|_| Err(abandoned())),
        }
    }

    /// Says, without blocking, whether the operation has ended (well or not).
    pub fn is_complete(&mut self) -> bool {
        if self.early.is_none() {
            self.early = match self.receiver.try_recv() {
                Ok(result) => Some(result),
                Err(TryRecvError::Disconnected) => Some(Err(abandoned())),
                Err(TryRecvError::Empty) => None,
            };
        }
        self.early.is_some()
    }
}

impl<B> Completion<B> {
    pub(crate) fn complete(self, result: Result<B>) {
        // The receiver may be gone: nobody waits for the result then.
        let _ = self.0.send(result);
    }
}

fn abandoned() -> Error {
    Error::Unsupported {
        what: "operation behind other work was dropped before it ran".into(),
        hint: "keep the communicator alive until its handles were waited on".into(),
    }
}
