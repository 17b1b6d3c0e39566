//! Shared regions: memory that users own and that peers reach in place.
//!
//! A region is one memory file with an equal part for every rank. Rank r's [`Buffer`] is part r; an operation on a
//! piece of it publishes where the piece lies (its *location*), and peers find it in their own mapping of the file.

use super::descriptors;
use super::group::Passage;
use super::segment::Mapping;
use crate::private::Private;
use crate::{Buffer, Error, Result};
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

/// Location words: region number + 1 above, byte offset in the rank's part below this bit.
const OFFSET_BITS: u32 = 40;
/// What rank 0 sends instead of a size when it could not make the file.
const REFUSED: u64 = u64::MAX;

/// The regions of a group that are still in use on this rank.
#[derive(Debug, Default)]
pub(super) struct Regions {
    made: u64,
    live: Vec<Weak<Region>>,
}

/// One memory file and this rank's mapping of it.
#[derive(Debug)]
pub(super) struct Region {
    number: u64,
    part: usize,
    mapping: Mapping,
}

impl Regions {
    /// Returns the location of this rank's bytes, 0 if they are in no region.
    pub(super) fn locate(&self, rank: usize, bytes: Private) -> u64 {
        for region in self.live.iter().filter_map(Weak::upgrade) {
            if let Some(offset) = region.mapping.offset_of(bytes.pointer(), bytes.len()) {
                let in_part = offset
                    .checked_sub(rank * region.part)
                    .filter(|at| at + bytes.len() <= region.part);
                return in_part.map_or(0, |at| (region.number + 1) << OFFSET_BITS | at as u64);
            }
        }
        0
    }

    /// Returns the address of `length` bytes at `rank`'s `location`, and what keeps it mapped.
    pub(super) fn resolve(&self, rank: usize, location: u64, length: usize) -> Result<(*mut u8, Arc<Region>)> {
        let number = (location >> OFFSET_BITS).wrapping_sub(1);
        let offset = (location & ((1 << OFFSET_BITS) - 1)) as usize;
        let region = self
            .live
            .iter()
            .filter_map(Weak::upgrade)
            .find(|region| region.number == number);
        match region {
            Some(region) if offset.checked_add(length).is_some_and(|end| end <= region.part) => {
                Ok((region.mapping.at(rank * region.part + offset, length), region))
            }
            _ => Err(Error::Unsupported {
                what: format!("rank {rank}'s buffer at {location:#x}, which is in no shared region known here"),
                hint: "keep every rank's part of an allocation alive while any rank uses its own".into(),
            }),
        }
    }
}

impl Passage<'_> {
    /// Makes a region with `bytes` bytes for every rank and returns this rank's part.
    pub(super) fn allocate(&mut self, bytes: usize) -> Result<Buffer> {
        self.enter(0)?;
        let part = bytes.max(1).next_multiple_of(4096);
        let total = part * self.group.size;
        let deadline = self.group.options.timeout;
        let file = match &self.engine.links {
            descriptors::Links::Root(peers) => {
                let file = Mapping::create_file(total, true);
                let (value, descriptors) = match &file {
                    Ok(file) => (total as u64, vec![file.as_fd()]),
                    Err(_) => (REFUSED, Vec::new()),
                };
                for peer in peers {
                    descriptors::send(peer, value, &descriptors)?;
                }
                file?
            }
            descriptors::Links::Leaf(root) => {
                let (value, mut files) = descriptors::receive(root, deadline)?;
                match (value, files.pop()) {
                    (value, Some(file)) if value == total as u64 => file,
                    _ => {
                        return Err(Error::Unsupported {
                            what: format!("{total} bytes of shared memory, which rank 0 could not get"),
                            hint: "see rank 0's error".into(),
                        });
                    }
                }
            }
        };
        let number = self.engine.regions.made;
        let region = Arc::new(Region {
            number,
            part,
            mapping: Mapping::map(file, total, true)?,
        });
        self.engine.regions.made += 1;
        self.engine.regions.live.retain(|region| region.strong_count() > 0);
        self.engine.regions.live.push(Arc::downgrade(&region));
        let start = region.mapping.at(self.group.rank * part, part);
        self.synchronise()?;
        // SAFETY: this rank's part of a fresh file: page-aligned, zeroed, `bytes <= part`, mapped while the region
        // lives; nobody else makes a buffer of part `rank`.
        Ok(unsafe { Buffer::shared(start, bytes, region) })
    }
}
