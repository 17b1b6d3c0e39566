//! Optimizer state on disk, in groups that are updated one after the other.

use super::BLOCK_BYTES;
use super::aligned_buffer::AlignedBuffer;
use super::pipeline::{self, Region};
use super::state_file::StateFile;
use crate::{DiskOptions, Error, Result};

/// Buffers under way: one is read, one changed, one written.
pub(crate) const BUFFERS: usize = 3;

/// One rank's optimizer state in a file, of which three groups at most are in memory.
///
/// A group has a number of elements, and one f32 array of that length for each state that the update rule keeps.
///
/// ```
/// use sconce_zero::{DiskOptions, DiskState};
///
/// let folder = tempfile::tempdir()?;
/// let options = DiskOptions { folder: folder.path().into(), sub_group_elements: 1000 };
/// let mut moments = DiskState::create(&options, 0, &[1000, 1000, 500], &[0.0, 1.0])?;
/// moments.for_each_group(|_group, arrays| {
///     arrays[0].fill(0.5);
///     Ok(())
/// })?;
/// assert_eq!(moments.read_group(2)?, [[0.5; 500], [1.0; 500]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DiskState {
    file: StateFile,
    regions: Vec<Region>,
    buffers: Vec<AlignedBuffer>,
    /// Some groups are updated and others not.
    is_lost: bool,
}

impl DiskState {
    /// Creates the state of `groups` groups, given by their numbers of elements, with one array per value in `initial`,
    /// filled with that value.
    ///
    /// All room is taken now: updates do not run out of it.
    ///
    /// # Errors
    /// [`Error::Setting`] when a group has more than [`DiskOptions::sub_group_elements`]; [`Error::DiskFolder`],
    /// [`Error::DiskSpace`], [`Error::DiskAccess`].
    pub fn create(options: &DiskOptions, rank: usize, groups: &[usize], initial: &[f32]) -> Result<Self> {
        let most = groups.iter().copied().max().unwrap_or(0);
        if most > options.sub_group_elements {
            return Err(Error::Setting {
                setting: "sub_group_elements",
                value: options.sub_group_elements.to_string(),
                expected: "the elements of the largest group or more",
            });
        }
        let arrays = initial.len();
        let (regions, bytes) = lay_out(groups, arrays);
        let file = StateFile::create(&options.folder, rank, bytes)?;
        let elements = regions.iter().map(|region| region.stride * arrays).max().unwrap_or(0);
        let count = regions.len().min(BUFFERS);
        let buffers = (0..count).map(|_| AlignedBuffer::new(elements)).collect();
        let mut state = Self {
            file,
            regions,
            buffers,
            is_lost: false,
        };
        state.fill(initial)?;
        Ok(state)
    }

    /// Runs `work` on every group, in order and on this thread, while the group after it is read and the one before it
    /// is written. It gets the group's number and its arrays, and what it changes in them is kept.
    ///
    /// # Errors
    /// The first error of `work`, [`Error::DiskAccess`], [`Error::DiskTruncated`]: these end it, and part of the state is
    /// updated and part is not, so all that follows is [`Error::DiskStateLost`].
    pub fn for_each_group(&mut self, work: impl FnMut(usize, &mut [&mut [f32]]) -> Result<()>) -> Result<()> {
        self.check_usable()?;
        // Also true after a panic in `work`.
        self.is_lost = true;
        pipeline::run(&self.file, &self.regions, &mut self.buffers, work)?;
        self.file.check_length()?;
        self.is_lost = false;
        Ok(())
    }

    /// Returns the arrays of one group, for a checkpoint.
    ///
    /// # Errors
    /// [`Error::DiskAccess`], [`Error::DiskTruncated`], [`Error::DiskStateLost`].
    ///
    /// # Panics
    /// When there is no group of that number.
    pub fn read_group(&mut self, group: usize) -> Result<Vec<&[f32]>> {
        self.check_usable()?;
        let region = self.regions[group];
        let buffer = &mut self.buffers[0];
        region.read(&self.file, buffer)?;
        Ok(region.arrays(buffer))
    }

    /// Replaces the arrays of one group, from a checkpoint.
    ///
    /// # Errors
    /// [`Error::DiskAccess`], [`Error::DiskTruncated`], [`Error::DiskStateLost`].
    ///
    /// # Panics
    /// When there is no group of that number, or the arrays are not as many and as long as it has.
    pub fn write_group(&mut self, group: usize, arrays: &[&[f32]]) -> Result<()> {
        self.check_usable()?;
        let region = self.regions[group];
        assert_eq!(arrays.len(), region.arrays, "arrays of a group");
        let buffer = &mut self.buffers[0];
        let places = region.arrays_mut(buffer);
        places
            .into_iter()
            .zip(arrays)
            .for_each(|(to, from)| to.copy_from_slice(from));
        self.is_lost = true;
        region.write(&self.file, buffer)?;
        self.is_lost = false;
        Ok(())
    }

    /// Returns the number of groups.
    pub fn groups(&self) -> usize {
        self.regions.len()
    }

    /// Returns how much memory the buffers take; the state itself takes none.
    pub fn bytes_in_memory(&self) -> u64 {
        self.buffers.iter().map(|buffer| buffer.size() as u64).sum()
    }

    /// Returns the length of the file.
    pub fn bytes_on_disk(&self) -> u64 {
        self.file.bytes()
    }

    /// Returns why the file goes through the system's page cache, which then holds copies of it in memory; `None` where
    /// it does not.
    pub fn buffered_because(&self) -> Option<&str> {
        self.file.buffered_because()
    }

    fn fill(&mut self, initial: &[f32]) -> Result<()> {
        for region in &self.regions {
            let buffer = &mut self.buffers[0];
            let arrays = region.arrays_mut(buffer);
            arrays
                .into_iter()
                .zip(initial)
                .for_each(|(array, value)| array.fill(*value));
            region.write(&self.file, buffer)?;
        }
        Ok(())
    }

    fn check_usable(&self) -> Result<()> {
        if self.is_lost {
            return Err(Error::DiskStateLost {
                path: self.file.path().into(),
            });
        }
        Ok(())
    }
}

/// Returns where each group lies, and the length of the file.
fn lay_out(groups: &[usize], arrays: usize) -> (Vec<Region>, u64) {
    let mut end = 0;
    let mut next = |elements: &usize| {
        let region = Region {
            offset: end,
            elements: *elements,
            stride: elements.max(&1).next_multiple_of(BLOCK_BYTES / size_of::<f32>()),
            arrays,
        };
        end += region.bytes() as u64;
        region
    };
    let regions = groups.iter().map(&mut next).collect();
    (regions, end)
}
