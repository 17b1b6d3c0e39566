//! Who is in the world.
//!
//! Launchers agree on what a rank is and on little else. This module turns whatever a launcher has put into the
//! environment into one checked [`World`], once, so that nothing behind it reads `RANK` and friends again.

mod slurm;

use std::net::IpAddr;

use crate::environment::{self as variable, Reader};
use crate::{Error, Result};
use slurm::Step;

/// Port of the rendezvous store where `MASTER_PORT` is not set; torchrun's default.
const DEFAULT_MASTER_PORT: u16 = 29500;
/// Address of rank 0 where nothing says otherwise.
const DEFAULT_MASTER_ADDR: &str = "127.0.0.1";

/// This process's place among the ranks of a run.
///
/// # Where it comes from
///
/// [`World::from_env`] knows four families of variables and takes the first that has its rank or its size set:
///
/// | order | family | rank, size | local rank, local size | host's number |
/// | --- | --- | --- | --- | --- |
/// | 1 | torchrun, `sconce launch` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `GROUP_RANK` or `NODE_RANK` |
/// | 2 | Open MPI | `OMPI_COMM_WORLD_RANK`, `..._SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `..._LOCAL_SIZE` | `NODE_RANK` |
/// | 3 | PMI (MPICH, Intel MPI) | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | `NODE_RANK` |
/// | 4 | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` | `SLURM_NODEID` |
/// | 5 | none: a world of one | | | |
///
/// - The family taken must have both rank and size.
/// - Local numbers that it lacks come from a Slurm step of the same rank and size if there is one. Otherwise they
///   equal rank and size if the world is known to be on one host: its size or local size says so, or the family sets
///   neither local number and `MASTER_ADDR` is loopback (for the first family: or unset). Otherwise their absence is
///   an error.
/// - A host's number that is not given is 0 on one host, and follows from rank and local size where every host has
///   equally many, consecutive ranks. Otherwise its absence is an error.
/// - Two complete families among the first three that disagree on rank or size are an error. Slurm is not compared:
///   a launcher inside a Slurm step, one task per host, is normal.
/// - `MASTER_ADDR` and `MASTER_PORT` alone make no distributed run (`accelerate launch --cpu` sets them for a single
///   process). `MASTER_ADDR` defaults to the first host of a Slurm step that spans several, else to 127.0.0.1;
///   `MASTER_PORT` to 29500.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// This process's number, from 0 to `size - 1`.
    pub rank: usize,
    /// How many ranks there are in all.
    pub size: usize,
    /// This process's number on its own host.
    pub local_rank: usize,
    /// How many ranks this host has.
    pub local_size: usize,
    /// The number of this host.
    pub node_rank: usize,
    /// Host name or address of rank 0.
    pub master_addr: String,
    /// Port of the rendezvous store on `master_addr`.
    pub master_port: u16,
}

impl World {
    /// Describes a world of one process.
    pub fn single() -> Self {
        Self {
            rank: 0,
            size: 1,
            local_rank: 0,
            local_size: 1,
            node_rank: 0,
            master_addr: DEFAULT_MASTER_ADDR.to_owned(),
            master_port: DEFAULT_MASTER_PORT,
        }
    }

    /// Reads this process's environment by the rule [above](Self#where-it-comes-from).
    ///
    /// # Errors
    ///
    /// [`Error::Unset`], [`Error::Environment`] or [`Error::Contradiction`], each with the names of the variables: one
    /// that is needed is missing, is not a number, or cannot hold together with another.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(variable::of_process)
    }

    /// Reads an environment given as a function from name to value, by the same rule.
    ///
    /// ```
    /// # use sconce_collectives::World;
    /// let world = World::from_lookup(|name| match name {
    ///     "RANK" => Some("1".to_owned()),
    ///     "WORLD_SIZE" => Some("2".to_owned()),
    ///     _ => None,
    /// })?;
    /// assert_eq!((world.rank, world.size, world.local_rank), (1, 2, 1));
    /// # Ok::<(), sconce_collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`World::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let reader = Reader::new(&lookup);
        check_agreement(&reader)?;
        let mut world = match FAMILIES.iter().find(|family| family.is_present(&reader)) {
            Some(family) => family.world(&reader)?,
            None => match Step::read(&reader)? {
                Some(step) => step.world()?,
                None => Self::single(),
            },
        };
        if let Some(address) = reader.text(variable::MASTER_ADDR) {
            world.master_addr = address;
        }
        if let Some(port) = reader.text(variable::MASTER_PORT) {
            world.master_port = port
                .parse()
                .ok()
                .filter(|&port| port != 0)
                .ok_or_else(|| Error::Environment {
                    variable: variable::MASTER_PORT,
                    value: port,
                    reason: "not a port; expected a number from 1 to 65535".to_owned(),
                })?;
        }
        Ok(world)
    }

    /// Whether this process is rank 0.
    pub fn is_main(&self) -> bool {
        self.rank == 0
    }

    /// Whether this process is the first on its host.
    pub fn is_local_main(&self) -> bool {
        self.local_rank == 0
    }

    /// Whether every rank is on this host.
    pub fn is_single_host(&self) -> bool {
        self.local_size == self.size
    }
}

/// The names under which one kind of launcher announces a rank.
struct Family {
    launcher: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    node_rank: &'static [&'static str],
    /// Whether an unset `MASTER_ADDR` means one host: it does where that family's launchers set it for several.
    sets_master: bool,
}

const FAMILIES: [Family; 3] = [
    Family {
        launcher: "torchrun or sconce launch",
        rank: variable::RANK,
        size: variable::WORLD_SIZE,
        local_rank: variable::LOCAL_RANK,
        local_size: variable::LOCAL_WORLD_SIZE,
        node_rank: &[variable::GROUP_RANK, variable::NODE_RANK],
        sets_master: true,
    },
    Family {
        launcher: "Open MPI",
        rank: variable::OMPI_COMM_WORLD_RANK,
        size: variable::OMPI_COMM_WORLD_SIZE,
        local_rank: variable::OMPI_COMM_WORLD_LOCAL_RANK,
        local_size: variable::OMPI_COMM_WORLD_LOCAL_SIZE,
        node_rank: &[variable::NODE_RANK],
        sets_master: false,
    },
    Family {
        launcher: "MPICH or Intel MPI",
        rank: variable::PMI_RANK,
        size: variable::PMI_SIZE,
        local_rank: variable::MPI_LOCALRANKID,
        local_size: variable::MPI_LOCALNRANKS,
        node_rank: &[variable::NODE_RANK],
        sets_master: false,
    },
];

impl Family {
    fn is_present(&self, reader: &Reader<'_>) -> bool {
        reader.text(self.rank).is_some() || reader.text(self.size).is_some()
    }

    fn world(&self, reader: &Reader<'_>) -> Result<World> {
        let needed = |name: &'static str, other: &'static str| {
            Number::read(reader, name)?.ok_or_else(|| Error::Unset {
                variable: name,
                reason: format!(
                    "{other} is set, so {} must set both; export it, or unset {other}",
                    self.launcher
                ),
            })
        };
        let rank = needed(self.rank, self.size)?;
        let size = needed(self.size, self.rank)?;
        check_below(rank, size)?;

        // A launcher inside a Slurm step makes ranks of its own; then the step's local numbers are not the ranks'.
        let step = Step::read(reader).ok().flatten();
        let step = step.filter(|step| step.rank.value == rank.value && step.size.value == size.value);
        let local_rank = Number::read(reader, self.local_rank)?;
        let local_size = Number::read(reader, self.local_size)?;
        let local_rank = local_rank.or(step.as_ref().and_then(|step| step.local_rank));
        let local_size = local_size.or(step.as_ref().and_then(|step| step.local_size));
        let one_host = match local_size {
            _ if size.value == 1 => true,
            Some(local_size) => local_size.value == size.value,
            None => {
                local_rank.is_none_or(|local_rank| local_rank.value == rank.value)
                    && reader
                        .text(variable::MASTER_ADDR)
                        .map_or(self.sets_master, |address| is_loopback(&address))
            }
        };
        let local = |given: Option<Number>, name: &'static str, whole: Number| match given {
            Some(number) => Ok(number),
            None if one_host => Ok(Number { name, ..whole }),
            None => Err(Error::Unset {
                variable: name,
                reason: format!(
                    "{rank} and {size} are set, but nothing says how the ranks are spread over hosts; start the ranks \
                     with a launcher that sets {name}, or export it on every rank"
                ),
            }),
        };
        let local_rank = local(local_rank, self.local_rank, rank)?;
        let local_size = local(local_size, self.local_size, size)?;

        let mut node_rank = None;
        for name in self.node_rank {
            node_rank = node_rank.or(Number::read(reader, name)?);
        }
        let node_rank = node_rank.or(step.as_ref().and_then(|step| step.node_rank));
        let place = Place {
            rank,
            size,
            local_rank,
            local_size,
            node_rank,
        };
        place.world(step.and_then(|step| step.first_host))
    }
}

/// The numbers of a rank as they were found, before they are checked against each other.
struct Place {
    rank: Number,
    size: Number,
    local_rank: Number,
    local_size: Number,
    node_rank: Option<Number>,
}

impl Place {
    /// Checks the numbers against each other and fills in the host's number.
    fn world(self, first_host: Option<String>) -> Result<World> {
        let Self {
            rank,
            size,
            local_rank,
            local_size,
            ..
        } = self;
        check_below(rank, size)?;
        check_below(local_rank, local_size)?;
        if local_size.value > size.value {
            return Err(local_size.error(format!("one host cannot have more ranks than the world; {size}")));
        }
        let several_hosts = local_size.value < size.value;
        let node_rank = if several_hosts { self.node_rank()? } else { 0 };
        let first_host = first_host.filter(|_| several_hosts);
        Ok(World {
            rank: rank.value,
            size: size.value,
            local_rank: local_rank.value,
            local_size: local_size.value,
            node_rank,
            master_addr: first_host.unwrap_or_else(|| DEFAULT_MASTER_ADDR.to_owned()),
            master_port: DEFAULT_MASTER_PORT,
        })
    }

    fn node_rank(&self) -> Result<usize> {
        let Self {
            rank,
            size,
            local_rank,
            local_size,
            ..
        } = *self;
        if let Some(node_rank) = self.node_rank {
            // Every other host has at least one rank.
            let most = size.value - local_size.value;
            if node_rank.value > most {
                return Err(node_rank.error(format!(
                    "with {size} and {local_size} there are at most {} hosts",
                    most + 1
                )));
            }
            return Ok(node_rank.value);
        }
        let first_here = rank.value.checked_sub(local_rank.value);
        match first_here {
            Some(first) if first % local_size.value == 0 && size.value % local_size.value == 0 => {
                Ok(first / local_size.value)
            }
            _ => Err(Error::Unset {
                variable: variable::NODE_RANK,
                reason: format!(
                    "the number of this host does not follow from {rank}, {local_rank}, {local_size} and {size}; export \
                     it, or give every host equally many consecutive ranks (`mpirun --map-by slot`)"
                ),
            }),
        }
    }
}

/// A number and the variable it came from (or stands for).
#[derive(Clone, Copy)]
struct Number {
    name: &'static str,
    value: usize,
}

impl Number {
    fn read(reader: &Reader<'_>, name: &'static str) -> Result<Option<Self>> {
        let Some(text) = reader.text(name) else { return Ok(None) };
        match text.parse() {
            Ok(value) => Ok(Some(Self { name, value })),
            Err(_) => Err(Error::Environment {
                variable: name,
                value: text,
                reason: "not a number; expected decimal digits".to_owned(),
            }),
        }
    }

    fn error(self, reason: String) -> Error {
        Error::Environment {
            variable: self.name,
            value: self.value.to_string(),
            reason,
        }
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}={}", self.name, self.value)
    }
}

fn check_below(rank: Number, size: Number) -> Result<()> {
    if size.value == 0 {
        return Err(size.error("there must be at least one rank".to_owned()));
    }
    if rank.value >= size.value {
        return Err(rank.error(format!("ranks count from 0, so it must be below {size}")));
    }
    Ok(())
}

/// Checks that the complete families say the same of this process.
fn check_agreement(reader: &Reader<'_>) -> Result<()> {
    let mut complete: Vec<(&Family, Number, Number)> = Vec::new();
    for family in &FAMILIES {
        if let (Some(rank), Some(size)) = (Number::read(reader, family.rank)?, Number::read(reader, family.size)?) {
            complete.push((family, rank, size));
        }
    }
    let Some((first, others)) = complete.split_first() else {
        return Ok(());
    };
    for other in others {
        for (one, two) in [(first.1, other.1), (first.2, other.2)] {
            if one.value != two.value {
                return Err(Error::Contradiction {
                    first: one.to_string(),
                    second: two.to_string(),
                    reason: format!(
                        "the first is set by {}, the second by {}; start with one of them, or unset the variables of the \
                         other",
                        first.0.launcher, other.0.launcher
                    ),
                });
            }
        }
    }
    Ok(())
}

/// Whether a host as written is loopback. Names are not resolved: reading the environment waits for no network.
pub(crate) fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
