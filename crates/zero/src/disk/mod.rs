//! Training state in files, for models whose state is larger than memory (ZeRO-Infinity, Rajbhandari et al. 2021).
//!
//! Each rank has files of its own, in a folder that is best on a local NVMe drive. They are scratch space: unreadable to
//! others, gone when training ends, and no checkpoint. What must outlast the process goes into a checkpoint.
//!
//! Reads and writes bypass the page cache (`O_DIRECT`) where the file system allows that: the cache would fill the very
//! memory that state on disk is meant to save. This asks for whole blocks of [`BLOCK_BYTES`] at multiples of it, in the
//! file and in memory, and so every array begins at a block. Threads with positioned reads and writes reach the same
//! bandwidth as io_uring with pieces of this size, and work in containers that forbid it.
//!
//! | file | what |
//! | --- | --- |
//! | [`state_file`] | one file: made, reserved, read, written, removed; every way in which that fails |
//! | [`leftovers`] | files of processes that were killed |
//! | [`pipeline`] | read group i + 1, update i, write i - 1 at once |
//! | [`disk_state`] | optimizer state, in groups |
//! | [`disk_values`] | other values, at any place |

mod aligned_buffer;
mod disk_state;
mod disk_values;
mod leftovers;
mod pipeline;
mod state_file;

pub(crate) use disk_state::BUFFERS;
pub use disk_state::DiskState;
pub use disk_values::DiskValues;
pub(crate) use disk_values::WINDOW;

/// What places and lengths in files, and addresses in memory, are multiples of. Devices have blocks of 512 or 4096 bytes.
pub(crate) const BLOCK_BYTES: usize = 4096;
