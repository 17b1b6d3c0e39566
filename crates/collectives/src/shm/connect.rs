//! How processes of one host become a group: they meet at a Unix socket whose name goes through the store.
//!
//! Rank 0 makes the segment, listens at an abstract socket with a random name and publishes that name. Every other
//! rank connects, says its number and gets the segment's descriptor; the connection stays as its link to rank 0. Both
//! sides check that the other runs under the same user.

use super::communicator::communicator;
use super::descriptors::{self, Links, io};
use super::group::Group;
use super::layout::Layout;
use super::segment::Segment;
use crate::store::StoreClient;
use crate::{Communicator, Error, Options, Result, World, single};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where rank 0 publishes the name of its socket.
const KEY: &str = "sconce/shm/socket";

/// Makes the group of all ranks of `world`, which are processes of this host.
///
/// # Errors
/// [`Error::Unsupported`] when the world spans hosts; [`Error::Timeout`] naming ranks that do not come in time; system
/// errors.
pub fn connect(world: &World, store: &StoreClient, options: &Options) -> Result<Arc<dyn Communicator>> {
    if world.size == 1 {
        return Ok(single());
    }
    if world.local_size != world.size {
        return Err(Error::Unsupported {
            what: format!(
                "shared memory for {} ranks of which {} are on this host",
                world.size, world.local_size
            ),
            hint: "several hosts need the mpi backend: set SCONCE_BACKEND=mpi, or launch with --backend mpi".into(),
        });
    }
    let deadline = Instant::now() + options.timeout;
    let (segment, links) = if world.rank == 0 {
        host(world, store, deadline)?
    } else {
        join(world, store, deadline)?
    };
    let group = Group::attach("world".into(), world.rank, world.size, segment, links, options)?;
    Ok(communicator(group))
}

fn host(world: &World, store: &StoreClient, deadline: Instant) -> Result<(OwnedFd, Links)> {
    let segment = Segment::create_file(&Layout { ranks: world.size })?;
    let name = format!("sconce-{:032x}", rand::random::<u128>());
    let address = SocketAddr::from_abstract_name(&name).map_err(|e| io("naming a socket", e))?;
    let listener = UnixListener::bind_addr(&address).map_err(|e| io("listening for the other ranks", e))?;
    store.set(KEY, name.as_bytes())?;
    let mut peers: Vec<Option<UnixStream>> = (1..world.size).map(|_| None).collect();
    let start = Instant::now();
    while peers.iter().any(Option::is_none) {
        if !readable(&listener, deadline)? {
            return Err(Error::Timeout {
                rank: 0,
                seconds: start.elapsed().as_secs_f64(),
                operation: "the start of the group".into(),
                missing: peers
                    .iter()
                    .enumerate()
                    .filter(|(_, peer)| peer.is_none())
                    .map(|(n, _)| n + 1)
                    .collect(),
            });
        }
        let (socket, _) = listener.accept().map_err(|e| io("accepting another rank", e))?;
        if let Some(rank) = greeted(&socket, deadline)
            && let Some(place @ None) = rank.checked_sub(1).and_then(|place| peers.get_mut(place))
        {
            descriptors::send(&socket, rank as u64, &[segment.as_fd()])?;
            *place = Some(socket);
        }
        // Anyone else is a stranger: its connection closes here.
    }
    // Before any rank can leave this group and meet again for another, whose socket has another name.
    store.delete(KEY)?;
    Ok((segment, Links::Root(peers.into_iter().flatten().collect())))
}

/// Returns the number that a peer of the same user gives.
fn greeted(mut socket: &UnixStream, deadline: Instant) -> Option<usize> {
    let mut bytes = [0; 8];
    let patience = remaining(deadline).min(Duration::from_secs(5));
    socket.set_read_timeout(Some(patience)).ok()?;
    is_same_user(socket).then_some(())?;
    socket.read_exact(&mut bytes).ok()?;
    usize::try_from(u64::from_le_bytes(bytes)).ok()
}

fn join(world: &World, store: &StoreClient, deadline: Instant) -> Result<(OwnedFd, Links)> {
    let context = "joining the group at rank 0's socket";
    let name = store.wait(KEY, remaining(deadline))?;
    let address = SocketAddr::from_abstract_name(&name).map_err(|e| io(context, e))?;
    let mut socket = UnixStream::connect_addr(&address).map_err(|e| io(context, e))?;
    if !is_same_user(&socket) {
        return Err(Error::Unsupported {
            what: "a group whose rank 0 runs under another user".into(),
            hint: "start all ranks as one user".into(),
        });
    }
    socket
        .write_all(&(world.rank as u64).to_le_bytes())
        .map_err(|e| io(context, e))?;
    let (_, mut files) = descriptors::receive(&socket, remaining(deadline))?;
    match files.pop() {
        Some(segment) => Ok((segment, Links::Leaf(socket))),
        None => Err(Error::Unsupported {
            what: format!("a second rank {}", world.rank),
            hint: "give every rank its own number".into(),
        }),
    }
}

fn is_same_user(socket: &UnixStream) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

fn readable(listener: &UnixListener, deadline: Instant) -> Result<bool> {
    let left = remaining(deadline);
    let timeout = Timespec {
        tv_sec: left.as_secs() as _,
        tv_nsec: left.subsec_nanos() as _,
    };
    match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => readable(listener, deadline),
        Err(errno) => Err(io("waiting for the other ranks", errno.into())),
    }
}

fn remaining(deadline: Instant) -> Duration {
    deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}
