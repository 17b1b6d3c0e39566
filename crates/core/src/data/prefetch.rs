//! Reading ahead: a thread makes the next batches while the loop works on this one.
//!
//! The thread sends what it makes through a channel of bounded length and waits when that is full. When the reader is
//! dropped the thread ends with the batch that it is at; nobody waits for it, since reading may take any time. What it
//! makes, and in which order, is what would have been made without it; a panic of the data set comes at its place too.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

/// What is read, one after the other.
pub(super) enum Reader<R> {
    /// On the thread that asks.
    Here(Box<dyn Iterator<Item = R> + Send>),
    /// On a thread of its own.
    Ahead(Receiver<thread::Result<R>>),
}

impl<R: Send + 'static> Reader<R> {
    /// Reads up to `ahead` items ahead; 0 reads on the thread that asks.
    pub(super) fn new(begin: impl Fn() -> Box<dyn Iterator<Item = R> + Send>, ahead: usize) -> Self {
        let Some(queued) = ahead.checked_sub(1) else {
            return Self::Here(begin());
        };
        // The thread itself holds one more, which it could not send yet.
        let (sender, receiver) = sync_channel(queued);
        let mut items = begin();
        let read = move || {
            loop {
                match catch_unwind(AssertUnwindSafe(|| items.next())) {
                    Ok(None) => return,
                    Ok(Some(item)) => {
                        if sender.send(Ok(item)).is_err() {
                            return;
                        }
                    }
                    Err(panic) => {
                        // Whether anybody still listens makes no difference.
                        let _ = sender.send(Err(panic));
                        return;
                    }
                }
            }
        };
        match thread::Builder::new().name("sconce-loader".into()).spawn(read) {
            Ok(_) => Self::Ahead(receiver),
            Err(error) => {
                tracing::warn!("no thread to read ahead on ({error}); batches are made when they are asked for");
                Self::Here(begin())
            }
        }
    }

    /// Returns the next item, or the panic in its place.
    pub(super) fn next(&mut self) -> Option<thread::Result<R>> {
        match self {
            Self::Here(items) => catch_unwind(AssertUnwindSafe(|| items.next())).transpose(),
            Self::Ahead(receiver) => receiver.recv().ok(),
        }
    }
}

impl<R> std::fmt::Debug for Reader<R> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Here(_) => "Here",
            Self::Ahead(_) => "Ahead",
        })
    }
}
