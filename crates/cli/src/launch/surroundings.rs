//! Which machines take part, by the flags and, where those say nothing, by what started the launchers.
//!
//! A batch system, `mpirun` or an operator that starts one launcher on each machine tells each of them its number. What
//! tells the number of machines, first found first: `--num_machines`; `PET_NNODES` or `NNODES` (torchrun's and those of
//! Kubernetes operators); a Slurm step; `mpirun`. The rest is taken from the same, and may be given by flags as well.

use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use sconce_collectives::World;
use sconce_collectives::environment as variable;
use sconce_collectives::store::Secret;

use super::arguments::Arguments;
use super::machines::{MachineCount, RendezvousBackend};
use super::rendezvous_conf::RendezvousConf;
use crate::command_error::CommandError;

/// torchrun's default for the port at which launchers meet.
const DEFAULT_PORT: u16 = 29500;
/// Variables with which a job's number may become its name, and the text from which launchers derive a secret.
const JOB_IDS: [&str; 5] = ["PET_RDZV_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"];

/// The machines of a run, and this one's place among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Machines {
    pub(super) count: MachineCount,
    /// Ranks on each machine.
    pub(super) local_ranks: usize,
    /// This machine's number, where it has one before the launchers meet.
    pub(super) rank: Option<usize>,
    /// Name or address of machine 0.
    pub(super) main_host: String,
    /// The port at which its launcher listens.
    pub(super) main_port: u16,
    pub(super) conf: RendezvousConf,
    /// The text of the secret that the launchers have in common; none that is alone needs.
    pub(super) secret: Option<String>,
    /// The job's name, where something gives it one.
    job: Option<String>,
}

impl Machines {
    /// Resolves the flags; `lookup` are the launcher's own variables.
    ///
    /// # Errors
    /// When something needed is missing, is no number, or does not go together.
    pub(super) fn resolve(
        arguments: &Arguments,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CommandError> {
        let lookup = |name: &str| {
            let value = lookup(name)?.trim().to_owned();
            (!value.is_empty()).then_some(value)
        };
        let flags = &arguments.machines;
        let conf = flags.rdzv_conf.clone().unwrap_or_default();
        let found = Found::look(flags.num_machines, &lookup)?;
        let count = found.count;
        let ranks = match arguments.num_processes {
            Some(ranks) => ranks,
            None => count.most * number(&lookup, "PET_NPROC_PER_NODE").ok().flatten().unwrap_or(1),
        };
        if ranks % count.most != 0 {
            let error = CommandError::usage(format!(
                "--num_processes {ranks} cannot be divided among {} machines",
                count.most
            ));
            let fits = ranks.div_ceil(count.most) * count.most;
            return Err(error.hint(format!(
                "it is the number of ranks on all machines together, and each has as many: {fits} would do"
            )));
        }
        let rank = flags.machine_rank.or(found.rank);
        if let Some(rank) = rank.filter(|rank| *rank >= count.most) {
            let machines = if count.most == 1 {
                "there is 1 machine"
            } else {
                "machines count from 0"
            };
            let error = CommandError::usage(format!("machine rank {rank} with --num_machines {count}: {machines}"));
            return Err(error.hint("--num_machines is how many there are, --machine_rank which of them this is"));
        }
        let job = conf.id.clone().or_else(|| JOB_IDS.into_iter().find_map(&lookup));
        let mut machines = Self {
            count,
            local_ranks: ranks / count.most,
            rank,
            main_host: String::new(),
            main_port: 0,
            conf,
            secret: None,
            job,
        };
        if machines.is_alone() {
            return Ok(machines);
        }
        let backend = flags
            .rdzv_backend
            .or(found.backend)
            .unwrap_or(RendezvousBackend::Static);
        if rank.is_none() && backend == RendezvousBackend::Static {
            let error = CommandError::usage(format!("--num_machines {count} needs --machine_rank"));
            return Err(error
                .hint("give each machine its number, from 0; machine 0 is the one that --main_process_ip names")
                .hint("or let them take numbers by themselves: --rdzv_backend c10d"));
        }
        let host = arguments.main_process_ip.clone().or(found.host);
        machines.main_host = host.ok_or_else(|| {
            CommandError::usage(format!("--num_machines {count} needs --main_process_ip"))
                .hint("the name or address under which all machines reach machine 0; MASTER_ADDR is read too")
        })?;
        machines.main_port = arguments.main_process_port.or(found.port).unwrap_or(DEFAULT_PORT);
        if machines.main_port == 0 {
            let error = CommandError::usage("--main_process_port 0: the launchers of several machines need one port");
            return Err(error.hint("choose one that is free on machine 0, or leave the flag out for 29500"));
        }
        machines.secret = Some(machines.choose_secret(lookup(variable::SCONCE_STORE_SECRET))?);
        Ok(machines)
    }

    /// Whether this is the only machine.
    pub(super) fn is_alone(&self) -> bool {
        self.count == MachineCount::ONE
    }

    /// The number of ranks on all machines, the most there can be.
    pub(super) fn ranks(&self) -> usize {
        self.count.most * self.local_ranks
    }

    /// Whether machine 0 is named by an address that leads to this host alone.
    pub(super) fn is_on_loopback(&self) -> bool {
        let bare = self.bare_main_host();
        bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// Name or address of machine 0 without brackets.
    pub(super) fn bare_main_host(&self) -> &str {
        self.main_host.trim_start_matches('[').trim_end_matches(']')
    }

    /// `host:port` of machine 0's launcher.
    pub(super) fn main_address(&self) -> String {
        join(&self.main_host, self.main_port)
    }

    /// The run's name: the job's, or one that no other run on this machine has.
    pub(super) fn run_id(&self) -> String {
        self.job.clone().unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            format!("{}-{}", now.as_secs(), std::process::id())
        })
    }

    fn choose_secret(&self, of_environment: Option<String>) -> Result<String, CommandError> {
        let given = self.conf.secret.clone().or(of_environment);
        if let Some(text) = given {
            Secret::from_text(&text).map_err(|error| {
                CommandError::usage(error)
                    .hint("give every launcher the same: SCONCE_STORE_SECRET, or --rdzv_conf secret=..")
            })?;
            return Ok(text);
        }
        let user = rustix::process::getuid().as_raw();
        let port = self.main_port;
        if let Some(job) = &self.job {
            return Ok(format!("the launchers of user {user} at port {port} in job {job}"));
        }
        if self.is_on_loopback() {
            return Ok(format!("the launchers of user {user} at port {port} of this host"));
        }
        let error = CommandError::usage("launchers of several machines need a secret that they have in common");
        Err(error
            .hint("export SCONCE_STORE_SECRET, the same on every machine; `openssl rand -hex 16` makes a good one")
            .hint("in a job of Slurm, PBS or LSF, or with --rdzv_conf id=NAME, one is derived from the job's name, which keeps out accidents only"))
    }
}

/// Whether what started the launchers tells of machines what the setting of a configuration file would: its number and
/// address of machines, or this one's number.
pub(super) fn are_told_by_environment(setting: &str, lookup: impl Fn(&str) -> Option<String>) -> bool {
    let is_set = |names: &[&str]| {
        names
            .iter()
            .any(|name| lookup(name).is_some_and(|value| !value.trim().is_empty()))
    };
    let of_machines = [
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
    ];
    if !of_machines.contains(&setting) {
        return false;
    }
    is_set(&["PET_NNODES", "NNODES"])
        || (setting == "machine_rank" && is_set(&["PET_NODE_RANK", "NODE_RANK"]))
        || step(&|name: &str| lookup(name)).is_ok_and(|step| step.is_some())
}

/// `host:port`, with brackets around an address of IPv6.
pub(super) fn join(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// What was found out about the machines.
#[derive(Debug)]
struct Found {
    count: MachineCount,
    rank: Option<usize>,
    host: Option<String>,
    port: Option<u16>,
    backend: Option<RendezvousBackend>,
}

impl Found {
    fn look(flag: Option<MachineCount>, lookup: &impl Fn(&str) -> Option<String>) -> Result<Self, CommandError> {
        let mut found = Self {
            count: flag.unwrap_or(MachineCount::ONE),
            rank: None,
            host: None,
            port: None,
            backend: None,
        };
        if flag == Some(MachineCount::ONE) {
            return Ok(found);
        }
        let of_operator = ["PET_NNODES", "NNODES"].into_iter().find(|name| lookup(name).is_some());
        let steps = match of_operator {
            Some(_) => None,
            None => step(lookup)?,
        };
        if let (None, Some(name)) = (flag, of_operator) {
            let text = lookup(name).unwrap_or_default();
            found.count = text
                .parse()
                .map_err(|expected| CommandError::usage(format!("{name}={text:?}: {expected}")))?;
        }
        if let Some(step) = steps {
            if flag.is_none() {
                found.count = MachineCount {
                    least: step.size,
                    most: step.size,
                };
            }
            found.rank = Some(step.node_rank);
            found.host = Some(step.master_addr).filter(|host| host != "127.0.0.1");
        }
        if found.count == MachineCount::ONE {
            return Ok(found);
        }
        for name in ["PET_NODE_RANK", "NODE_RANK"] {
            found.rank = number(lookup, name)?.or(found.rank);
        }
        let endpoint = lookup("PET_RDZV_ENDPOINT");
        let endpoint = endpoint
            .as_deref()
            .map(|text| text.rsplit_once(':').unwrap_or((text, "")));
        let host = lookup("PET_MASTER_ADDR").or_else(|| lookup(variable::MASTER_ADDR));
        found.host = host.or(endpoint.map(|(host, _)| host.to_owned())).or(found.host);
        for name in ["PET_MASTER_PORT", variable::MASTER_PORT] {
            found.port = found.port.or(number(lookup, name)?);
        }
        found.port = found.port.or(endpoint.and_then(|(_, port)| port.parse().ok()));
        if lookup("PET_RDZV_BACKEND").is_some_and(|backend| backend == "c10d") {
            found.backend = Some(RendezvousBackend::C10d);
        }
        Ok(found)
    }
}

/// The launchers as a world of one process on each host, by Slurm's variables or an MPI's, if those started them.
fn step(lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<World>, CommandError> {
    let families: [(&str, &[&str], &str); 3] = [
        ("srun", &["SLURM_"], variable::SLURM_STEP_ID),
        ("mpirun", &["OMPI_"], variable::OMPI_COMM_WORLD_LOCAL_SIZE),
        ("mpirun", &["PMI_", "MPI_LOCAL"], variable::MPI_LOCALNRANKS),
    ];
    for (starter, prefixes, sign) in families {
        if lookup(sign).is_none() {
            continue;
        }
        let of_family = |name: &str| match prefixes.iter().any(|prefix| name.starts_with(prefix)) {
            true => lookup(name),
            false => None,
        };
        let world = World::from_lookup(of_family).map_err(|error| {
            CommandError::usage(error).hint("or say which machines there are: --num_machines, --machine_rank")
        })?;
        if world.size == 1 {
            continue;
        }
        if world.local_size != 1 {
            let error = CommandError::usage(format!(
                "{starter} has started {} launchers on this machine, where one starts all ranks",
                world.local_size
            ));
            return Err(error.hint(match starter {
                "srun" => "srun --ntasks-per-node=1 sconce launch ..; or start the ranks without the launcher",
                _ => "mpirun --map-by ppr:1:node sconce launch ..; or start the ranks without the launcher",
            }));
        }
        return Ok(Some(World {
            node_rank: world.rank,
            ..world
        }));
    }
    Ok(None)
}

/// Reads a number, if the variable is set.
fn number<T: std::str::FromStr>(
    lookup: &impl Fn(&str) -> Option<String>,
    name: &str,
) -> Result<Option<T>, CommandError> {
    lookup(name)
        .map(|text| {
            text.parse()
                .map_err(|_| CommandError::usage(format!("{name}={text:?}: a whole number is needed")))
        })
        .transpose()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Launch {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn resolve(flags: &[&str], variables: &[(&str, &str)]) -> Result<Machines, String> {
        let words = [&["launch"], flags, &["program"]].concat();
        let launch = Launch::try_parse_from(words).unwrap();
        let lookup = |name: &str| {
            let found = variables.iter().find(|(of, _)| *of == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Machines::resolve(&launch.arguments, lookup).map_err(|error| error.to_string())
    }

    /// Count, this machine's number, host, port, ranks on each.
    fn place(machines: &Machines) -> (String, Option<usize>, &str, u16, usize) {
        (
            machines.count.to_string(),
            machines.rank,
            &machines.main_host,
            machines.main_port,
            machines.local_ranks,
        )
    }

    const SECRET: (&str, &str) = ("SCONCE_STORE_SECRET", "0123456789abcdef");

    #[test]
    fn without_flags_and_variables_there_is_one_machine() {
        assert!(resolve(&["-n", "3"], &[]).unwrap().is_alone());
        assert!(
            resolve(&[], &[("MASTER_ADDR", "a"), ("NODE_RANK", "1")])
                .unwrap()
                .is_alone()
        );
        let in_job = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
        ];
        assert!(resolve(&[], &in_job).unwrap().is_alone());
    }

    #[test]
    fn flags_say_which_machines_there_are() {
        let flags = [
            "--num_machines=2",
            "--machine-rank",
            "1",
            "--main_process_ip",
            "node1",
            "--main_process_port",
            "4000",
            "-n",
            "6",
        ];
        let machines = resolve(&flags, &[SECRET]).unwrap();
        assert_eq!(place(&machines), ("2".to_owned(), Some(1), "node1", 4000, 3));
        assert_eq!(machines.main_address(), "node1:4000");
    }

    #[test]
    fn slurm_says_it_of_one_launcher_on_each_host() {
        let step = [
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_NODEID", "1"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_STEP_NODELIST", "node[003-004]"),
        ];
        let machines = resolve(&["-n", "8"], &step).unwrap();
        assert_eq!(place(&machines), ("2".to_owned(), Some(1), "node003", 29500, 4));
        assert_eq!(machines.run_id(), "77");
        assert!(machines.secret.is_some(), "derived from the job");
        // A flag says otherwise.
        assert!(resolve(&["--num_machines", "1"], &step).unwrap().is_alone());

        let two_each = step.map(|(name, value)| match name {
            "SLURM_STEP_NUM_TASKS" => (name, "4"),
            "SLURM_STEP_TASKS_PER_NODE" => (name, "2(x2)"),
            _ => (name, value),
        });
        let error = resolve(&[], &two_each).unwrap_err();
        assert!(error.contains("srun has started 2 launchers"), "{error}");
    }

    #[test]
    fn mpirun_says_it_but_for_the_address() {
        let of_mpirun = [
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_SIZE", "3"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("NODE_RANK", "2"),
            ("MASTER_ADDR", "node1"),
            SECRET,
        ];
        let machines = resolve(&[], &of_mpirun).unwrap();
        assert_eq!(place(&machines), ("3".to_owned(), Some(2), "node1", 29500, 1));
        let error = resolve(&[], &[&of_mpirun[..5], &[SECRET]].concat()).unwrap_err();
        assert!(error.contains("needs --main_process_ip"), "{error}");
    }

    #[test]
    fn operators_of_kubernetes_say_it_as_to_torchrun() {
        let of_pod = [
            ("PET_NNODES", "1:4"),
            ("PET_NPROC_PER_NODE", "2"),
            ("PET_RDZV_BACKEND", "c10d"),
            ("PET_RDZV_ENDPOINT", "job-worker-0:23456"),
            SECRET,
        ];
        let machines = resolve(&[], &of_pod).unwrap();
        assert_eq!(place(&machines), ("1:4".to_owned(), None, "job-worker-0", 23456, 2));
        let of_pod = [
            ("NNODES", "2"),
            ("NODE_RANK", "1"),
            ("MASTER_ADDR", "job-0"),
            ("MASTER_PORT", "400"),
            SECRET,
        ];
        let machines = resolve(&["-n", "2"], &of_pod).unwrap();
        assert_eq!(place(&machines), ("2".to_owned(), Some(1), "job-0", 400, 1));
    }

    #[test]
    fn what_is_missing_or_does_not_go_together_is_told_by_name() {
        let two = ["--num_machines", "2", "--main_process_ip", "node1"];
        let with = |more: &[&'static str]| [&two[..], more].concat();
        for (flags, variables, part) in [
            (with(&[]), vec![SECRET], "needs --machine_rank"),
            (
                with(&["--machine_rank", "2"]),
                vec![SECRET],
                "machine rank 2 with --num_machines 2",
            ),
            (
                with(&["--machine_rank", "1", "-n", "3"]),
                vec![SECRET],
                "3 cannot be divided among 2 machines",
            ),
            (with(&["--machine_rank", "1"]), vec![], "SCONCE_STORE_SECRET"),
            (
                with(&["--machine_rank", "1"]),
                vec![("SCONCE_STORE_SECRET", "short")],
                "needs 16 or more",
            ),
            (
                with(&["--machine_rank", "1", "--main_process_port", "0"]),
                vec![SECRET],
                "need one port",
            ),
            (vec!["--machine_rank", "1"], vec![], "there is 1 machine"),
            (
                vec!["--num_machines", "2", "--machine_rank", "1"],
                vec![SECRET],
                "needs --main_process_ip",
            ),
            (vec![], vec![("PET_NNODES", "two")], "PET_NNODES=\"two\""),
            (with(&[]), vec![("NODE_RANK", "x"), SECRET], "NODE_RANK=\"x\""),
        ] {
            let error = resolve(&flags, &variables).unwrap_err();
            assert!(error.contains(part), "{flags:?}: {error}");
        }
        // On loopback, and with machines that take numbers by themselves, neither is needed.
        let flags = [
            "--num_machines",
            "2",
            "--main_process_ip",
            "127.0.0.1",
            "--rdzv_backend",
            "c10d",
        ];
        assert_eq!(resolve(&flags, &[]).unwrap().rank, None);
    }
}
