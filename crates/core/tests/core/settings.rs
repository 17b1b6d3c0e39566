//! The builder: settings from code, from the environment, and by default.

use super::on_ranks;
use sconce_collectives::single;
use sconce_core::{Accelerator, AcceleratorBuilder, Error, Result, Sgd, ShardingStrategy, Weights};
use std::time::Duration;

fn build_with(builder: AcceleratorBuilder, variables: &[(&str, &str)]) -> Result<Box<dyn Accelerator>> {
    builder.build_with(|name| {
        variables
            .iter()
            .find(|(other, _)| *other == name)
            .map(|(_, value)| (*value).into())
    })
}

#[track_caller]
fn assert_refused(builder: AcceleratorBuilder, variables: &[(&str, &str)], parts: &[&str]) {
    let error = build_with(builder, variables).unwrap_err();
    assert!(matches!(error, Error::Setting { .. }), "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text:?}");
    }
}

#[test]
fn an_empty_environment_makes_a_world_of_one_with_defaults() {
    let acc = build_with(AcceleratorBuilder::default(), &[]).unwrap();
    assert_eq!((acc.world().rank, acc.world().size), (0, 1));
    assert_eq!((acc.accumulation().steps(), acc.seed()), (1, 0));
    assert!(acc.is_main_process() && acc.is_local_main_process());
    assert!(acc.device().is_cpu());
    acc.wait_for_everyone().unwrap();
}

#[test]
fn accumulation_steps_come_from_code_then_from_the_environment() {
    let steps = |builder, value| {
        build_with(builder, &[("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", value)])
            .unwrap()
            .accumulation()
            .steps()
    };
    assert_eq!(steps(AcceleratorBuilder::default(), "3"), 3);
    assert_eq!(steps(AcceleratorBuilder::default(), " 4 "), 4);
    assert_eq!(steps(AcceleratorBuilder::default(), ""), 1);
    assert_eq!(
        steps(AcceleratorBuilder::default().gradient_accumulation_steps(5), "3"),
        5
    );
}

#[test]
fn bad_values_are_refused_with_the_name_under_which_they_were_given() {
    for variable in ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "SCONCE_TIMEOUT"] {
        for value in ["x", "0", "-1", "2.5", "1 2", "99999999999999999999"] {
            let parts = [variable, value, "whole number above 0"];
            assert_refused(AcceleratorBuilder::default(), &[(variable, value)], &parts);
        }
    }
    let builder = AcceleratorBuilder::default().gradient_accumulation_steps(0);
    assert_refused(builder, &[], &["gradient_accumulation_steps", "\"0\"", "above 0"]);
}

#[test]
fn errors_of_the_world_name_their_variable() {
    let text = build_with(AcceleratorBuilder::default(), &[("RANK", "1")])
        .unwrap_err()
        .to_string();
    assert!(text.contains("WORLD_SIZE"), "{text}");
    let variables = [("RANK", "2"), ("WORLD_SIZE", "2")];
    let text = build_with(AcceleratorBuilder::default(), &variables)
        .unwrap_err()
        .to_string();
    assert!(text.contains("RANK"), "{text}");
}

#[test]
fn a_group_given_in_code_decides_the_world_whatever_the_environment_says() {
    on_ranks(3, |communicator| {
        let rank = communicator.rank();
        let builder = AcceleratorBuilder::default()
            .communicator(communicator)
            .timeout(Duration::from_secs(5));
        let acc = build_with(builder, &[("RANK", "1"), ("WORLD_SIZE", "2")]).unwrap();
        assert_eq!(
            (acc.world().rank, acc.world().size, acc.world().local_rank),
            (rank, 3, rank)
        );
        assert_eq!(acc.is_main_process(), rank == 0);
        acc.wait_for_everyone().unwrap();
    });
}

/// Shards gradients alone, which cannot be.
#[derive(Debug)]
struct GradientsAlone;

impl ShardingStrategy for GradientsAlone {
    fn name(&self) -> &str {
        "gradients_alone"
    }

    fn place(&self, _: &sconce_zero::ParameterInfo) -> sconce_zero::Placement {
        sconce_zero::Placement {
            gradient: sconce_zero::Residence::Sharded,
            ..sconce_zero::Placement::REPLICATED
        }
    }
}

#[test]
fn a_strategy_that_cannot_be_is_refused_when_the_optimizer_is_prepared() {
    let acc = build_with(
        AcceleratorBuilder::default()
            .communicator(single())
            .strategy(GradientsAlone),
        &[],
    )
    .unwrap();
    candle_nn::linear(2, 1, acc.var_builder(Weights::Random { seed: 0 }).unwrap()).unwrap();
    let text = acc.prepare_optimizer(Box::new(Sgd::default())).unwrap_err().to_string();
    assert!(
        text.contains("gradients_alone") && text.contains("whole gradient") && text.contains("weight"),
        "{text}"
    );
}

#[test]
fn ranks_that_were_told_different_things_are_named_before_training() {
    let told = |differs: fn(AcceleratorBuilder, usize) -> (AcceleratorBuilder, f64, usize, usize)| {
        on_ranks(3, |communicator| {
            let rank = communicator.rank();
            let (builder, rate, batch, rows) = differs(AcceleratorBuilder::default().communicator(communicator), rank);
            let acc = builder.build_with(|_| None).unwrap();
            let _model = super::training::model(&*acc);
            let rule = Sgd {
                learning_rate: rate,
                ..Sgd::default()
            };
            let data = sconce_core::DataLoader::new(super::training::dataset(rows).2, batch);
            let outcome = acc.prepare(rule, data, sconce_core::schedule::ConstantSchedule);
            outcome.map(drop).unwrap_err().to_string()
        })
    };
    for (texts, parts) in [
        (
            told(|builder, rank| (builder, 0.1 * (1 + rank / 2) as f64, 4, 24)),
            ["optimizer", "0.1", "rank 2 has", "0.2"],
        ),
        (
            told(|builder, rank| (builder.gradient_accumulation_steps(1 + rank as u64 / 2), 0.1, 4, 24)),
            [
                "settings",
                "accumulation_steps: 1",
                "rank 2 has",
                "accumulation_steps: 2",
            ],
        ),
        (
            told(|builder, rank| (builder, 0.1, 4 + rank / 2, 24)),
            ["data loader", "4 a rank", "rank 2 has", "5 a rank"],
        ),
        (
            told(|builder, rank| (builder, 0.1, 4, 24 + rank / 2)),
            ["data loader", "24 samples", "rank 2 has", "25 samples"],
        ),
    ] {
        for text in &texts {
            assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} in {text}");
        }
    }
}
