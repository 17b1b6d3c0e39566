//! All-reduce over MPI, beside a bare loop of `MPI_Allreduce` through the same library, in one run.
//!
//! Starts itself under `mpirun`. Prints JSON lines: `ours_us` and `bare_us` are medians over rounds in which the two take
//! turns, `of_bare` is the median of the rounds' ratios of bandwidth (1 is equal, more is faster than MPI's own).

use mpi_sys as ffi;
use sconce_collectives::measure::median;
use sconce_collectives::{Backend, Communicator, Options, ReduceOp, World, connect_over};
use std::process::{Command, ExitCode};
use std::time::Instant;

const MIB: usize = 1 << 20;

/// Set in the ranks.
const IS_RANK: &str = "SCONCE_BENCH_RANK";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let (mut ranks, mut rounds, mut largest) = ("2".to_owned(), 15, 64 * MIB);
    for pair in arguments.chunks(2) {
        match pair {
            [flag, value] if flag == "--ranks" => ranks.clone_from(value),
            [flag, value] if flag == "--rounds" => rounds = number(value),
            [flag, value] if flag == "--largest_mib" => largest = number(value) * MIB,
            _ => usage(&pair[0]),
        }
    }
    if std::env::var_os(IS_RANK).is_some() {
        bench(rounds, largest);
        return ExitCode::SUCCESS;
    }
    let program = std::env::current_exe().expect("this program has a path");
    let mut job = Command::new("mpirun");
    job.args(["-n", &ranks]).arg(program).args(&arguments);
    job.env(IS_RANK, "1").env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    let status = job.status().expect("mpirun is in PATH");
    if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn number(text: &str) -> usize {
    text.parse().ok().filter(|n| *n > 0).unwrap_or_else(|| usage(text))
}

fn usage(what: &str) -> ! {
    eprintln!("error: {what:?} was not expected; use --ranks 2 --rounds 15 --largest_mib 64");
    std::process::exit(2)
}

fn bench(rounds: usize, largest: usize) {
    let world = World::from_env().expect("mpirun sets the world");
    let connection = connect_over(Backend::Mpi, &world, &Options::default()).expect("all ranks come");
    let group = &*connection.communicator;
    let sizes = [4, 1 << 10, 64 << 10, MIB, 16 * MIB, largest];
    let (mut input, mut output) = (vec![1f32; largest / 4], vec![0f32; largest / 4]);
    for bytes in sizes.into_iter().filter(|bytes| *bytes <= largest) {
        let repeat = (4 * MIB / bytes).clamp(1, 2000);
        let (input, output) = (&mut input[..bytes / 4], &mut output[..bytes / 4]);
        check(group, input, output);
        // Zeros, which stay as they are however often they are summed up.
        input.fill(0.0);
        output.fill(0.0);
        let mut samples = Vec::new();
        for round in 0..=rounds {
            let bare = sample(group, repeat, || bare_all_reduce(input, output));
            let ours = sample(group, repeat, || {
                group.all_reduce(output, ReduceOp::Sum).expect("the operation succeeds");
            });
            // Round 0 warms up.
            if round > 0 {
                samples.push((ours, bare));
            }
        }
        if world.is_main() {
            let line = serde_json::json!({
                "operation": "all_reduce", "dtype": "f32", "bytes": bytes, "ranks": world.size,
                "ours_us": round(median(samples.iter().map(|(ours, _)| ours * 1e6).collect())),
                "bare_us": round(median(samples.iter().map(|(_, bare)| bare * 1e6).collect())),
                "ours_gb_per_s": round(median(samples.iter().map(|(ours, _)| bytes as f64 / ours / 1e9).collect())),
                "of_bare": round(median(samples.iter().map(|(ours, bare)| bare / ours).collect())),
            });
            println!("{line}");
        }
    }
}

/// Both ways come to the same sum.
fn check(group: &dyn Communicator, input: &mut [f32], output: &mut [f32]) {
    input.fill(group.rank() as f32 + 0.5);
    bare_all_reduce(input, output);
    group.all_reduce(input, ReduceOp::Sum).expect("the operation succeeds");
    assert_eq!(input, output);
}

/// Returns the seconds of one call, the mean over a batch of them, on the slowest rank.
fn sample(group: &dyn Communicator, repeat: usize, mut call: impl FnMut()) -> f64 {
    group.barrier().expect("all ranks are here");
    let start = Instant::now();
    for _ in 0..repeat {
        call();
    }
    let mut seconds = [start.elapsed().as_secs_f64() / repeat as f64];
    group
        .all_reduce(&mut seconds, ReduceOp::Max)
        .expect("all ranks are here");
    seconds[0]
}

fn bare_all_reduce(input: &[f32], output: &mut [f32]) {
    let (from, to) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
    let count = i32::try_from(input.len()).expect("a bench's size");
    // SAFETY: the library is initialised; both buffers hold `count` elements, and all ranks make this call.
    let code = unsafe { ffi::MPI_Allreduce(from, to, count, ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, ffi::RSMPI_COMM_WORLD) };
    assert_eq!(code, 0, "MPI_Allreduce succeeds");
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
