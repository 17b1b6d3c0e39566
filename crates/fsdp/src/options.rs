//! What is said of fully sharded data parallelism, by whomever; what nobody says has FSDP's defaults.

use crate::{
    BackwardPrefetch, Error, FsdpStrategy, FsdpVersion, FullySharded, IgnoredModules, Named, PrecisionPolicy,
    ReshardAfterForward, Result, StateDictType, WrapPolicy,
};

/// The switches of FSDP, under Accelerate's names (`FullyShardedDataParallelPlugin`); `None` is not said.
#[derive(Debug, Clone, Default)]
pub struct FullyShardedOptions {
    /// Whose names and defaults hold; [`FsdpVersion::One`] by default.
    pub version: Option<FsdpVersion>,
    /// Version 1: what is sharded; [`FsdpStrategy::FullShard`] by default.
    pub sharding_strategy: Option<FsdpStrategy>,
    /// Version 2: whether parameters are released after the forward, as they are by default. Version 1: the strategy by
    /// another name.
    pub reshard_after_forward: Option<ReshardAfterForward>,
    /// How many ranks shard together, in the hybrid strategies; the ranks of one host by default. Must divide the world.
    /// Version 2 is hybrid where it is given.
    pub shard_group: Option<usize>,
    /// What becomes a unit; [`WrapPolicy::NoWrap`] by default.
    pub auto_wrap_policy: Option<WrapPolicy>,
    /// What is not sharded; nothing by default.
    pub ignored_modules: Option<IgnoredModules>,
    /// When the next unit of the backward is gathered; [`BackwardPrefetch::None`] by default in version 1, in version 2
    /// always [`BackwardPrefetch::Pre`].
    pub backward_prefetch: Option<BackwardPrefetch>,
    /// Version 1: whether the next unit of the forward is gathered ahead; not by default.
    pub forward_prefetch: Option<bool>,
    /// Whether gathers ahead stop at [`Gathering::max_live_elements`](sconce_zero::Gathering); they do by default.
    pub limit_all_gathers: Option<bool>,
    /// Whether shares and optimizer state lie on the host; not by default.
    pub offload_params: Option<bool>,
    /// Whether units keep only their inputs for the backward and compute again; not by default.
    pub activation_checkpointing: Option<bool>,
    /// Whether gradients are reduced in every micro-batch of an accumulation; they are by default. If not, every rank holds
    /// whole gradients and reduces them once: Accelerate's `no_sync`, its default, which trades memory for traffic.
    pub sync_each_batch: Option<bool>,
    /// How state is saved; [`StateDictType::Full`] by default in version 1, [`StateDictType::Sharded`] in version 2.
    pub state_dict_type: Option<StateDictType>,
    /// Types to compute and reduce in.
    pub mixed_precision_policy: Option<PrecisionPolicy>,
    /// Whether parameters keep names and shapes: here always.
    pub use_orig_params: Option<bool>,
    /// Whether all ranks begin with rank 0's values: here always.
    pub sync_module_states: Option<bool>,
    /// Whether one rank reads the weights for all: here each reads its share only.
    pub cpu_ram_efficient_loading: Option<bool>,
}

impl FullyShardedOptions {
    /// Takes from `other` what these options do not say.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            version: self.version.or(other.version),
            sharding_strategy: self.sharding_strategy.or(other.sharding_strategy),
            reshard_after_forward: self.reshard_after_forward.or(other.reshard_after_forward),
            shard_group: self.shard_group.or(other.shard_group),
            auto_wrap_policy: self.auto_wrap_policy.or(other.auto_wrap_policy),
            ignored_modules: self.ignored_modules.or(other.ignored_modules),
            backward_prefetch: self.backward_prefetch.or(other.backward_prefetch),
            forward_prefetch: self.forward_prefetch.or(other.forward_prefetch),
            limit_all_gathers: self.limit_all_gathers.or(other.limit_all_gathers),
            offload_params: self.offload_params.or(other.offload_params),
            activation_checkpointing: self.activation_checkpointing.or(other.activation_checkpointing),
            sync_each_batch: self.sync_each_batch.or(other.sync_each_batch),
            state_dict_type: self.state_dict_type.or(other.state_dict_type),
            mixed_precision_policy: self.mixed_precision_policy.or(other.mixed_precision_policy),
            use_orig_params: self.use_orig_params.or(other.use_orig_params),
            sync_module_states: self.sync_module_states.or(other.sync_module_states),
            cpu_ram_efficient_loading: self.cpu_ram_efficient_loading.or(other.cpu_ram_efficient_loading),
        }
    }

    /// Fills in the defaults and checks that everything goes together.
    ///
    /// # Errors
    /// [`Error::Setting`] for what the version does not have, and for what does not go together.
    pub fn resolve(self) -> Result<FullySharded> {
        let version = self.version.unwrap_or_default();
        self.check_version(version)?;
        let strategy = self.strategy(version)?;
        self.check_together(strategy)?;
        let notices = self.notices(version, strategy);
        let (prefetch, state_dict_type) = match version {
            FsdpVersion::One => (self.backward_prefetch.unwrap_or_default(), StateDictType::Full),
            FsdpVersion::Two => (BackwardPrefetch::Pre, StateDictType::Sharded),
        };
        Ok(FullySharded {
            version,
            strategy,
            ranks_per_group: self.shard_group,
            auto_wrap_policy: self.auto_wrap_policy.unwrap_or_default(),
            ignored_modules: self.ignored_modules,
            backward_prefetch: prefetch,
            forward_prefetch: self.forward_prefetch.unwrap_or(false),
            limit_all_gathers: self.limit_all_gathers.unwrap_or(true),
            offload_params: self.offload_params.unwrap_or(false),
            activation_checkpointing: self.activation_checkpointing.unwrap_or(false),
            sync_each_batch: self.sync_each_batch.unwrap_or(true),
            state_dict_type: self.state_dict_type.unwrap_or(state_dict_type),
            precision: self.mixed_precision_policy.unwrap_or_default(),
            notices,
        })
    }

    /// Refuses what a version does not have, as Accelerate does.
    fn check_version(&self, version: FsdpVersion) -> Result<()> {
        if version == FsdpVersion::One {
            return Ok(());
        }
        if self.forward_prefetch == Some(true) {
            return refuse(
                "forward_prefetch",
                "true",
                "version 2 does not have it; leave it out, or use version 1",
            );
        }
        if self.state_dict_type == Some(StateDictType::Local) {
            let expected = "version 2 has FULL_STATE_DICT and SHARDED_STATE_DICT only";
            return refuse("state_dict_type", StateDictType::Local.name(), expected);
        }
        Ok(())
    }

    /// Finds the strategy behind the names of either version.
    fn strategy(&self, version: FsdpVersion) -> Result<FsdpStrategy> {
        match (version, self.reshard_after_forward) {
            (FsdpVersion::Two, Some(ReshardAfterForward::Strategy(strategy))) => {
                let expected = "expected true or false in version 2; strategies are version 1's";
                refuse("reshard_after_forward", strategy.name(), expected)
            }
            (FsdpVersion::Two, reshard) => Ok(
                match (reshard != Some(ReshardAfterForward::Bool(false)), self.shard_group) {
                    (true, None) => FsdpStrategy::FullShard,
                    (false, None) => FsdpStrategy::ShardGradOp,
                    (true, Some(_)) => FsdpStrategy::HybridShard,
                    (false, Some(_)) => FsdpStrategy::HybridShardZero2,
                },
            ),
            // Accelerate's launcher always says so, whatever the strategy is.
            (FsdpVersion::One, None | Some(ReshardAfterForward::Bool(true))) => {
                Ok(self.sharding_strategy.unwrap_or_default())
            }
            (FsdpVersion::One, Some(ReshardAfterForward::Bool(false))) => {
                let expected = "expected the name of a strategy in version 1, where SHARD_GRAD_OP is what keeps parameters \
                                after the forward; or use version 2";
                refuse("reshard_after_forward", "false", expected)
            }
            (FsdpVersion::One, Some(ReshardAfterForward::Strategy(strategy))) => match self.sharding_strategy {
                // FULL_SHARD is what Accelerate's launcher says where nothing was said.
                Some(other) if other != strategy && other != FsdpStrategy::FullShard => refuse(
                    "reshard_after_forward",
                    strategy.name(),
                    format!("sharding_strategy is {}: leave out one of the two", other.name()),
                ),
                _ => Ok(strategy),
            },
        }
    }

    fn check_together(&self, strategy: FsdpStrategy) -> Result<()> {
        if let Some(policy) = &self.mixed_precision_policy {
            policy.check()?;
        }
        if self.cpu_ram_efficient_loading == Some(true) && self.sync_module_states == Some(false) {
            let expected = "cpu_ram_efficient_loading is true and needs it; leave it out, or turn both off";
            return refuse("sync_module_states", "false", expected);
        }
        if self.offload_params == Some(true) && !strategy.shards() {
            let expected =
                "the strategy is NO_SHARD, and only what is sharded is offloaded; use another strategy, or false";
            return refuse("offload_params", "true", expected);
        }
        match self.shard_group {
            Some(0) => refuse("shard_group", "0", "expected a number of ranks"),
            Some(ranks) if !strategy.is_hybrid() => refuse(
                "shard_group",
                ranks.to_string(),
                format!(
                    "the strategy is {}; use HYBRID_SHARD or HYBRID_SHARD_ZERO2",
                    strategy.name()
                ),
            ),
            _ => Ok(()),
        }
    }

    /// Says what is said and does nothing, or not what PyTorch would do.
    fn notices(&self, version: FsdpVersion, strategy: FsdpStrategy) -> Vec<String> {
        let mut notices = Vec::new();
        let mut note = |holds: bool, notice: &str| notices.extend(holds.then(|| notice.to_owned()));
        let no_unit = matches!(self.auto_wrap_policy, None | Some(WrapPolicy::NoWrap));
        note(
            no_unit && strategy.shards(),
            "auto_wrap_policy=NO_WRAP: no part of the model is a unit, so that parameters stay whole on every rank; only \
             gradients and optimizer state are sharded",
        );
        note(
            self.use_orig_params == Some(false),
            "use_orig_params=false: parameters keep their names and shapes all the same",
        );
        note(
            self.sync_module_states == Some(false),
            "sync_module_states=false: all ranks begin with the same values all the same",
        );
        if version == FsdpVersion::Two {
            // FULL_SHARD is what Accelerate's launcher says where nothing was said.
            let said = self.sharding_strategy.filter(|said| *said != FsdpStrategy::FullShard);
            note(
                said.is_some(),
                "sharding_strategy is version 1's: in version 2 reshard_after_forward decides",
            );
            note(
                self.backward_prefetch.is_some(),
                "backward_prefetch is version 1's: version 2 always gathers the next unit ahead",
            );
        }
        note(
            self.state_dict_type.is_some_and(|kind| kind != StateDictType::Full),
            "state_dict_type: Accelerator::state_dict returns whole tensors on rank 0 whatever it says, and \
             local_state_dict each rank's shares",
        );
        notices
    }
}

fn refuse<T>(setting: &'static str, value: impl Into<String>, expected: impl Into<String>) -> Result<T> {
    Err(Error::Setting {
        setting,
        value: value.into(),
        expected: expected.into(),
    })
}
