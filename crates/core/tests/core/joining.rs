//! Loops over inputs of which ranks have different numbers: they end together, with the means of those that have some.

use super::training::{FEATURES, dataset, gradient, loss, model, parameters};
use super::{bits, build, deviation, on_ranks};
use sconce_core::{Accelerator, AcceleratorBuilder, Dataset as _, Error, Result, Sgd, ShardingStrategy, ZeroStage};
use std::sync::Arc;

const RATE: f64 = 0.05;
const ROWS: usize = 60;

/// The rows of each input of a rank: three at a time.
fn inputs(rank: usize) -> Vec<[usize; 3]> {
    let count = [4, 1, 3, 6][rank];
    (0..count)
        .map(|input| std::array::from_fn(|row| (rank * 17 + input * 3 + row) % ROWS))
        .collect()
}

/// Trains on own inputs; returns the parameters, and how often the loop ran.
fn train(acc: &dyn Accelerator) -> (Vec<f32>, Vec<f32>, usize) {
    let model = model(acc);
    let initial = parameters(&model);
    let rule = Sgd {
        learning_rate: RATE,
        ..Sgd::default()
    };
    let mut optimizer = acc.prepare_optimizer(Box::new(rule)).unwrap();
    let data = dataset(ROWS).2;
    let own = inputs(acc.world().rank).into_iter();
    let own = own.map(|rows| {
        data.batch(&rows, acc.device()).map_err(|source| Error::Dataset {
            batch: 0,
            epoch: 0,
            source,
        })
    });
    let mut runs = 0;
    for batch in acc.join_uneven_inputs(own) {
        acc.accumulate();
        acc.backward(&loss(&model, &batch.unwrap())).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        runs += 1;
    }
    assert_eq!(acc.accumulation().weight(), 1.0);
    (initial, parameters(&model), runs)
}

/// The same in f64, over the inputs of all ranks: the mean over the ranks that have one, window by window.
fn reference(initial: &[f32], world: usize, accumulation: usize) -> Vec<f64> {
    let (features, targets, _) = dataset(ROWS);
    let mut parameters = Vec::from_iter(initial.iter().map(|p| f64::from(*p)));
    let most = (0..world).map(|rank| inputs(rank).len()).max().unwrap();
    let mut sum = vec![0.0; FEATURES + 1];
    for turn in 0..most {
        let given = Vec::from_iter((0..world).filter_map(|rank| inputs(rank).get(turn).copied()));
        for rows in &given {
            let gradient = gradient(&parameters, &features, &targets, rows);
            sum.iter_mut()
                .zip(gradient)
                .for_each(|(sum, g)| *sum += g / (given.len() * accumulation) as f64);
        }
        if (turn + 1) % accumulation == 0 || turn + 1 == most {
            parameters
                .iter_mut()
                .zip(&mut sum)
                .for_each(|(p, g)| *p -= RATE * std::mem::take(g));
        }
    }
    parameters
}

#[test]
fn ranks_whose_inputs_have_ended_go_along_and_count_for_nothing() {
    for world in 1..=4 {
        for accumulation in [1, 2] {
            let run = |strategy: fn() -> Arc<dyn ShardingStrategy>| {
                on_ranks(world, |communicator| {
                    let builder = AcceleratorBuilder::default().gradient_accumulation_steps(accumulation);
                    train(&*build(builder.strategy(strategy()).communicator(communicator)))
                })
            };
            let outcomes = run(|| Arc::new(sconce_core::DataParallel));
            let most = (0..world).map(|rank| inputs(rank).len()).max().unwrap();
            for (initial, found, runs) in &outcomes {
                assert_eq!(*runs, most);
                let far = deviation(found, &reference(initial, world, accumulation as usize));
                assert!(far < 1e-6, "world {world}, accumulation {accumulation}: {far:.1e}");
            }
            let sharded = run(|| Arc::new(ZeroStage::One));
            assert_eq!(bits(&sharded[0].1), bits(&outcomes[0].1));
        }
    }
}

#[test]
fn an_input_that_cannot_be_read_and_a_rank_without_any_end_the_loop_on_all_ranks() {
    let run = |own: fn(usize) -> Vec<Result<u32>>| {
        on_ranks(3, |communicator| {
            let acc = build(AcceleratorBuilder::default().communicator(communicator));
            let given = acc.join_uneven_inputs(own(acc.world().rank));
            let given = Vec::from_iter(given.map(|one| one.map_err(|error| error.to_string())));
            acc.wait_for_everyone().unwrap();
            given
        })
    };
    let unread = run(|rank| match rank {
        1 => vec![
            Ok(1),
            Err(Error::Loader {
                reason: "a torn file".into(),
            }),
        ],
        _ => vec![Ok(1), Ok(2), Ok(3)],
    });
    for given in &unread {
        assert!(given.len() == 2 && given[0].is_ok() && given[1].is_err(), "{unread:?}");
    }
    let told = unread[0][1].as_ref().unwrap_err();
    assert!(told.contains("rank 1") && told.contains("a torn file"), "{told}");
    let empty = run(|rank| if rank == 2 { vec![] } else { vec![Ok(1)] });
    for given in &empty {
        let told = given[0].as_ref().unwrap_err();
        assert!(
            given.len() == 1 && told.contains("1 rank(s) have no input at all"),
            "{told}"
        );
    }
    let nothing = run(|_| vec![]);
    assert!(nothing.iter().all(Vec::is_empty));
}
