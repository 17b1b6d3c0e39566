//! What code says of the loop: when windows end, how schedules count, which dtype products have.

use candle_core::DType;
use sconce_core::deepspeed::MixedPrecision;
use sconce_core::{
    AcceleratorBuilder, BackoffScaling, FullyShardedOptions, LossScaling, Result, RunSettings, ScheduleAdvance,
};

fn settings(builder: &AcceleratorBuilder) -> Result<RunSettings> {
    builder.settings(2, |_| None)
}

#[test]
fn how_windows_are_synchronised_and_schedules_count_is_accelerates_default_unless_code_says_otherwise() {
    let run = settings(&AcceleratorBuilder::default()).unwrap();
    assert!(run.synchronisation.with_dataloader && !run.synchronisation.each_batch);
    assert!(run.stepping.with_optimizer && run.stepping.advance == ScheduleAdvance::One);
    assert!(!run.autocast && !run.detect_anomaly && run.parameter_dtype() == run.compute_dtype());
    let builder = AcceleratorBuilder::default()
        .sync_each_batch(true)
        .sync_with_dataloader(false)
        .step_scheduler_with_optimizer(false)
        .schedule_advance(ScheduleAdvance::WorldSize)
        .detect_anomaly(true)
        .mixed_precision(MixedPrecision::Fp16)
        .autocast(true);
    let run = settings(&builder).unwrap();
    assert!(!run.synchronisation.with_dataloader && run.synchronisation.each_batch);
    assert!(!run.stepping.with_optimizer && run.stepping.advance == ScheduleAdvance::WorldSize);
    assert!(run.detect_anomaly && run.autocast);
    assert_eq!((run.parameter_dtype(), run.compute_dtype()), (DType::F32, DType::F16));
    // f16 is scaled as PyTorch's GradScaler does by default, also where products alone are f16.
    assert_eq!(run.loss_scaling, Some(LossScaling::Backoff(BackoffScaling::default())));
}

#[test]
fn fsdp_reduces_each_batch_as_the_run_does_unless_its_own_switch_says_otherwise() {
    let each = |of_run: Option<bool>, of_fsdp: Option<bool>| {
        let options = FullyShardedOptions {
            sync_each_batch: of_fsdp,
            ..FullyShardedOptions::default()
        };
        let builder = AcceleratorBuilder::default().fully_sharded(options);
        let builder = match of_run {
            Some(each) => builder.sync_each_batch(each),
            None => builder,
        };
        settings(&builder).unwrap().fully_sharded.unwrap().sync_each_batch
    };
    assert_eq!(
        [each(None, None), each(Some(false), None), each(Some(true), None)],
        [true, false, true]
    );
    assert_eq!(
        [each(Some(false), Some(true)), each(Some(true), Some(false))],
        [true, false]
    );
}
