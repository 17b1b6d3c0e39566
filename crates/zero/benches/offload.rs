//! Time of an optimizer step whose state is on disk, beside the same reads and writes without a step.
//!
//! Prints JSON lines. The state is four times as large as the buffers. Three loops over it are sampled in turn:
//! `adamw` updates parameters through [`DiskState`]; `pipeline` has [`DiskState`] read and write the same groups and
//! computes nothing; `files` is two threads without anything between them, one that reads a file of that size in pieces
//! of that size and one that writes it. Medians are over rounds; `of_pipeline` and `of_files` are medians of the ratio
//! of the two throughputs of one round. Files are opened with `O_DIRECT`, or the page cache would be measured.

use rayon::prelude::*;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use sconce_collectives::measure::median;
use sconce_zero::{AdamW, DiskOptions, DiskState, OptimizerRule, StateSlices, Update};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

/// Elements of one task, as in the engine.
const BLOCK: usize = 1 << 15;
/// What places in files and in memory are multiples of.
const ALIGNMENT: usize = 4096;
/// AdamW's two moments.
const ARRAYS: usize = 2;
const BUFFERS: usize = 3;
/// State by buffers.
const TIMES: usize = 4;

fn main() {
    let mut rest = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut millions, mut rounds) = (8, 10);
    while let Some(argument) = rest.next() {
        let value = rest.next().unwrap_or_else(|| usage(&argument));
        let number = value.parse::<usize>().unwrap_or_else(|_| usage(&value)).max(1);
        match argument.as_str() {
            "--rounds" => rounds = number,
            "--millions" => millions = number,
            _ => usage(&argument),
        }
    }
    // A whole number of blocks, so that the file has no padding.
    let group = (millions * 1_000_000).next_multiple_of(ALIGNMENT);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder in the target folder");
    bench(folder.path(), group, rounds);
}

fn usage(what: &str) -> ! {
    eprintln!("error: {what:?} was not expected; use --millions 8 --rounds 10");
    std::process::exit(2)
}

fn bench(folder: &Path, group: usize, rounds: usize) {
    let groups = vec![group; BUFFERS * TIMES];
    let options = DiskOptions {
        folder: folder.into(),
        sub_group_elements: group,
    };
    let mut state = DiskState::create(&options, 0, &groups, &[0.0; ARRAYS]).expect("there is room for the state");
    if let Some(reason) = state.buffered_because() {
        eprintln!(
            "error: {}: {reason}; this would measure the page cache",
            folder.display()
        );
        std::process::exit(1);
    }
    let mut files = Files::new(folder, group * ARRAYS * size_of::<f32>(), groups.len());
    let mut model = Model::new(group * groups.len());
    let bytes = 2 * state.bytes_on_disk();
    eprintln!(
        "state {} MB in {} groups, buffers {} MB",
        state.bytes_on_disk() >> 20,
        groups.len(),
        state.bytes_in_memory() >> 20
    );
    let mut seconds = [const { Vec::new() }; 3];
    // Round 0 warms up.
    for round in 0..=rounds {
        for turn in 0..3 {
            let which = (round + turn) % 3;
            let start = Instant::now();
            match which {
                0 => model.step(&mut state, group, round as u64 + 1),
                1 => state.for_each_group(|_, _| Ok(())).expect("the disk works"),
                _ => files.move_all(),
            }
            seconds[which].extend((round > 0).then(|| start.elapsed().as_secs_f64()));
        }
    }
    let [step, pipeline, files] = &seconds;
    report("files", bytes, files, &[]);
    report("pipeline", bytes, pipeline, &[("of_files", files)]);
    let others = [("of_pipeline", pipeline), ("of_files", files)];
    report("adamw", bytes, step, &others);
}

fn report(loop_name: &str, bytes: u64, seconds: &[f64], others: &[(&str, &Vec<f64>)]) {
    let median_seconds = median(seconds.to_vec());
    let mut line = serde_json::json!({
        "loop": loop_name,
        "seconds": round(median_seconds),
        "gb_per_s": round(bytes as f64 / median_seconds / 1e9),
    });
    for (name, other) in others {
        let ratios = seconds.iter().zip(*other).map(|(own, other)| other / own).collect();
        line[name] = round(median(ratios)).into();
    }
    println!("{line}");
}

/// Parameters and gradients, which stay in memory.
struct Model {
    parameters: Vec<f32>,
    gradients: Vec<f32>,
}

impl Model {
    fn new(elements: usize) -> Self {
        let wave = |number: usize| (number as f32 * 0.37).sin();
        Self {
            parameters: (0..elements).into_par_iter().map(wave).collect(),
            gradients: (0..elements)
                .into_par_iter()
                .map(|number| 0.01 * wave(number + 1))
                .collect(),
        }
    }

    fn step(&mut self, state: &mut DiskState, group: usize, step: u64) {
        let rule = AdamW::default();
        let update = Update {
            learning_rate: 1e-3,
            step,
            gradient_scale: 0.5,
        };
        let outcome = state.for_each_group(|number, arrays| {
            let [first, second] = arrays else {
                unreachable!("two arrays were asked for")
            };
            let range = number * group..(number + 1) * group;
            let parameters = self.parameters[range.clone()].par_chunks_mut(BLOCK);
            let moments = first.par_chunks_mut(BLOCK).zip(second.par_chunks_mut(BLOCK));
            let pieces = parameters.zip(self.gradients[range].par_chunks(BLOCK)).zip(moments);
            pieces.for_each(|((p, g), (m, v))| rule.update(&update, p, g, StateSlices([m, v, &mut []])));
            Ok(())
        });
        outcome.expect("the disk works");
    }
}

/// Two files, one to read and one to write, and memory for a piece of each.
struct Files {
    from: File,
    to: File,
    memory: [Vec<u8>; 2],
    piece: usize,
    pieces: usize,
}

impl Files {
    fn new(folder: &Path, piece: usize, pieces: usize) -> Self {
        let open = |name: &str| {
            let flags = OFlags::DIRECT.bits() as i32;
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true).create_new(true).custom_flags(flags);
            let file = options.open(folder.join(name)).expect("a file in the folder");
            // As the state's file: extents of a file that grows may lie elsewhere on the disk.
            fallocate(&file, FallocateFlags::empty(), 0, (piece * pieces) as u64).expect("there is room");
            file
        };
        let mut files = Self {
            from: open("from"),
            to: open("to"),
            memory: [(); 2].map(|()| vec![1; piece + ALIGNMENT]),
            piece,
            pieces,
        };
        // Once each, so that blocks that are new cost nothing when time counts.
        files.move_all_writing(true);
        files.move_all_writing(false);
        files
    }

    fn move_all(&mut self) {
        let offsets = |piece: usize| move |number: usize| (number * piece) as u64;
        let (offset, pieces) = (offsets(self.piece), self.pieces);
        let (from, to) = (&self.from, &self.to);
        let [read, write] = self.memory.each_mut().map(|memory| aligned(memory));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..pieces {
                    from.read_exact_at(read, offset(number)).expect("the disk works");
                }
            });
            for number in 0..pieces {
                to.write_all_at(write, offset(number)).expect("the disk works");
            }
        });
    }

    fn move_all_writing(&mut self, source: bool) {
        let file = if source { &self.from } else { &self.to };
        let memory = aligned(&mut self.memory[0]);
        for number in 0..self.pieces {
            file.write_all_at(memory, (number * self.piece) as u64)
                .expect("there is room");
        }
    }
}

/// Returns the part of `memory` that begins at a block, a block less.
fn aligned(memory: &mut [u8]) -> &mut [u8] {
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    let length = memory.len() - ALIGNMENT;
    &mut memory[start..][..length]
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
