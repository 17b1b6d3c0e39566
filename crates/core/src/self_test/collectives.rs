//! Collective operations against closed forms.

use super::{Checked, SelfTest, expect};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use sconce_collectives::{Element, ReduceOp};

/// Elements of each buffer: around what travels in one message, and large ones.
const COUNTS: [usize; 4] = [1, 17, 4_096, 262_144];

/// Sums of these numbers are whole, and small enough for every type.
fn value(rank: usize, place: usize) -> u8 {
    ((rank + place) % 5) as u8
}

fn reduced<T: Element + PartialEq + std::fmt::Debug>(
    test: &SelfTest<'_>,
    of: fn(u8) -> T,
) -> Result<(), super::CheckError> {
    for count in COUNTS {
        for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
            let mut buffer = Vec::from_iter((0..count).map(|place| of(value(test.rank(), place))));
            test.acc.communicator().all_reduce(&mut buffer, op)?;
            let expected = (0..count).map(|place| {
                let values = (0..test.ranks()).map(|rank| value(rank, place));
                of(match op {
                    ReduceOp::Min => values.min().unwrap_or(0),
                    ReduceOp::Max => values.max().unwrap_or(0),
                    // 64 ranks come to 256 at most.
                    _ => values.sum::<u8>(),
                })
            });
            let expected = Vec::from_iter(expected);
            if let Some(place) = (0..count).find(|place| buffer[*place] != expected[*place]) {
                return Err(format!(
                    "{op:?} of {count} elements: element {place} is {:?}, expected {:?}",
                    buffer[place], expected[place]
                )
                .into());
            }
        }
    }
    Ok(())
}

pub(super) fn all_reduce(test: &SelfTest<'_>) -> Checked {
    if test.ranks() <= 32 {
        // Whole numbers up to 256 are exact in bf16.
        reduced(test, |value| bf16::from_f32(f32::from(value)))?;
        reduced(test, |value| f16::from_f32(f32::from(value)))?;
        reduced(test, f32::from)?;
        reduced(test, f64::from)?;
        reduced(test, i64::from)?;
    }
    let rank = Tensor::new(test.rank() as f32, &Device::Cpu)?.to_device(test.acc.device())?;
    let mean = test.acc.reduce(&rank, ReduceOp::Mean)?.to_device(&Device::Cpu)?;
    let mean = mean.to_scalar::<f32>()?;
    expect(
        "the mean of the ranks' numbers",
        &mean,
        &((test.ranks() - 1) as f32 / 2.0),
    )?;
    Ok(format!("{COUNTS:?} elements"))
}

pub(super) fn roots(test: &SelfTest<'_>) -> Checked {
    let (rank, ranks) = (test.rank(), test.ranks());
    let group = test.acc.communicator();
    for root in 0..ranks {
        let mut buffer = vec![rank as f32; 1000];
        group.broadcast(&mut buffer, root)?;
        expect("a broadcast", &buffer, &vec![root as f32; 1000])?;
        let mut buffer = vec![(rank + 1) as i64; 1000];
        group.reduce(&mut buffer, ReduceOp::Sum, root)?;
        if rank == root {
            expect(
                "a sum at its root",
                &buffer,
                &vec![(ranks * (ranks + 1) / 2) as i64; 1000],
            )?;
        }
    }
    Ok(format!("{ranks} roots"))
}

pub(super) fn parts(test: &SelfTest<'_>) -> Checked {
    const PART: usize = 1000;
    let (rank, ranks) = (test.rank(), test.ranks());
    let group = test.acc.communicator();
    let input = Vec::from_iter((0..ranks * PART).map(|place| (place + rank) as f32));
    let mut own = vec![0f32; PART];
    group.reduce_scatter(&input, &mut own, ReduceOp::Sum)?;
    let others = (ranks * (ranks - 1) / 2) as f32;
    let sum = |place: usize| (place * ranks) as f32 + others;
    expect(
        "a part of a sum",
        &own,
        &Vec::from_iter((rank * PART..(rank + 1) * PART).map(sum)),
    )?;
    let mut all = vec![0f32; ranks * PART];
    group.all_gather(&own, &mut all)?;
    expect("gathered parts", &all, &Vec::from_iter((0..ranks * PART).map(sum)))?;
    let own = Tensor::full(rank as f32, (2, 3), &Device::Cpu)?.to_device(test.acc.device())?;
    let rows = test.acc.gather(&own)?.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
    let expected = Vec::from_iter((0..2 * ranks).map(|row| vec![(row / 2) as f32; 3]));
    expect("gathered tensors", &rows, &expected)?;
    Ok(format!("{ranks} parts of {PART} elements"))
}

pub(super) fn point_to_point(test: &SelfTest<'_>) -> Checked {
    let (rank, ranks) = (test.rank(), test.ranks());
    let group = test.acc.communicator();
    let input = Vec::from_iter((0..ranks).map(|to| (100 * rank + to) as i64));
    let mut output = vec![0i64; ranks];
    group.all_to_all(&input, &mut output)?;
    let expected = Vec::from_iter((0..ranks).map(|from| (100 * from + rank) as i64));
    expect("all-to-all", &output, &expected)?;
    if ranks > 1 {
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let mut got = vec![0f32; 5000];
        group.send_receive(&vec![rank as f32; 5000], next, &mut got, before)?;
        expect("what the rank before sends", &got, &vec![before as f32; 5000])?;
    }
    group.barrier()?;
    Ok(format!("around {ranks} ranks"))
}
