//! Which rank sees which samples, against accelerate's tables.

use super::{accelerator, build, fixture, on_ranks};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::{Communicator, single};
use sconce_core::{AcceleratorBuilder, DataLoader, Dataset, Error, PreparedLoader, Result, TensorDataset};
use serde_json::Value;
use std::sync::Arc;

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

fn numbers(samples: usize) -> Numbers {
    Numbers { samples, broken: None }
}

fn epoch(loader: &mut PreparedLoader<Numbers>) -> Vec<Vec<usize>> {
    loader.into_iter().map(Result::unwrap).collect()
}

/// A row of a table: the setting, and what every rank gets.
struct Row<'r> {
    samples: usize,
    loader: DataLoader<Numbers>,
    world: usize,
    text: String,
    ranks: &'r [Value],
}

fn rows(table: &Value) -> Vec<Row<'_>> {
    let row = |row| -> Row<'_> {
        let row: &Value = row;
        let number = |name: &str| row[name].as_u64().unwrap() as usize;
        let drop_last = row["drop_last"].as_bool().unwrap();
        Row {
            samples: number("n"),
            loader: DataLoader::new(numbers(number("n")), number("batch")).drop_last(drop_last),
            world: number("world"),
            text: format!(
                "{} samples in batches of {} for {}, {drop_last}",
                row["n"], row["batch"], row["world"]
            ),
            ranks: row["ranks"].as_array().unwrap(),
        }
    };
    table["rows"].as_array().unwrap().iter().map(row).collect()
}

fn as_lists(batches: &Value) -> Vec<Vec<usize>> {
    serde_json::from_value(batches.clone()).unwrap()
}

/// Checks all rows of a table; `of_rank` picks a rank's batches from its entry.
fn check(table: &Value, worlds: std::ops::RangeInclusive<usize>, of_rank: fn(&Value) -> &Value) {
    let rows = rows(table);
    let mut compared = 0;
    for world in worlds {
        let counts = on_ranks(world, |communicator| {
            let rank = communicator.rank();
            let acc = accelerator(communicator);
            let mut compared = 0;
            for row in rows.iter().filter(|row| row.world == world) {
                let expected = as_lists(of_rank(&row.ranks[rank]));
                match acc.prepare_loader(row.loader.clone()) {
                    Ok(mut loader) => {
                        assert_eq!(loader.len(), expected.len(), "{}", row.text);
                        assert_eq!(epoch(&mut loader), expected, "{}, rank {rank}", row.text);
                        compared += 1;
                    }
                    // Differs on purpose: accelerate repeats samples until every rank has one, or gives no batches.
                    Err(error) => {
                        assert!(matches!(error, Error::Loader { .. }), "{error}");
                        assert!(expected.is_empty() || row.samples < world, "{}: {error}", row.text);
                    }
                }
            }
            compared
        });
        assert!(counts.iter().all(|count| *count == counts[0]));
        compared += counts[0];
    }
    println!("{compared} of {} rows compared", rows.len());
    assert!(compared * 10 >= rows.len() * 6);
}

#[test]
fn several_ranks_get_the_batches_of_accelerates_batch_sampler_shard() {
    check(&fixture("batch_sampler_shard.json"), 2..=4, |rank| rank);
}

#[test]
fn one_and_more_ranks_get_the_batches_of_accelerates_prepared_loader() {
    check(&fixture("data_loader.json"), 1..=3, |rank| &rank["batches"]);
}

#[test]
fn the_last_batch_is_known_as_such_where_accelerate_knows_it() {
    let table = fixture("data_loader.json");
    let rows = rows(&table);
    for world in 1..=3 {
        on_ranks(world, |communicator| {
            let rank = communicator.rank();
            // Windows so long that only the end of the loader ends one.
            let builder = AcceleratorBuilder::default()
                .communicator(communicator)
                .gradient_accumulation_steps(1000);
            let acc = build(builder);
            for row in rows.iter().filter(|row| row.world == world) {
                let Ok(mut loader) = acc.prepare_loader(row.loader.clone()) else {
                    continue;
                };
                let flags: Vec<bool> = (&mut loader)
                    .into_iter()
                    .map(|_| {
                        acc.accumulate();
                        acc.sync_gradients()
                    })
                    .collect();
                let expected: Vec<bool> = serde_json::from_value(row.ranks[rank]["end_flags"].clone()).unwrap();
                assert_eq!(flags, expected, "{}", row.text);
            }
        });
    }
}

fn refusal(communicator: Arc<dyn Communicator>, loader: DataLoader<Numbers>) -> String {
    let error = accelerator(communicator).prepare_loader(loader).unwrap_err();
    assert!(matches!(error, Error::Loader { .. }), "{error}");
    error.to_string()
}

#[test]
fn fewer_samples_than_ranks_no_samples_no_batch_and_a_batch_of_nothing_are_refused_on_every_rank() {
    for world in 2..=4 {
        for text in on_ranks(world, |rank| refusal(rank, DataLoader::new(numbers(world - 1), 1))) {
            assert!(
                text.contains(&format!("{} samples for {world} ranks", world - 1)),
                "{text}"
            );
        }
        let full = 2 * world;
        for text in on_ranks(world, |rank| {
            refusal(rank, DataLoader::new(numbers(full - 1), 2).drop_last(true))
        }) {
            assert!(
                text.contains("drop_last") && text.contains(&format!("{} samples", full - 1)),
                "{text}"
            );
        }
    }
    assert!(refusal(single(), DataLoader::new(numbers(0), 2)).contains("0 samples"));
    assert!(refusal(single(), DataLoader::new(numbers(4), 0)).contains("batch size"));
}

/// Returns two epochs of a shuffled loader, all ranks' batches in their global order.
fn shuffled(world: usize, seed: u64) -> Vec<Vec<usize>> {
    let ranks = on_ranks(world, |communicator| {
        let acc = build(AcceleratorBuilder::default().communicator(communicator).seed(seed));
        let mut loader = acc
            .prepare_loader(DataLoader::new(numbers(24), 12 / world).shuffle(true))
            .unwrap();
        [epoch(&mut loader), epoch(&mut loader)]
    });
    (0..2)
        .map(|number| {
            (0..2)
                .flat_map(|batch| ranks.iter().flat_map(move |rank| rank[number][batch].clone()))
                .collect()
        })
        .collect()
}

#[test]
fn a_shuffled_epoch_has_every_sample_once_in_an_order_that_the_number_of_ranks_does_not_change() {
    let reference = shuffled(1, 5);
    assert_ne!(reference[0], reference[1]);
    for epoch in &reference {
        let mut sorted = epoch.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..24).collect::<Vec<_>>());
        assert_ne!(*epoch, sorted);
    }
    for world in 2..=4 {
        assert_eq!(shuffled(world, 5), reference);
    }
    assert_ne!(shuffled(1, 6), reference);
}

#[test]
fn an_epoch_can_be_repeated_by_its_number_and_the_seed_can_be_set_later() {
    let acc = accelerator(single());
    acc.set_seed(9);
    let mut loader = acc
        .prepare_loader(DataLoader::new(numbers(16), 4).shuffle(true))
        .unwrap();
    assert_eq!(
        (acc.seed(), loader.epoch(), loader.len(), loader.is_empty()),
        (9, 0, 4, false)
    );
    let epochs = [epoch(&mut loader), epoch(&mut loader)];
    assert_eq!(loader.epoch(), 2);
    loader.set_epoch(1);
    assert_eq!(epoch(&mut loader), epochs[1]);
    let other = build(AcceleratorBuilder::default().communicator(single()).seed(9));
    let mut loader = other
        .prepare_loader(DataLoader::new(numbers(16), 4).shuffle(true))
        .unwrap();
    assert_eq!(epoch(&mut loader), epochs[0]);
}

#[test]
fn a_data_sets_error_comes_with_batch_and_epoch_and_the_next_batch_can_still_be_had() {
    let acc = accelerator(single());
    let data = Numbers {
        samples: 6,
        broken: Some(3),
    };
    let mut loader = acc.prepare_loader(DataLoader::new(data, 2)).unwrap();
    for epoch in 0..2 {
        let batches: Vec<Result<Vec<usize>>> = loader.into_iter().collect();
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
