//! Latency and bandwidth of collectives over shared memory, beside memcpy in the same run.
//!
//! Prints JSON lines. `algorithm_gb_per_s` is S / t with S the bytes of the full buffer per rank (for reduce-scatter and
//! all-gather the total), `bus_gb_per_s` multiplies it by nccl-tests' factor: all-reduce 2 (n - 1) / n, reduce-scatter,
//! all-gather and all-to-all (n - 1) / n, others 1. Every case is sampled once per round, cases taking turns, and
//! medians are over rounds; `of_memcpy` is the median of the ratio to one core's memcpy of the same round.

use sconce_collectives::measure::{Buffers, Case, Operation, median, repetitions};
use sconce_collectives::{Communicator, ElementType, Options, shm};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const MIB: usize = 1 << 20;

/// What is measured in turn.
#[derive(Clone, Copy)]
enum Turn {
    Case(Case),
    /// The least that any barrier costs on this machine: every rank stores a number and reads the others'.
    BareBarrier,
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

fn turns(largest: usize) -> Vec<Turn> {
    use Operation::*;
    let case = |operation, element, bytes, shared| {
        Turn::Case(Case {
            operation,
            element,
            bytes,
            shared,
        })
    };
    let (u8, f32, bf16) = (ElementType::U8, ElementType::F32, ElementType::BF16);
    let mut turns = vec![
        case(MemcpyAlone, u8, largest, false),
        case(MemcpyTogether, u8, largest, false),
        Turn::BareBarrier,
        case(Barrier, u8, 0, false),
    ];
    for bytes in [4, 64, 256, 1 << 10, 4 << 10] {
        turns.push(case(AllReduce, f32, bytes, false));
    }
    for bytes in [64 << 10, MIB, 16 * MIB, largest]
        .into_iter()
        .filter(|bytes| *bytes <= largest)
    {
        turns.push(case(AllReduce, f32, bytes, true));
        turns.push(case(AllReduce, f32, bytes, false));
    }
    for shared in [true, false] {
        turns.push(case(AllReduce, bf16, largest, shared));
        for operation in [ReduceScatter, AllGather, Broadcast] {
            turns.push(case(operation, f32, largest, shared));
        }
    }
    turns.push(case(ReduceScatter, bf16, largest, true));
    turns.push(case(AllToAll, f32, largest, false));
    turns
}

fn bench(ranks: usize, rounds: usize, largest: usize) {
    let turns = turns(largest);
    let samples: Mutex<Vec<Vec<f64>>> = Mutex::new(vec![Vec::new(); turns.len()]);
    let groups = shm::threads(ranks, &Options::default()).expect("threads can be made");
    std::thread::scope(|scope| {
        for group in &groups {
            let (turns, samples) = (&turns, &samples);
            scope.spawn(move || {
                LINES[group.rank()].0.store(0, Ordering::SeqCst);
                let mut buffers = Buffers::new(&**group, largest).expect("the segment fits memory");
                let mut barriers = 0;
                // Round 0 warms up.
                for round in 0..=rounds {
                    for (number, turn) in turns.iter().enumerate() {
                        let seconds = match turn {
                            Turn::BareBarrier => bare_barriers(&**group, &mut barriers),
                            Turn::Case(case) => {
                                let repeat = repetitions(case.bytes);
                                buffers.sample(&**group, case, repeat).expect("the operation succeeds")
                            }
                        };
                        if round > 0 && group.rank() == 0 {
                            samples.lock().expect("no rank panics")[number].push(seconds);
                        }
                    }
                }
            });
        }
    });
    let samples = samples.into_inner().expect("no rank panicked");
    for (turn, own) in turns.iter().zip(&samples) {
        report(turn, ranks, own, &samples[0], largest);
    }
}

/// One counter per rank, on a cache line of its own.
static LINES: [Line; 64] = [const { Line(AtomicUsize::new(0)) }; 64];

#[repr(align(128))]
struct Line(AtomicUsize);

/// Returns the seconds of one bare barrier; `passed` counts those there were.
fn bare_barriers(group: &dyn Communicator, passed: &mut usize) -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (size, repeat) = (group.size(), repetitions(0));
    group.barrier().expect("barrier");
    let start = Instant::now();
    for _ in 0..repeat {
        *passed += 1;
        LINES[group.rank()].0.store(*passed, Ordering::Release);
        for line in &LINES[..size] {
            while line.0.load(Ordering::Acquire) < *passed {
                if size <= cores {
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64() / f64::from(repeat);
    group.barrier().expect("barrier");
    seconds
}

fn report(turn: &Turn, ranks: usize, samples: &[f64], memcpy: &[f64], largest: usize) {
    let (name, factor, case) = match turn {
        Turn::BareBarrier => ("bare barrier", 0.0, None),
        Turn::Case(case) => (case.operation.name(), case.operation.bus_factor(ranks), Some(case)),
    };
    let bytes = case.map_or(0, |case| case.bytes);
    let seconds = median(samples.to_vec());
    let algorithm = bytes as f64 / seconds / 1e9;
    let ratios = samples.iter().zip(memcpy).map(|(own, memcpy)| memcpy / own).collect();
    let is_shared = case.is_some_and(|case| case.shared);
    let memory = if is_shared { "segment" } else { "private" };
    let dtype = case.map_or("u8", |case| case.element.name());
    let mut line = serde_json::json!({
        "operation": name,
        "dtype": dtype,
        "bytes": bytes,
        "ranks": ranks,
        "memory": memory,
        "latency_us": round(seconds * 1e6),
    });
    if bytes > 0 {
        line["algorithm_gb_per_s"] = round(algorithm).into();
        line["bus_gb_per_s"] = round(algorithm * factor).into();
    }
    if bytes == largest {
        line["of_memcpy"] = round(median(ratios)).into();
    }
    println!("{line}");
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
