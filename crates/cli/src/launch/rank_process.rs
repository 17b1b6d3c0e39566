//! One rank as a process: started, signalled with all that it has spawned, and never left behind.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, getpid, kill_process, kill_process_group, pidfd_open,
    set_child_subreaper, waitid, waitpid,
};
use signal_hook::low_level::signal_name;

use super::parent_death;

/// The process group that a rank runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Group {
    /// A group of the rank's own: a signal reaches the rank and its children, and nothing else.
    Own,
    /// The same for `mpirun`, which gives its ranks groups of theirs and ends them itself. Those that it leaves behind
    /// become children of the launcher's.
    Job,
    /// The launcher's group, for a single rank that reads from the terminal: a terminal stops any other group that
    /// does. Ctrl-C and Ctrl-Z then reach the rank from the terminal itself.
    Launcher,
}

/// A running or ended rank. Dropping it kills the rank and, in a group of its own, all that is left of that group.
#[derive(Debug)]
pub(super) struct RankProcess {
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
    group: Group,
}

impl RankProcess {
    /// Starts `command`. Must be called on the launcher's main thread (see [`parent_death`]).
    ///
    /// # Errors
    /// When the system cannot start the process.
    pub(super) fn spawn(mut command: Command, group: Group) -> io::Result<Self> {
        if group != Group::Launcher {
            command.process_group(0);
        }
        if group == Group::Job {
            set_child_subreaper(Some(getpid()))?;
        }
        parent_death::end_with_launcher(&mut command);
        let mut child = command.spawn()?;
        let pid = Pid::from_child(&child);
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self {
                child,
                pid,
                pidfd,
                group,
            }),
            Err(error) => {
                let _ = child.kill().and_then(|()| child.wait());
                Err(error.into())
            }
        }
    }

    /// The process id of the rank.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The group that the rank runs in.
    pub(super) fn group(&self) -> Group {
        self.group
    }

    /// A descriptor that becomes readable when the rank ends.
    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The process, for taking its pipes.
    pub(super) fn child_mut(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Sends `signal` to the rank and, in a group of its own, to its children, also those that have outlived it.
    pub(super) fn signal(&self, signal: Signal) {
        // The process is not waited for before it is dropped, so its id cannot name another process or group yet. The
        // only failure left is that nothing of it runs any more, which is as good.
        let _ = match self.group {
            Group::Own | Group::Job => kill_process_group(self.pid, signal),
            Group::Launcher => kill_process(self.pid, signal),
        };
    }

    /// How the rank ended, if it has. It stays waitable, which keeps its id from being used again.
    ///
    /// # Errors
    /// When the system denies the answer.
    pub(super) fn end(&self) -> io::Result<Option<End>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let Some(status) = waitid(WaitId::Pid(self.pid), options)? else {
            return Ok(None);
        };
        Ok(status
            .exit_status()
            .map(End::Code)
            .or(status.terminating_signal().map(End::Signal)))
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
        if self.group == Group::Job {
            kill_children();
        }
    }
}

/// Kills the children of this process, and theirs as they become its own.
fn kill_children() {
    loop {
        let children = children();
        if children.is_empty() {
            return;
        }
        for child in children {
            // Nobody else waits for it, so its id is its own until then.
            let _ = kill_process(child, Signal::KILL);
            let _ = waitpid(Some(child), WaitOptions::empty());
        }
    }
}

/// The children of all threads of this process; none where the kernel does not list them.
fn children() -> Vec<Pid> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let numbers = lists.flat_map(|list| {
        list.split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect::<Vec<_>>()
    });
    numbers.filter_map(Pid::from_raw).collect()
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// By itself, with this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl End {
    /// Whether the process said that all went well.
    pub(super) fn is_success(self) -> bool {
        self == Self::Code(0)
    }

    /// The code with which a shell would tell this end: 128 + N for signal N.
    pub(super) fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        };
        // Exit codes and signal numbers have 8 and 7 bits. A failure must not be told as 0, whatever comes.
        u8::try_from(code).unwrap_or(1)
    }
}

impl fmt::Display for End {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(formatter, "exited with code {code}"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(formatter, "killed by signal {signal} ({name})"),
                None => write!(formatter, "killed by signal {signal}"),
            },
        }
    }
}
