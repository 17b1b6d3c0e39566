//! The `sconce` binary.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    sconce_cli::run()
}
