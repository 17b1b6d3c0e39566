//! Handing memory files from one rank to the others over Unix sockets.
//!
//! Rank 0 of a group holds one socket to every other rank; whenever the group needs new shared memory, rank 0 makes the
//! file and sends its descriptor. Processes first meet at an abstract socket whose name went through the store.

use crate::{Error, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Most descriptors in one message (the kernel's limit is 253).
const MOST: usize = 250;

/// This rank's sockets within its group.
#[derive(Debug)]
pub(super) enum Links {
    /// Rank 0: a socket to each other rank, in rank order from rank 1.
    Root(Vec<UnixStream>),
    /// Any other rank: the socket to rank 0.
    Leaf(UnixStream),
}

impl Links {
    /// Makes the links of a group of `ranks` threads.
    pub(super) fn of_threads(ranks: usize) -> Result<Vec<Self>> {
        let mut root = Vec::new();
        let mut leaves = Vec::new();
        for _ in 1..ranks {
            let (ours, theirs) = UnixStream::pair().map_err(|e| io("socket pair", e))?;
            root.push(ours);
            leaves.push(Self::Leaf(theirs));
        }
        leaves.insert(0, Self::Root(root));
        Ok(leaves)
    }
}

/// Sends `value` and descriptors to one peer.
pub(super) fn send(socket: &UnixStream, value: u64, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    if descriptors.len() > MOST {
        return Err(Error::Unsupported {
            what: format!("group of {} ranks on one host", descriptors.len()),
            hint: format!("shared memory groups have at most {MOST} ranks"),
        });
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let bytes = value.to_le_bytes();
    let sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
        .map_err(|e| io("sending shared memory to a peer", e.into()))?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io("sending shared memory to a peer", short()))
    }
}

/// Receives what a peer sent with [`send`].
pub(super) fn receive(socket: &UnixStream, deadline: Duration) -> Result<(u64, Vec<OwnedFd>)> {
    let context = "receiving shared memory from rank 0";
    socket
        .set_read_timeout(Some(deadline.max(Duration::from_millis(1))))
        .map_err(|e| io(context, e))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 8];
    let message = loop {
        match recvmsg(
            socket.as_fd(),
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other.map_err(|e| io(context, e.into()))?,
        }
    };
    if message.bytes != bytes.len() {
        return Err(io(context, short()));
    }
    let mut received = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = part {
            received.extend(descriptors);
        }
    }
    Ok((u64::from_le_bytes(bytes), received))
}

pub(super) fn io(context: &str, source: std::io::Error) -> Error {
    Error::Io {
        context: context.into(),
        source,
    }
}

fn short() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the peer closed its socket")
}
