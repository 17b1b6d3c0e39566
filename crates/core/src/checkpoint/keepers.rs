//! Who answers for a checkpoint's folder: rank 0, or where hosts share no file system the first rank of each.
//!
//! Then every host gets a whole checkpoint: each rank writes its file on its own host, and the first ranks send each other
//! what they lack. A host that is lost takes no checkpoint with it, and any number of ranks and hosts reads what one has.

use super::error::CheckpointError;
use crate::Result;
use crate::objects::gather_objects;
use crate::together::where_chosen;
use sconce_collectives::{Communicator, World};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::Path;

/// Bytes that are sent at a time.
const BLOCK: usize = 8 << 20;

/// Whether this rank is one that answers for a folder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keepers {
    /// Whether each host has a folder of its own.
    pub(super) on_each_node: bool,
    pub(super) is_one: bool,
}

impl Keepers {
    pub(crate) fn new(world: &World, on_each_node: bool) -> Self {
        Self {
            on_each_node,
            is_one: if on_each_node {
                world.is_local_main()
            } else {
                world.is_main()
            },
        }
    }

    /// Returns what `work` does on the ranks that answer for a folder, there, and fails on all ranks if it fails on one.
    pub(crate) fn run<T, E: std::fmt::Display>(
        self,
        group: &dyn Communicator,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<Option<T>> {
        where_chosen(group, self.is_one, work)
    }

    /// Puts those of a checkpoint's files into each host's folder that other hosts have; called by all ranks. The inner
    /// result is this rank's own: what it could not read or write.
    pub(super) fn spread(
        self,
        group: &dyn Communicator,
        files: &BTreeMap<String, u64>,
        folder: &Path,
    ) -> Result<Result<(), CheckpointError>> {
        let keepers = group.split(self.is_one.then_some(0), group.rank() as i64)?;
        let Some(keepers) = keepers else { return Ok(Ok(())) };
        let own = files.keys().filter(|file| folder.join(file).exists());
        let own = Vec::from_iter(own.map(|file| (file.clone(), keepers.rank())));
        let owners = BTreeMap::from_iter(gather_objects(&*keepers, &own)?.into_iter().rev());
        let mut outcome = Ok(());
        for (file, length) in files {
            let path = folder.join(file);
            let copied = match owners.get(file) {
                Some(owner) => copy(&*keepers, *owner, &path, *length)?,
                None => Err(io::ErrorKind::NotFound.into()),
            };
            outcome = outcome.and(copied.map_err(|error| {
                let reason = format!("{error}; save_on_each_node is for hosts that share no folder");
                CheckpointError::unusable(&path, reason)
            }));
        }
        Ok(outcome)
    }
}

/// Sends a file from the folder of `owner` to those of the others. A failure here is told when all is sent: the others wait
/// for every block.
fn copy(keepers: &dyn Communicator, owner: usize, path: &Path, length: u64) -> Result<io::Result<()>> {
    let is_owner = keepers.rank() == owner;
    let mut file = if is_owner {
        File::open(path)
    } else {
        File::create_new(path)
    };
    let mut block = vec![0u8; BLOCK.min(length as usize)];
    for start in (0..length).step_by(BLOCK) {
        let part = &mut block[..(length - start).min(BLOCK as u64) as usize];
        if is_owner {
            step(&mut file, |file| file.read_exact(part));
        }
        keepers.broadcast(part, owner)?;
        if !is_owner {
            step(&mut file, |file| file.write_all(part));
        }
    }
    Ok(file.map(drop))
}

/// Goes on with a file, unless that failed before.
fn step(file: &mut io::Result<File>, go_on: impl FnOnce(&mut File) -> io::Result<()>) {
    if let Ok(open) = file
        && let Err(error) = go_on(open)
    {
        *file = Err(error);
    }
}
