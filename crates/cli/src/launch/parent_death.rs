//! Ties a child's life to the launcher's, so that even `kill -9` of the launcher leaves no rank behind.
//!
//! Linux can send a process a signal when the thread that forked it ends (`PR_SET_PDEATHSIG`). Two limits follow:
//! ranks must be spawned from the main thread, which lives as long as the launcher; and only the ranks themselves get
//! the signal, not what they have spawned in turn. A rank's own children outlive it only when the launcher was killed
//! with SIGKILL: in every other case the launcher ends the rank's whole process group.
//!
//! This is the crate's only unsafe code.
#![allow(unsafe_code)]

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Has the process that `command` starts killed as soon as the launcher ends, however it ends.
pub(super) fn end_with_launcher(command: &mut Command) {
    let launcher = getpid();
    let request_death_signal = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The launcher may have died before the request was made: then no signal comes, but the parent has changed.
        if getppid() == Some(launcher) {
            Ok(())
        } else {
            Err(Errno::SRCH.into())
        }
    };
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe work is allowed. It makes two
    // direct system calls (prctl, getppid); it allocates nothing, takes no lock, touches no descriptor, and captures
    // one integer by copy. Its errors are plain error numbers, which are built without allocation.
    unsafe {
        command.pre_exec(request_death_signal);
    }
}
