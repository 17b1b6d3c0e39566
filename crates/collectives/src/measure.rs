//! Times of collective operations, as `cargo xtask bench collectives` and `sconce bench` take them: one case after the other,
//! over the same buffers, so that cases of a round see the machine alike.

use crate::{Buffer, Communicator, Counts, Element, ElementType, ReduceOp, Result};
use half::bf16;
use std::time::Instant;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// One rank copies; the others wait.
    MemcpyAlone,
    /// All ranks copy at once.
    MemcpyTogether,
    /// Nothing but waiting for all.
    Barrier,
    /// The sum of all ranks' buffers, on all.
    AllReduce,
    /// Each rank its part of the sum.
    ReduceScatter,
    /// All ranks' parts, on all.
    AllGather,
    /// Rank 0's buffer, on all.
    Broadcast,
    /// From each rank a part for each.
    AllToAll,
}

impl Operation {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::MemcpyAlone => "memcpy, one rank alone",
            Self::MemcpyTogether => "memcpy, all ranks together",
            Self::Barrier => "barrier",
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
        }
    }

    /// Returns nccl-tests' factor from algorithm bandwidth to that of the bus.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let ranks = ranks as f64;
        match self {
            Self::Barrier => 0.0,
            Self::AllReduce => 2.0 * (ranks - 1.0) / ranks,
            Self::ReduceScatter | Self::AllGather | Self::AllToAll => (ranks - 1.0) / ranks,
            Self::MemcpyAlone | Self::MemcpyTogether | Self::Broadcast => 1.0,
        }
    }
}

/// One operation on a buffer of some size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The operation.
    pub operation: Operation,
    /// The type of elements: f32, bf16, or bytes for copies.
    pub element: ElementType,
    /// Bytes of the full buffer of each rank.
    pub bytes: usize,
    /// Whether the buffer is one of [`Communicator::allocate`]'s, rather than the program's own.
    pub shared: bool,
}

/// How often a sample repeats an operation on so many bytes, for times that a clock can tell.
pub fn repetitions(bytes: usize) -> u32 {
    match bytes {
        0..=4096 => 5000,
        4097..=1_048_576 => 100,
        _ => 1,
    }
}

/// One rank's buffers: touched once, used by all cases.
#[derive(Debug)]
pub struct Buffers {
    shared: Buffer,
    private: Buffer,
    second: Buffer,
}

impl Buffers {
    /// Makes buffers for cases of up to `bytes`; called by all ranks.
    ///
    /// # Errors
    /// When there is no memory for them, or the group fails.
    pub fn new(group: &dyn Communicator, bytes: usize) -> Result<Self> {
        let mut buffers = Self {
            shared: group.allocate(bytes)?,
            private: Buffer::on_heap(bytes),
            second: Buffer::on_heap(bytes),
        };
        group.barrier()?;
        for buffer in [&mut buffers.shared, &mut buffers.private, &mut buffers.second] {
            buffer.as_mut_slice::<u8>().fill(0);
        }
        Ok(buffers)
    }

    /// Returns the seconds of one operation, the mean over `repeat` of them; called by all ranks.
    ///
    /// # Errors
    /// When the group fails.
    pub fn sample(&mut self, group: &dyn Communicator, case: &Case, repeat: u32) -> Result<f64> {
        group.barrier()?;
        let start = Instant::now();
        for _ in 0..repeat {
            match case.element {
                ElementType::BF16 => self.run::<bf16>(group, case)?,
                ElementType::U8 => self.run::<u8>(group, case)?,
                _ => self.run::<f32>(group, case)?,
            }
        }
        let seconds = start.elapsed().as_secs_f64() / f64::from(repeat);
        group.barrier()?;
        Ok(seconds)
    }

    fn run<T: Element>(&mut self, group: &dyn Communicator, case: &Case) -> Result<()> {
        let count = case.bytes / T::TYPE.size();
        let size = group.size();
        let even = count / size * size;
        let buffer = if case.shared {
            &mut self.shared
        } else {
            &mut self.private
        };
        let whole = &mut buffer.as_mut_slice::<T>()[..count];
        let second = &mut self.second.as_mut_slice::<T>()[..count];
        match case.operation {
            Operation::MemcpyAlone if group.rank() != 0 => Ok(()),
            Operation::MemcpyAlone | Operation::MemcpyTogether => {
                second.copy_from_slice(whole);
                std::hint::black_box(&second);
                Ok(())
            }
            Operation::Barrier => group.barrier(),
            Operation::AllReduce => group.all_reduce(whole, ReduceOp::Sum),
            Operation::ReduceScatter if case.shared => {
                group.reduce_scatter_in_place(&mut whole[..even], Counts::Equal(even / size), ReduceOp::Sum)
            }
            Operation::ReduceScatter => group.reduce_scatter(&whole[..even], &mut second[..even / size], ReduceOp::Sum),
            Operation::AllGather => group.all_gather_in_place(&mut whole[..even], Counts::Equal(even / size)),
            Operation::Broadcast => group.broadcast(whole, 0),
            Operation::AllToAll => group.all_to_all(&whole[..even], &mut second[..even]),
        }
    }
}

/// Returns the middle of some values, the upper of two; 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
