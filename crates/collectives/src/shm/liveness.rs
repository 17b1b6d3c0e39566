//! Who of the peers is still alive: one process descriptor (`pidfd`) per peer process, polled only while waiting.

use super::layout::LEFT;
use super::segment::Segment;
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Acquire;

/// A watch over the processes of the other ranks.
#[derive(Debug)]
pub(super) struct Liveness {
    peers: Vec<(usize, OwnedFd)>,
}

impl Liveness {
    /// Watches nobody; for ranks that are threads of one process, and before the peers are known.
    pub(super) fn of_threads() -> Self {
        Self { peers: Vec::new() }
    }

    /// Watches the processes that have registered in the segment, all of which are still alive.
    pub(super) fn of_processes(segment: &Segment) -> Result<Self> {
        let own = rustix::process::getpid();
        let mut peers = Vec::new();
        for rank in 0..segment.layout().ranks {
            let id = segment.line(rank).process.load(Acquire);
            let Some(pid) = Pid::from_raw(id as i32).filter(|pid| *pid != own) else {
                continue;
            };
            let descriptor = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| Error::Io {
                context: format!(
                    "watching rank {rank} (process {id}); ranks of one host must share a process namespace"
                ),
                source: errno.into(),
            })?;
            peers.push((rank, descriptor));
        }
        Ok(Self { peers })
    }

    /// Returns a rank that is gone although it had not left the group.
    pub(super) fn dead(&self, segment: &Segment) -> Option<usize> {
        if self.peers.is_empty() {
            return None;
        }
        let mut polled: Vec<_> = self
            .peers
            .iter()
            .map(|(_, fd)| PollFd::new(fd, PollFlags::IN))
            .collect();
        let immediately = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut polled, Some(&immediately)).unwrap_or(0) == 0 {
            return None;
        }
        let ended = polled
            .iter()
            .zip(&self.peers)
            .filter(|(fd, _)| !fd.revents().is_empty());
        ended
            .map(|(_, (rank, _))| *rank)
            .find(|rank| segment.line(*rank).presence.load(Acquire) != LEFT)
    }
}
