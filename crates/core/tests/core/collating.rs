//! Batches out of samples.

use super::accelerator;
use candle_core::{DType, Device, Tensor};
use sconce_collectives::single;
use sconce_core::data::{Collate, DataError, IndexedSamples, SampleIterator};
use sconce_core::{DataLoader, Dataset as _, IterableDataset};
use std::collections::BTreeMap;

fn collate<T: Collate>(samples: Vec<T>) -> T::Batch {
    T::collate(samples, &Device::Cpu).unwrap()
}

fn refusal<T: Collate<Batch: std::fmt::Debug>>(samples: Vec<T>) -> String {
    T::collate(samples, &Device::Cpu).unwrap_err().to_string()
}

#[test]
fn samples_of_one_form_are_stacked_part_by_part() {
    let rows = collate(vec![
        Tensor::new(&[1u32, 2], &Device::Cpu).unwrap(),
        Tensor::new(&[3u32, 4], &Device::Cpu).unwrap(),
    ]);
    assert_eq!(rows.to_vec2::<u32>().unwrap(), [[1, 2], [3, 4]]);
    assert_eq!(collate(vec![1.5f32, 2.5]).to_vec1::<f32>().unwrap(), [1.5, 2.5]);
    assert_eq!(collate(vec![true, false]).to_vec1::<u8>().unwrap(), [1, 0]);
    assert_eq!(
        collate(vec![vec![1i64, 2], vec![3, 4]]).to_vec2::<i64>().unwrap(),
        [[1, 2], [3, 4]]
    );
    let (numbers, texts, flags) = collate(vec![(7u32, "a".to_owned(), true), (8, "b".to_owned(), false)]);
    assert_eq!(
        (numbers.to_vec1::<u32>().unwrap(), texts),
        (vec![7, 8], vec!["a".to_owned(), "b".to_owned()])
    );
    assert_eq!(flags.dims(), [2]);
    let of = |number: f64| BTreeMap::from([("x".to_owned(), vec![number; 3]), ("y".to_owned(), vec![-number])]);
    let map = collate(vec![of(1.0), of(2.0)]);
    assert_eq!(
        (map["x"].dims(), map["y"].to_vec2::<f64>().unwrap()),
        (&[2, 3][..], vec![vec![-1.0], vec![-2.0]])
    );
    let of = |number: u32| {
        vec![
            Tensor::new(number, &Device::Cpu).unwrap(),
            Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap(),
        ]
    };
    let list = collate(vec![of(1), of(2), of(3)]);
    assert_eq!(
        (list[0].to_vec1::<u32>().unwrap(), list[1].dims()),
        (vec![1, 2, 3], &[3, 2][..])
    );
}

#[test]
fn ragged_samples_are_refused_by_number_and_shape() {
    let zeros = |count: usize| Tensor::zeros(count, DType::F32, &Device::Cpu).unwrap();
    let text = refusal(vec![zeros(3), zeros(3), zeros(4)]);
    assert!(
        text.contains("sample 2") && text.contains("f32 [4]") && text.contains("f32 [3]"),
        "{text}"
    );
    let text = refusal(vec![(0u32, vec![1i64]), (0, vec![1, 2])]);
    assert!(
        text.contains("field 1") && text.contains("sample 1") && text.contains("length 2"),
        "{text}"
    );
    let text = refusal(vec![vec![zeros(1)], vec![]]);
    assert!(text.contains("sample 1") && text.contains("0 tensors"), "{text}");
    let text = refusal(vec![
        BTreeMap::from([("a".to_owned(), 1u32)]),
        BTreeMap::from([("b".to_owned(), 1)]),
    ]);
    assert!(text.contains("sample 1") && text.contains("\"b\""), "{text}");
    let text = refusal(Vec::<Tensor>::new());
    assert!(text.contains("no samples"), "{text}");
}

#[test]
fn samples_in_memory_and_samples_made_by_number_are_data_sets() {
    let acc = accelerator(single());
    let pairs: Vec<(f32, i64)> = (0..5).map(|number| (number as f32 / 2.0, number)).collect();
    let mut loader = acc.prepare_loader(DataLoader::new(pairs.clone(), 2)).unwrap();
    let made = IndexedSamples::new(5, move |number| Ok::<_, DataError>(pairs[number]));
    let mut of_made = acc.prepare_loader(DataLoader::new(made, 2)).unwrap();
    let mut numbers = Vec::new();
    for (batch, other) in (&mut loader).into_iter().zip(&mut of_made) {
        let ((x, y), (other_x, other_y)) = (batch.unwrap(), other.unwrap());
        assert_eq!(x.to_vec1::<f32>().unwrap(), other_x.to_vec1::<f32>().unwrap());
        assert_eq!(y.to_vec1::<i64>().unwrap(), other_y.to_vec1::<i64>().unwrap());
        numbers.extend(y.to_vec1::<i64>().unwrap());
    }
    assert_eq!(numbers, [0, 1, 2, 3, 4]);
    let failing = IndexedSamples::new(3, |number| match number {
        1 => Err("unreadable".into()),
        _ => Ok(number as f32),
    });
    let text = failing.batch(&[0, 1], &Device::Cpu).unwrap_err().to_string();
    assert_eq!(text, "sample 1: unreadable");
}

/// A stream of pairs.
struct Pairs;

impl IterableDataset for Pairs {
    type Sample = (f32, Vec<u32>);

    fn samples(&self, epoch: u64) -> Result<SampleIterator<Self::Sample>, DataError> {
        Ok(Box::new(
            (0..3).map(move |number| Ok((number as f32, vec![epoch as u32; 2]))),
        ))
    }

    fn length(&self) -> Option<usize> {
        Some(3)
    }
}

#[test]
fn a_streams_samples_are_collated_and_it_is_told_the_epoch() {
    let acc = accelerator(single());
    let mut loader = acc.prepare_loader(DataLoader::stream(Pairs, 2)).unwrap();
    assert_eq!(loader.batches(), Some(2));
    for epoch in 0..2 {
        let batches: Vec<_> = (&mut loader).into_iter().map(Result::unwrap).collect();
        assert_eq!(batches[0].0.to_vec1::<f32>().unwrap(), [0.0, 1.0]);
        assert_eq!(batches[1].1.to_vec2::<u32>().unwrap(), [[epoch, epoch]]);
    }
}
