//! Data loaders: which rank sees which samples.

use super::{CheckError, Checked, SelfTest, expect};
use crate::{Accelerator, AcceleratorBuilder, DataLoader, PreparedLoader, TensorDataset};
use candle_core::{Device, Tensor};

const BATCH: usize = 8;

/// Samples that are their numbers.
fn numbers(samples: usize) -> Result<TensorDataset, CheckError> {
    let numbers = Tensor::arange(0u32, samples as u32, &Device::Cpu)?;
    Ok(TensorDataset::new(vec![numbers])?)
}

/// Returns all ranks' samples of an epoch, step by step.
fn epoch(acc: &dyn Accelerator, loader: &mut PreparedLoader<TensorDataset>) -> Result<Vec<u32>, CheckError> {
    let mut seen = Vec::new();
    for batch in loader {
        let gathered = acc.gather_for_metrics(&batch?[0])?;
        seen.extend(gathered.to_device(&Device::Cpu)?.to_vec1::<u32>()?);
    }
    Ok(seen)
}

fn sorted(mut numbers: Vec<u32>) -> Vec<u32> {
    numbers.sort_unstable();
    numbers
}

pub(super) fn union(test: &SelfTest<'_>) -> Checked {
    let samples = 4 * BATCH * test.ranks();
    let all = Vec::from_iter(0..samples as u32);
    let mut kinds = 0;
    for shuffle in [false, true] {
        for split in [false, true] {
            for dispatch in [false, true] {
                let acc = test.new_accelerator(AcceleratorBuilder::default())?;
                let batch = if split { BATCH * test.ranks() } else { BATCH };
                let loader = DataLoader::new(numbers(samples)?, batch)
                    .shuffle(shuffle)
                    .split_batches(split);
                let mut loader = acc.prepare_loader(loader.dispatch_batches(dispatch))?;
                let seen = epoch(&*acc, &mut loader)?;
                let what = format!("samples, shuffle {shuffle}, split {split}, dispatch {dispatch}");
                expect(&format!("{what}: in order"), &(seen == all), &!shuffle)?;
                expect(&what, &sorted(seen), &all)?;
                kinds += 1;
            }
        }
    }
    Ok(format!("{samples} samples, {kinds} kinds of loader"))
}

pub(super) fn seeds(test: &SelfTest<'_>) -> Checked {
    let samples = 32 * test.ranks();
    let order = |seed: u64, number: u64| -> Result<Vec<u32>, CheckError> {
        let acc = test.new_accelerator(AcceleratorBuilder::default().seed(seed))?;
        let mut loader = acc.prepare_loader(DataLoader::new(numbers(samples)?, BATCH).shuffle(true))?;
        loader.set_epoch(number);
        epoch(&*acc, &mut loader)
    };
    let first = order(1, 0)?;
    expect("the same epoch again", &order(1, 0)?, &first)?;
    expect("the next epoch is another order", &(order(1, 1)? == first), &false)?;
    expect("another seed is another order", &(order(2, 0)? == first), &false)?;
    Ok(format!("{samples} samples, 2 seeds, 2 epochs"))
}

pub(super) fn metrics(test: &SelfTest<'_>) -> Checked {
    // The last batch is short on some rank, whatever their number.
    let samples = 2 * BATCH * test.ranks() + 3;
    let acc = test.new_accelerator(AcceleratorBuilder::default())?;
    let mut loader = acc.prepare_loader(DataLoader::new(numbers(samples)?, BATCH))?;
    let seen = epoch(&*acc, &mut loader)?;
    expect("samples", &sorted(seen), &Vec::from_iter(0..samples as u32))?;
    Ok(format!("{samples} samples of {samples}"))
}
