//! What a fully sharded run is, and how the engine is told.

use crate::placement::FsdpPlacement;
use crate::{
    BackwardPrefetch, Error, FsdpStrategy, FsdpVersion, IgnoredModules, Named, PrecisionPolicy, Result, StateDictType,
    WrapPolicy,
};
use sconce_zero::{EngineOptions, Gathering, Offloaded, ShardingStrategy, Tier, UnitPolicy};

/// A fully sharded run, with nothing left open but the world: [`FullyShardedOptions`](crate::FullyShardedOptions) and
/// FSDP's defaults.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FullySharded {
    /// Whose defaults hold.
    pub version: FsdpVersion,
    /// What is sharded, and over whom.
    pub strategy: FsdpStrategy,
    /// How many ranks shard together in the hybrid strategies; `None` is those of one host.
    pub ranks_per_group: Option<usize>,
    /// What becomes a unit.
    pub auto_wrap_policy: WrapPolicy,
    /// What is not sharded.
    pub ignored_modules: Option<IgnoredModules>,
    /// When the next unit of the backward is gathered.
    pub backward_prefetch: BackwardPrefetch,
    /// Whether the next unit of the forward is gathered ahead.
    pub forward_prefetch: bool,
    /// Whether gathers ahead have a limit.
    pub limit_all_gathers: bool,
    /// Whether shares and optimizer state lie on the host.
    pub offload_params: bool,
    /// Whether units compute again in the backward.
    pub activation_checkpointing: bool,
    /// Whether gradients are reduced in every micro-batch.
    pub sync_each_batch: bool,
    /// How state is saved.
    pub state_dict_type: StateDictType,
    /// Types to compute and reduce in.
    pub precision: PrecisionPolicy,
    pub(crate) notices: Vec<String>,
}

impl FullySharded {
    /// Returns what a user should be told: settings that do nothing, or not what PyTorch would do. Each is one line.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Returns which declared parts become units.
    pub fn units(&self) -> UnitPolicy {
        self.auto_wrap_policy.unit_policy(self.ignored_modules.as_ref())
    }

    /// Returns which declared parts compute again in the backward: the units, or all parts where there are none.
    pub fn recomputed(&self) -> UnitPolicy {
        match (self.activation_checkpointing, &self.auto_wrap_policy) {
            (false, _) => UnitPolicy::none(),
            (true, WrapPolicy::NoWrap) => UnitPolicy::all(),
            (true, _) => self.units(),
        }
    }

    /// Returns where state lives.
    pub fn placement(&self) -> Box<dyn ShardingStrategy> {
        let strategy = Box::new(FsdpPlacement {
            strategy: self.strategy,
            ignored: self.ignored_modules.clone(),
            sync_each_batch: self.sync_each_batch,
        });
        if !self.offload_params {
            return strategy;
        }
        Box::new(Offloaded {
            strategy,
            parameters: Tier::Host,
            optimizer_state: Tier::Host,
        })
    }

    /// Returns how many ranks shard together in a world of `world_size` ranks, `local_size` on each host; `None` is all.
    ///
    /// # Errors
    /// [`Error::Setting`] if that does not divide the world.
    pub fn shard_group(&self, world_size: usize, local_size: usize) -> Result<Option<usize>> {
        if !self.strategy.is_hybrid() {
            return Ok(None);
        }
        let ranks = self.ranks_per_group.unwrap_or(local_size);
        if ranks == 0 || !world_size.is_multiple_of(ranks) {
            return Err(Error::Setting {
                setting: "shard_group",
                value: ranks.to_string(),
                expected: format!("expected a divisor of the number of ranks, {world_size}"),
            });
        }
        Ok((ranks < world_size).then_some(ranks))
    }

    /// Says where a hybrid strategy has only one group in a world of `world_size` ranks, `local_size` on each host.
    pub fn notice_of_one_group(&self, world_size: usize, local_size: usize) -> Option<String> {
        let has_one =
            self.strategy.is_hybrid() && world_size > 1 && matches!(self.shard_group(world_size, local_size), Ok(None));
        let plain = if self.strategy.reshards_after_forward() {
            FsdpStrategy::FullShard
        } else {
            FsdpStrategy::ShardGradOp
        };
        has_one.then(|| {
            format!(
                "{} on one host is {}: all ranks are one group, unless FullyShardedOptions::shard_group makes smaller ones",
                self.strategy.name(),
                plain.name()
            )
        })
    }

    /// Returns how parameters are gathered, beginning with `gathering`.
    pub fn gathering(&self, gathering: Gathering) -> Gathering {
        Gathering {
            // FSDP counts units, not elements.
            prefetch_elements: usize::MAX,
            prefetch_units: 1,
            forward_prefetch: self.forward_prefetch,
            backward_prefetch: self.backward_prefetch,
            reshard_after_forward: self.strategy.reshards_after_forward() || !self.strategy.shards(),
            max_live_elements: match self.limit_all_gathers {
                true => gathering.max_live_elements,
                false => usize::MAX,
            },
        }
    }

    /// Makes `options` those of this run.
    ///
    /// # Errors
    /// As [`FullySharded::shard_group`].
    pub fn engine_options(
        &self,
        options: EngineOptions,
        world_size: usize,
        local_size: usize,
    ) -> Result<EngineOptions> {
        Ok(EngineOptions {
            strategy: self.placement(),
            shard_group: self.shard_group(world_size, local_size)?,
            units: self.units(),
            recompute: self.recomputed(),
            reduce_dtype: self.precision.reduce_dtype.unwrap_or(options.reduce_dtype),
            cast_inputs: self.precision.cast_forward_inputs,
            output_dtype: self.precision.output_dtype,
            gathering: self.gathering(options.gathering.clone()),
            ..options
        })
    }
}
