//! What is saved on any number of ranks under any strategy is what is restored on any other, bit for bit, and training
//! goes on as if it had not stopped.

use super::oracle::{ROWS, Trace, batch, model_of_dtype};
use super::zero_stages::{EVERYTHING, options};
use super::{bits, engine, flat, on_ranks};
use candle_core::{DType, Tensor};
use sconce_collectives::{Communicator, ReduceOp};
use sconce_zero::{
    AdamW, DataParallel, DiskOptions, Elements, Engine, EngineOptions, EngineState, Error, Offloaded, ParameterInfo,
    ParameterSet, StateSource, Tier, ZeroStage,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

const STEPS: usize = 3;

/// Whole arrays by parameter and name.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Saved {
    pub(super) arrays: BTreeMap<(String, String), Vec<u32>>,
}

impl StateSource for Saved {
    fn read(
        &mut self,
        info: &ParameterInfo,
        what: &str,
        elements: Range<usize>,
        values: &mut [f32],
    ) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
        let Some(array) = self.arrays.get(&(info.name.clone(), what.into())) else {
            return Ok(false);
        };
        let pairs = values.iter_mut().zip(&array[elements]);
        pairs.for_each(|(value, saved)| *value = f32::from_bits(*saved));
        Ok(true)
    }
}

pub(super) type Pieces = Mutex<BTreeMap<(String, String), Vec<Option<u32>>>>;

/// Puts this rank's pieces where they belong; every element must come once.
pub(super) fn save(engine: &Engine, pieces: &Pieces) -> EngineState {
    engine
        .visit_state(&mut |piece| {
            let values: Vec<f32> = match piece.values {
                Elements::F32(values) => values.to_vec(),
                Elements::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
                Elements::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
            };
            let mut pieces = pieces.lock().unwrap();
            let whole = || vec![None; piece.shape.iter().product()];
            let array = pieces
                .entry((piece.info.name.clone(), piece.what.into()))
                .or_insert_with(whole);
            assert_eq!(values.len(), piece.elements.len());
            for (place, value) in array[piece.elements].iter_mut().zip(values) {
                assert_eq!(
                    place.replace(value.to_bits()),
                    None,
                    "{} {}",
                    piece.info.name,
                    piece.what
                );
            }
            Ok(())
        })
        .unwrap();
    engine.state()
}

pub(super) fn whole(pieces: Pieces) -> Saved {
    let all = pieces.into_inner().unwrap().into_iter();
    let whole = all.map(|(key, array)| {
        (
            key,
            array.into_iter().map(|value| value.expect("every element")).collect(),
        )
    });
    Saved {
        arrays: whole.collect(),
    }
}

/// Makes an engine with its model and optimizer.
fn start(communicator: &Arc<dyn Communicator>, dtype: DType, options: EngineOptions) -> (Engine, super::oracle::Model) {
    let engine = engine(
        communicator,
        EngineOptions {
            frozen: ParameterSet::matching(|info| info.name == "down.bias"),
            ..options
        },
    );
    let model = model_of_dtype(&engine, dtype);
    let rule = AdamW {
        weight_decay: 0.1,
        ..AdamW::default()
    };
    engine.set_optimizer(Box::new(rule)).unwrap();
    (engine, model)
}

fn steps(
    communicator: &dyn Communicator,
    engine: &Engine,
    model: &super::oracle::Model,
    dtype: DType,
    steps: Range<usize>,
) -> Trace {
    let mut trace = Trace {
        losses: Vec::new(),
        norms: Vec::new(),
        parameters: Vec::new(),
    };
    for step in steps {
        let (rows, targets) = batch(step);
        let share = ROWS / communicator.size();
        let own = |tensor: &Tensor| {
            let own = tensor.narrow(0, communicator.rank() * share, share).unwrap();
            own.to_dtype(dtype).unwrap()
        };
        let loss = model.loss(&own(&rows), &own(&targets)).to_dtype(DType::F32).unwrap();
        engine.backward(&loss, true).unwrap();
        trace.norms.push(engine.clip_grad_norm(0.05).unwrap().to_bits());
        engine.step(1e-2).unwrap();
        engine.zero_grad();
        let mut mean = [loss.to_scalar::<f32>().unwrap()];
        communicator.all_reduce(&mut mean, ReduceOp::Mean).unwrap();
        trace.losses.push(mean[0].to_bits());
    }
    let tensors = engine.tensors(true).unwrap();
    let wide = tensors
        .iter()
        .map(|(_, tensor)| flat(&tensor.to_dtype(DType::F32).unwrap()));
    trace.parameters = wide.flat_map(|values| bits(&values)).collect();
    trace
}

/// A strategy and where its state lies, by number.
fn strategy(number: usize, folder: &Path, world: usize) -> EngineOptions {
    let disk = Some(DiskOptions {
        folder: folder.into(),
        sub_group_elements: 100,
    });
    match number {
        0 => options(DataParallel),
        1 => options(ZeroStage::One),
        2 => options(ZeroStage::Two),
        3 => options(EVERYTHING),
        4 => EngineOptions {
            shard_group: (world == 4).then_some(2),
            ..options(EVERYTHING)
        },
        _ => EngineOptions {
            disk,
            ..options(Offloaded {
                strategy: Box::new(EVERYTHING),
                parameters: Tier::Disk,
                optimizer_state: Tier::Disk,
            })
        },
    }
}

const STRATEGIES: usize = 6;

/// What a run leaves behind in the middle, and how it goes on.
fn run(world: usize, dtype: DType, number: usize) -> (Saved, EngineState, Trace) {
    let folder = tempfile::tempdir().unwrap();
    let pieces = Pieces::default();
    let mut outcomes = on_ranks(world, |communicator| {
        let (engine, model) = start(&communicator, dtype, strategy(number, folder.path(), world));
        steps(&*communicator, &engine, &model, dtype, 0..STEPS);
        let state = save(&engine, &pieces);
        (state, steps(&*communicator, &engine, &model, dtype, STEPS..2 * STEPS))
    });
    let (state, trace) = outcomes.remove(0);
    assert!(outcomes.iter().all(|(other, _)| *other == state), "ranks know the same");
    (whole(pieces), state, trace)
}

/// Restores on `world` ranks; returns what is saved then at once, and how the run goes on.
fn resume(
    world: usize,
    dtype: DType,
    number: usize,
    saved: &Saved,
    state: &EngineState,
) -> (Saved, EngineState, Trace) {
    let folder = tempfile::tempdir().unwrap();
    let pieces = Pieces::default();
    let mut outcomes = on_ranks(world, |communicator| {
        let (engine, model) = start(&communicator, dtype, strategy(number, folder.path(), world));
        let missing = engine.restore_state(state, &mut saved.clone()).unwrap();
        assert!(missing.is_empty(), "{missing:?}");
        let state = save(&engine, &pieces);
        (state, steps(&*communicator, &engine, &model, dtype, STEPS..2 * STEPS))
    });
    let (state, trace) = outcomes.remove(0);
    (whole(pieces), state, trace)
}

#[test]
fn every_strategy_on_every_world_restores_what_any_other_saved_bit_for_bit() {
    for dtype in [DType::F32, DType::BF16] {
        for from in 1..=4 {
            // The same bits under every strategy, so that one of them on each world stands for all as a source.
            let (saved, state, trace) = run(from, dtype, from % STRATEGIES);
            for to in 1..=4 {
                for number in 0..STRATEGIES {
                    let what = format!("{dtype:?} from {from} to {to} ranks, strategy {number}");
                    let (again, known, went_on) = resume(to, dtype, number, &saved, &state);
                    assert_eq!((&again, &known), (&saved, &state), "{what}");
                    // Replicas' sums run in another order.
                    let has_replicas = |number| number == 4 && to == 4;
                    if from == to && has_replicas(from % STRATEGIES) == has_replicas(number) {
                        assert_eq!(went_on, trace, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_pair_of_strategies_goes_on_with_the_bits_of_the_run_that_was_not_interrupted() {
    for dtype in [DType::F32, DType::BF16] {
        for from in 0..STRATEGIES {
            let (saved, state, trace) = run(3, dtype, from);
            for to in 0..STRATEGIES {
                let (_, _, went_on) = resume(3, dtype, to, &saved, &state);
                assert_eq!(went_on, trace, "{dtype:?} from strategy {from} to {to}");
            }
        }
    }
}

#[test]
fn what_a_source_lacks_is_named_and_keeps_its_value() {
    let (mut saved, state, _) = run(2, DType::F32, 3);
    saved.arrays.remove(&("up.bias".into(), "exp_avg".into()));
    saved.arrays.remove(&("down.weight".into(), "value".into()));
    on_ranks(2, |communicator| {
        let (engine, _model) = start(&communicator, DType::F32, options(ZeroStage::One));
        let before = engine.tensors(true).unwrap();
        let weight = |tensors: &[(String, Tensor)]| {
            let found = tensors.iter().find(|(name, _)| name == "down.weight").unwrap();
            bits(&flat(&found.1))
        };
        let before = weight(&before);
        let missing = engine.restore_state(&state, &mut saved.clone()).unwrap();
        assert_eq!(missing, ["down.weight (value)", "up.bias (exp_avg)"]);
        assert_eq!(weight(&engine.tensors(true).unwrap()), before);
    });
}

#[test]
fn saving_that_fails_leaves_state_on_disk_as_it_was() {
    let disk = STRATEGIES - 1;
    let (_, _, trace) = run(2, DType::BF16, disk);
    let folder = tempfile::tempdir().unwrap();
    let outcomes = on_ranks(2, |communicator| {
        let (engine, model) = start(&communicator, DType::BF16, strategy(disk, folder.path(), 2));
        steps(&*communicator, &engine, &model, DType::BF16, 0..STEPS);
        let full = || Error::Order {
            what: "saving",
            hint: "make room",
        };
        let mut rest = engine.state_plan().unwrap().len() / 2;
        let outcome = engine.visit_state(&mut |_| match rest.checked_sub(1) {
            Some(less) => {
                rest = less;
                Ok(())
            }
            None => Err(full()),
        });
        assert_eq!(outcome.unwrap_err().to_string(), full().to_string());
        steps(&*communicator, &engine, &model, DType::BF16, STEPS..2 * STEPS)
    });
    assert_eq!(outcomes[0], trace);
}

#[test]
fn a_source_that_fails_ends_the_group_with_the_name_of_the_array() {
    struct Torn;
    impl StateSource for Torn {
        fn read(
            &mut self,
            info: &ParameterInfo,
            _: &str,
            _: Range<usize>,
            _: &mut [f32],
        ) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
            if info.name == "up.weight" {
                Err("torn".into())
            } else {
                Ok(false)
            }
        }
    }
    for error in on_ranks(2, |communicator| {
        let (engine, _model) = start(&communicator, DType::F32, options(ZeroStage::Two));
        engine.restore_state(&EngineState::default(), &mut Torn).unwrap_err()
    }) {
        assert!(
            matches!(error, Error::Restore { .. }) && error.to_string() == "restoring up.weight (value): torn",
            "{error}"
        );
    }
}
