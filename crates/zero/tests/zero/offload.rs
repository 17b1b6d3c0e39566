//! State on the host and on disk comes to the same bits as state in the device's memory.

use super::oracle::Trace;
use super::zero_stages::{EVERYTHING, STAGES, options, train};
use super::{engine, on_ranks, oracle::new_model};
use sconce_zero::{
    AdamW, DataParallel, DiskOptions, EngineOptions, Error, MemoryReport, Offloaded, ShardingStrategy, Tier,
};
use std::path::Path;

/// State of at most 50 parameters at once, of some 400: less than most of the model's tensors have.
fn on_disk(strategy: impl ShardingStrategy + 'static, parameters: Tier, folder: &Path) -> EngineOptions {
    EngineOptions {
        disk: Some(DiskOptions {
            folder: folder.into(),
            sub_group_elements: 50,
        }),
        ..options(Offloaded {
            strategy: Box::new(strategy),
            parameters,
            optimizer_state: Tier::Disk,
        })
    }
}

fn all_tiers(world: usize, accumulation: usize, folder: &Path, expected: &[Trace]) {
    let strategies: [Box<dyn Fn(Tier) -> EngineOptions + Sync>; 3] = [
        Box::new(|tier| on_disk(DataParallel, tier, folder)),
        Box::new(|tier| on_disk(STAGES[1], tier, folder)),
        Box::new(|tier| on_disk(EVERYTHING, tier, folder)),
    ];
    for (number, strategy) in strategies.iter().enumerate() {
        for tier in [Tier::Device, Tier::Host, Tier::Disk] {
            let found = train(world, accumulation, || strategy(tier));
            assert_eq!(found, expected, "strategy {number}, {tier:?}, world {world}");
        }
    }
}

#[test]
fn state_and_shares_on_disk_train_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for world in 1..=3 {
        let expected = train(world, 1, || options(DataParallel));
        all_tiers(world, 1, folder.path(), &expected);
    }
    // Files are removed with their engines.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn what_is_on_disk_is_not_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let reports = |options: &(dyn Fn() -> EngineOptions + Sync)| -> Vec<MemoryReport> {
        on_ranks(2, |communicator| {
            let engine = engine(&communicator, options());
            let model = new_model(&engine);
            engine.set_optimizer(Box::new(AdamW::default())).unwrap();
            let (rows, targets) = super::oracle::batch(0);
            engine.backward(&model.loss(&rows, &targets), true).unwrap();
            engine.step(0.1).unwrap();
            engine.memory()
        })
    };
    let here = reports(&|| options(EVERYTHING));
    let there = reports(&|| on_disk(EVERYTHING, Tier::Disk, folder.path()));
    for (here, there) in here.iter().zip(&there) {
        assert_eq!(here.on_disk, 0);
        assert_eq!(there.parameters, 0);
        assert!(there.on_disk >= here.parameters + here.optimizer_state);
        assert_eq!(here.gradients, there.gradients);
    }
}

#[test]
fn disk_tiers_without_a_folder_are_refused() {
    let outcome = on_ranks(1, |communicator| {
        let options = EngineOptions {
            disk: None,
            ..on_disk(DataParallel, Tier::Device, Path::new("unused"))
        };
        let engine = engine(&communicator, options);
        new_model(&engine);
        engine.set_optimizer(Box::new(AdamW::default()))
    });
    let error = outcome.into_iter().next().unwrap().unwrap_err();
    assert!(matches!(error, Error::UnsupportedPlacement { .. }), "{error}");
    assert!(error.to_string().contains("EngineOptions::disk"), "{error}");
}

#[test]
fn a_folder_that_is_not_there_fails_the_step_on_every_rank_and_changes_nothing() {
    let missing = Path::new("/nonexistent/offload");
    let outcomes = on_ranks(2, |communicator| {
        let engine = engine(&communicator, on_disk(STAGES[1], Tier::Device, missing));
        let model = new_model(&engine);
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        let before = super::bits(&super::values(&engine));
        let (rows, targets) = super::oracle::batch(0);
        engine.backward(&model.loss(&rows, &targets), true).unwrap();
        let error = engine.step(0.1).unwrap_err();
        assert_eq!(super::bits(&super::values(&engine)), before);
        error.to_string()
    });
    assert!(
        outcomes.iter().all(|error| error.contains("/nonexistent/offload")),
        "{outcomes:?}"
    );
}
