//! MPI: what this program was built with, and the `mpirun` that would start ranks.

use std::process::{Command, Stdio};

use super::Report;
use crate::launch::program;

pub(super) fn tell(report: &mut Report) {
    report.add("mpi", library());
    report.add("mpirun", mpirun());
}

#[cfg(feature = "mpi")]
fn library() -> String {
    sconce_collectives::mpi::library_version().unwrap_or_else(|reason| format!("none: {reason}"))
}

#[cfg(not(feature = "mpi"))]
fn library() -> String {
    "none: this program was built without the feature mpi".to_owned()
}

fn mpirun() -> String {
    let Ok(path) = program::find("mpirun".as_ref(), std::env::var_os("PATH")) else {
        return "none in PATH".to_owned();
    };
    let asked = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
    let version = match asked {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            // Open MPI says it in the first line, MPICH's relatives in the second.
            let mut lines = text.lines().filter(|line| !line.trim().is_empty());
            let told = lines
                .clone()
                .find(|line| line.contains("Version:"))
                .or_else(|| lines.next());
            let told = told.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
            told.unwrap_or_else(|| format!("it does not tell its version ({})", output.status))
        }
        Err(reason) => format!("it cannot be started: {reason}"),
    };
    format!("{version}, {}", path.display())
}
