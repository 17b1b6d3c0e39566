//! Reading ahead of the loop, and rank 0 reading for all: the same batches, failures at their place, no hangs.

use super::loading::{NumberStream, Numbers, epoch, numbers};
use super::{accelerator, build, on_ranks};
use candle_core::{Device, Tensor};
use sconce_collectives::single;
use sconce_core::data::{DataError, SampleIterator, Source};
use sconce_core::{Accelerator, AcceleratorBuilder, DataLoader, Dataset, Error, IterableDataset, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

#[test]
fn batches_and_their_order_do_not_depend_on_how_many_are_read_ahead() {
    let acc = accelerator(single());
    let of = |ahead| {
        let loader = DataLoader::new(numbers(23), 2).shuffle(true).prefetch(ahead);
        let mut loader = acc.prepare_loader(loader).unwrap();
        [epoch(&mut loader), epoch(&mut loader)]
    };
    for ahead in [1, 2, 3, 100] {
        assert_eq!(of(ahead), of(0));
    }
}

/// Tells of every batch when it begins to be made, and of its end.
struct Telling {
    begun: Mutex<Sender<usize>>,
    dropped: Mutex<Sender<()>>,
}

impl Dataset for Telling {
    type Batch = usize;

    fn len(&self) -> usize {
        1000
    }

    fn batch(&self, samples: &[usize], _: &Device) -> Result<usize, DataError> {
        self.begun.lock().unwrap().send(samples[0])?;
        Ok(samples[0])
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        let _ = self.dropped.lock().unwrap().send(());
    }
}

fn telling() -> (Telling, Receiver<usize>, Receiver<()>) {
    let (begun, of_begun) = channel();
    let (dropped, of_dropped) = channel();
    let telling = Telling {
        begun: Mutex::new(begun),
        dropped: Mutex::new(dropped),
    };
    (telling, of_begun, of_dropped)
}

#[test]
fn as_many_batches_as_asked_for_are_made_ahead_and_leaving_early_ends_the_thread() {
    for ahead in [1, 2, 5] {
        let (data, begun, dropped) = telling();
        let acc = accelerator(single());
        let loader = acc.prepare_loader(DataLoader::new(data, 1).prefetch(ahead)).unwrap();
        let mut batches = (&loader).into_iter();
        let mut most = 0;
        for taken in 0..200 {
            assert_eq!(batches.next().unwrap().unwrap(), taken);
            // These come without being asked for; one too many would come in some round, if not in each.
            while most < taken + ahead {
                most = begun.recv().unwrap();
            }
            most = begun.try_iter().last().unwrap_or(most);
            assert_eq!(most, taken + ahead);
        }
        drop(batches);
        drop(loader);
        // The thread held the data set too.
        dropped.recv().unwrap();
    }
}

#[test]
fn without_reading_ahead_a_batch_is_made_when_it_is_asked_for() {
    let (data, begun, _dropped) = telling();
    let acc = accelerator(single());
    let loader = acc.prepare_loader(DataLoader::new(data, 1).prefetch(0)).unwrap();
    let mut batches = (&loader).into_iter();
    assert!(begun.try_recv().is_err());
    for taken in 0..3 {
        batches.next().unwrap().unwrap();
        assert_eq!((begun.try_recv(), begun.try_recv().is_err()), (Ok(taken), true));
    }
}

/// Panics at a sample.
struct Panicking(usize);

impl Dataset for Panicking {
    type Batch = Vec<usize>;

    fn len(&self) -> usize {
        12
    }

    fn batch(&self, samples: &[usize], _: &Device) -> Result<Vec<usize>, DataError> {
        assert!(!samples.contains(&self.0), "sample {} has a bug", self.0);
        Ok(samples.to_vec())
    }
}

#[test]
fn a_panic_of_a_data_set_comes_at_its_batch() {
    for ahead in [0, 1, 3] {
        let acc = accelerator(single());
        let loader = acc
            .prepare_loader(DataLoader::new(Panicking(5), 2).prefetch(ahead))
            .unwrap();
        let mut batches = (&loader).into_iter();
        assert_eq!(batches.next().unwrap().unwrap(), [0, 1]);
        assert_eq!(batches.next().unwrap().unwrap(), [2, 3]);
        let panic = catch_unwind(AssertUnwindSafe(|| batches.next())).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "sample 5 has a bug");
        assert!(batches.next().is_none());
    }
}

/// Runs an epoch and returns its batches, or the messages in their place.
fn outcomes<D: Source<Batch = Vec<usize>>>(
    acc: &dyn Accelerator,
    loader: DataLoader<D>,
) -> Vec<Result<Vec<usize>, String>> {
    let mut loader = acc.prepare_loader(loader).unwrap();
    let text = |outcome: sconce_core::Result<_>| outcome.map_err(|error| error.to_string());
    (&mut loader).into_iter().map(text).collect()
}

#[test]
fn a_failure_where_rank_0_reads_reaches_all_ranks_at_its_step_and_the_next_steps_follow() {
    for ahead in [0, 2] {
        for world in 2..=3 {
            let data = Numbers {
                samples: 6 * world,
                broken: Some(2 * world + 1),
            };
            let ranks = on_ranks(world, |communicator| {
                let loader = DataLoader::new(data.clone(), 2).prefetch(ahead).dispatch_batches(true);
                outcomes(&*accelerator(communicator), loader)
            });
            for (rank, steps) in ranks.iter().enumerate() {
                assert_eq!(steps.len(), 3);
                assert_eq!(steps[0].as_ref().unwrap()[0], 2 * rank);
                let text = steps[1].as_ref().unwrap_err();
                assert!(
                    text.contains("batch 1 of epoch 0") && text.contains("unreadable"),
                    "{text}"
                );
                assert_eq!(steps[2].as_ref().unwrap()[0], 4 * world + 2 * rank);
            }
        }
    }
}

/// A stream of 12 numbers; one of them cannot be read.
#[derive(Clone)]
struct Broken(usize);

impl IterableDataset for Broken {
    type Sample = usize;

    fn samples(&self, epoch: u64) -> Result<SampleIterator<usize>, DataError> {
        if epoch == 1 {
            return Err("the stream is gone".into());
        }
        let broken = self.0;
        let read = move |number| match number == broken {
            true => Err(format!("line {number} is broken").into()),
            false => Ok(number),
        };
        Ok(Box::new((0..12).map(read)))
    }
}

#[test]
fn a_broken_sample_of_a_stream_fails_its_step_on_every_rank_and_a_stream_that_does_not_open_its_epoch() {
    for dispatch in [false, true] {
        for steps in on_ranks(2, |communicator| {
            let acc = accelerator(communicator);
            let loader = DataLoader::stream_with(Broken(5), 2, |samples, _| Ok(samples));
            let mut loader = acc.prepare_loader(loader.dispatch_batches(dispatch)).unwrap();
            let mut epochs = Vec::new();
            for _ in 0..2 {
                let text = |outcome: sconce_core::Result<_>| outcome.map_err(|error| error.to_string());
                epochs.push((&mut loader).into_iter().map(text).collect::<Vec<_>>());
            }
            epochs
        }) {
            assert_eq!(steps[0].len(), 3);
            let text = steps[0][1].as_ref().unwrap_err();
            assert!(
                text.contains("batch 1 of epoch 0") && text.contains("line 5 is broken"),
                "{text}"
            );
            assert!(steps[0][0].is_ok() && steps[0][2].is_ok());
            assert_eq!(steps[1].len(), 1);
            let text = steps[1][0].as_ref().unwrap_err();
            assert!(
                text.contains("batch 0 of epoch 1") && text.contains("the stream is gone"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_panic_where_rank_0_reads_ends_the_loop_on_all_ranks() {
    for ahead in [0, 2] {
        let ranks = on_ranks(3, |communicator| {
            let rank = communicator.rank();
            let acc = accelerator(communicator);
            let loader = DataLoader::new(Panicking(7), 2).prefetch(ahead).dispatch_batches(true);
            let loader = acc.prepare_loader(loader).unwrap();
            let mut batches = (&loader).into_iter();
            assert_eq!(batches.next().unwrap().unwrap(), [2 * rank, 2 * rank + 1]);
            let second = catch_unwind(AssertUnwindSafe(|| batches.next()));
            match second {
                Err(panic) => format!("panic: {}", panic.downcast_ref::<String>().unwrap()),
                Ok(Some(Err(error @ Error::Loader { .. }))) => error.to_string(),
                Ok(other) => format!("{other:?}"),
            }
        });
        assert_eq!(ranks[0], "panic: sample 7 has a bug");
        for text in &ranks[1..] {
            assert!(text.contains("rank 0") && text.contains("sample 7 has a bug"), "{text}");
        }
    }
}

/// A stream that counts how often it is opened.
#[derive(Clone)]
struct Counting(Arc<AtomicUsize>);

impl IterableDataset for Counting {
    type Sample = usize;

    fn samples(&self, _: u64) -> Result<SampleIterator<usize>, DataError> {
        self.0.fetch_add(1, SeqCst);
        NumberStream(8).samples(0)
    }
}

#[test]
fn only_rank_0_opens_a_stream_that_is_dispatched() {
    let opened = on_ranks(3, |communicator| {
        let acc = accelerator(communicator);
        let counting = Counting(Arc::default());
        let loader = DataLoader::stream_with(counting.clone(), 2, |samples, _| Ok(samples));
        let batches = outcomes(&*acc, loader.dispatch_batches(true));
        assert_eq!(batches.len(), 2);
        counting.0.load(SeqCst)
    });
    assert_eq!(opened, [1, 0, 0]);
}

/// Draws from the random state for every batch, as an augmentation would.
struct Drawing;

impl Dataset for Drawing {
    type Batch = Vec<usize>;

    fn len(&self) -> usize {
        24
    }

    fn batch(&self, samples: &[usize], _: &Device) -> Result<Vec<usize>, DataError> {
        Ok(samples.iter().map(|_| RandomState::draw_key() as usize).collect())
    }
}

#[test]
fn what_is_random_in_a_data_set_follows_from_seed_epoch_rank_and_batch_alone() {
    let of = |ahead, seed, skip, dispatch| {
        on_ranks(2, |communicator| {
            let acc = build(AcceleratorBuilder::default().communicator(communicator).seed(seed));
            let before = RandomState::current();
            let loader = DataLoader::new(Drawing, 2).prefetch(ahead).dispatch_batches(dispatch);
            let mut loader = acc.prepare_loader(loader).unwrap();
            loader.skip_first_batches(skip);
            let drawn = [epoch(&mut loader), epoch(&mut loader)];
            assert_eq!(RandomState::current(), before);
            drawn
        })
    };
    let drawn = of(0, 3, 0, false);
    assert_eq!(of(2, 3, 0, false), drawn);
    assert_eq!(of(2, 3, 0, true), drawn);
    for (resumed, drawn) in of(1, 3, 2, false).iter().zip(&drawn) {
        assert_eq!((&resumed[0][..], &resumed[1]), (&drawn[0][2..], &drawn[1]));
    }
    let mut all: Vec<usize> = [drawn, of(0, 4, 0, false)]
        .into_iter()
        .flatten()
        .flatten()
        .flatten()
        .flatten()
        .collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 2 * 2 * 24, "no two draws are the same");
}

/// A stream of numbers in random order.
#[derive(Clone)]
struct Random;

impl IterableDataset for Random {
    type Sample = usize;

    fn samples(&self, _: u64) -> Result<SampleIterator<usize>, DataError> {
        Ok(Box::new((0..12).map(|_| Ok(RandomState::draw_key() as usize))))
    }
}

#[test]
fn what_is_random_in_a_stream_is_the_same_on_all_ranks_that_read_it() {
    let of = |world: usize, ahead, dispatch| {
        let ranks = on_ranks(world, |communicator| {
            // What ranks draw otherwise is another on each.
            RandomState::seed(communicator.rank() as u64);
            let loader = DataLoader::stream_with(Random, 1, |samples, _| Ok(samples)).prefetch(ahead);
            let acc = accelerator(communicator);
            let mut loader = acc.prepare_loader(loader.dispatch_batches(dispatch)).unwrap();
            [epoch(&mut loader).concat(), epoch(&mut loader).concat()]
        });
        [0, 1].map(|epoch| {
            (0..12)
                .map(|at| ranks[at % world][epoch][at / world])
                .collect::<Vec<_>>()
        })
    };
    let alone = of(1, 0, false);
    assert_ne!(alone[0], alone[1]);
    for world in 1..=3 {
        for (ahead, dispatch) in [(0, false), (2, false), (2, true)] {
            assert_eq!(of(world, ahead, dispatch), alone);
        }
    }
}

#[test]
fn dispatched_tensors_arrive_with_shape_dtype_and_bits() {
    let of = |numbers: &[f32]| {
        let rows = Tensor::new(numbers, &Device::Cpu).unwrap();
        (
            rows.to_dtype(candle_core::DType::BF16).unwrap(),
            vec!["text".to_owned()],
            f64::NAN,
        )
    };
    for world in 2..=3 {
        on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let collate = move |samples: Vec<usize>, _: &Device| {
                let numbers: Vec<f32> = samples.iter().map(|sample| *sample as f32 / 3.0).collect();
                Ok(of(&numbers))
            };
            let loader = DataLoader::stream_with(NumberStream(6), 2, collate).dispatch_batches(true);
            let mut loader = acc.prepare_loader(loader).unwrap();
            let (rows, texts, number) = (&mut loader).into_iter().next().unwrap().unwrap();
            let first = acc.world().rank as f32 * 2.0;
            let (expected, ..) = of(&[first / 3.0, (first + 1.0) / 3.0]);
            assert_eq!(rows.dtype(), expected.dtype());
            assert_eq!(
                rows.to_vec1::<half::bf16>().unwrap(),
                expected.to_vec1::<half::bf16>().unwrap()
            );
            assert_eq!(texts, ["text"]);
            assert!(number.is_nan());
        });
    }
}
