//! `prepare` under a DeepSpeed configuration, and clipping that is set for the run.

use super::training::{dataset, loss, model, parameters};
use super::{bits, build, on_ranks};
use sconce_collectives::{Communicator, single};
use sconce_core::deepspeed::{ConfiguredOptimizer, ConfiguredSchedule, DeepSpeedConfig, Validation};
use sconce_core::schedule::{ConstantSchedule, WarmupDecayLr, WarmupLr};
use sconce_core::{Accelerator, AcceleratorBuilder, AdamW, DataLoader, Optimizer, PreparedLoader, Sgd, TensorDataset};
use std::sync::Arc;

const ROWS: usize = 16;
const STEEP: Sgd = Sgd {
    learning_rate: 0.5,
    momentum: 0.0,
    dampening: 0.0,
    weight_decay: 0.0,
    nesterov: false,
};

fn config(text: &str) -> DeepSpeedConfig {
    DeepSpeedConfig::parse(text, "ds.json", Validation::Lenient).unwrap()
}

fn with(communicator: Arc<dyn Communicator>, text: &str) -> Box<dyn Accelerator> {
    build(
        AcceleratorBuilder::default()
            .communicator(communicator)
            .deepspeed(config(text)),
    )
}

/// What `prepare` says on one rank, with a batch of 4.
#[track_caller]
fn assert_refused<T>(outcome: sconce_core::Result<T>, parts: &[&str]) {
    let Err(error) = outcome else { panic!("not refused") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} in {message:?}");
    }
}

fn loader() -> DataLoader<TensorDataset> {
    DataLoader::new(dataset(ROWS).2, 4)
}

/// Trains an epoch; clips to `max_norm` itself where it is given. Returns the parameters' bits.
fn train(
    acc: &dyn Accelerator,
    model: &candle_nn::Linear,
    optimizer: &mut Optimizer,
    loader: &mut PreparedLoader<TensorDataset>,
    max_norm: Option<f64>,
    mut after_step: impl FnMut(),
) -> Vec<u32> {
    for batch in loader {
        acc.accumulate();
        acc.backward(&loss(model, &batch.unwrap())).unwrap();
        if let Some(max_norm) = max_norm {
            acc.clip_grad_norm(max_norm).unwrap();
        }
        optimizer.step().unwrap();
        after_step();
        optimizer.zero_grad().unwrap();
    }
    bits(&parameters(model))
}

fn train_steeply(acc: &dyn Accelerator, max_norm: Option<f64>) -> Vec<u32> {
    let model = model(acc);
    let (mut optimizer, mut loader, _) = acc.prepare(STEEP, loader(), ConstantSchedule).unwrap();
    train(acc, &model, &mut optimizer, &mut loader, max_norm, || {})
}

#[test]
fn a_step_clips_as_the_configuration_says_where_the_program_does_not() {
    for world in [1, 2] {
        on_ranks(world, |communicator| {
            let plain = |norm| {
                let builder = AcceleratorBuilder::default().communicator(Arc::clone(&communicator));
                train_steeply(&*build(builder), norm)
            };
            let under = |text, norm| train_steeply(&*with(Arc::clone(&communicator), text), norm);
            let (unclipped, clipped) = (plain(None), plain(Some(0.25)));
            assert_ne!(unclipped, clipped);
            let text = r#"{"gradient_clipping": 0.25}"#;
            assert_eq!(under(text, None), clipped);
            // A program that clips itself, by the same norm, is not clipped twice.
            assert_eq!(under(text, Some(0.25)), clipped);
            assert_eq!(under(r#"{"gradient_clipping": "auto"}"#, Some(0.25)), clipped);
            assert_eq!(under("{}", Some(0.25)), clipped);
            assert_eq!(under("{}", None), plain(Some(1.0)));
            assert_eq!(under(r#"{"gradient_clipping": 0}"#, None), unclipped);
            let builder = AcceleratorBuilder::default()
                .communicator(Arc::clone(&communicator))
                .gradient_clipping(0.25);
            assert_eq!(train_steeply(&*build(builder), None), clipped);
        });
    }
}

#[test]
fn another_norm_than_was_decided_is_refused_with_the_name_of_who_decided() {
    let acc = with(single(), r#"{"gradient_clipping": 0.5}"#);
    assert_refused(
        acc.clip_grad_norm(1.0),
        &[
            "clip_grad_norm max_norm=\"1\"",
            "ds.json: `gradient_clipping` is 0.5",
            "make them equal",
        ],
    );
    let acc = with(single(), r#"{"gradient_clipping": 0}"#);
    assert_refused(
        acc.clip_grad_norm(1.0),
        &["`gradient_clipping` is 0, which turns clipping off"],
    );
}

#[test]
fn gradients_are_summed_over_ranks_where_the_configuration_says_so() {
    let trained = |communicator: Arc<dyn Communicator>, text: &str, rate: f64| {
        let acc = with(communicator, text);
        let model = model(&*acc);
        let rule = Sgd {
            learning_rate: rate,
            ..STEEP
        };
        let (mut optimizer, mut loader, _) = acc.prepare(rule, loader(), ConstantSchedule).unwrap();
        train(&*acc, &model, &mut optimizer, &mut loader, None, || {})
    };
    on_ranks(2, |communicator| {
        let sum = r#"{"gradient_allreduce_op": "sum", "gradient_clipping": 0}"#;
        let sums = trained(Arc::clone(&communicator), sum, 0.125);
        // Two ranks' sum is twice their mean; powers of two change no digits.
        assert_eq!(sums, trained(communicator, r#"{"gradient_clipping": 0}"#, 0.25));
    });
}

#[test]
fn optimizer_and_schedule_of_the_configuration_train_as_those_written_in_code() {
    let text = r#"{"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9], "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear"}}}"#;
    on_ranks(2, |communicator| {
        let acc = with(Arc::clone(&communicator), text);
        let net = model(&*acc);
        let optimizer = ConfiguredOptimizer {
            learning_rate: Some(0.1),
            weight_decay: Some(0.01),
            ..ConfiguredOptimizer::default()
        };
        let schedule = ConfiguredSchedule {
            warmup_steps: Some(2),
            total_steps: Some(4),
        };
        let data = DataLoader::new(dataset(ROWS).2, 1);
        let (mut optimizer, mut loader, mut scheduler) = acc.prepare(optimizer, data, schedule).unwrap();
        let after_step = || scheduler.step().unwrap();
        let configured = train(&*acc, &net, &mut optimizer, &mut loader, None, after_step);

        let builder = AcceleratorBuilder::default()
            .communicator(communicator)
            .gradient_accumulation_steps(2);
        let acc = build(builder);
        let net = model(&*acc);
        let rule = AdamW {
            learning_rate: 0.1,
            beta1: 0.8,
            beta2: 0.9,
            epsilon: 1e-8,
            weight_decay: 0.01,
            ..AdamW::default()
        };
        let schedule = WarmupDecayLr {
            warmup: WarmupLr {
                minimum: 0.0,
                maximum: Some(0.1),
                warmup_steps: 2,
                warmup_type: sconce_core::schedule::WarmupType::Linear,
            },
            total_steps: 4,
        };
        let data = DataLoader::new(dataset(ROWS).2, 1);
        let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rule, data, schedule).unwrap();
        let after_step = || scheduler.step().unwrap();
        let coded = train(&*acc, &net, &mut optimizer, &mut loader, Some(1.0), after_step);
        assert_eq!(configured, coded);
    });
}

#[test]
fn optimizer_and_schedule_are_given_once_and_by_one_side() {
    let optimizer = r#""optimizer": {"type": "SGD", "params": {"lr": 0.1}}"#;
    let scheduler = r#""scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}"#;
    let stand_in = ConfiguredOptimizer::default();
    let schedule = ConfiguredSchedule::default();
    let prepared = |text: &str| {
        let acc = with(single(), text);
        model(&*acc);
        acc
    };
    let acc = prepared(&format!("{{{optimizer}}}"));
    assert_refused(
        acc.prepare(STEEP, loader(), ConstantSchedule),
        &[
            "ds.json: `optimizer`: the program brings one of its own",
            "deepspeed::ConfiguredOptimizer",
        ],
    );
    assert_refused(
        acc.prepare(stand_in, loader(), schedule),
        &["ds.json: has no section `scheduler`", "deepspeed::ConfiguredSchedule"],
    );
    acc.prepare(stand_in, loader(), ConstantSchedule).unwrap();

    let acc = prepared(&format!("{{{optimizer}, {scheduler}}}"));
    assert_refused(
        acc.prepare(stand_in, loader(), ConstantSchedule),
        &[
            "ds.json: `scheduler`: the program brings one of its own",
            "deepspeed::ConfiguredSchedule",
        ],
    );
    let other = ConfiguredOptimizer {
        learning_rate: Some(0.2),
        ..stand_in
    };
    assert_refused(
        acc.prepare(other, loader(), schedule),
        &["`optimizer.params.lr` is 0.1 in the file and 0.2 in the program"],
    );
    acc.prepare(stand_in, loader(), schedule).unwrap();

    let acc = prepared("{}");
    assert_refused(
        acc.prepare(stand_in, loader(), ConstantSchedule),
        &["ds.json: has no section `optimizer`"],
    );
    assert_refused(
        acc.prepare(STEEP, loader(), schedule),
        &["needs a deepspeed::ConfiguredOptimizer"],
    );
    let acc = build(AcceleratorBuilder::default().communicator(single()));
    model(&*acc);
    assert_refused(
        acc.prepare(stand_in, loader(), ConstantSchedule),
        &["no DeepSpeed configuration is in use", "`optimizer`"],
    );

    let cycle = r#""scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}}"#;
    let acc = prepared(&format!("{{{optimizer}, {cycle}}}"));
    assert_refused(
        acc.prepare(stand_in, loader(), schedule),
        &["`scheduler.params.cycle_momentum`", "set it to false"],
    );
    let auto = r#"{"optimizer": {"type": "Adam", "params": {"lr": "auto", "eps": "auto"}}}"#;
    assert_refused(
        prepared(auto).prepare(stand_in, loader(), ConstantSchedule),
        &["nothing fills \"auto\" at `optimizer.params.lr`, `optimizer.params.eps`"],
    );
}

#[test]
fn the_loader_has_the_batch_size_of_the_configuration() {
    for (text, parts) in [
        (
            r#"{"train_micro_batch_size_per_gpu": 8}"#,
            &["`train_micro_batch_size_per_gpu` is 8 in the file and 4 in the program"][..],
        ),
        (
            r#"{"train_batch_size": 16}"#,
            &["`train_batch_size` is 16 in the file and 4 in the program"],
        ),
    ] {
        let acc = with(single(), text);
        model(&*acc);
        assert_refused(acc.prepare(STEEP, loader(), ConstantSchedule), parts);
    }
    for text in [
        r#"{"train_micro_batch_size_per_gpu": 4, "train_batch_size": 8}"#,
        r#"{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, "train_batch_size": 8}"#,
        r#"{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}"#,
    ] {
        let acc = with(single(), text);
        model(&*acc);
        acc.prepare(STEEP, loader(), ConstantSchedule).unwrap();
    }
}

#[test]
fn every_optimizer_of_a_section_becomes_the_rule_with_its_numbers() {
    let rule = |text: &str| {
        let section = config(&format!(r#"{{"optimizer": {text}}}"#)).optimizer.unwrap();
        format!("{:?}", section.rule().unwrap())
    };
    let adam =
        r#""params": {"lr": 0.5, "betas": [0.7, 0.8], "eps": 1e-6, "weight_decay": 0.25, "bias_correction": false"#;
    let numbers = "learning_rate: 0.5, beta1: 0.7, beta2: 0.8, epsilon: 1e-6, weight_decay: 0.25, \
                   bias_correction: false, amsgrad: false }";
    for (text, expected) in [
        (
            format!(r#"{{"type": "AdamW", {adam}}}}}"#),
            format!("AdamW {{ {numbers}"),
        ),
        (
            format!(r#"{{"type": "Adam", {adam}}}}}"#),
            format!("AdamW {{ {numbers}"),
        ),
        (
            format!(r#"{{"type": "Adam", {adam}, "adam_w_mode": false}}}}"#),
            format!("Adam {{ {numbers}"),
        ),
        (
            r#"{"type": "Lion"}"#.into(),
            "Lion { learning_rate: 0.001, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }".into(),
        ),
        (
            r#"{"type": "Adagrad", "params": {"lr": 0.5}}"#.into(),
            "Adagrad { learning_rate: 0.5, learning_rate_decay: 0.0, weight_decay: 0.0, \
             initial_accumulator_value: 0.0, epsilon: 1e-10 }"
                .into(),
        ),
        (
            r#"{"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9, "nesterov": true}}"#.into(),
            "Sgd { learning_rate: 0.5, momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: true }".into(),
        ),
    ] {
        assert_eq!(rule(&text), expected, "{text}");
    }
}
