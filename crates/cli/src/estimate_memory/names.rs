//! Names of strategies, memories and types on the command line.

use clap::ValueEnum;
use clap::builder::PossibleValue;
use sconce_core::memory_estimate::{RunStrategy, TableDtype};
use sconce_core::{FsdpStrategy, Tier};

/// A strategy.
#[derive(Debug, Clone, Copy)]
pub(super) struct StrategyName(pub(super) RunStrategy);

impl ValueEnum for StrategyName {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [StrategyName; 9] = [
            StrategyName(RunStrategy::DataParallel),
            StrategyName(RunStrategy::Zero1),
            StrategyName(RunStrategy::Zero2),
            StrategyName(RunStrategy::Zero3),
            StrategyName(RunStrategy::Fsdp(FsdpStrategy::FullShard)),
            StrategyName(RunStrategy::Fsdp(FsdpStrategy::ShardGradOp)),
            StrategyName(RunStrategy::Fsdp(FsdpStrategy::NoShard)),
            StrategyName(RunStrategy::Fsdp(FsdpStrategy::HybridShard)),
            StrategyName(RunStrategy::Fsdp(FsdpStrategy::HybridShardZero2)),
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

/// Where offloaded state lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct TierName(pub(super) Tier);

impl ValueEnum for TierName {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [TierName; 3] = [TierName(Tier::Device), TierName(Tier::Host), TierName(Tier::Disk)];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self.0 {
            Tier::Host => "cpu",
            Tier::Disk => "nvme",
            _ => "none",
        }))
    }
}

/// A type of Accelerate's table.
#[derive(Debug, Clone, Copy)]
pub(super) struct DtypeName(pub(super) TableDtype);

impl ValueEnum for DtypeName {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [DtypeName; 4] = [
            DtypeName(TableDtype::Float32),
            DtypeName(TableDtype::Float16),
            DtypeName(TableDtype::Int8),
            DtypeName(TableDtype::Int4),
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}
