//! What a program does before a checkpoint is written or read: to keep files of its own in it.

use super::CheckpointError;
use crate::Result;
use crate::agreement::check_alike;
use crate::together::together;
use sconce_collectives::Communicator;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

type Hook = dyn Fn(&Path) -> Result<(), Box<dyn std::error::Error + Send + Sync>> + Send + Sync;

/// The hooks of one occasion, in the order in which they were registered.
#[derive(Default)]
pub(super) struct Hooks {
    entries: Arc<Mutex<Entries>>,
}

#[derive(Default)]
struct Entries {
    next: u64,
    hooks: Vec<(u64, Arc<Hook>)>,
}

/// A hook that is registered; it stays so when this is dropped.
pub struct HookHandle {
    entries: Weak<Mutex<Entries>>,
    number: u64,
}

impl std::fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HookHandle")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

impl HookHandle {
    /// Takes the hook back; on all ranks alike.
    pub fn remove(self) {
        if let Some(entries) = self.entries.upgrade() {
            lock(&entries).hooks.retain(|(number, _)| *number != self.number);
        }
    }
}

impl Hooks {
    pub(super) fn add(
        &self,
        hook: impl Fn(&Path) -> Result<(), Box<dyn std::error::Error + Send + Sync>> + Send + Sync + 'static,
    ) -> HookHandle {
        let mut entries = lock(&self.entries);
        let number = entries.next;
        entries.next += 1;
        entries.hooks.push((number, Arc::new(hook)));
        HookHandle {
            entries: Arc::downgrade(&self.entries),
            number,
        }
    }

    /// Calls all hooks with a checkpoint's folder; called by all ranks, which succeed or fail together.
    pub(super) fn run(&self, group: &dyn Communicator, what: &'static str, folder: &Path) -> Result<()> {
        // A hook may register or remove others.
        let hooks = Vec::from_iter(lock(&self.entries).hooks.iter().map(|(_, hook)| Arc::clone(hook)));
        check_alike(group, what, &format!("{} hooks", hooks.len()))?;
        let mut calls = hooks.iter().enumerate();
        let outcome = calls.try_for_each(|(number, hook)| {
            hook(folder).map_err(|source| CheckpointError::Hook {
                path: folder.into(),
                what,
                number,
                source,
            })
        });
        together(group, outcome)
    }
}

fn lock(entries: &Mutex<Entries>) -> MutexGuard<'_, Entries> {
    entries.lock().unwrap_or_else(PoisonError::into_inner)
}
