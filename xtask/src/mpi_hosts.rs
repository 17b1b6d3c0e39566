//! `cargo xtask mpi-hosts`: jobs over two hosts, which are network namespaces of this one.
//!
//! Each has a network of its own, joined by a virtual cable, and a host name of its own; so MPI must use TCP between them,
//! and starts its daemon on the second as on any other host, but for `ip netns exec` in the place of `ssh`. Needs root,
//! iproute2 and Open MPI, and changes nothing outside the namespaces, which go when it ends.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use xshell::{Cmd, Shell, cmd};

use crate::namespaces::Namespaces;
use crate::test_totals::TestTotals;

/// The launcher's flags for ways to shard.
const STRATEGIES: [&[&str]; 3] = [
    &[],
    &["--use_deepspeed", "--zero_stage", "3"],
    &["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
];

/// Two groups of ranks, each on a host of its own, that are replicas of each other.
const REPLICAS: [&str; 5] = [
    "--use_fsdp",
    "--fsdp_sharding_strategy",
    "HYBRID_SHARD",
    "--fsdp_auto_wrap_policy",
    "TRANSFORMER_BASED_WRAP",
];

/// Runs the conformance suite over two hosts, then trains over them, which must come to the bits of one host. Each job
/// counts as a test.
///
/// # Errors
/// When namespaces cannot be made, a job fails, or bits differ.
pub(crate) fn run(shell: &Shell, root: &Path) -> Result<TestTotals> {
    let mut totals = TestTotals::default();
    let build = "build --quiet --workspace --features mpi --bins --examples".split(' ');
    cmd!(shell, "cargo {build...}").quiet().run()?;
    let suite = conformance_suite(shell)?;
    let hosts = Hosts::make(shell)?;

    let networks = hosts.mpirun(1, &["readlink", "/proc/self/ns/net"])?.read()?;
    let mut networks: Vec<&str> = networks.lines().collect();
    networks.sort_unstable();
    networks.dedup();
    ensure!(
        networks.len() == 2,
        "the ranks have one network where two were expected"
    );
    println!("mpi-hosts: two hosts, each with a network of its own");

    for per_host in [1, 2] {
        let suite = suite.to_str().context("the target folder's path is text")?;
        let job = hosts.mpirun(
            per_host,
            &[suite, "--test-threads=1", "--color=never", "--skip", "over_"],
        )?;
        let printed = job
            .env("SCONCE_TEST_OVER_MPI", "1")
            .env("SCONCE_BACKEND", "mpi")
            .read()?;
        ensure!(printed.contains("0 failed"), "the suite did not run:\n{printed}");
        totals.passed += 1;
        println!("mpi-hosts: the conformance suite passes on {} ranks", 2 * per_host);
    }

    let training = Training { root, hosts: &hosts };
    for strategy in STRATEGIES {
        for per_host in [1, 2] {
            let (one, two) = (
                training.on_one(per_host, strategy)?,
                training.on_two(per_host, strategy)?,
            );
            let ranks = 2 * per_host;
            ensure!(
                one.model == two.model,
                "{strategy:?} on {ranks} ranks: other bits than on one host"
            );
            totals.passed += 1;
            println!("mpi-hosts: training on {ranks} ranks has the bits of one host {strategy:?}");
        }
    }
    // On one host this strategy has one group, whose sums run in another order.
    let (one, two) = (training.on_one(2, &REPLICAS)?, training.on_two(2, &REPLICAS)?);
    ensure!(
        one.model != two.model && are_near(&one.losses, &two.losses),
        "{REPLICAS:?}: losses {:?} on one host, {:?} on two",
        one.losses,
        two.losses
    );
    totals.passed += 1;
    println!("mpi-hosts: hosts that are replicas train as one host does, within rounding");
    Ok(totals)
}

/// Says whether losses are there and equal within rounding and the digits that are printed.
fn are_near(one: &[f64], two: &[f64]) -> bool {
    let is_near = |(one, two): (&f64, &f64)| (one - two).abs() < 1e-3;
    !one.is_empty() && one.len() == two.len() && one.iter().zip(two).all(is_near)
}

/// The training program, on one host or two.
struct Training<'a> {
    root: &'a Path,
    hosts: &'a Hosts<'a>,
}

/// What a training came to.
struct Trained {
    /// The bytes of its weights.
    model: Vec<u8>,
    losses: Vec<f64>,
}

impl Training<'_> {
    /// Trains on as many ranks as two hosts would have, on this host and without MPI.
    fn on_one(&self, per_host: usize, strategy: &[&str]) -> Result<Trained> {
        self.run(per_host, strategy, Cmd::quiet)
    }

    fn on_two(&self, per_host: usize, strategy: &[&str]) -> Result<Trained> {
        let hostfile = self.hosts.hostfile(per_host)?;
        let hostfile = hostfile.to_str().context("the temporary folder's path is text")?;
        let flags = [&["--mpirun_hostfile", hostfile], strategy].concat();
        self.run(per_host, &flags, |launch| self.hosts.on_first(launch))
    }

    /// Trains with `flags` for the launcher, whose command `place` puts where it is to run.
    fn run<'s>(&'s self, per_host: usize, flags: &[&str], place: impl FnOnce(Cmd<'s>) -> Cmd<'s>) -> Result<Trained> {
        let shell = self.hosts.namespaces.shell;
        let launcher = self.root.join("target/debug/sconce");
        let program = self.root.join("target/debug/examples/finetune_llama");
        let output = self.hosts.folder.join("model");
        shell.remove_path(&output)?;
        let ranks = (2 * per_host).to_string();
        let training = ["--steps", "6", "--lr", "1e-2", "--output_dir"];
        let launch = cmd!(
            shell,
            "{launcher} launch -n {ranks} {flags...} {program} {training...} {output}"
        );
        let printed = place(launch).read()?;
        let loss = |line: &str| line.split_once(" loss ")?.1.split_whitespace().next()?.parse().ok();
        Ok(Trained {
            model: fs::read(output.join("model.safetensors"))?,
            losses: printed.lines().filter_map(loss).collect(),
        })
    }
}

/// Builds the conformance suite and returns its program.
fn conformance_suite(shell: &Shell) -> Result<PathBuf> {
    let build = "test --quiet --workspace --features mpi --test conformance --no-run --message-format json".split(' ');
    let messages = cmd!(shell, "cargo {build...}").quiet().ignore_stderr().read()?;
    let of_suite = messages
        .lines()
        .filter(|line| line.contains("\"name\":\"conformance\""));
    let mut path = of_suite.filter_map(|line| line.split_once("\"executable\":\"")?.1.split('"').next());
    Ok(path
        .next_back()
        .context("cargo named no program for the conformance suite")?
        .into())
}

/// Two hosts, and what tells `mpirun` of them. They go when this is dropped.
struct Hosts<'s> {
    namespaces: Namespaces<'s>,
    folder: PathBuf,
}

impl<'s> Hosts<'s> {
    fn make(shell: &'s Shell) -> Result<Self> {
        let hosts = Self {
            namespaces: Namespaces::make(shell, 2)?,
            folder: std::env::temp_dir().join(format!("sconce-mpi-hosts-{}", std::process::id())),
        };
        fs::create_dir_all(&hosts.folder)?;
        let Namespaces { names, addresses, .. } = &hosts.namespaces;
        let (first_address, first, second_address, second) = (&addresses[0], &names[0], &addresses[1], &names[1]);
        // Called as `ssh` would be: with a host and a command.
        let agent = format!(
            "#!/bin/sh\n\
             case $1 in {first_address}) name={first};; {second_address}) name={second};; *) exit 255;; esac\n\
             shift\n\
             exec ip netns exec $name unshare --uts sh -c \"hostname $name; $*\"\n"
        );
        fs::write(hosts.agent(), agent)?;
        fs::set_permissions(hosts.agent(), fs::Permissions::from_mode(0o755))?;
        Ok(hosts)
    }

    fn agent(&self) -> PathBuf {
        self.folder.join("agent")
    }

    fn hostfile(&self, per_host: usize) -> Result<PathBuf> {
        let file = self.folder.join(format!("hosts-{per_host}"));
        let addresses = self.namespaces.addresses.iter();
        let lines: String = addresses
            .map(|address| format!("{address} slots={per_host}\n"))
            .collect();
        fs::write(&file, lines)?;
        Ok(file)
    }

    /// A job of `per_host` ranks on each host.
    fn mpirun(&self, per_host: usize, words: &[&str]) -> Result<Cmd<'s>> {
        let (ranks, hostfile) = ((2 * per_host).to_string(), self.hostfile(per_host)?);
        let job = cmd!(
            self.namespaces.shell,
            "mpirun -n {ranks} --bind-to none --hostfile {hostfile} {words...}"
        );
        Ok(self.on_first(job))
    }

    /// The same command on the first host, with `ip netns exec` for Open MPI's `ssh`.
    fn on_first(&self, command: Cmd<'_>) -> Cmd<'s> {
        let words = self.namespaces.on(0, &format!("exec {command}"));
        let (program, words) = (&words[0], &words[1..]);
        cmd!(self.namespaces.shell, "{program} {words...}")
            .env("OMPI_MCA_plm_rsh_agent", self.agent())
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .quiet()
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
