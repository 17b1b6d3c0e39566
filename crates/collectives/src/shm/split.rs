//! Making sub-groups: rank 0 of the parent makes every segment and socket and hands them out.

use super::communicator::communicator;
use super::descriptors::{self, Links, io};
use super::group::{Group, Passage};
use super::layout::Layout;
use super::segment::Segment;
use crate::private::Private;
use crate::sub_groups::sub_groups;
use crate::{Communicator, Error, Options, Result, single};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// What a rank needs to attach to its sub-group.
#[derive(Debug)]
pub(super) struct Share {
    name: String,
    rank: usize,
    size: usize,
    /// Segment and sockets; nothing for a group of one.
    files: Option<(OwnedFd, Links)>,
}

impl Share {
    pub(super) fn attach(self, options: &Options) -> Result<Arc<dyn Communicator>> {
        let Some((segment, links)) = self.files else {
            return Ok(single());
        };
        let group = Group::attach(self.name, self.rank, self.size, segment, links, options)?;
        Ok(communicator(group))
    }
}

impl Passage<'_> {
    /// Agrees on the sub-groups and returns this rank's share of its own.
    pub(super) fn split(&mut self, color: Option<u32>, key: i64) -> Result<Option<Share>> {
        let (rank, size) = (self.group.rank, self.group.size);
        self.enter(0)?;
        let mut wishes = vec![[0i64; 2]; size];
        wishes[rank] = [color.map_or(-1, i64::from), key];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut wishes);
        let parts: Vec<_> = (0..size).map(|rank| rank * 16..(rank + 1) * 16).collect();
        self.staged_all_gather(Private::of_mut(bytes), &parts)?;

        let groups = sub_groups(&wishes);
        self.engine.splits += 1;
        let name = |color: i64| format!("{}/{}.{color}", self.group.name, self.engine.splits);
        let mut share = None;
        for (color, members) in &groups {
            let own = members.iter().position(|member| *member == rank);
            let files = self.hand_out(members)?;
            if let Some(own) = own {
                share = Some(Share {
                    name: name(*color),
                    rank: own,
                    size: members.len(),
                    files,
                });
            }
        }
        Ok(share)
    }

    /// Gives every member its files; returns this rank's own, if it is one.
    fn hand_out(&self, members: &[usize]) -> Result<Option<(OwnedFd, Links)>> {
        if members.len() < 2 {
            return Ok(None);
        }
        let own = members.iter().position(|member| *member == self.group.rank);
        let peers = match (&self.engine.links, own) {
            (Links::Root(peers), _) => peers,
            (Links::Leaf(_), None) => return Ok(None),
            (Links::Leaf(root), Some(own)) => {
                let (_, files) = descriptors::receive(root, self.group.options.timeout)?;
                return unpack(files, own).map(Some);
            }
        };
        let segment = Segment::create_file(&Layout { ranks: members.len() })?;
        let mut shares = Links::of_threads(members.len())?;
        for (number, member) in members.iter().enumerate().filter(|(number, _)| Some(*number) != own) {
            let sockets = match &shares[number] {
                Links::Root(sockets) => sockets.iter().map(AsFd::as_fd).collect(),
                Links::Leaf(socket) => vec![socket.as_fd()],
            };
            let files: Vec<_> = std::iter::once(segment.as_fd()).chain(sockets).collect();
            descriptors::send(&peers[member - 1], number as u64, &files)?;
        }
        Ok(own.map(|own| (segment, shares.swap_remove(own))))
    }
}

fn unpack(files: Vec<OwnedFd>, own: usize) -> Result<(OwnedFd, Links)> {
    let mut files = files.into_iter();
    let (Some(segment), mut sockets) = (files.next(), files.map(UnixStream::from)) else {
        return Err(io(
            "receiving a sub-group's files",
            std::io::ErrorKind::UnexpectedEof.into(),
        ));
    };
    let links = match (own, sockets.len()) {
        (0, _) => Links::Root(sockets.collect()),
        (_, 1) => Links::Leaf(sockets.next().expect("one socket")),
        (_, count) => {
            return Err(Error::Unsupported {
                what: format!("{count} sockets from rank 0 where one was expected"),
                hint: "start all ranks from the same build".into(),
            });
        }
    };
    Ok((segment, links))
}
