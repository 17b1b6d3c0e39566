//! `sconce completions`: a script that teaches a shell the commands and flags, from the definition that parses them.

use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

use crate::cli;
use crate::command_error::CommandError;
use crate::terminal::print;

const WHERE: &str = "\
Where each shell looks for it:
  bash:       sconce completions bash > ~/.local/share/bash-completion/completions/sconce
  zsh:        sconce completions zsh > \"${fpath[1]}/_sconce\"
  fish:       sconce completions fish > ~/.config/fish/completions/sconce.fish
  elvish:     sconce completions elvish >> ~/.config/elvish/rc.elv
  powershell: sconce completions powershell >> $PROFILE";

/// Print a script that completes commands and flags of sconce in a shell
#[derive(Debug, Args)]
#[command(after_help = WHERE)]
pub(crate) struct Arguments {
    /// The shell
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// Runs `sconce completions`.
///
/// # Errors
/// When stdout cannot be written to.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut cli::definition(), "sconce", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
