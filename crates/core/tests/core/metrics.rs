//! Gathering for metrics: every sample of the data set counts once, whatever the loader.

use super::loading::{NumberStream, numbers};
use super::{accelerator, on_ranks};
use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use sconce_collectives::single;
use sconce_core::data::Source;
use sconce_core::{Accelerator, DataLoader, Error};
use std::collections::BTreeMap;

/// Returns, on every rank, what an epoch's gathered results are, and how many steps this rank took.
fn gathered<D: Source<Batch = Vec<usize>>>(
    acc: &dyn Accelerator,
    loader: DataLoader<D>,
    skip: usize,
    in_loop: bool,
) -> (Vec<usize>, usize) {
    let mut loader = acc.prepare_loader(loader).unwrap();
    loader.skip_first_batches(skip);
    let mut seen = Vec::new();
    let mut own = Vec::new();
    let mut steps = 0;
    for batch in &mut loader {
        let batch = batch.unwrap();
        steps += 1;
        if in_loop {
            let rows: Vec<i64> = batch.iter().map(|sample| *sample as i64).collect();
            let rows = Tensor::new(rows, &Device::Cpu).unwrap();
            let both = (rows.clone(), vec![rows.affine(2.0, 0.0).unwrap()]);
            let (rows, doubled) = acc.gather_for_metrics(&both).unwrap();
            let rows: Vec<i64> = rows.to_vec1().unwrap();
            let doubled: Vec<i64> = doubled[0].to_vec1().unwrap();
            assert!(rows.iter().zip(doubled).all(|(row, doubled)| row * 2 == doubled));
            let objects = acc.gather_objects_for_metrics(&batch).unwrap();
            assert_eq!(objects.iter().map(|sample| *sample as i64).collect::<Vec<_>>(), rows);
            seen.extend(objects);
        } else {
            own.extend(batch);
        }
    }
    if !in_loop {
        let rows: Vec<i64> = own.iter().map(|sample| *sample as i64).collect();
        let rows = acc
            .gather_for_metrics(&Tensor::new(rows, &Device::Cpu).unwrap())
            .unwrap();
        seen = rows
            .to_vec1::<i64>()
            .unwrap()
            .into_iter()
            .map(|sample| sample as usize)
            .collect();
    }
    (seen, steps)
}

/// A loader's kind and settings, drawn at random.
#[derive(Debug, Clone)]
struct Case {
    samples: usize,
    per_rank: usize,
    world: usize,
    kind: usize,
    split: bool,
    even: bool,
    drop_last: bool,
    skip: usize,
    prefetch: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (1usize..40, 1usize..5, 1usize..5, 0usize..7);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (sizes, flags, 0usize..4, 0usize..4).prop_map(|(sizes, (split, even, drop_last), skip, prefetch)| {
        let (samples, per_rank, world, kind) = sizes;
        Case {
            samples,
            per_rank,
            world,
            kind,
            split: split && kind < 5,
            even: even || matches!(kind, 1 | 3 | 6),
            drop_last,
            skip,
            prefetch,
        }
    })
}

impl Case {
    fn settings<D: Source>(&self, loader: DataLoader<D>) -> DataLoader<D> {
        loader
            .split_batches(self.split)
            .even_batches(self.even)
            .drop_last(self.drop_last)
            .prefetch(self.prefetch)
    }

    fn run(&self, acc: &dyn Accelerator) -> (Vec<usize>, usize) {
        let size = self.per_rank * if self.split { self.world } else { 1 };
        let map = self.settings(DataLoader::new(numbers(self.samples), size));
        let stream = DataLoader::stream_with(NumberStream(self.samples), size, |samples, _| Ok(samples));
        let stream = self.settings(stream);
        let (skip, in_loop) = (self.skip, self.even);
        match self.kind {
            0 => gathered(acc, map, skip, in_loop),
            1 => gathered(acc, map.shuffle(true).dispatch_batches(true), skip, in_loop),
            2 => gathered(acc, stream, skip, in_loop),
            3 => gathered(acc, stream.dispatch_batches(true), skip, in_loop),
            4 => gathered(acc, map.shuffle(true), skip, in_loop),
            5 => gathered(acc, map.batch_sampler(self.own_batches()), skip, in_loop),
            _ => {
                let own = map.batch_sampler(self.own_batches());
                gathered(acc, own.dispatch_batches(true), skip, in_loop)
            }
        }
    }

    /// Batches of 1, 2, 3, 1, 2, 3 .. samples.
    fn own_batches(&self) -> Vec<Vec<usize>> {
        let mut batches = Vec::new();
        let mut next = 0;
        while next < self.samples {
            let end = (next + batches.len() % 3 + 1).min(self.samples);
            batches.push((next..end).collect());
            next = end;
        }
        batches
    }

    /// Returns how many samples an epoch has that are neither dropped nor skipped.
    fn expected(&self) -> usize {
        if self.kind >= 5 {
            let batches = self.own_batches();
            let kept = match self.drop_last && self.world > 1 {
                true => batches.len() / self.world * self.world,
                false => batches.len(),
            };
            let skipped = (self.skip * self.world).min(kept);
            return batches[skipped..kept].iter().map(Vec::len).sum();
        }
        let together = self.per_rank * self.world;
        let kept = match self.drop_last {
            true => self.samples / together * together,
            false => self.samples,
        };
        kept.saturating_sub(self.skip * together)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_sample_is_seen_once_and_ranks_take_as_many_steps(case in cases()) {
        let nothing = match case.kind {
            5 | 6 => case.drop_last && case.world > 1 && case.own_batches().len() < case.world,
            _ => case.drop_last && case.samples < case.per_rank * case.world,
        };
        // Refused for what has a length: a test of its own.
        prop_assume!(!nothing || matches!(case.kind, 2 | 3));
        let ranks = on_ranks(case.world, |communicator| case.run(&*accelerator(communicator)));
        for (seen, steps) in &ranks {
            prop_assert_eq!(&seen, &&ranks[0].0);
            prop_assert!(!case.even || *steps == ranks[0].1);
        }
        let mut seen = ranks[0].0.clone();
        // Ranks' results come rank by rank, so that only those of the steps are in order.
        if case.even && case.kind != 1 && case.kind != 4 {
            prop_assert!(seen.is_sorted(), "{:?}", seen);
        }
        seen.sort_unstable();
        let before = seen.len();
        seen.dedup();
        prop_assert_eq!((before, seen.len()), (case.expected(), case.expected()), "{:?}", seen);
        prop_assert!(seen.iter().all(|sample| *sample < case.samples));
    }
}

#[test]
fn counts_are_those_of_accelerates_metric_tests() {
    for world in 1..=4 {
        on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let count = |loader: DataLoader<_>| gathered(&*acc, loader, 0, true).0.len();
            for samples in [99, 512] {
                for split in [false, true] {
                    let loader = || DataLoader::new(numbers(samples), if split { 4 * world } else { 16 });
                    assert_eq!(count(loader().split_batches(split)), samples);
                    assert_eq!(count(loader().split_batches(split).dispatch_batches(true)), samples);
                }
            }
            let stream = || DataLoader::stream_with(NumberStream(30), 4, |samples, _| Ok(samples));
            assert_eq!(gathered(&*acc, stream(), 0, true).0.len(), 30);
            assert_eq!(gathered(&*acc, stream().dispatch_batches(true), 0, true).0.len(), 30);
            let dropping = DataLoader::new(numbers(10 * world + 1), 5).drop_last(true);
            let mut loader = acc.prepare_loader(dropping).unwrap();
            let counts = (&mut loader).into_iter().map(|batch| {
                let batch: Vec<u32> = batch.unwrap().into_iter().map(|sample| sample as u32).collect();
                let rows = Tensor::new(batch, &Device::Cpu).unwrap();
                acc.gather_for_metrics(&rows).unwrap().dim(0).unwrap()
            });
            assert_eq!(counts.collect::<Vec<_>>(), [5 * world, 5 * world]);
        });
    }
}

#[test]
fn an_evaluation_within_a_training_loop_is_trimmed_by_its_own_loader() {
    for text in on_ranks(2, |communicator| {
        let acc = accelerator(communicator);
        let mut training = acc.prepare_loader(DataLoader::new(numbers(5), 2)).unwrap();
        let mut evaluation = acc.prepare_loader(DataLoader::new(numbers(3), 1)).unwrap();
        let mut counts = Vec::new();
        for batch in &mut training {
            let batch = batch.unwrap();
            let mut evaluated = 0;
            for batch in &mut evaluation {
                evaluated += acc.gather_objects_for_metrics(&batch.unwrap()).unwrap().len();
            }
            counts.push((acc.gather_objects_for_metrics(&batch).unwrap().len(), evaluated));
        }
        counts
    }) {
        assert_eq!(text, [(4, 3), (1, 3)]);
    }
}

#[test]
fn what_is_not_one_row_a_sample_is_an_error_on_every_rank_that_names_the_rank() {
    for text in on_ranks(3, |communicator| {
        let acc = accelerator(communicator);
        let rank = acc.world().rank;
        let mut loader = acc.prepare_loader(DataLoader::new(numbers(12), 2)).unwrap();
        let mut epoch = (&mut loader).into_iter();
        epoch.next().unwrap().unwrap();
        let rows = |count: usize| Tensor::zeros((count, 3), DType::F32, &Device::Cpu).unwrap();
        let error = acc
            .gather_for_metrics(&rows(if rank == 1 { 3 } else { 2 }))
            .unwrap_err();
        assert!(matches!(error, Error::Metrics { .. }));
        let scalar = Tensor::new(1f32, &Device::Cpu).unwrap();
        let of_scalar = acc.gather_for_metrics(&scalar).unwrap_err().to_string();
        assert!(of_scalar.contains("scalar"), "{of_scalar}");
        let objects = acc.gather_objects_for_metrics(&[1]).unwrap_err().to_string();
        assert!(objects.contains("rank 0 gives 1 rows in a batch of 2"), "{objects}");
        // The group is still whole.
        assert_eq!(acc.gather_for_metrics(&rows(2)).unwrap().dims(), [6, 3]);
        error.to_string()
    }) {
        assert!(text.contains("rank 1 gives 3 rows in a batch of 2"), "{text}");
    }
}

#[test]
fn a_step_in_which_some_ranks_have_no_batch_is_an_error_and_no_hang() {
    let outcomes = on_ranks(2, |communicator| {
        let acc = accelerator(communicator);
        let loader = DataLoader::new(numbers(5), 2).even_batches(false);
        let mut loader = acc.prepare_loader(loader).unwrap();
        let gather = |batch: sconce_core::Result<Vec<usize>>| acc.gather_objects_for_metrics(&batch.unwrap());
        (&mut loader).into_iter().map(gather).collect::<Vec<_>>()
    });
    assert_eq!(outcomes[0][0].as_ref().unwrap(), &[0, 1, 2, 3]);
    assert_eq!(outcomes[1].len(), 1);
    let text = outcomes[0][1].as_ref().unwrap_err().to_string();
    assert!(text.contains("even_batches"), "{text}");
}

#[test]
fn objects_of_any_size_are_gathered_in_rank_order_and_what_json_cannot_say_is_an_error() {
    for world in 1..=4 {
        on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let of = |rank: usize| BTreeMap::from([("rank".to_owned(), "x".repeat(rank * 1000))]);
            let own = vec![of(acc.world().rank); acc.world().rank];
            let expected: Vec<_> = (0..world).flat_map(|rank| vec![of(rank); rank]).collect();
            assert_eq!(acc.gather_objects(&own).unwrap(), expected);
            let last = acc.world().rank + 1 == world;
            let error = acc.gather_objects(&[if last { f64::NAN } else { 1.0 }]).unwrap_err();
            assert!(
                error.to_string().contains(&format!("rank {}'s values", world - 1)),
                "{error}"
            );
            acc.wait_for_everyone().unwrap();
        });
    }
}

#[test]
fn nested_tensors_are_gathered_broadcast_and_padded_part_by_part() {
    for world in 1..=4 {
        on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let rank = acc.world().rank;
            let of = |rank: usize, rows: usize| Tensor::full(rank as u32, rows, &Device::Cpu).unwrap();
            let nested = |rank: usize| {
                let map = BTreeMap::from([("a".to_owned(), Some(of(rank, 2))), ("b".to_owned(), None)]);
                (vec![of(rank, 1), of(rank, 3)], map, (7u32, "text".to_owned()))
            };
            let (list, map, rest) = acc.gather(&nested(rank)).unwrap();
            assert_eq!((list[0].dims(), list[1].dims()), (&[world][..], &[3 * world][..]));
            assert_eq!(map["a"].as_ref().unwrap().dims(), [2 * world]);
            assert!(map["b"].is_none());
            assert_eq!(rest, (7, "text".into()));
            let (list, ..) = acc.broadcast(&nested(rank), world - 1).unwrap();
            assert_eq!(list[1].to_vec1::<u32>().unwrap(), [world as u32 - 1; 3]);
            let padded = acc.pad_across_processes(&vec![of(rank, rank + 1)], 0, 9.0).unwrap();
            assert_eq!(padded[0].dims(), [world]);
        });
    }
    let acc = accelerator(single());
    assert!(acc.gather(&Vec::<Tensor>::new()).unwrap().is_empty());
}

#[test]
fn every_rank_gets_one_ranks_value() {
    for world in 1..=3 {
        for from in 0..world {
            let told = on_ranks(world, |communicator| {
                let acc = accelerator(communicator);
                let own = (acc.world().rank, format!("rank {}", acc.world().rank));
                (
                    acc.broadcast_object(&own, from).unwrap(),
                    acc.broadcast_object(&own, world).is_err(),
                )
            });
            assert_eq!(told, vec![((from, format!("rank {from}")), true); world]);
        }
    }
}
