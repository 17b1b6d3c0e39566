//! What belongs to a checkpoint of one loop: its models, and whatever else has a state.

use super::folder_lock::FolderLock;
use super::hooks::Hooks;
use crate::{Error, Result};
use sconce_zero::Engine;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Something whose state belongs to checkpoints; the state is the same on all ranks, and written as JSON.
///
/// Every value that serde can write and read is one, behind a mutex that the program shares with the accelerator.
pub trait Stateful: Send + Sync {
    /// Returns the state.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    fn state(&self) -> Result<Value, Box<dyn std::error::Error + Send + Sync>>;

    /// Goes on from a state.
    ///
    /// # Errors
    /// When it is not a state of this.
    fn restore(&self, state: Value) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

impl<T: Serialize + DeserializeOwned + Send> Stateful for Mutex<T> {
    fn state(&self) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Ok(serde_json::to_value(
            &*self.lock().unwrap_or_else(PoisonError::into_inner),
        )?)
    }

    fn restore(&self, state: Value) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        *self.lock().unwrap_or_else(PoisonError::into_inner) = serde_json::from_value(state)?;
        Ok(())
    }
}

/// What the accelerators of one loop save together.
#[derive(Default)]
pub struct Registry {
    entries: Mutex<Entries>,
    pub(super) before_saving: Hooks,
    pub(super) before_loading: Hooks,
}

#[derive(Default)]
struct Entries {
    engines: Vec<Arc<Engine>>,
    objects: Vec<(String, Arc<dyn Stateful>)>,
    /// That of the folder of numbered checkpoints, on rank 0.
    lock: Option<FolderLock>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = Vec::from_iter(self.lock().objects.iter().map(|(name, _)| name.clone()));
        f.debug_struct("Registry")
            .field("objects", &names)
            .finish_non_exhaustive()
    }
}

impl Registry {
    pub(crate) fn add_engine(&self, engine: &Arc<Engine>) {
        self.lock().engines.push(Arc::clone(engine));
    }

    /// Adds an object of the accelerator's own kind, which gets the next number of its kind.
    pub(crate) fn add_numbered(&self, kind: &str, object: Arc<dyn Stateful>) {
        let mut entries = self.lock();
        let number = (0..)
            .find(|number| !entries.has(&format!("{kind} {number}")))
            .unwrap_or(0);
        entries.objects.push((format!("{kind} {number}"), object));
    }

    /// Adds an object of the program's, by a name of its own.
    pub(crate) fn add(&self, name: &str, object: Arc<dyn Stateful>) -> Result<()> {
        let mut entries = self.lock();
        if entries.has(name) {
            return Err(Error::Setting {
                setting: "register_for_checkpointing name",
                value: name.into(),
                expected: "a name that no other object has".into(),
            });
        }
        entries.objects.push((name.into(), object));
        Ok(())
    }

    /// Keeps a folder locked as long as the loop's accelerators live.
    pub(crate) fn keep(&self, lock: FolderLock) {
        self.lock().lock = Some(lock);
    }

    pub(super) fn engines(&self) -> Vec<Arc<Engine>> {
        self.lock().engines.clone()
    }

    pub(super) fn objects(&self) -> Vec<(String, Arc<dyn Stateful>)> {
        self.lock().objects.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn has(&self, name: &str) -> bool {
        self.objects.iter().any(|(other, _)| other == name)
    }
}
