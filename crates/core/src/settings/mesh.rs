//! Accelerate's mesh, as far as it is one of data parallel groups.

use super::given::Origin;
use super::variables::Environment;
use crate::environment as variable;
use crate::{Error, Result};
use sconce_fsdp::{FsdpVersion, FullyShardedOptions};

/// Groups of ranks that each hold all state, and how many ranks share it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mesh {
    replicate: u64,
    shard: u64,
}

impl Mesh {
    /// Reads the variables that count where `ACCELERATE_USE_PARALLELISM_CONFIG` is true; `None` where it is not.
    pub(super) fn read(environment: &Environment<'_>) -> Result<Option<Self>> {
        if environment.flag(variable::ACCELERATE_USE_PARALLELISM_CONFIG)? != Some(true) {
            return Ok(None);
        }
        for name in [
            variable::PARALLELISM_CONFIG_TP_SIZE,
            variable::PARALLELISM_CONFIG_CP_SIZE,
            variable::PARALLELISM_CONFIG_SP_SIZE,
        ] {
            if let Some(size) = environment.above_zero(name)?.filter(|size| *size > 1) {
                let expected = "expected 1: ranks share training state, not products or sequences; use \
                                PARALLELISM_CONFIG_DP_SHARD_SIZE";
                return Err(Origin::Variable(name).refuse(size, expected));
            }
        }
        let size = |name| Ok::<_, Error>(environment.above_zero(name)?.unwrap_or(1));
        Ok(Some(Self {
            replicate: size(variable::PARALLELISM_CONFIG_DP_REPLICATE_SIZE)?,
            shard: size(variable::PARALLELISM_CONFIG_DP_SHARD_SIZE)?,
        }))
    }

    /// Returns the switches of FSDP with the mesh's groups.
    pub(super) fn applied(
        self,
        options: Option<FullyShardedOptions>,
        world_size: usize,
    ) -> Result<Option<FullyShardedOptions>> {
        let used = Origin::Variable(variable::ACCELERATE_USE_PARALLELISM_CONFIG);
        let Some(mut options) = options.filter(|options| options.version == Some(FsdpVersion::Two)) else {
            return Err(used.refuse(
                true,
                "a mesh needs FSDP's version 2: ACCELERATE_USE_FSDP true, FSDP_VERSION 2",
            ));
        };
        let (replicate, shard) = (self.replicate, self.shard);
        if replicate.saturating_mul(shard) != world_size as u64 {
            let sizes = format!("{replicate} groups of {shard} ranks");
            let expected = format!(
                "the product of PARALLELISM_CONFIG_DP_REPLICATE_SIZE and PARALLELISM_CONFIG_DP_SHARD_SIZE must be the \
                 number of ranks, {world_size}"
            );
            return Err(used.refuse(sizes, expected));
        }
        options.shard_group = (replicate > 1).then_some(super::resolve::count(shard));
        Ok(Some(options))
    }
}
