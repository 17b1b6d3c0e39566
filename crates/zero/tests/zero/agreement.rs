//! Ranks must have one model, and get one set of values.

use super::{bits, buckets, engine, linear_loss, on_ranks, parameters, sgd, values};
use candle_core::{DType, Device};
use candle_nn::Init;
use sconce_zero::{EngineOptions, Error, Weights};

/// What `set_optimizer` says on every rank.
type Outcomes = Vec<Result<(), Error>>;

/// Builds a model of these names and shapes on each rank; returns what `set_optimizer` says there.
fn outcomes(world: usize, shapes: impl Fn(usize) -> Vec<(&'static str, Vec<usize>)> + Sync) -> Outcomes {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, EngineOptions::default());
        let vb = engine
            .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
            .unwrap();
        for (name, shape) in shapes(communicator.rank()) {
            vb.get_with_hints(shape, name, Init::Const(0.0)).unwrap();
        }
        engine.set_optimizer(sgd())
    })
}

#[test]
fn the_first_rank_and_parameter_that_differ_are_named_on_every_rank() {
    let common = || vec![("a", vec![3, 5]), ("b", vec![4]), ("c", vec![2])];
    let shape = |rank: usize| {
        if rank >= 1 {
            vec![("a", vec![3, 5]), ("b", vec![2, 2]), ("c", vec![9])]
        } else {
            common()
        }
    };
    let name = |rank: usize| {
        if rank >= 1 {
            vec![("a", vec![3, 5]), ("d", vec![4])]
        } else {
            common()
        }
    };
    let fewer = |rank: usize| if rank >= 1 { common()[..2].to_vec() } else { common() };
    let more = |rank: usize| if rank >= 1 { common() } else { common()[..2].to_vec() };
    for world in 2..=4 {
        let cases: [(Outcomes, [&str; 3]); 4] = [
            (
                outcomes(world, shape),
                ["number 1", r#""b" [2, 2]"#, r#"rank 0 has "b" [4]"#],
            ),
            (
                outcomes(world, name),
                ["number 1", r#""d" [4]"#, r#"rank 0 has "b" [4]"#],
            ),
            (outcomes(world, fewer), ["number 2", "nothing", r#"rank 0 has "c" [2]"#]),
            (outcomes(world, more), ["number 2", r#""c" [2]"#, "rank 0 has nothing"]),
        ];
        for (outcomes, parts) in cases {
            for outcome in outcomes {
                let error = outcome.unwrap_err();
                assert!(matches!(error, Error::DifferentModels { rank: 1, .. }), "{error}");
                let text = error.to_string();
                assert!(parts.iter().all(|part| text.contains(part)), "world {world}: {text}");
            }
        }
    }
}

#[test]
fn a_last_rank_that_differs_is_named_on_every_rank() {
    let shapes = |rank: usize| vec![("a", vec![if rank == 3 { 2 } else { 1 }])];
    for outcome in outcomes(4, shapes) {
        assert!(
            matches!(outcome, Err(Error::DifferentModels { rank: 3, number: 0, .. })),
            "{outcome:?}"
        );
    }
}

#[test]
fn equal_models_are_accepted() {
    for world in 1..=4 {
        let shapes = |_| vec![("a b\n\"c\"", vec![3, 5]), ("scalar", vec![]), ("empty", vec![0, 3])];
        assert!(outcomes(world, shapes).into_iter().all(|outcome| outcome.is_ok()));
    }
}

#[test]
fn initial_values_that_differ_become_rank_0s() {
    for world in 2..=4 {
        let ranks = on_ranks(world, |communicator| {
            let engine = engine(&communicator, EngineOptions::default());
            let seed = communicator.rank() as u64;
            let vb = engine
                .var_builder(Weights::Random { seed }, DType::F32, &Device::Cpu)
                .unwrap();
            let init = Init::Randn { mean: 0.0, stdev: 1.0 };
            for (name, size) in [("small", 3), ("large", 70_001)] {
                vb.get_with_hints(size, name, init).unwrap();
            }
            let own = values(&engine);
            engine.set_optimizer(sgd()).unwrap();
            (own, values(&engine))
        });
        for (own, after) in &ranks {
            assert_eq!(bits(after), bits(&ranks[0].0));
            assert!(own == &ranks[0].0 || own != after);
        }
        assert_ne!(ranks[0].0, ranks[1].0);
    }
}

#[test]
fn bucket_sizes_that_differ_are_an_error_not_a_hang() {
    let outcomes = on_ranks(2, |communicator| {
        let engine = engine(
            &communicator,
            buckets(if communicator.rank() == 0 { 0 } else { 1 << 20 }, 0),
        );
        let [a, b] = parameters(&engine, [("a", 3), ("b", 70)]);
        engine.set_optimizer(sgd()).unwrap();
        let loss = super::add(linear_loss(&a, &[1.0; 3]), &linear_loss(&b, &[1.0; 70]));
        engine.backward(&loss, true)
    });
    assert!(outcomes.iter().all(Result::is_err));
}

#[test]
fn a_parameter_without_elements_trains_along() {
    for world in 1..=2 {
        on_ranks(world, |communicator| {
            let engine = engine(&communicator, buckets(0, 0));
            let [p, empty] = parameters(&engine, [("p", 3), ("empty", 0)]);
            engine.set_optimizer(sgd()).unwrap();
            let loss = super::add(linear_loss(&p, &[1.0; 3]), &linear_loss(&empty, &[]));
            engine.backward(&loss, true).unwrap();
            engine.step(1.0).unwrap();
        });
    }
}
