//! Which rank sees which samples, against accelerate's tables.

use super::{accelerator, fixture, on_ranks};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::{Communicator, single};
use sconce_core::data::{DataError, SampleIterator, Source, Stream};
use sconce_core::{Accelerator, DataLoader, Dataset, Error, IterableDataset, PreparedLoader, Result, TensorDataset};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A data set whose batches are the numbers of their samples.
#[derive(Debug, Clone)]
pub(super) struct Numbers {
    pub(super) samples: usize,
    /// A sample that cannot be read.
    pub(super) broken: Option<usize>,
}

impl Dataset for Numbers {
    type Batch = Vec<usize>;

    fn len(&self) -> usize {
        self.samples
    }

    fn batch(&self, samples: &[usize], _: &Device) -> Result<Vec<usize>, Box<dyn std::error::Error + Send + Sync>> {
        match self.broken.filter(|broken| samples.contains(broken)) {
            Some(broken) => Err(format!("sample {broken} is unreadable").into()),
            None => Ok(samples.to_vec()),
        }
    }
}

pub(super) fn numbers(samples: usize) -> Numbers {
    Numbers { samples, broken: None }
}

/// A stream of the numbers below this one.
#[derive(Debug, Clone, Copy)]
pub(super) struct NumberStream(pub(super) usize);

impl IterableDataset for NumberStream {
    type Sample = usize;

    fn samples(&self, _: u64) -> Result<SampleIterator<usize>, DataError> {
        Ok(Box::new((0..self.0).map(Ok)))
    }
}

pub(super) fn epoch<D: Source<Batch = Vec<usize>>>(loader: &mut PreparedLoader<D>) -> Vec<Vec<usize>> {
    loader.into_iter().map(Result::unwrap).collect()
}

/// A row of a table of accelerate's.
struct Row<'r> {
    row: &'r Value,
    world: usize,
}

impl Row<'_> {
    fn number(&self, name: &str) -> usize {
        self.row[name].as_u64().unwrap() as usize
    }

    fn flag(&self, name: &str) -> bool {
        // What a table does not name is not varied in it.
        self.row.get(name).is_none_or(|flag| flag.as_bool().unwrap())
    }

    fn settings<D: Source>(&self, loader: DataLoader<D>) -> DataLoader<D> {
        loader
            .drop_last(self.flag("drop_last"))
            .split_batches(self.flag("split_batches"))
            .even_batches(self.flag("even_batches"))
    }

    fn loader(&self) -> DataLoader<Numbers> {
        self.settings(DataLoader::new(numbers(self.number("n")), self.number("batch")))
    }

    fn stream(&self) -> DataLoader<Stream<NumberStream, Vec<usize>>> {
        let dataset = NumberStream(self.number("n"));
        self.settings(DataLoader::stream_with(dataset, self.number("batch"), |samples, _| {
            Ok(samples)
        }))
    }

    /// Returns what this rank gets in the table, or `None` where accelerate refuses.
    fn of_rank(&self, rank: usize) -> Option<&Value> {
        self.row.get("ranks").map(|ranks| &ranks[rank])
    }
}

/// Runs `check` for every row of a table, on every rank of its world; it says whether the row was compared.
///
/// Returns how many rows were.
fn check_rows(file: &str, check: impl Fn(&Row<'_>, &dyn Accelerator) -> bool + Sync) -> usize {
    let table = fixture(file);
    let rows = table["rows"].as_array().unwrap();
    let mut compared = 0;
    for world in 1..=4 {
        let rows = rows.iter().filter(|row| row["world"] == world);
        let rows: Vec<_> = rows.map(|row| Row { row, world }).collect();
        if rows.is_empty() {
            continue;
        }
        let counts = on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            rows.iter().filter(|row| check(row, &*acc)).count()
        });
        assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
        compared += counts[0];
    }
    println!("{file}: {compared} of {} rows compared", rows.len());
    compared
}

fn as_lists(batches: &Value) -> Vec<Vec<usize>> {
    serde_json::from_value(batches.clone()).unwrap()
}

/// Checks that a refusal is one of those that are meant to be: where accelerate refuses too, and, since a loop without
/// a step hides a mistake, where there are no samples, or where `drop_last` leaves none.
///
/// Returns whether they refuse too.
fn check_refusal(row: &Row<'_>, rank: usize, error: &Error) -> bool {
    assert!(matches!(error, Error::Loader { .. }), "{error}");
    match row.of_rank(rank) {
        None => {
            assert!(error.to_string().contains("split_batches"), "{error}");
            true
        }
        Some(batches) => {
            let batches = batches.get("batches").unwrap_or(batches);
            assert!(batches.as_array().unwrap().is_empty(), "{}: {error}", row.row);
            assert!(row.number("n") == 0 || row.flag("drop_last"), "{}: {error}", row.row);
            false
        }
    }
}

fn check_length(row: &Row<'_>, theirs: &Value, ours: usize) {
    // Differs: their length counts batches that do not come where a short batch is split and not filled up.
    if row.flag("even_batches") || !row.flag("split_batches") {
        assert_eq!(*theirs, ours, "{}", row.row);
    }
}

#[test]
fn several_ranks_get_the_batches_of_accelerates_batch_sampler_shard() {
    let compared = check_rows("batch_sampler_shard.json", |row, acc| {
        let rank = acc.world().rank;
        // Differs: a class of its own there, which fills up the last batch of one rank alone too. Their
        // `prepare_data_loader` does not use it for one rank, and neither is there anything to fill up for here.
        if row.world == 1 && row.flag("even_batches") && !row.flag("drop_last") {
            return false;
        }
        match acc.prepare_loader(row.loader()) {
            Ok(mut loader) => {
                let expected = as_lists(row.of_rank(rank).expect("refused, as in accelerate"));
                assert_eq!(loader.len(), expected.len(), "{}", row.row);
                check_length(row, &row.row["len"][rank], loader.len());
                assert_eq!(epoch(&mut loader), expected, "{}, rank {rank}", row.row);
                true
            }
            Err(error) => check_refusal(row, rank, &error),
        }
    });
    assert_eq!(compared, 1782);
}

#[test]
fn ranks_get_the_batches_flags_and_remainders_of_accelerates_prepared_loader() {
    let compared = check_rows("data_loader.json", |row, acc| {
        let rank = acc.world().rank;
        let mut loader = match acc.prepare_loader(row.loader()) {
            Ok(loader) => loader,
            Err(error) => return check_refusal(row, rank, &error),
        };
        let expected = row.of_rank(rank).expect("refused, as in accelerate");
        check_length(row, &expected["len"], loader.len());
        let mut batches = Vec::new();
        let mut flags = Vec::new();
        for batch in &mut loader {
            batches.push(batch.unwrap());
            flags.push(Value::from(acc.end_of_dataloader()));
            // Without even batches rank 0 alone is sure to be in the last step.
            if acc.end_of_dataloader() && (rank == 0 || row.flag("even_batches")) {
                check_remainder(row, &expected["remainder"], acc.remainder().unwrap());
            }
        }
        assert_eq!(batches, as_lists(&expected["batches"]), "{}, rank {rank}", row.row);
        assert_eq!(&flags, expected["end_flags"].as_array().unwrap(), "{}", row.row);
        assert!(!acc.end_of_dataloader() && acc.remainder().is_none());
        for (skipped, left) in expected["skip"].as_object().unwrap() {
            loader.set_epoch(0);
            loader.skip_first_batches(skipped.parse().unwrap());
            let found = epoch(&mut loader);
            assert_eq!(found, as_lists(left), "{}, rank {rank}, skipped {skipped}", row.row);
            // Differs: their loader skips in every epoch.
            assert_eq!(epoch(&mut loader), batches);
        }
        true
    });
    assert_eq!(compared, 200);
}

/// Theirs is 0 where nothing is to be cut off, and -1 where they do not know; ours is the number of samples either way.
fn check_remainder(row: &Row<'_>, theirs: &Value, ours: usize) {
    let together = row.number("batch") * if row.flag("split_batches") { 1 } else { row.world };
    match theirs.as_i64().unwrap() {
        0 => assert_eq!(ours, together, "{}", row.row),
        // With `drop_last` every batch is full.
        -1 => assert_eq!(ours, together, "{}", row.row),
        theirs => assert_eq!(ours as i64, theirs, "{}", row.row),
    }
}

#[test]
fn ranks_get_the_parts_of_a_stream_that_accelerates_iterable_shard_gives_them() {
    let compared = check_rows("iterable_shard.json", |row, acc| {
        let rank = acc.world().rank;
        // Differs as with one rank above: nothing is filled up.
        if row.world == 1 && !row.flag("drop_last") {
            return false;
        }
        match acc.prepare_loader(row.stream()) {
            Ok(mut loader) => {
                assert_eq!(loader.batches(), None);
                let samples: Vec<usize> = epoch(&mut loader).concat();
                let expected: Vec<usize> = serde_json::from_value(row.of_rank(rank).unwrap().clone()).unwrap();
                assert_eq!(samples, expected, "{}, rank {rank}", row.row);
            }
            // Differs: they notice a batch that cannot be split when it is there to be split.
            Err(error) => {
                let batches = row.of_rank(rank);
                assert!(
                    batches.is_none_or(|samples| *samples == serde_json::json!([])),
                    "{}: {error}",
                    row.row
                );
            }
        }
        true
    });
    assert_eq!(compared, 700);
}

#[test]
fn batches_of_varying_size_are_dealt_as_accelerate_does() {
    let compared = check_rows("dynamic_batches.json", |row, acc| {
        let sizes: Vec<usize> = serde_json::from_value(row.row["sizes"].clone()).unwrap();
        let mut next = 0;
        let batches = sizes.iter().map(|size| {
            next += size;
            (next - size..next).collect()
        });
        let batches: Vec<Vec<usize>> = batches.collect();
        let loader = DataLoader::new(numbers(next), 0).batch_sampler(batches);
        let loader = loader.even_batches(row.flag("even_batches"));
        let mut loader = acc.prepare_loader(loader).unwrap();
        let expected = as_lists(row.of_rank(acc.world().rank).unwrap());
        assert_eq!(loader.len(), expected.len());
        assert_eq!(epoch(&mut loader), expected, "{}", row.row);
        true
    });
    assert_eq!(compared, 30);
}

#[test]
fn rank_0_dispatches_the_batches_that_accelerates_does() {
    let compared = check_rows("dispatch.json", |row, acc| {
        fn found<D: Source<Batch = Vec<usize>>>(
            acc: &dyn Accelerator,
            loader: DataLoader<D>,
        ) -> (Vec<Vec<usize>>, usize) {
            let mut loader = acc.prepare_loader(loader.dispatch_batches(true)).unwrap();
            let mut remainder = 0;
            let batches = (&mut loader).into_iter().map(|batch| {
                remainder = acc.remainder().unwrap_or_default();
                batch.unwrap()
            });
            (batches.collect(), remainder)
        }
        let expected = row.of_rank(acc.world().rank).unwrap();
        let (batches, remainder) = if row.row["dataset"] == "map" {
            let loader = row.loader();
            if expected.get("error").is_some() && acc.prepare_loader(loader.clone()).is_err() {
                // Differs: a crash there, here an error that says that `drop_last` leaves no batch.
                return true;
            }
            found(acc, loader)
        } else {
            found(acc, row.stream())
        };
        // Differs: where the first round is incomplete and dropped, the epoch is empty; accelerate crashes.
        assert_eq!(batches, as_lists(&expected["batches"]), "{}", row.row);
        assert_eq!(
            remainder as u64,
            expected["remainder"].as_u64().unwrap_or(0),
            "{}",
            row.row
        );
        true
    });
    assert_eq!(compared, 112);
}

#[test]
fn the_last_batch_of_a_stream_is_known_as_such_without_its_length() {
    for world in 1..=3 {
        for dispatch in [false, true] {
            for (samples, drop_last) in [
                (16 * world, false),
                (16 * world, true),
                (16 * world + 1, true),
                (12 * world + 1, false),
            ] {
                on_ranks(world, |communicator| {
                    let acc = accelerator(communicator);
                    let stream = DataLoader::stream_with(NumberStream(samples), 4, |samples, _| Ok(samples));
                    let stream = stream.drop_last(drop_last).dispatch_batches(dispatch);
                    let mut loader = acc.prepare_loader(stream).unwrap();
                    for _ in 0..2 {
                        let flags = (&mut loader).into_iter().map(|batch| {
                            batch.unwrap();
                            acc.end_of_dataloader()
                        });
                        assert_eq!(flags.collect::<Vec<_>>(), [false, false, false, true]);
                    }
                    assert!(!acc.end_of_dataloader());
                });
            }
        }
    }
}

/// Counts how often it is cloned.
struct Counted(Arc<AtomicUsize>);

impl Clone for Counted {
    fn clone(&self) -> Self {
        self.0.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

struct CountedStream(Arc<AtomicUsize>);

impl IterableDataset for CountedStream {
    type Sample = Counted;

    fn samples(&self, _: u64) -> Result<SampleIterator<Counted>, DataError> {
        let clones = Arc::clone(&self.0);
        Ok(Box::new((0..7).map(move |_| Ok(Counted(Arc::clone(&clones))))))
    }
}

#[test]
fn samples_of_a_stream_are_cloned_only_where_they_may_fill_up() {
    let counts = [1, 2].map(|world| {
        on_ranks(world, |communicator| {
            let clones = Arc::<AtomicUsize>::default();
            let stream = CountedStream(Arc::clone(&clones));
            let stream = DataLoader::stream_with(stream, 2, |samples, _| Ok(samples.len()));
            let mut loader = accelerator(communicator).prepare_loader(stream).unwrap();
            let rows: usize = (&mut loader).into_iter().map(Result::unwrap).sum();
            (rows, clones.load(Ordering::Relaxed))
        })
    });
    // Of two ranks each keeps the four samples of the first step, and the second lacks one in the last.
    assert_eq!(counts[0], [(7, 0)]);
    assert_eq!(counts[1], [(4, 4), (4, 5)]);
}

fn refusal(communicator: Arc<dyn Communicator>, loader: DataLoader<Numbers>) -> String {
    let error = accelerator(communicator).prepare_loader(loader).unwrap_err();
    assert!(matches!(error, Error::Loader { .. }), "{error}");
    error.to_string()
}

#[test]
fn no_samples_no_batch_and_settings_that_do_not_go_together_are_refused_on_every_rank() {
    let of = |samples, size| DataLoader::new(numbers(samples), size);
    for world in 2..=4 {
        let full = 2 * world;
        let cases = [
            (
                of(full - 1, 2).drop_last(true),
                format!("{} samples do not fill one batch", full - 1),
            ),
            (
                of(full, world + 1).split_batches(true),
                format!("a multiple of {world}"),
            ),
            (
                of(full, 2).split_batches(true).batch_sampler(vec![vec![0]]),
                "batches of one size".into(),
            ),
            (
                of(full, 2).dispatch_batches(true).even_batches(false),
                "dispatch_batches".into(),
            ),
        ];
        for (loader, words) in cases {
            for text in on_ranks(world, |rank| refusal(rank, loader.clone())) {
                assert!(text.contains(&words), "{text}");
            }
        }
    }
    assert!(refusal(single(), of(0, 2)).contains("0 samples"));
    assert!(refusal(single(), of(4, 0)).contains("batch size"));
    assert!(refusal(single(), of(4, 0).batch_sampler(Vec::new())).contains("0 batches"));
}

#[test]
fn a_data_sets_error_comes_with_batch_and_epoch_and_the_next_batch_can_still_be_had() {
    let acc = accelerator(single());
    let data = Numbers {
        samples: 6,
        broken: Some(3),
    };
    let loader = acc.prepare_loader(DataLoader::new(data, 2)).unwrap();
    for epoch in 0..2 {
        let batches: Vec<Result<Vec<usize>>> = (&loader).into_iter().collect();
        match &batches[1] {
            Err(Error::Dataset {
                batch: 1,
                epoch: found,
                source,
            }) => {
                assert_eq!((*found, source.to_string().as_str()), (epoch, "sample 3 is unreadable"));
            }
            other => panic!("{other:?}"),
        }
        let text = batches[1].as_ref().unwrap_err().to_string();
        assert!(
            text.contains(&format!("batch 1 of epoch {epoch}")) && text.contains("sample 3 is unreadable"),
            "{text}"
        );
        assert_eq!(batches[2].as_ref().unwrap(), &[4, 5]);
    }
}

#[test]
fn a_tensor_data_sets_batch_has_the_same_rows_of_every_tensor() {
    let rows = Tensor::arange(0u32, 20, &Device::Cpu)
        .unwrap()
        .reshape((2, 10))
        .unwrap()
        .t()
        .unwrap();
    let labels = Tensor::arange(0i64, 10, &Device::Cpu).unwrap();
    let data = TensorDataset::new(vec![rows, labels]).unwrap();
    let batch = data.batch(&[7, 0, 7], &Device::Cpu).unwrap();
    assert_eq!(batch[0].to_vec2::<u32>().unwrap(), [[7, 17], [0, 10], [7, 17]]);
    assert_eq!(batch[1].to_vec1::<i64>().unwrap(), [7, 0, 7]);
    assert!(data.batch(&[10], &Device::Cpu).is_err());
}

#[test]
fn tensors_that_make_no_data_set_are_refused() {
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    assert!(TensorDataset::new(Vec::new()).is_err());
    assert!(TensorDataset::new(vec![ones(&[])]).is_err());
    let text = TensorDataset::new(vec![ones(&[3, 2]), ones(&[4])])
        .unwrap_err()
        .to_string();
    assert!(text.contains("tensor 1 has 4 rows, tensor 0 has 3"), "{text}");
}
