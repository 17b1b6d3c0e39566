//! Checkpoints: all of a run's state, from which it goes on, on any number of ranks and under any strategy.
//!
//! # What a checkpoint is
//!
//! A folder of one safetensors file per rank that saved and `index.json`, which says for every parameter, array and range
//! of elements where it lies: nothing in it depends on who saved what, so each rank that loads reads the ranges it holds.
//! The index also has what is no array: counts, loss scales, the state of objects (schedules, loaders, the program's own)
//! and every rank's random state. Every mebibyte has a hash, which is compared where it is read.
//!
//! # Why none is lost
//!
//! A checkpoint is written under a hidden name. When all ranks' files are on disk, rank 0 writes the index and gives the
//! folder its name, and only then are older ones pruned. A process that dies at any moment leaves complete checkpoints as
//! they were, and a hidden folder that the next attempt removes. All ranks succeed or fail together.
//!
//! [`Checkpoint`] reads one without a run: for tools, and for programs that want its weights.
//!
//! Nothing that is read can execute anything, and nothing is believed unchecked: lengths, ranges, names and versions of a
//! damaged or hostile checkpoint are errors that name the file and the tensor, before anything is changed, but for hashes,
//! which are compared while values are read: a mismatch ends the run. The index begins with a hash of its own text. Files in
//! the folder that the index does not name are the program's, as its hooks wrote them.

mod array_file;
mod background;
mod differences;
mod error;
mod folder;
mod folder_lock;
mod hooks;
mod index;
mod keepers;
mod load;
mod opened;
mod registry;
mod save;
mod weights_export;

pub use background::Background;
pub use differences::{Difference, DifferenceKind};
pub use error::CheckpointError;
pub(crate) use folder::check_writable;
pub(crate) use folder_lock::FolderLock;
pub use hooks::HookHandle;
pub(crate) use keepers::Keepers;
pub use load::{LoadOptions, Loaded};
pub use opened::{Checkpoint, SavedArray, SavedModel, SavedTensor, Verified};
pub use registry::{Registry, Stateful};
pub use weights_export::{ExportOptions, Exported};

use crate::{Accelerator, Error, Result};
use save::State;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a run keeps numbered checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoints {
    /// The folder; ranks on other hosts must see the same, but with
    /// [`save_on_each_node`](crate::AcceleratorBuilder::save_on_each_node).
    pub folder: PathBuf,
    /// How many complete ones are kept, at least one; `None` keeps all.
    pub total_limit: Option<usize>,
}

impl<'a> dyn Accelerator + 'a {
    /// Makes an object's state part of checkpoints, under a name of its own; on all ranks alike.
    ///
    /// Schedules and loaders that this accelerator prepared are part of them already.
    ///
    /// # Errors
    /// [`Error::Setting`] for a name that another object has.
    pub fn register_for_checkpointing(&self, name: &str, object: Arc<dyn Stateful>) -> Result<()> {
        self.registry().add(name, object)
    }

    /// Has `hook` called before each save, on every rank, with the folder that is being written: what it puts there is part
    /// of the checkpoint, appears and is pruned with it. On all ranks alike; hooks are called in their order, in the thread that
    /// saves, also where the rest is written in the background. Ranks of one host share the folder: a file of a rank's own
    /// needs a name of its own, and names that begin with `rank-` and `index.json` are the checkpoint's.
    ///
    /// A hook that fails on any rank fails the save on all of them, with the first such rank's reason on rank 0, and nothing
    /// is published.
    pub fn register_save_state_pre_hook(
        &self,
        hook: impl Fn(&Path) -> Result<(), Box<dyn std::error::Error + Send + Sync>> + Send + Sync + 'static,
    ) -> HookHandle {
        self.registry().before_saving.add(hook)
    }

    /// Has `hook` called before each load, on every rank, with the folder of the checkpoint, which fits the model: before
    /// anything of the run is changed. On all ranks alike. It is not called where weights alone are loaded.
    ///
    /// A hook that fails on any rank fails the load on all of them.
    pub fn register_load_state_pre_hook(
        &self,
        hook: impl Fn(&Path) -> Result<(), Box<dyn std::error::Error + Send + Sync>> + Send + Sync + 'static,
    ) -> HookHandle {
        self.registry().before_loading.add(hook)
    }

    /// Saves the state of the run to a new folder, and returns when it is on disk; called by all ranks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when the folder exists, or some rank cannot write; failures of the group.
    pub fn save_state(&self, folder: impl AsRef<Path>) -> Result<PathBuf> {
        self.finish_saving()?;
        self.save_to(folder.as_ref().to_owned(), None)
    }

    /// Saves the state of the run as the next numbered checkpoint of [`Checkpoints`], and prunes older ones.
    ///
    /// # Errors
    /// [`Error::Setting`] where no folder is set; else as [`save_state`](#method.save_state).
    pub fn save_checkpoint(&self) -> Result<PathBuf> {
        self.finish_saving()?;
        let (target, limit) = self.next_checkpoint()?;
        self.save_to(target, limit)
    }

    /// Does what [`save_checkpoint`](#method.save_checkpoint) does behind the training: returns when the state has been
    /// copied. One is written at a time: a save that comes earlier waits. A failure is told by the next save, or by
    /// [`finish_saving`](#method.finish_saving), which the program calls at its end.
    ///
    /// # Errors
    /// As there, and failures of the save before.
    pub fn save_checkpoint_in_background(&self) -> Result<PathBuf> {
        self.finish_saving()?;
        let (target, limit) = self.next_checkpoint()?;
        let state = State::begin(self, target.clone(), limit)?;
        self.background().start(&**self.communicator(), state)?;
        Ok(target)
    }

    /// Returns when what is saved in the background is on disk; called by all ranks.
    ///
    /// # Errors
    /// Failures of that save.
    pub fn finish_saving(&self) -> Result<()> {
        let outcome = self.background().finish();
        crate::together::together(&**self.communicator(), outcome)?;
        Ok(())
    }

    /// Goes on from a checkpoint: `folder`, or the newest complete one in it; called by all ranks, after `prepare`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] when there is none, it is damaged, or it is of another model; [`Error::Setting`] when it has
    /// other objects; failures of the group.
    pub fn load_state(&self, folder: impl AsRef<Path>) -> Result<Loaded> {
        self.load_state_with(folder, &LoadOptions::default())
    }

    /// Goes on from the newest complete checkpoint of [`Checkpoints`], if there is any checkpoint there at all; called by all
    /// ranks, after `prepare`.
    ///
    /// # Errors
    /// As [`load_state`](#method.load_state): also when there are checkpoints and none of them is complete.
    pub fn load_latest(&self) -> Result<Option<Loaded>> {
        let (_, numbers, folder) = self.numbered_checkpoints()?;
        match numbers {
            0 => Ok(None),
            _ => self.load_state(folder).map(Some),
        }
    }

    /// Does what [`load_state`](#method.load_state) does, leaving out what the options say.
    ///
    /// # Errors
    /// As there.
    pub fn load_state_with(&self, folder: impl AsRef<Path>, options: &LoadOptions) -> Result<Loaded> {
        self.finish_saving()?;
        load::load(self, folder.as_ref(), options)
    }

    fn save_to(&self, target: PathBuf, limit: Option<usize>) -> Result<PathBuf> {
        let State { facts, boxes, engines } = State::begin(self, target, limit)?;
        save::write(&**self.communicator(), facts, boxes, |boxes, take| {
            boxes.for_each(&engines, take)
        })
    }

    /// Returns the place of the next numbered checkpoint.
    fn next_checkpoint(&self) -> Result<(PathBuf, Option<usize>)> {
        let (next, _, folder) = self.numbered_checkpoints()?;
        let limit = self
            .settings()
            .checkpoints
            .as_ref()
            .and_then(|checkpoints| checkpoints.total_limit);
        Ok((folder::numbered(&folder, next), limit))
    }

    /// Returns the number of the next checkpoint, how many there are, and in which folder; rank 0 looks for all.
    fn numbered_checkpoints(&self) -> Result<(u64, u64, PathBuf)> {
        let Some(checkpoints) = &self.settings().checkpoints else {
            return Err(Error::Setting {
                setting: "checkpoints",
                value: "none".into(),
                expected: "a folder: AcceleratorBuilder::checkpoints, or name one with save_state".into(),
            });
        };
        let look = || {
            let numbers = folder::numbers(&checkpoints.folder)?;
            Ok::<_, CheckpointError>((numbers.last().map_or(0, |last| last + 1), numbers.len() as u64))
        };
        let found = crate::together::on_main(&**self.communicator(), look)?;
        let (next, count) = self.broadcast_object(&found.unwrap_or_default(), 0)?;
        Ok((next, count, checkpoints.folder.clone()))
    }
}
