//! The signals that tell the launcher to stop, caught so that they can be passed on to the ranks.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::backend::SignalDelivery;
use signal_hook::iterator::exfiltrator::SignalOnly;

/// Catches SIGINT, SIGTERM, SIGHUP and SIGQUIT, and SIGTSTP (Ctrl-Z), from its creation on.
///
/// Signals that the launcher was started with ignored stay so: `nohup sconce launch` must survive SIGHUP.
#[derive(Debug)]
pub(super) struct StopSignals {
    delivery: SignalDelivery<UnixStream, SignalOnly>,
}

impl StopSignals {
    /// Begins to catch the signals.
    ///
    /// # Errors
    /// When the system refuses a handler or a pair of sockets.
    pub(super) fn catch() -> io::Result<Self> {
        let ignored = ignored_signals().unwrap_or(0);
        let caught = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP];
        let caught = caught.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
        let (read, write) = UnixStream::pair()?;
        Ok(Self {
            delivery: SignalDelivery::with_pipe(read, write, SignalOnly, caught)?,
        })
    }

    /// A descriptor that becomes readable when a signal has come.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.delivery.get_read().as_fd()
    }

    /// The signals that have come since the last call.
    pub(super) fn take(&mut self) -> Vec<Signal> {
        self.delivery.pending().filter_map(Signal::from_named_raw).collect()
    }
}

/// Makes sure that ended children stay until they are waited for.
///
/// A parent that ignores SIGCHLD hands that down, and the kernel then discards how children have ended.
///
/// # Errors
/// When the system refuses a handler.
pub(super) fn keep_ended_children() -> io::Result<()> {
    signal_hook::flag::register(SIGCHLD, Arc::new(AtomicBool::new(false))).map(|_| ())
}

/// The set of signals that this process ignores, signal N as bit N - 1.
fn ignored_signals() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}
