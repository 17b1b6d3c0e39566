//! The flags of `sconce launch` about several machines and about starting ranks again.
//!
//! Every machine has a launcher of its own with the same command line, but for its `--machine_rank`. What the flags leave
//! open, a batch system may say ([`surroundings`](super::surroundings)).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::rendezvous_conf::RendezvousConf;

/// Flags about several machines, in Accelerate's spelling.
#[derive(Debug, Args)]
#[command(next_help_heading = "Several machines")]
pub(super) struct MachineArguments {
    /// How many machines take part, each with a launcher of its own and an equal share of the ranks; MIN:MAX for as
    /// many as there are between the two, while --num_processes is the number of ranks on MAX [default: 1, or what
    /// srun, mpirun, PET_NNODES or NNODES say]
    #[arg(
        verbatim_doc_comment,
        long = "num_machines",
        alias = "num-machines",
        value_name = "N or MIN:MAX"
    )]
    pub(super) num_machines: Option<MachineCount>,

    /// The number of this machine, from 0; ranks of machine 0 come first, and its launcher is where the others meet
    #[arg(long = "machine_rank", alias = "machine-rank", value_name = "N")]
    pub(super) machine_rank: Option<usize>,

    /// Accepted as Accelerate has it; launchers always meet at --main_process_ip, on one network or not
    #[arg(long = "same_network", alias = "same-network")]
    pub(super) same_network: bool,

    /// How machines get their numbers: static, each by its --machine_rank; c10d, by themselves, and the one that has
    /// the address --main_process_ip is machine 0 [default: static]
    #[arg(
        verbatim_doc_comment,
        long = "rdzv_backend",
        alias = "rdzv-backend",
        value_enum,
        value_name = "BACKEND"
    )]
    pub(super) rdzv_backend: Option<RendezvousBackend>,

    /// Settings of the meeting, as KEY=VALUE with commas between: timeout (600: seconds in which all machines must have
    /// come), last_call_timeout (10: seconds in which more than MIN may), keep_alive_timeout (5: seconds after which a
    /// silent machine counts as gone), secret (better: SCONCE_STORE_SECRET), id
    #[arg(
        verbatim_doc_comment,
        long = "rdzv_conf",
        alias = "rdzv-conf",
        value_name = "KEY=VALUE,.."
    )]
    pub(super) rdzv_conf: Option<RendezvousConf>,

    /// Name of the ranks' role, which they find in ROLE_NAME [default: default]
    #[arg(long, value_name = "NAME")]
    pub(super) role: Option<String>,

    /// How often all ranks are started again after one has failed [default: 0]
    #[arg(
        long = "max_restarts",
        alias = "max-restarts",
        value_name = "N",
        help_heading = "Supervision"
    )]
    pub(super) max_restarts: Option<usize>,

    /// How often launchers of several machines look after each other; how a rank ends is noticed at once [default: 0.5]
    #[arg(
        long = "monitor_interval", alias = "monitor-interval", value_name = "SECONDS",
        value_parser = interval, help_heading = "Supervision"
    )]
    pub(super) monitor_interval: Option<Duration>,
}

/// How many machines a run may have: a number, or a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MachineCount {
    pub(super) least: usize,
    pub(super) most: usize,
}

impl MachineCount {
    /// One machine, the launcher's own.
    pub(super) const ONE: Self = Self { least: 1, most: 1 };

    /// Whether machines may leave and come while the run goes on.
    pub(super) fn is_elastic(self) -> bool {
        self.least < self.most
    }
}

impl FromStr for MachineCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "a number of machines, or MIN:MAX, is needed".to_owned();
        let (least, most) = text.split_once(':').unwrap_or((text, text));
        let least = least.trim().parse::<usize>().map_err(|_| wrong())?;
        let most = most.trim().parse::<usize>().map_err(|_| wrong())?;
        match (least, most) {
            (0, _) => Err("at least 1 machine is needed".to_owned()),
            _ if least > most => Err(format!("MIN must not be above MAX; write {most}:{least}")),
            _ => Ok(Self { least, most }),
        }
    }
}

impl fmt::Display for MachineCount {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_elastic() {
            true => write!(formatter, "{}:{}", self.least, self.most),
            false => write!(formatter, "{}", self.most),
        }
    }
}

/// How machines get their numbers, by torchrun's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum RendezvousBackend {
    /// By `--machine_rank`.
    Static,
    /// By themselves.
    C10d,
}

fn interval(text: &str) -> Result<Duration, String> {
    let wrong = "a number of seconds above 0 is needed";
    let parsed = text.parse::<f64>().map_err(|_| wrong.to_owned())?;
    match Duration::try_from_secs_f64(parsed) {
        Ok(interval) if !interval.is_zero() => Ok(interval),
        _ => Err(wrong.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_machines_is_a_number_or_a_range() {
        let count = |text: &str| text.parse::<MachineCount>().map(|count| (count.least, count.most));
        assert_eq!(count("3"), Ok((3, 3)));
        assert_eq!(count("1:4"), Ok((1, 4)));
        for wrong in ["0", "0:2", "4:1", "", "a", "1:", "1:2:3", "-1"] {
            assert!(count(wrong).is_err(), "{wrong}");
        }
    }
}
