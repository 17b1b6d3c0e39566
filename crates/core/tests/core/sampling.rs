//! In which order samples come.

use super::loading::{epoch, numbers};
use super::{accelerator, build, fixture, on_ranks};
use sconce_collectives::single;
use sconce_core::data::{Sampler as _, SubsetSampler, WeightedSampler};
use sconce_core::{AcceleratorBuilder, DataLoader};

#[test]
fn a_seed_shuffles_as_accelerates_seedable_sampler() {
    let table = fixture("seedable_sampler.json");
    let rows = table["rows"].as_array().unwrap();
    for row in rows {
        let number = |name: &str| row[name].as_u64().unwrap();
        let acc = build(
            AcceleratorBuilder::default()
                .communicator(single())
                .seed(number("seed")),
        );
        let loader = DataLoader::new(numbers(number("n") as usize), 1).shuffle(true);
        let mut loader = acc.prepare_loader(loader).unwrap();
        loader.set_epoch(number("epoch"));
        let order: Vec<usize> = epoch(&mut loader).concat();
        let expected: Vec<usize> = serde_json::from_value(row["order"].clone()).unwrap();
        assert_eq!(order, expected, "{row}");
    }
    assert_eq!(rows.len(), 21);
}

#[test]
fn samplers_that_name_samples_which_are_not_there_fail_at_that_batch() {
    let acc = accelerator(single());
    let subset = SubsetSampler {
        samples: vec![2, 3, 9, 0],
        shuffle: false,
    };
    let cases = [
        DataLoader::new(numbers(4), 2).sampler(subset),
        DataLoader::new(numbers(4), 2).batch_sampler(vec![vec![2, 3], vec![9, 0]]),
    ];
    for loader in cases {
        let loader = acc.prepare_loader(loader).unwrap();
        let batches: Vec<_> = (&loader).into_iter().collect();
        assert_eq!(batches[0].as_ref().unwrap(), &[2, 3]);
        let text = batches[1].as_ref().unwrap_err().to_string();
        assert!(
            text.contains("batch 1 of epoch 0") && text.contains("sample 9"),
            "{text}"
        );
        assert_eq!(batches.len(), 2);
    }
}

#[test]
fn a_weighted_sampler_draws_by_weight_and_never_what_has_none() {
    let weights = [1.0, 0.0, 3.0, 0.0];
    let sampler = WeightedSampler::new(&weights, 4000).unwrap();
    let drawn: Vec<usize> = sampler.order(7, 0).collect();
    let count = |sample| drawn.iter().filter(|drawn| **drawn == sample).count();
    assert_eq!((count(1), count(3), count(0) + count(2)), (0, 0, 4000));
    // Four standard deviations of 4000 draws with probability 1/4.
    assert!(count(0).abs_diff(1000) < 4 * 28, "{}", count(0));
    assert_eq!(drawn, sampler.order(7, 0).collect::<Vec<_>>());
    assert_ne!(drawn, sampler.order(7, 1).collect::<Vec<_>>());
    for weights in [&[][..], &[0.0], &[1.0, -1.0], &[f64::NAN], &[f64::INFINITY]] {
        assert!(WeightedSampler::new(weights, 1).is_err(), "{weights:?}");
    }
}

#[test]
fn a_shuffled_subset_has_its_samples_once_each() {
    let samples = vec![5, 1, 8, 3];
    let sampler = SubsetSampler {
        samples: samples.clone(),
        shuffle: true,
    };
    let orders: Vec<Vec<usize>> = (0..8).map(|epoch| sampler.order(1, epoch).collect()).collect();
    assert!(orders.iter().any(|order| *order != orders[0]));
    for mut order in orders {
        order.sort_unstable();
        assert_eq!(order, [1, 3, 5, 8]);
    }
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
