//! `cargo xtask mpi-hosts`: jobs over two hosts, which are network namespaces of this one.
//!
//! Each has a network of its own, joined by a virtual cable, and a host name of its own; so MPI must use TCP between them,
//! and starts its daemon on the second as on any other host, but for `ip netns exec` in the place of `ssh`. Needs root,
//! iproute2 and Open MPI, and changes nothing outside the namespaces, which go when it ends.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use xshell::{Cmd, Shell, cmd};

/// The hosts' addresses, from a range that is for such things (RFC 2544).
const ADDRESSES: [&str; 2] = ["198.18.0.1", "198.18.0.2"];

/// The launcher's flags for ways to shard.
const STRATEGIES: [&[&str]; 3] = [
    &[],
    &["--use_deepspeed", "--zero_stage", "3"],
    &["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
];

/// Runs the conformance suite over two hosts, then trains over them, which must come to the bits of one host.
///
/// # Errors
/// When namespaces cannot be made, a job fails, or bits differ.
pub(crate) fn run(shell: &Shell, root: &Path) -> Result<()> {
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
        println!("mpi-hosts: the conformance suite passes on {} ranks", 2 * per_host);
    }

    let launcher = root.join("target/debug/sconce");
    let program = root.join("target/debug/examples/finetune_llama");
    for (number, strategy) in STRATEGIES.into_iter().enumerate() {
        for per_host in [1, 2] {
            let ranks = (2 * per_host).to_string();
            let model = |over: &str| hosts.folder.join(format!("{over}-{number}-{ranks}"));
            let training = |output: &Path| {
                let mut words = vec![program.clone().into_os_string()];
                words.extend(["--steps", "6", "--lr", "1e-2", "--output_dir"].map(Into::into));
                words.push(output.into());
                words
            };
            let (one, two) = (model("one"), model("two"));
            let words = training(&one);
            cmd!(shell, "{launcher} launch -n {ranks} {strategy...} {words...}")
                .quiet()
                .ignore_stdout()
                .run()?;
            let (words, hostfile) = (training(&two), hosts.hostfile(per_host)?);
            let flags = cmd!(
                shell,
                "{launcher} launch -n {ranks} --mpirun_hostfile {hostfile} {strategy...} {words...}"
            );
            hosts.on_first(flags).ignore_stdout().run()?;
            let bytes = |folder: PathBuf| fs::read(folder.join("model.safetensors"));
            ensure!(
                bytes(one)? == bytes(two)?,
                "{strategy:?} on {ranks} ranks: other bits than on one host"
            );
            println!("mpi-hosts: training on {ranks} ranks has the bits of one host {strategy:?}");
        }
    }
    Ok(())
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

/// Two network namespaces, joined, and what tells `mpirun` of them. They go when this is dropped.
struct Hosts<'s> {
    shell: &'s Shell,
    names: [String; 2],
    folder: PathBuf,
}

impl<'s> Hosts<'s> {
    fn make(shell: &'s Shell) -> Result<Self> {
        if cmd!(shell, "id -u").quiet().read()? != "0" {
            bail!("mpi-hosts makes network namespaces, for which it must be root");
        }
        let process = std::process::id();
        let hosts = Self {
            shell,
            names: [1, 2].map(|number| format!("sconce-{process}-{number}")),
            folder: std::env::temp_dir().join(format!("sconce-mpi-hosts-{process}")),
        };
        fs::create_dir_all(&hosts.folder)?;
        let [first, second] = &hosts.names;
        for name in &hosts.names {
            cmd!(shell, "ip netns add {name}").quiet().run()?;
            cmd!(shell, "ip -n {name} link set lo up").quiet().run()?;
        }
        cmd!(
            shell,
            "ip -n {first} link add cable type veth peer name cable netns {second}"
        )
        .quiet()
        .run()?;
        for (name, address) in hosts.names.iter().zip(ADDRESSES) {
            cmd!(shell, "ip -n {name} addr add {address}/24 dev cable")
                .quiet()
                .run()?;
            cmd!(shell, "ip -n {name} link set cable up").quiet().run()?;
        }
        let [first_address, second_address] = ADDRESSES;
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
        let lines = ADDRESSES.map(|address| format!("{address} slots={per_host}\n"));
        fs::write(&file, lines.concat())?;
        Ok(file)
    }

    /// A job of `per_host` ranks on each host.
    fn mpirun(&self, per_host: usize, words: &[&str]) -> Result<Cmd<'s>> {
        let (ranks, hostfile) = ((2 * per_host).to_string(), self.hostfile(per_host)?);
        let job = cmd!(
            self.shell,
            "mpirun -n {ranks} --bind-to none --hostfile {hostfile} {words...}"
        );
        Ok(self.on_first(job))
    }

    /// The same command on the first host, with `ip netns exec` for Open MPI's `ssh`.
    fn on_first(&self, command: Cmd<'_>) -> Cmd<'s> {
        let (agent, first, command) = (self.agent(), &self.names[0], command.to_string());
        let line = format!("hostname {first}; exec {command}");
        cmd!(self.shell, "ip netns exec {first} unshare --uts sh -c {line}")
            .env("OMPI_MCA_plm_rsh_agent", agent)
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .quiet()
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            // It may not have come to be.
            let _ = cmd!(self.shell, "ip netns del {name}").quiet().ignore_stderr().run();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}
