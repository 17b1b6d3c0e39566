//! Training speed beside PyTorch's, and how it scales: steps of all groups of processes take turns in one run.
//!
//! Every group trains the Llama of 5.3 M parameters of [`overhead`](super::overhead) on 4 rows of 256 tokens a rank: one process
//! with one thread and with two, and two ranks of one thread each under data parallelism, FULL_SHARD and ZeRO-3. Beside
//! ours, where `--python` has torch and transformers, stand PyTorch's (`xtask/peers/bench_llama.py`): one process likewise, DDP and FSDP 2.
//!
//! Ours find what `sconce launch` sets for glibc's allocator.
//!
//! A process trains one step when it is told so by a line on its stdin, and answers with what the step took. A round is a
//! step of every group, in an order that turns from round to round; ratios are medians of the rounds' ratios.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use candle_core::{Device, Tensor};
use sconce_collectives::environment as variable;
use sconce_collectives::measure::median;
use sconce_collectives::store::{Secret, StoreServer};
use sconce_core::environment::KEPT_MEMORY;
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{
    AcceleratorBuilder, AdamW, BackwardPrefetch, DataLoader, FsdpStrategy, FullyShardedOptions, TensorDataset, Weights,
    WrapPolicy, ZeroStage,
};
use sconce_examples::models::{Llama, LlamaConfig};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::overhead::CONFIG;
use super::round;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../xtask/peers/bench_llama.py");
const ROWS: usize = 4;
const TOKENS: usize = 256;

/// What is compared with what: the name, ranks, threads of each, our strategy, PyTorch's.
const CASES: [(&str, usize, usize, &str, Option<&str>); 5] = [
    ("one thread", 1, 1, "ddp", Some("plain")),
    ("two threads", 1, 2, "ddp", Some("plain")),
    ("two ranks, data parallel", 2, 1, "ddp", Some("ddp")),
    ("two ranks, FULL_SHARD", 2, 1, "full_shard", Some("fsdp2")),
    ("two ranks, ZeRO-3", 2, 1, "zero3", None),
];

/// What a step took on a rank, in seconds.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Took {
    forward: f64,
    backward: f64,
    update: f64,
}

impl Took {
    fn whole(self) -> f64 {
        self.forward + self.backward + self.update
    }
}

/// What a process says when its stdin ends.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Memory {
    /// Most resident memory, in MiB, and what was resident before the model was made.
    peak_mib: f64,
    before_mib: f64,
}

/// Measures over as many rounds; `python` is the interpreter that has torch.
pub(crate) fn run(rounds: usize, python: &Path) -> Result<()> {
    let has_peer = Command::new(python)
        .args(["-c", "import torch, transformers"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    let mut groups = Vec::new();
    for (number, (_, ranks, threads, strategy, peer)) in CASES.into_iter().enumerate() {
        groups.push((number, true, Group::ours(ranks, threads, strategy)?));
        if let Some(peer) = peer.filter(|_| has_peer) {
            groups.push((number, false, Group::peer(python, ranks, threads, peer, number)?));
        }
    }
    // By round, then by group. The first two rounds warm up.
    let mut times: Vec<Vec<Took>> = Vec::new();
    for number in 0..rounds + 2 {
        let mut took = vec![Took::default(); groups.len()];
        for turn in 0..groups.len() {
            let at = (number + turn) % groups.len();
            took[at] = groups[at].2.step()?;
        }
        times.extend((number >= 2).then_some(took));
    }
    let at = |case: usize, ours: bool| {
        groups
            .iter()
            .position(|(of, is_ours, _)| (*of, *is_ours) == (case, ours))
    };
    let ratios = |of: usize, to: usize| Vec::from_iter(times.iter().map(|took| took[of].whole() / took[to].whole()));
    let of_one_thread = at(0, true).context("the first case is ours")?;
    let mut lines = Vec::new();
    for (number, (name, ranks, ..)) in CASES.into_iter().enumerate() {
        let ours = at(number, true).context("every case is ours")?;
        let peer = at(number, false);
        let part = |of: usize, part: fn(&Took) -> f64| median(times.iter().map(|took| part(&took[of])).collect());
        let speed = |of: usize| {
            let tokens = (ranks * ROWS * TOKENS) as f64;
            (tokens / part(of, |took| took.whole())).round()
        };
        let scaling = ratios(of_one_thread, ours)
            .into_iter()
            .map(|ratio| ratio * ranks as f64);
        let ms = [
            part(ours, |took| took.forward),
            part(ours, |took| took.backward),
            part(ours, |took| took.update),
        ];
        let ratio = |of: usize| round(part(of, |took| took.backward) / part(of, |took| took.forward));
        let line = json!({
            "case": name,
            "tokens_per_second": speed(ours),
            "tokens_per_second_of_pytorch": peer.map(speed),
            "speed_of_pytorchs": peer.map(|peer| round(median(ratios(peer, ours)))),
            "speed_of_one_thread": round(median(scaling.collect())),
            "backward_of_forward": ratio(ours),
            "pytorchs_backward_of_forward": peer.map(ratio),
            "ms": ms.map(|seconds| round(seconds * 1e3)),
        });
        lines.push((ours, peer, line));
    }
    let memory = groups
        .into_iter()
        .map(|(_, _, group)| group.finish())
        .collect::<Result<Vec<_>>>()?;
    for (ours, peer, mut line) in lines {
        line["peak_mib"] = json!(memory[ours].peak_mib.round());
        line["peak_mib_of_pytorch"] = json!(peer.map(|peer| memory[peer].peak_mib.round()));
        let added = |of: usize| (memory[of].peak_mib - memory[of].before_mib).round();
        line["added_mib"] = json!(added(ours));
        line["added_mib_of_pytorch"] = json!(peer.map(added));
        println!("{line}");
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!(
        "{}",
        json!({ "rounds": rounds, "with_pytorch": has_peer, "load_average": load.trim() })
    );
    Ok(())
}

/// Processes that step together.
struct Group {
    ranks: Vec<(Child, ChildStdin, BufReader<ChildStdout>)>,
    _store: Option<StoreServer>,
}

impl Group {
    fn ours(ranks: usize, threads: usize, strategy: &str) -> Result<Self> {
        let secret = Secret::random();
        let store = StoreServer::start("127.0.0.1:0", secret.clone())?;
        let command = || -> Result<Command> {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["--stepper", strategy]);
            command.envs(KEPT_MEMORY);
            command.env(variable::SCONCE_STORE_ADDR, store.address().to_string());
            command.env(variable::SCONCE_STORE_SECRET, secret.to_text());
            Ok(command)
        };
        let ranks = Self::start(ranks, threads, command)?;
        Ok(Self {
            ranks,
            _store: Some(store),
        })
    }

    fn peer(python: &Path, ranks: usize, threads: usize, strategy: &str, number: usize) -> Result<Self> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let config = std::env::temp_dir().join(format!("sconce-bench-{}-{number}.json", std::process::id()));
        std::fs::write(&config, CONFIG)?;
        let command = || -> Result<Command> {
            let mut command = Command::new(python);
            command.arg(SCRIPT).arg(strategy).arg(&config);
            command.args([ROWS.to_string(), TOKENS.to_string()]);
            command.env(variable::MASTER_ADDR, "127.0.0.1");
            command.env(variable::MASTER_PORT, port.to_string());
            Ok(command)
        };
        let ranks = Self::start(ranks, threads, command)?;
        std::fs::remove_file(config)?;
        Ok(Self { ranks, _store: None })
    }

    /// Starts the ranks and returns when all are ready.
    fn start(
        ranks: usize,
        threads: usize,
        command: impl Fn() -> Result<Command>,
    ) -> Result<Vec<(Child, ChildStdin, BufReader<ChildStdout>)>> {
        let mut started = Vec::new();
        for rank in 0..ranks {
            let mut child = command()?
                .env(variable::RANK, rank.to_string())
                .env(variable::LOCAL_RANK, rank.to_string())
                .env(variable::WORLD_SIZE, ranks.to_string())
                .env(variable::LOCAL_WORLD_SIZE, ranks.to_string())
                .env("RAYON_NUM_THREADS", threads.to_string())
                .env("OMP_NUM_THREADS", threads.to_string())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let (input, output) = (child.stdin.take(), child.stdout.take());
            let input = input.context("stdin is a pipe")?;
            started.push((child, input, BufReader::new(output.context("stdout is a pipe")?)));
        }
        for (_, _, output) in &mut started {
            if line(output)?.trim() != "ready" {
                bail!("a process of the bench did not get ready");
            }
        }
        Ok(started)
    }

    /// Has all ranks take a step; returns what it took on the slowest.
    fn step(&mut self) -> Result<Took> {
        for (_, input, _) in &mut self.ranks {
            input.write_all(b"step\n")?;
        }
        let mut slowest = Took::default();
        for (_, _, output) in &mut self.ranks {
            let took: Took = serde_json::from_str(&line(output)?)?;
            if took.whole() > slowest.whole() {
                slowest = took;
            }
        }
        Ok(slowest)
    }

    /// Ends the ranks; returns the memory of the one that had most.
    fn finish(self) -> Result<Memory> {
        let mut most: Option<Memory> = None;
        let mut ends = Vec::new();
        for (child, input, output) in self.ranks {
            drop(input);
            ends.push((child, output));
        }
        for (mut child, mut output) in ends {
            let memory: Memory = serde_json::from_str(&line(&mut output)?)?;
            if most.is_none_or(|most| memory.peak_mib > most.peak_mib) {
                most = Some(memory);
            }
            child.wait()?;
        }
        most.context("a group has ranks")
    }
}

fn line(output: &mut BufReader<ChildStdout>) -> Result<String> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    Ok(line)
}

/// Is one of our processes: steps whenever a line comes.
pub(crate) fn step_on_demand(strategy: &str) -> Result<()> {
    let before_mib = status_mib("VmRSS:");
    let builder = AcceleratorBuilder::default();
    let builder = match strategy {
        "ddp" => builder,
        "zero3" => builder.strategy(ZeroStage::Three {
            persistence_threshold: 0,
        }),
        "full_shard" => builder.fully_sharded(FullyShardedOptions {
            sharding_strategy: Some(FsdpStrategy::FullShard),
            auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
            forward_prefetch: Some(true),
            backward_prefetch: Some(BackwardPrefetch::Pre),
            ..FullyShardedOptions::default()
        }),
        other => bail!("unknown strategy {other}"),
    };
    let acc = builder.build()?;
    let config = LlamaConfig::from_json(CONFIG, &PathBuf::from("the bench's config"))?;
    let model = Llama::new(&config, acc.var_builder(Weights::Random { seed: 1 })?)?;
    let count = acc.world().size * ROWS * TOKENS;
    let ids = Vec::from_iter((0..count).map(|at| (at * 7919 + at * at * 31) as i64 % 4096));
    let data = TensorDataset::new(vec![Tensor::from_vec(ids, (count / TOKENS, TOKENS), &Device::Cpu)?])?;
    let rule = AdamW {
        learning_rate: 1e-4,
        ..AdamW::default()
    };
    let (mut optimizer, mut loader, _) = acc.prepare(rule, DataLoader::new(data, ROWS), ConstantSchedule)?;
    let mut output = std::io::stdout();
    writeln!(output, "ready")?;
    for line in std::io::stdin().lines() {
        line?;
        let mut took = Took::default();
        acc.wait_for_everyone()?;
        for batch in &mut loader {
            let tokens = &batch?[0];
            let start = Instant::now();
            let loss = model.loss(tokens, tokens)?;
            took.forward = start.elapsed().as_secs_f64();
            acc.backward(&loss)?;
            took.backward = start.elapsed().as_secs_f64() - took.forward;
            optimizer.step()?;
            optimizer.zero_grad()?;
            took.update = start.elapsed().as_secs_f64() - took.forward - took.backward;
        }
        writeln!(output, "{}", serde_json::to_string(&took)?)?;
    }
    let memory = Memory {
        peak_mib: status_mib("VmHWM:"),
        before_mib,
    };
    writeln!(output, "{}", serde_json::to_string(&memory)?)?;
    Ok(())
}

/// A figure of `/proc/self/status`, in MiB; 0 where there is none.
fn status_mib(name: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let found = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = found.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}
