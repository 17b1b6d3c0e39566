//! Values on disk that are read and written at any place, such as shares of parameters while they are not gathered.

use super::BLOCK_BYTES;
use super::aligned_buffer::AlignedBuffer;
use super::state_file::StateFile;
use crate::{DiskOptions, Result};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes read or written at once; large enough that a fast drive does not wait for the next request.
pub(crate) const WINDOW: usize = 4 << 20;

/// One rank's values in a file, of whatever type; all bytes are zero at first.
///
/// Threads may share them; they wait for each other.
#[derive(Debug)]
pub struct DiskValues {
    file: StateFile,
    bytes: u64,
    window: Mutex<AlignedBuffer>,
}

impl DiskValues {
    /// Creates `bytes` bytes of values. All room is taken now: writes do not run out of it.
    ///
    /// # Errors
    /// [`Error::DiskFolder`](crate::Error::DiskFolder), [`Error::DiskSpace`](crate::Error::DiskSpace).
    pub fn create(options: &DiskOptions, rank: usize, bytes: u64) -> Result<Self> {
        let whole = bytes.next_multiple_of(BLOCK_BYTES as u64);
        let file = StateFile::create(&options.folder, rank, whole)?;
        let window = whole.min(WINDOW as u64) as usize;
        Ok(Self {
            file,
            bytes,
            window: Mutex::new(AlignedBuffer::new(window / size_of::<f32>())),
        })
    }

    /// Reads the values from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::DiskAccess`](crate::Error::DiskAccess), [`Error::DiskTruncated`](crate::Error::DiskTruncated).
    ///
    /// # Panics
    /// When they end after the last byte.
    pub fn read(&self, offset: u64, values: &mut [u8]) -> Result<()> {
        let mut memory = self.window();
        let mut rest = values;
        for piece in self.pieces(offset, rest.len()) {
            let window = &mut memory.bytes_mut()[..piece.length];
            self.file.read(piece.start, window)?;
            let (values, after) = rest.split_at_mut(piece.wanted.len());
            values.copy_from_slice(&window[piece.wanted]);
            rest = after;
        }
        Ok(())
    }

    /// Writes values from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::DiskAccess`](crate::Error::DiskAccess), [`Error::DiskTruncated`](crate::Error::DiskTruncated). Some of
    /// the values are written then and others not.
    ///
    /// # Panics
    /// When they end after the last byte.
    pub fn write(&self, offset: u64, values: &[u8]) -> Result<()> {
        let mut memory = self.window();
        let mut rest = values;
        for piece in self.pieces(offset, rest.len()) {
            let window = &mut memory.bytes_mut()[..piece.length];
            // Of blocks at the ends, what belongs to others stays.
            if piece.wanted.start > 0 {
                self.file.read(piece.start, &mut window[..BLOCK_BYTES])?;
            }
            if piece.wanted.end < piece.length {
                let last = piece.length - BLOCK_BYTES;
                self.file.read(piece.start + last as u64, &mut window[last..])?;
            }
            let (values, after) = rest.split_at(piece.wanted.len());
            window[piece.wanted].copy_from_slice(values);
            self.file.write(piece.start, window)?;
            rest = after;
        }
        Ok(())
    }

    /// Returns how much memory the buffer takes; the values themselves take none.
    pub fn bytes_in_memory(&self) -> u64 {
        self.window().size() as u64
    }

    /// Returns the length of the file.
    pub fn bytes_on_disk(&self) -> u64 {
        self.file.bytes()
    }

    /// Cuts a range into pieces of whole blocks, each at most as large as the window.
    fn pieces(&self, offset: u64, length: usize) -> impl Iterator<Item = Piece> + use<> {
        let end = offset.saturating_add(length as u64);
        assert!(end <= self.bytes, "values end at {end}, there are {} bytes", self.bytes);
        let mut at = offset;
        std::iter::from_fn(move || {
            let start = at - at % BLOCK_BYTES as u64;
            let stop = end.min(start + WINDOW as u64);
            let wanted = (at - start) as usize..(stop - start) as usize;
            at = stop;
            (!wanted.is_empty()).then(|| Piece {
                start,
                length: wanted.end.next_multiple_of(BLOCK_BYTES),
                wanted,
            })
        })
    }

    fn window(&self) -> MutexGuard<'_, AlignedBuffer> {
        // Contents do not outlast a call, so a panic in one spoils nothing.
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Blocks that are read or written at once.
struct Piece {
    /// Of the blocks, in the file.
    start: u64,
    /// Of the blocks, in bytes.
    length: usize,
    /// What is asked for of them.
    wanted: Range<usize>,
}
