//! What a Slurm step says of this process.
//!
//! Slurm tells a task its numbers directly, but how many tasks share its host and where the first host is only in
//! compressed lists (`4(x2),3` and `node[003-005,7]`).

use super::{Number, Place, World};
use crate::environment::{self as variable, Reader};
use crate::{Error, Result};

/// A Slurm step as seen by one of its tasks.
pub(super) struct Step {
    pub(super) rank: Number,
    pub(super) size: Number,
    pub(super) local_rank: Option<Number>,
    pub(super) local_size: Option<Number>,
    pub(super) node_rank: Option<Number>,
    /// The host that has rank 0 under Slurm's own distributions, if its list could be read.
    pub(super) first_host: Option<String>,
}

impl Step {
    /// Reads the step's variables; `None` if there is neither rank nor size.
    pub(super) fn read(reader: &Reader<'_>) -> Result<Option<Self>> {
        let rank = Number::read(reader, variable::SLURM_PROCID)?;
        // An interactive step of one task runs inside a job of many: the step's own count goes first.
        let step_size = Number::read(reader, variable::SLURM_STEP_NUM_TASKS)?;
        let size = match step_size {
            Some(size) => Some(size),
            None => Number::read(reader, variable::SLURM_NTASKS)?,
        };
        let (rank, size) = match (rank, size) {
            (None, None) => return Ok(None),
            (Some(rank), Some(size)) => (rank, size),
            (Some(rank), None) => return Err(unset(variable::SLURM_NTASKS, &rank.to_string())),
            (None, Some(size)) => return Err(unset(variable::SLURM_PROCID, &size.to_string())),
        };
        let in_step = step_size.is_some()
            || [
                variable::SLURM_STEP_ID,
                variable::SLURM_STEP_TASKS_PER_NODE,
                variable::SLURM_STEP_NODELIST,
            ]
            .into_iter()
            .any(|name| reader.text(name).is_some());
        if !in_step && rank.value == 0 && size.value > 1 {
            // A batch script itself: it looks like rank 0, but nobody has started the others.
            return Err(unset(variable::SLURM_STEP_ID, &format!("{rank} and {size}")));
        }
        let node_rank = Number::read(reader, variable::SLURM_NODEID)?;
        let local_size = match node_rank {
            Some(node_rank) => local_size(reader, node_rank, size)?,
            None => None,
        };
        let hosts = reader
            .text(variable::SLURM_STEP_NODELIST)
            .or_else(|| reader.text(variable::SLURM_JOB_NODELIST));
        Ok(Some(Self {
            rank,
            size,
            local_rank: Number::read(reader, variable::SLURM_LOCALID)?,
            local_size,
            node_rank,
            first_host: hosts.as_deref().and_then(first_host),
        }))
    }

    /// Turns the step into a world; every number must be there unless the step has one task.
    pub(super) fn world(self) -> Result<World> {
        let Self { rank, size, .. } = self;
        let step = format!("{rank} and {size}");
        let local = |given: Option<Number>, name: &'static str, alone: usize| match given {
            Some(number) => Ok(number),
            None if size.value == 1 => Ok(Number { name, value: alone }),
            None => Err(unset(name, &step)),
        };
        let node_rank = local(self.node_rank, variable::SLURM_NODEID, 0)?;
        let local_rank = local(self.local_rank, variable::SLURM_LOCALID, 0)?;
        let local_size = local(self.local_size, variable::SLURM_STEP_TASKS_PER_NODE, 1)?;
        Place {
            rank,
            size,
            local_rank,
            local_size,
            node_rank: Some(node_rank),
        }
        .world(self.first_host)
    }
}

fn unset(name: &'static str, found: &str) -> Error {
    Error::Unset {
        variable: name,
        reason: format!(
            "{found} is set, as in a Slurm job, but only `srun` starts ranks; start the program with `srun`, or unset the \
             SLURM_ variables for a single process"
        ),
    }
}

fn local_size(reader: &Reader<'_>, node: Number, size: Number) -> Result<Option<Number>> {
    for name in [variable::SLURM_STEP_TASKS_PER_NODE, variable::SLURM_TASKS_PER_NODE] {
        let Some(text) = reader.text(name) else { continue };
        let counts = TaskCounts::parse(&text, node.value).ok_or_else(|| Error::Environment {
            variable: name,
            value: text.clone(),
            reason: "not a list of task counts; expected a form like `4(x2),3`".to_owned(),
        })?;
        if counts.sum != size.value {
            return Err(Error::Contradiction {
                first: format!("{name}={text}"),
                second: size.to_string(),
                reason: format!(
                    "the first adds up to {} tasks; start the step with `srun` and its own counts",
                    counts.sum
                ),
            });
        }
        return match counts.here {
            Some(value) => Ok(Some(Number { name, value })),
            None => Err(Error::Contradiction {
                first: format!("{name}={text}"),
                second: node.to_string(),
                reason: format!("the first lists {} hosts, and they count from 0", counts.hosts),
            }),
        };
    }
    Ok(None)
}

/// What `4(x2),3` says: four tasks on each of two hosts, then three on one.
struct TaskCounts {
    hosts: usize,
    sum: usize,
    /// The count of the host asked for, if it is in the list.
    here: Option<usize>,
}

impl TaskCounts {
    fn parse(text: &str, host: usize) -> Option<Self> {
        let mut counts = Self {
            hosts: 0,
            sum: 0,
            here: None,
        };
        for part in text.split(',') {
            let (tasks, repeat) = match part.trim().split_once("(x") {
                Some((tasks, repeat)) => (tasks, repeat.strip_suffix(')')?.parse().ok()?),
                None => (part.trim(), 1),
            };
            let tasks: usize = tasks.parse().ok()?;
            if (counts.hosts..counts.hosts.checked_add(repeat)?).contains(&host) {
                counts.here = Some(tasks);
            }
            counts.hosts += repeat;
            counts.sum = counts.sum.checked_add(tasks.checked_mul(repeat)?)?;
        }
        Some(counts)
    }
}

/// The first host of a list such as `node[003-005,7],login1`: here `node003`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let plain = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..plain]);
        if !rest[plain..].starts_with('[') {
            break;
        }
        let (range, after) = rest[plain + 1..].split_once(']')?;
        let first = range.split(['-', ',']).next().filter(|first| !first.is_empty())?;
        host.push_str(first);
        rest = after;
    }
    let is_name = |character: char| character.is_ascii_alphanumeric() || "-._".contains(character);
    (!host.is_empty() && host.chars().all(is_name)).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_host_of_a_node_list_keeps_leading_zeros() {
        let cases = [
            ("node7", Some("node7")),
            ("node[003-005,7]", Some("node003")),
            ("node[7,3-5],login1", Some("node7")),
            ("a1,a[2-3]", Some("a1")),
            ("rack[1-2]node[04-05]", Some("rack1node04")),
            ("gpu[1-2]-ib.cluster", Some("gpu1-ib.cluster")),
            ("node[", None),
            ("node[]", None),
            ("", None),
            (",node1", None),
            ("no de", None),
        ];
        for (list, expected) in cases {
            assert_eq!(first_host(list).as_deref(), expected, "{list:?}");
        }
    }

    #[test]
    fn task_counts_expand_repeats() {
        let here = |host| TaskCounts::parse("4(x2),3", host).map(|counts| (counts.hosts, counts.sum, counts.here));
        assert_eq!(here(0), Some((3, 11, Some(4))));
        assert_eq!(here(1), Some((3, 11, Some(4))));
        assert_eq!(here(2), Some((3, 11, Some(3))));
        assert_eq!(here(3), Some((3, 11, None)));
        for text in [
            "",
            "4(x2",
            "4(2)",
            "x",
            "4,,3",
            "-1",
            "4(x99999999999999999999)",
            "9999999999(x9999999999)",
        ] {
            assert!(TaskCounts::parse(text, 0).is_none(), "{text:?}");
        }
    }
}
