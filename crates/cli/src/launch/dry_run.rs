//! `--dry_run`: what would be started, as commands that a shell understands.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::process::{Command, ExitCode};

use super::alone;
use super::main_process::MainProcess;
use super::place::Place;
use super::round::Job;
use super::surroundings::Machines;
use crate::command_error::CommandError;
use crate::terminal::print;
use sconce_core::environment::TORCHELASTIC_ERROR_FILE;

/// Prints the changed environment and the command of every rank of this machine.
///
/// No store is started, so the ranks are not led to one: started by hand, rank 0 hosts it itself.
///
/// # Errors
/// When nothing can be printed, or the address of rank 0 is not this host's.
pub(super) fn print_ranks(job: &Job<'_>, machines: &Machines) -> Result<ExitCode, CommandError> {
    let place = if machines.is_alone() {
        let arguments = job.arguments;
        let main = MainProcess::choose(arguments.main_process_ip.as_deref(), arguments.main_process_port)?;
        alone::place(machines.local_ranks, &main, None, &machines.run_id(), 0)
    } else {
        Place {
            run_id: machines.run_id(),
            round: 0,
            restarts: 0,
            // Those that take numbers by themselves have none yet.
            machine: machines.rank.unwrap_or(0),
            machines: machines.count.most,
            local_ranks: machines.local_ranks,
            main_address: machines.main_host.clone(),
            main_port: machines.main_port.saturating_add(1),
            store: None,
        }
    };
    let environment = job.environment(&place);
    let mut text = String::new();
    for local_rank in 0..place.local_ranks {
        let mut command = job.command(&place, &environment, local_rank, "".as_ref());
        command.env_remove(TORCHELASTIC_ERROR_FILE);
        let _ = writeln!(text, "# rank {} of {}", place.rank(local_rank), place.world_size());
        text += &shell_command(&command, job.words());
    }
    print(&text).map(|()| ExitCode::SUCCESS)
}

/// Prints the changed environment and the command of `mpirun`.
///
/// # Errors
/// When nothing can be printed.
pub(super) fn print_job(command: &Command) -> Result<ExitCode, CommandError> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    print(&shell_command(command, words.map(OsStr::to_owned))).map(|()| ExitCode::SUCCESS)
}

/// `env` with what the command's environment changes, one variable a line, and the words.
fn shell_command(command: &Command, words: impl Iterator<Item = OsString>) -> String {
    let own = |name: &OsStr| std::env::var_os(name);
    let changes = || {
        command
            .get_envs()
            .filter(|(name, value)| own(name).as_deref() != *value)
    };
    let mut text = "env".to_owned();
    // `env` takes what it is to unset before what it is to set.
    for (name, _) in changes().filter(|(_, value)| value.is_none()) {
        let _ = write!(text, " \\\n  -u {}", quoted(name));
    }
    for (name, value) in changes() {
        if let Some(value) = value {
            let _ = write!(text, " \\\n  {}={}", name.to_string_lossy(), quoted(value));
        }
    }
    let words = Vec::from_iter(words.map(|word| quoted(&word)));
    let _ = writeln!(text, " \\\n  {}", words.join(" "));
    text
}

/// A word as a shell must read it.
fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "_-./:=,@%+".contains(character);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_words_that_were_meant() {
        for word in ["plain", "", "two words", "it's", "$HOME", "a\nb", "-x=1", "*"] {
            let printed = Command::new("/bin/sh")
                .args(["-c", &format!("printf %s {}", quoted(word.as_ref()))])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(printed.stdout).unwrap(), word);
        }
    }
}
