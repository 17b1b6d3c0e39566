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
            told(&text).unwrap_or_else(|| format!("it does not tell its version ({})", output.status))
        }
        Err(reason) => format!("it cannot be started: {reason}"),
    };
    format!("{version}, {}", path.display())
}

/// What of the answer to `--version` names the program and its version.
fn told(text: &str) -> Option<String> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next()?;
    // Open MPI says both in the first line, MPICH's relatives the version in the second.
    let version = lines.find(|line| line.trim_start().starts_with("Version:"));
    let words = first.split_whitespace();
    let words = words.chain(version.into_iter().flat_map(str::split_whitespace));
    Some(words.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::told;

    #[test]
    fn program_and_version_are_found_in_the_answers_of_both_families() {
        let open_mpi = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n";
        assert_eq!(told(open_mpi).as_deref(), Some("mpirun (Open MPI) 4.1.4"));
        let hydra = "HYDRA build details:\n    Version:                                 4.0.2\n    CC:  gcc\n";
        assert_eq!(told(hydra).as_deref(), Some("HYDRA build details: Version: 4.0.2"));
        assert_eq!(told(""), None);
    }
}
