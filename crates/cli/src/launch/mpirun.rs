//! `sconce launch --backend mpi`: hands the start of the ranks to `mpirun`, which knows hosts and fabric.
//!
//! Only `mpirun` can make a world of MPI's: ranks that are started one by one are worlds of one. So the launcher checks the
//! command line, says what the ranks inherit, and supervises `mpirun` as it would a rank: it passes output on by rank
//! ([`rank_tags`](super::rank_tags)) and signals to `mpirun`, whose exit code is the job's.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::arguments::Arguments;
use super::cpu_affinity;
use super::environment::JobEnvironment;
use super::host_topology::HostTopology;
use super::program;
use super::surroundings::Machines;
use crate::command_error::CommandError;
use sconce_collectives::Backend;

/// Whose `mpirun` it is: they differ in flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    OpenMpi,
    /// MPICH, Intel MPI and their relatives, which hand the environment on by themselves.
    Hydra,
}

/// The `mpirun` of this host, and which hosts it shall use.
#[derive(Debug)]
pub(super) struct Mpirun {
    program: PathBuf,
    family: Family,
    hostfile: Option<PathBuf>,
}

/// The backend that the flags, or else the variables that the ranks inherit, ask for; `of_ranks` is what the ranks will find.
///
/// # Errors
/// When they contradict each other, or the variable names no backend.
pub(super) fn backend(
    arguments: &Arguments,
    of_ranks: impl Fn(&str) -> Option<String>,
) -> Result<Backend, CommandError> {
    match (arguments.backend, &arguments.mpirun_hostfile) {
        (Some(backend), Some(_)) if backend.backend() != Backend::Mpi => {
            Err(CommandError::usage("--mpirun_hostfile needs --backend mpi"))
        }
        (_, Some(_)) => Ok(Backend::Mpi),
        (Some(backend), None) => Ok(backend.backend()),
        (None, None) => Backend::from_lookup(of_ranks).map_err(CommandError::usage),
    }
}

impl Mpirun {
    /// Finds `mpirun` and checks what it cannot be told.
    ///
    /// # Errors
    /// Without an `mpirun`, without the hostfile, and with flags about what `mpirun` does in its own way.
    pub(super) fn find(arguments: &Arguments, machines: &Machines) -> Result<Self, CommandError> {
        let idle = [
            ("--main_process_ip", arguments.main_process_ip.is_some()),
            ("--main_process_port", arguments.main_process_port.is_some()),
            ("--num_machines", !machines.is_alone()),
            ("--max_restarts", arguments.max_restarts() > 0),
        ];
        let idle = idle.into_iter().find_map(|(flag, given)| given.then_some(flag));
        if let Some(flag) = idle.or_else(|| arguments.logs.any()) {
            let error = CommandError::usage(format!("{flag} has no effect with --backend mpi"));
            return Err(error.hint("mpirun starts and supervises the ranks; leave the flag out"));
        }
        if let Some(file) = &arguments.mpirun_hostfile
            && !file.is_file()
        {
            let error = CommandError::usage(format!("there is no hostfile {}", file.display()));
            return Err(error.hint("it has a line for each host, such as `node1 slots=4`"));
        }
        let program = program::find("mpirun".as_ref(), std::env::var_os("PATH")).map_err(|_| {
            CommandError::usage("no program mpirun in PATH").hint(
                "install the MPI that the program was built with (Debian: openmpi-bin), or leave --backend mpi out for \
                 ranks on this host",
            )
        })?;
        let version = Command::new(&program).arg("--version").output();
        let version = version.map_err(|reason| CommandError::failure(format!("cannot start mpirun: {reason}")))?;
        let is_open_mpi = String::from_utf8_lossy(&version.stdout).contains("Open MPI");
        Ok(Self {
            program,
            family: if is_open_mpi { Family::OpenMpi } else { Family::Hydra },
            hostfile: arguments.mpirun_hostfile.clone(),
        })
    }

    /// How many of `ranks` some host gets at least; `None` without a hostfile, where a batch system may know of hosts.
    pub(super) fn ranks_per_host(&self, ranks: usize) -> Option<usize> {
        self.hostfile.as_deref().map(|file| ranks.div_ceil(hosts_in(file)))
    }

    /// How many of this host's hardware threads `mpirun` is to bind each rank to, with `per_host` ranks on a host.
    ///
    /// # Errors
    /// Why it is not to bind them, as a notice for the user.
    pub(super) fn binding(&self, host: &HostTopology, per_host: usize) -> Result<usize, String> {
        let allowed = cpu_affinity::allowed()?;
        match (self.family, allowed.len()) {
            (Family::Hydra, _) => Err("it is known for Open MPI's mpirun only how it binds them".into()),
            // It knows the limits of a container, but not those of a process.
            (_, cores) if cores != host.cores() => Err(format!(
                "mpirun would use the host's {} cores, and this process may use {cores} of them",
                host.cores()
            )),
            (_, cores) if per_host > cores => Err(format!("{per_host} ranks have {cores} core(s) in common")),
            (_, cores) => Ok(cores / per_host),
        }
    }

    /// The file of `mpirun`.
    pub(super) fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the command that starts the ranks, each bound to as many hardware threads as `binding` says.
    pub(super) fn command(
        &self,
        ranks: usize,
        binding: Option<usize>,
        environment: &JobEnvironment,
        executable: &Path,
        program_arguments: &[OsString],
    ) -> Command {
        let mut command = Command::new(&self.program);
        command.args(self.flags(ranks, binding, environment.names()));
        command.arg(executable).args(program_arguments);
        environment.apply(&mut command);
        command
    }

    fn flags<'a>(
        &self,
        ranks: usize,
        binding: Option<usize>,
        variables: impl Iterator<Item = &'a str>,
    ) -> Vec<OsString> {
        let mut flags: Vec<OsString> = vec!["-n".into(), ranks.to_string().into()];
        let hostfile = self.hostfile.as_ref().map(|file| file.clone().into_os_string());
        match self.family {
            Family::OpenMpi => {
                flags.push("--tag-output".into());
                match binding {
                    Some(threads) => {
                        let map = format!("slot:PE={threads}");
                        let words = ["--use-hwthread-cpus", "--bind-to", "hwthread", "--map-by"];
                        flags.extend(words.map(OsString::from));
                        flags.push(map.into());
                    }
                    // Bound to one core, as is its default, a rank's threads would share it.
                    None => flags.extend(["--bind-to".into(), "none".into()]),
                }
                match hostfile {
                    Some(file) => flags.extend(["--hostfile".into(), file]),
                    // On this host any number of ranks goes, as without MPI.
                    None => flags.push("--oversubscribe".into()),
                }
                for name in variables {
                    flags.extend(["-x".into(), name.into()]);
                }
            }
            Family::Hydra => flags.extend(hostfile.into_iter().flat_map(|file| ["-f".into(), file])),
        }
        flags
    }
}

/// The number of hosts that a hostfile names, at least 1.
fn hosts_in(file: &Path) -> usize {
    let text = fs::read_to_string(file).unwrap_or_default();
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    let mut hosts = Vec::from_iter(lines.filter_map(|line| line.split([' ', '\t', ':']).next()));
    hosts.retain(|host| !host.is_empty());
    hosts.sort_unstable();
    hosts.dedup();
    hosts.len().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(family: Family, hostfile: Option<&str>, binding: Option<usize>) -> String {
        let mpirun = Mpirun {
            program: "mpirun".into(),
            family,
            hostfile: hostfile.map(PathBuf::from),
        };
        let flags = mpirun.flags(4, binding, ["A", "B"].into_iter());
        flags.join(" ".as_ref()).into_string().unwrap()
    }

    #[test]
    fn each_family_is_told_ranks_hosts_and_variables_in_its_own_way() {
        assert_eq!(
            flags(Family::OpenMpi, None, None),
            "-n 4 --tag-output --bind-to none --oversubscribe -x A -x B"
        );
        let with_hosts = "-n 4 --tag-output --bind-to none --hostfile hosts -x A -x B";
        assert_eq!(flags(Family::OpenMpi, Some("hosts"), None), with_hosts);
        assert_eq!(flags(Family::Hydra, Some("hosts"), None), "-n 4 -f hosts");
        let bound =
            "-n 4 --tag-output --use-hwthread-cpus --bind-to hwthread --map-by slot:PE=3 --oversubscribe -x A -x B";
        assert_eq!(flags(Family::OpenMpi, None, Some(3)), bound);
    }

    #[test]
    fn hosts_are_counted_once_and_comments_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("hosts");
        fs::write(&file, "# cluster\nnode1 slots=4\nnode2:4\n\nnode1 slots=2 # again\n").unwrap();
        assert_eq!(hosts_in(&file), 2);
        assert_eq!(hosts_in(&folder.path().join("none")), 1);
    }
}
