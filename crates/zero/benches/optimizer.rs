//! Time of an optimizer step over flat memory, beside a loop that only moves the same bytes.
//!
//! Prints JSON lines. An AdamW step reads parameter, gradient and two moments and writes all but the gradient; no
//! processor can be faster than those bytes. `streams` is a loop that reads and writes what the f32 step does and
//! computes nothing. The steps are those of f32 values, of bf16 values and gradients, and of f32 masters with a bf16
//! copy and bf16 gradients; moments are f32 in all. All walk arrays of the same length in the same pieces, as the engine
//! does, and are sampled in turn; medians are over rounds, and `of_streams` and `of_f32` are medians of the ratios of two
//! times of one round: above 1 is faster than that loop.

use half::bf16;
use rayon::prelude::*;
use sconce_collectives::measure::median;
use sconce_zero::{AdamW, Gradient, HalfMut, OptimizerRule, StateSlices, Update, Values};
use std::hint::black_box;
use std::time::Instant;

/// Elements of one task, as in the engine.
const BLOCK: usize = 1 << 15;

/// What is sampled.
#[derive(Clone, Copy)]
enum Loop {
    Streams,
    F32,
    Bf16,
    MastersAndCopy,
}

/// In the order of the lines printed.
const LOOPS: [Loop; 4] = [Loop::Streams, Loop::F32, Loop::Bf16, Loop::MastersAndCopy];

impl Loop {
    fn dtype(self) -> &'static str {
        match self {
            Self::Streams | Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::MastersAndCopy => "f32+bf16",
        }
    }

    /// Bytes per parameter that are read or written.
    fn bytes(self) -> usize {
        let moments = 16;
        match self {
            // Value read and written, gradient.
            Self::Streams | Self::F32 => moments + 8 + 4,
            Self::Bf16 => moments + 4 + 2,
            // Master read and written, copy written, gradient.
            Self::MastersAndCopy => moments + 8 + 2 + 2,
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let mut threads = vec![1, 2];
    let (mut millions, mut rounds) = (100, 15);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let value = rest.next().unwrap_or_else(|| usage(argument));
        let number = |text: &str| text.parse::<usize>().unwrap_or_else(|_| usage(text)).max(1);
        match argument.as_str() {
            "--threads" => threads = value.split(',').map(number).collect(),
            "--rounds" => rounds = number(value),
            "--millions" => millions = number(value),
            _ => usage(argument),
        }
    }
    let mut arrays = Arrays::new(millions * 1_000_000);
    for threads in threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads can be made")
            .install(|| bench(&mut arrays, threads, rounds));
    }
}

fn usage(what: &str) -> ! {
    eprintln!("error: {what:?} was not expected; use --millions 100 --threads 1,2 --rounds 15");
    std::process::exit(2)
}

fn bench(arrays: &mut Arrays, threads: usize, rounds: usize) {
    let rule = AdamW::default();
    let mut seconds = LOOPS.map(|_| Vec::new());
    // Round 0 warms up.
    for round in 0..=rounds {
        let update = Update {
            learning_rate: 1e-3,
            step: round as u64 + 1,
            gradient_scale: 0.5,
        };
        // Every loop comes as often before each other one as after it.
        let mut order: Vec<usize> = (0..LOOPS.len()).collect();
        order.rotate_left(round / 2 % LOOPS.len());
        if round % 2 == 1 {
            order.reverse();
        }
        for number in order {
            let sample = arrays.sample(LOOPS[number], &rule, &update);
            seconds[number].extend((round > 0).then_some(sample));
        }
    }
    let ratio = |of: usize, number: usize| {
        let pairs = seconds[of].iter().zip(&seconds[number]);
        median(pairs.map(|(of, one)| of / one).collect())
    };
    for (number, kind) in LOOPS.into_iter().enumerate() {
        let seconds = median(seconds[number].clone());
        let parameters = arrays.parameter.len();
        let mut line = serde_json::json!({
            "loop": if number == 0 { "streams" } else { rule.name() },
            "dtype": kind.dtype(),
            "parameters": parameters,
            "threads": threads,
            "bytes_per_parameter": kind.bytes(),
            "ns_per_parameter": round(seconds * 1e9 / parameters as f64),
            "gb_per_s": round((parameters * kind.bytes()) as f64 / seconds / 1e9),
        });
        match kind {
            Loop::Streams => {}
            Loop::F32 => line["of_streams"] = round(ratio(0, number)).into(),
            Loop::Bf16 | Loop::MastersAndCopy => line["of_f32"] = round(ratio(1, number)).into(),
        }
        println!("{line}");
    }
}

/// What the steps read and write; the moments are those of all of them.
struct Arrays {
    parameter: Vec<f32>,
    gradient: Vec<f32>,
    half_parameter: Vec<bf16>,
    half_gradient: Vec<bf16>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Arrays {
    fn new(size: usize) -> Self {
        let wave = |number: usize| (number as f32 * 0.37).sin();
        let gradient = |number: usize| 0.01 * wave(number + 1);
        Self {
            parameter: (0..size).map(wave).collect(),
            gradient: (0..size).map(gradient).collect(),
            half_parameter: (0..size).map(|number| bf16::from_f32(wave(number))).collect(),
            half_gradient: (0..size).map(|number| bf16::from_f32(gradient(number))).collect(),
            // Written once, so that no page is new when time counts, and not denormal.
            first: vec![1e-3; size],
            second: vec![1e-6; size],
        }
    }

    /// Returns the seconds that a loop takes on all pieces.
    fn sample(&mut self, kind: Loop, rule: &dyn OptimizerRule, update: &Update) -> f64 {
        let start = Instant::now();
        let values = match kind {
            Loop::Streams | Loop::F32 => Values::F32(&mut self.parameter),
            Loop::Bf16 => Values::Half(HalfMut::Bf16(&mut self.half_parameter)),
            Loop::MastersAndCopy => Values::Masters {
                masters: &mut self.parameter,
                copy: HalfMut::Bf16(&mut self.half_parameter),
            },
        };
        let gradient = match kind {
            Loop::Streams | Loop::F32 => Gradient::F32(&self.gradient),
            Loop::Bf16 | Loop::MastersAndCopy => Gradient::Bf16(&self.half_gradient),
        };
        let state = StateSlices([&mut self.first, &mut self.second, &mut []]);
        let pieces = values
            .chunks(BLOCK)
            .zip(gradient.chunks(BLOCK))
            .zip(state.chunks(BLOCK));
        let pieces: Vec<_> = pieces.collect();
        let (keep, take) = black_box((!0, 0));
        pieces
            .into_par_iter()
            .for_each(|((values, gradient), state)| match (kind, values, gradient) {
                (Loop::Streams, Values::F32(parameter), Gradient::F32(gradient)) => {
                    let [first, second, _] = state.0;
                    move_streams(keep, take, parameter, gradient, first, second);
                }
                (_, values, gradient) => rule.update_values(update, values, gradient, state),
            });
        start.elapsed().as_secs_f64()
    }
}

/// Reads four streams and writes three. With all bits in `keep` and none in `take`, which the compiler does not know,
/// nothing changes; one instruction per stream and vector.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
fn move_streams(keep: u32, take: u32, parameter: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32]) {
    let mixed = |old: f32, new: f32| f32::from_bits((old.to_bits() & keep) | (new.to_bits() & take));
    let moments = first.iter_mut().zip(second);
    for ((p, g), (m, v)) in parameter.iter_mut().zip(gradient).zip(moments) {
        *p = mixed(*p, *g);
        *m = mixed(*m, *g);
        *v = mixed(*v, *g);
    }
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
