//! Latency and bandwidth of collectives over shared memory, beside memcpy in the same run.
//!
//! Prints JSON lines. `algorithm_gb_per_s` is S / t with S the bytes of the full buffer per rank (for reduce-scatter and
//! all-gather the total), `bus_gb_per_s` multiplies it by nccl-tests' factor: all-reduce 2 (n - 1) / n, reduce-scatter,
//! all-gather and all-to-all (n - 1) / n, others 1. Every case is sampled once per round, cases taking turns, and
//! medians are over rounds; `of_memcpy` is the median of the ratio to one core's memcpy of the same round.

use half::bf16;
use sconce_collectives::{Buffer, Communicator, Counts, Element, Options, ReduceOp, shm};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const MIB: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq)]
enum Operation {
    /// One rank copies; the others wait.
    MemcpyAlone,
    /// All ranks copy at once.
    MemcpyTogether,
    /// The least that any barrier costs on this machine: every rank stores a number and reads the others'.
    BareBarrier,
    Barrier,
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
}

#[derive(Clone, Copy)]
struct Case {
    operation: Operation,
    dtype: &'static str,
    bytes: usize,
    /// The buffer lies in the segment (true) or in private memory.
    shared: bool,
}

fn main() {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let mut ranks = vec![2, 4];
    let (mut rounds, mut largest) = (15, 64 * MIB);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let value = rest.next().unwrap_or_else(|| usage(argument));
        let number = |text: &str| text.parse::<usize>().unwrap_or_else(|_| usage(text));
        match argument.as_str() {
            "--ranks" => ranks = value.split(',').map(number).collect(),
            "--rounds" => rounds = number(value).max(1),
            "--largest_mib" => largest = number(value).max(1) * MIB,
            _ => usage(argument),
        }
    }
    ranks.into_iter().for_each(|ranks| bench(ranks, rounds, largest));
}

fn usage(what: &str) -> ! {
    eprintln!("error: {what:?} was not expected; use --ranks 2,4 --rounds 15 --largest_mib 64");
    std::process::exit(2)
}

fn cases(largest: usize) -> Vec<Case> {
    use Operation::*;
    let case = |operation, dtype, bytes, shared| Case {
        operation,
        dtype,
        bytes,
        shared,
    };
    let mut cases = vec![
        case(MemcpyAlone, "u8", largest, false),
        case(MemcpyTogether, "u8", largest, false),
        case(BareBarrier, "u8", 0, false),
        case(Barrier, "u8", 0, false),
    ];
    for bytes in [4, 64, 256, 1 << 10, 4 << 10] {
        cases.push(case(AllReduce, "f32", bytes, false));
    }
    for bytes in [64 << 10, MIB, 16 * MIB, largest]
        .into_iter()
        .filter(|bytes| *bytes <= largest)
    {
        cases.push(case(AllReduce, "f32", bytes, true));
        cases.push(case(AllReduce, "f32", bytes, false));
    }
    for shared in [true, false] {
        cases.push(case(AllReduce, "bf16", largest, shared));
        for operation in [ReduceScatter, AllGather, Broadcast] {
            cases.push(case(operation, "f32", largest, shared));
        }
    }
    cases.push(case(ReduceScatter, "bf16", largest, true));
    cases.push(case(AllToAll, "f32", largest, false));
    cases
}

fn bench(ranks: usize, rounds: usize, largest: usize) {
    let cases = cases(largest);
    let samples: Mutex<Vec<Vec<f64>>> = Mutex::new(vec![Vec::new(); cases.len()]);
    let groups = shm::threads(ranks, &Options::default()).expect("threads can be made");
    std::thread::scope(|scope| {
        for group in &groups {
            let (cases, samples) = (&cases, &samples);
            scope.spawn(move || {
                let mut memory = Memory::new(&**group, largest);
                // Round 0 warms up.
                for round in 0..=rounds {
                    for (number, case) in cases.iter().enumerate() {
                        let seconds = memory.sample(&**group, case);
                        if round > 0 && group.rank() == 0 {
                            samples.lock().expect("no rank panics")[number].push(seconds);
                        }
                    }
                }
            });
        }
    });
    let samples = samples.into_inner().expect("no rank panicked");
    for (case, own) in cases.iter().zip(&samples) {
        report(case, ranks, own, &samples[0], largest);
    }
}

/// One rank's buffers: touched once, used by all cases.
struct Memory {
    shared: Buffer,
    private: Buffer,
    second: Buffer,
    bare_barriers: usize,
    cores: usize,
}

/// One counter per rank, on a cache line of its own.
static LINES: [Line; 64] = [const { Line(AtomicUsize::new(0)) }; 64];

#[repr(align(128))]
struct Line(AtomicUsize);

impl Memory {
    fn new(group: &dyn Communicator, bytes: usize) -> Self {
        let mut memory = Self {
            shared: group.allocate(bytes).expect("the segment fits memory"),
            private: Buffer::on_heap(bytes),
            second: Buffer::on_heap(bytes),
            bare_barriers: 0,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        };
        LINES[group.rank()].0.store(0, Ordering::SeqCst);
        group.barrier().expect("barrier");
        for buffer in [&mut memory.shared, &mut memory.private, &mut memory.second] {
            buffer.as_mut_slice::<u8>().fill(0);
        }
        memory
    }

    /// Returns the seconds of one operation, the mean over a batch of them.
    fn sample(&mut self, group: &dyn Communicator, case: &Case) -> f64 {
        let repeat = match case.bytes {
            0..=4096 => 5000,
            4097..=1_048_576 => 100,
            _ => 1,
        };
        group.barrier().expect("barrier");
        let start = Instant::now();
        for _ in 0..repeat {
            match case.dtype {
                "bf16" => self.run::<bf16>(group, case),
                "u8" => self.run::<u8>(group, case),
                _ => self.run::<f32>(group, case),
            }
        }
        let seconds = start.elapsed().as_secs_f64() / f64::from(repeat);
        group.barrier().expect("barrier");
        seconds
    }

    fn run<T: Element>(&mut self, group: &dyn Communicator, case: &Case) {
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
            Operation::BareBarrier => {
                self.bare_barriers += 1;
                LINES[group.rank()].0.store(self.bare_barriers, Ordering::Release);
                for line in &LINES[..size] {
                    while line.0.load(Ordering::Acquire) < self.bare_barriers {
                        if size <= self.cores {
                            std::hint::spin_loop();
                        } else {
                            std::thread::yield_now();
                        }
                    }
                }
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
        .expect("the operation succeeds");
    }
}

fn report(case: &Case, ranks: usize, samples: &[f64], memcpy: &[f64], largest: usize) {
    let n = ranks as f64;
    let (name, factor) = match case.operation {
        Operation::MemcpyAlone => ("memcpy, one rank alone", 1.0),
        Operation::MemcpyTogether => ("memcpy, all ranks together", 1.0),
        Operation::BareBarrier => ("bare barrier", 0.0),
        Operation::Barrier => ("barrier", 0.0),
        Operation::AllReduce => ("all_reduce", 2.0 * (n - 1.0) / n),
        Operation::ReduceScatter => ("reduce_scatter", (n - 1.0) / n),
        Operation::AllGather => ("all_gather", (n - 1.0) / n),
        Operation::Broadcast => ("broadcast", 1.0),
        Operation::AllToAll => ("all_to_all", (n - 1.0) / n),
    };
    let seconds = median(samples.to_vec());
    let algorithm = case.bytes as f64 / seconds / 1e9;
    let ratios = samples.iter().zip(memcpy).map(|(own, memcpy)| memcpy / own).collect();
    let memory = if case.shared { "segment" } else { "private" };
    let mut line = serde_json::json!({
        "operation": name,
        "dtype": case.dtype,
        "bytes": case.bytes,
        "ranks": ranks,
        "memory": memory,
        "latency_us": round(seconds * 1e6),
    });
    if case.bytes > 0 {
        line["algorithm_gb_per_s"] = round(algorithm).into();
        line["bus_gb_per_s"] = round(algorithm * factor).into();
    }
    if case.bytes == largest {
        line["of_memcpy"] = round(median(ratios)).into();
    }
    println!("{line}");
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
