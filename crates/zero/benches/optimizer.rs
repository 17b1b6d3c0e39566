//! Time of an optimizer step over flat memory, beside a loop that only moves the same bytes.
//!
//! Prints JSON lines. An AdamW step reads parameter, gradient and two moments and writes all but the gradient: 28 bytes
//! per f32 parameter, and no processor can be faster than those. `streams` is a loop that reads and writes the same and
//! computes nothing. Both walk the same arrays in the same pieces, as the engine does, and are sampled in turn; medians
//! are over rounds, and `of_streams` is the median of the ratio of the two times of one round.

use rayon::prelude::*;
use sconce_zero::{AdamW, OptimizerRule, StateSlices, Update};
use std::hint::black_box;
use std::time::Instant;

/// Elements of one task, as in the engine.
const BLOCK: usize = 1 << 15;
/// Four streams read, three written, 4 bytes each.
const BYTES_PER_PARAMETER: usize = 28;

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
    let mut streams = Streams::new(millions * 1_000_000);
    for threads in threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads can be made")
            .install(|| bench(&mut streams, threads, rounds));
    }
}

fn usage(what: &str) -> ! {
    eprintln!("error: {what:?} was not expected; use --millions 100 --threads 1,2 --rounds 15");
    std::process::exit(2)
}

fn bench(streams: &mut Streams, threads: usize, rounds: usize) {
    let rule = AdamW::default();
    let (mut step, mut move_only) = (Vec::new(), Vec::new());
    // Round 0 warms up.
    for round in 0..=rounds as u64 {
        let update = Update {
            learning_rate: 1e-3,
            step: round + 1,
            gradient_scale: 0.5,
        };
        let mut sample_step = |streams: &mut Streams| {
            let seconds = streams.sample(|p, g, state| rule.update(&update, p, g, state));
            step.extend((round > 0).then_some(seconds));
        };
        let mut sample_moves = |streams: &mut Streams| {
            let (keep, take) = black_box((!0, 0));
            let seconds = streams.sample(|p, g, StateSlices([m, v, _])| move_streams(keep, take, p, g, m, v));
            move_only.extend((round > 0).then_some(seconds));
        };
        if round % 2 == 0 {
            sample_step(streams);
            sample_moves(streams);
        } else {
            sample_moves(streams);
            sample_step(streams);
        }
    }
    let ratios = step.iter().zip(&move_only).map(|(step, moves)| moves / step).collect();
    report(streams, threads, "streams", move_only, None);
    report(streams, threads, rule.name(), step, Some(median(ratios)));
}

fn report(streams: &Streams, threads: usize, loop_name: &str, seconds: Vec<f64>, of_streams: Option<f64>) {
    let parameters = streams.parameter.len();
    let seconds = median(seconds);
    let mut line = serde_json::json!({
        "loop": loop_name,
        "dtype": "f32",
        "parameters": parameters,
        "threads": threads,
        "ns_per_parameter": round(seconds * 1e9 / parameters as f64),
        "gb_per_s": round((parameters * BYTES_PER_PARAMETER) as f64 / seconds / 1e9),
    });
    if let Some(ratio) = of_streams {
        line["of_streams"] = round(ratio).into();
    }
    println!("{line}");
}

/// What a step reads and writes.
struct Streams {
    parameter: Vec<f32>,
    gradient: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Streams {
    fn new(size: usize) -> Self {
        let wave = |number: usize| (number as f32 * 0.37).sin();
        Self {
            parameter: (0..size).map(wave).collect(),
            gradient: (0..size).map(|number| 0.01 * wave(number + 1)).collect(),
            // Written once, so that no page is new when time counts, and not denormal.
            first: vec![1e-3; size],
            second: vec![1e-6; size],
        }
    }

    /// Returns the seconds that `work` takes on all pieces; a piece is parameter, gradient and moments.
    fn sample(&mut self, work: impl Fn(&mut [f32], &[f32], StateSlices<'_>) + Sync) -> f64 {
        let start = Instant::now();
        let moments = self.first.chunks_mut(BLOCK).zip(self.second.chunks_mut(BLOCK));
        let parameters = self.parameter.chunks_mut(BLOCK).zip(self.gradient.chunks(BLOCK));
        let pieces: Vec<_> = parameters
            .zip(moments)
            .map(|((p, g), (m, v))| (p, g, StateSlices([m, v, &mut []])))
            .collect();
        pieces.into_par_iter().for_each(|(p, g, state)| work(p, g, state));
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

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
