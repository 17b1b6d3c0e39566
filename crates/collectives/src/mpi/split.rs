//! Making sub-groups, each with an MPI communicator of its own.

use super::communicator::communicator;
use super::group::Group;
use super::library::Channel;
use super::waiting::Patience;
use crate::collective::{Kind, Signature};
use crate::private::Private;
use crate::sub_groups::sub_groups;
use crate::{Communicator, Options, Result, single};
use std::sync::Arc;

/// What a rank needs to enter its sub-group.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) name: String,
    rank: usize,
    size: usize,
    channel: Channel,
}

impl Share {
    /// Makes the sub-group of `parent` as this rank sees it.
    pub(super) fn communicator(self, parent: &Group, options: &Options) -> Arc<dyn Communicator> {
        if self.size == 1 {
            return single();
        }
        communicator(Group::new(
            self.name,
            self.rank,
            self.size,
            parent.local_ranks,
            parent.library,
            self.channel,
            options.clone(),
        ))
    }
}

impl Group {
    /// Makes a group of all ranks with options of its own.
    pub(super) fn connect(&self, options: &Options) -> Result<Arc<dyn Communicator>> {
        let share = self.split(Some(0), self.rank as i64)?;
        let share = share.expect("every rank has a color");
        let share = Share {
            name: "world".into(),
            ..share
        };
        Ok(share.communicator(self, options))
    }

    /// Agrees on the sub-groups and returns this rank's share of its own.
    pub(super) fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Share>> {
        let signature = Signature::of_kind(Kind::Split, 0);
        self.pass(signature, Patience::behind(), |passage| {
            let wish = [color.map_or(-1, i64::from), key];
            let bytes: &[u8] = bytemuck::cast_slice(&wish);
            let came = passage.enter(|_| Private::of(bytes))?;
            let mut wishes = vec![wish; self.size];
            for peer in (0..self.size).filter(|peer| *peer != self.rank) {
                let target: &mut [u8] = bytemuck::cast_slice_mut(&mut wishes[peer..=peer]);
                Private::of_mut(target).copy_between(&came.from(peer, bytes.len()));
            }
            passage.engine.splits += 1;
            let splits = passage.engine.splits;
            let own = sub_groups(&wishes)
                .into_iter()
                .enumerate()
                .find_map(|(number, (color, members))| {
                    let place = members.iter().position(|member| *member == self.rank)?;
                    Some((number, color, members.len(), place))
                });
            // All ranks are here, or they would not have sent their wishes; one that stops now would be waited for.
            let number = own.map(|(number, ..)| number as u32);
            let place = own.map_or(0, |(.., place)| place);
            let channel = passage.or_end_the_job(|| self.library.split(self.channel, number, place))?;
            Ok(own.zip(channel).map(|((_, color, size, rank), channel)| Share {
                name: format!("{}/{splits}.{color}", self.name),
                rank,
                size,
                channel,
            }))
        })
    }
}
