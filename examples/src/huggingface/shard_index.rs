//! The list of shards of a model that is split over several files.
//!
//! The index is untrusted: a name like `../../etc/passwd` would let a downloaded folder choose which files of this
//! machine are read, and a list that does not match its shards would load half a model. Neither passes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use super::safetensors_header::read_safetensors_header;

/// `model.safetensors.index.json`: which shard holds which tensor.
#[derive(Debug)]
pub(super) struct ShardIndex {
    path: PathBuf,
    /// Tensor names by shard name; every shard name is a plain file name.
    tensors_by_shard: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Deserialize)]
struct IndexFile {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Reads the index and checks the names in it, before any file is touched because of it.
    ///
    /// # Errors
    /// If the file is malformed, empty, or names a shard that is not a plain name of a safetensors file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let read = || -> Result<BTreeMap<String, BTreeSet<String>>> {
            let file: IndexFile = serde_json::from_str(&fs::read_to_string(path)?)?;
            ensure!(
                !file.weight_map.is_empty(),
                "`weight_map` is empty, expected the shard of every tensor"
            );
            let mut tensors_by_shard = BTreeMap::<_, BTreeSet<_>>::new();
            for (tensor, shard) in file.weight_map {
                ensure!(
                    is_plain_safetensors_name(&shard),
                    "tensor `{tensor}` is said to be in {shard:?}, expected the name of a safetensors file in the same \
                     folder; do not use this folder unless you trust where it comes from"
                );
                tensors_by_shard.entry(shard).or_default().insert(tensor);
            }
            Ok(tensors_by_shard)
        };
        let tensors_by_shard =
            read().with_context(|| format!("{}: cannot be used as an index of shards", path.display()))?;
        Ok(Self {
            path: path.to_owned(),
            tensors_by_shard,
        })
    }

    /// Returns the paths of the shards in `directory`, sorted by name.
    ///
    /// # Errors
    /// If a shard is missing or malformed, or holds other tensors than the index lists.
    pub(super) fn check_shards(&self, directory: &Path) -> Result<Vec<PathBuf>> {
        self.tensors_by_shard
            .iter()
            .map(|(shard, listed)| self.check_shard(directory.join(shard), listed))
            .collect()
    }

    fn check_shard(&self, shard: PathBuf, listed: &BTreeSet<String>) -> Result<PathBuf> {
        if !shard.is_file() {
            bail!(
                "{}: is listed in {} and missing; download it too",
                shard.display(),
                self.path.display()
            );
        }
        let held: BTreeSet<String> = read_safetensors_header(&shard)?.offset_keys().into_iter().collect();
        if let Some(tensor) = listed.difference(&held).next() {
            bail!(
                "{}: has no tensor `{tensor}`, which {} lists in it; download the folder again",
                shard.display(),
                self.path.display()
            );
        }
        if let Some(tensor) = held.difference(listed).next() {
            bail!(
                "{}: holds a tensor `{tensor}` that {} does not list in it; download the folder again",
                shard.display(),
                self.path.display()
            );
        }
        Ok(shard)
    }
}

/// Without separators a name that ends so is one component and none of the special ones. Backslashes and colons are
/// refused everywhere, so that a folder means the same on every system.
fn is_plain_safetensors_name(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\\', ':', '\0'])
}
