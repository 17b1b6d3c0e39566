//! One rank's file, and every way in which files fail.
//!
//! All room is reserved at creation: a disk that is too small is an error before training starts, not in the middle of a
//! step, when half of the state is new and half old.
//!
//! A file ends with a block that is never written. A write after something else truncated the file makes it longer again,
//! with a hole of zeros before it, but never as long as it was: the length tells at any time whether all is still there.

use super::aligned_buffer::AlignedBuffer;
use super::{BLOCK_BYTES, leftovers};
use crate::{Error, Result};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use tempfile::NamedTempFile;

/// Bytes written at once where room is reserved by writing.
const ZEROS: usize = 1 << 20;

/// A file of fixed length that is removed on drop; its last block is not for use.
#[derive(Debug)]
pub(super) struct StateFile {
    file: NamedTempFile,
    /// With the last block.
    bytes: u64,
    buffered_because: Option<String>,
}

impl StateFile {
    /// Creates a file with room for `bytes` bytes, which are zero, under a name that no other file has.
    ///
    /// # Errors
    /// [`Error::DiskFolder`] and [`Error::DiskSpace`].
    pub(super) fn create(folder: &Path, rank: usize, bytes: u64) -> Result<Self> {
        leftovers::remove(folder);
        let bytes = bytes + BLOCK_BYTES as u64;
        let file = tempfile::Builder::new()
            .prefix(&format!("{}{rank}-", leftovers::prefix()))
            .suffix(leftovers::SUFFIX)
            .tempfile_in(folder)
            .map_err(|source| Error::DiskFolder {
                folder: folder.into(),
                source,
            })?;
        leftovers::mark_in_use(file.as_file());
        reserve(file.as_file(), bytes).map_err(|source| Error::DiskSpace {
            path: file.path().into(),
            bytes,
            source,
        })?;
        let buffered_because = bypass_page_cache(file.as_file()).err();
        if let Some(reason) = &buffered_because {
            tracing::warn!(
                "{}: {reason}; the system's page cache will hold copies of the training state in this file, besides the \
                 buffers: prefer a folder on a local disk",
                file.path().display()
            );
        }
        Ok(Self {
            file,
            bytes,
            buffered_because,
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns the length of the file.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns why reads and writes go through the page cache, if they do.
    pub(super) fn buffered_because(&self) -> Option<&str> {
        self.buffered_because.as_deref()
    }

    /// Reads whole blocks.
    ///
    /// # Errors
    /// [`Error::DiskAccess`], [`Error::DiskTruncated`].
    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(Access::Reading, offset, bytes)?;
        let length = bytes.len();
        let mut done = 0;
        while done < length {
            let outcome = self.file.as_file().read_at(&mut bytes[done..], offset + done as u64);
            done += self.progress(Access::Reading, offset, length, outcome)?;
        }
        Ok(())
    }

    /// Writes whole blocks.
    ///
    /// # Errors
    /// [`Error::DiskAccess`], [`Error::DiskTruncated`].
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(Access::Writing, offset, bytes)?;
        let mut done = 0;
        while done < bytes.len() {
            let outcome = self.file.as_file().write_at(&bytes[done..], offset + done as u64);
            done += self.progress(Access::Writing, offset, bytes.len(), outcome)?;
        }
        Ok(())
    }

    /// Checks that nothing truncated the file since it was made.
    ///
    /// # Errors
    /// [`Error::DiskAccess`], [`Error::DiskTruncated`].
    pub(super) fn check_length(&self) -> Result<()> {
        self.check(Access::Writing, self.bytes, &[])
    }

    /// Checks that the access is one of whole blocks, and that the file still is as long as it was made.
    fn check(&self, access: Access, offset: u64, bytes: &[u8]) -> Result<()> {
        let address = if bytes.is_empty() { 0 } else { bytes.as_ptr() as u64 };
        let places = address | offset | bytes.len() as u64;
        let is_aligned = places.is_multiple_of(BLOCK_BYTES as u64);
        assert!(is_aligned, "reads and writes are of whole blocks");
        let metadata = self.file.as_file().metadata();
        let found = metadata
            .map_err(|source| self.failed(access, offset, bytes.len(), source))?
            .len();
        if found == self.bytes {
            Ok(())
        } else {
            Err(self.truncated(access, offset, found))
        }
    }

    /// Returns how far one call came, in whole blocks: direct access goes on at a block.
    fn progress(&self, access: Access, offset: u64, bytes: usize, outcome: io::Result<usize>) -> Result<usize> {
        match outcome {
            Ok(count) if count >= BLOCK_BYTES => Ok(count - count % BLOCK_BYTES),
            Ok(count) => Err(match self.file.as_file().metadata() {
                Ok(metadata) if metadata.len() < self.bytes => self.truncated(access, offset, metadata.len()),
                _ => {
                    let reason = format!("the system moved {count} bytes of a block of {BLOCK_BYTES}");
                    self.failed(access, offset, bytes, io::Error::other(reason))
                }
            }),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(self.failed(access, offset, bytes, error)),
        }
    }

    fn truncated(&self, access: Access, offset: u64, found: u64) -> Error {
        Error::DiskTruncated {
            path: self.path().into(),
            action: access.name(),
            offset,
            found,
            expected: self.bytes,
        }
    }

    fn failed(&self, access: Access, offset: u64, bytes: usize, source: io::Error) -> Error {
        Error::DiskAccess {
            path: self.path().into(),
            action: access.name(),
            offset,
            bytes,
            source,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Access {
    Reading,
    Writing,
}

impl Access {
    fn name(self) -> &'static str {
        match self {
            Self::Reading => "reading",
            Self::Writing => "writing",
        }
    }
}

/// Makes the file `bytes` long and takes the room for it, by writing where the file system cannot reserve.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    let zeros = vec![0; ZEROS];
    let mut done = 0;
    while done < bytes {
        let piece = &zeros[..(bytes - done).min(ZEROS as u64) as usize];
        file.write_all_at(piece, done)?;
        done += piece.len() as u64;
    }
    Ok(())
}

/// Switches to direct access; says why not if that fails, and leaves the file as it was.
fn bypass_page_cache(file: &File) -> std::result::Result<(), String> {
    let flags = fcntl_getfl(file).map_err(|errno| format!("its flags cannot be read: {errno}"))?;
    fcntl_setfl(file, flags | OFlags::DIRECT).map_err(|errno| format!("the file system has no O_DIRECT ({errno})"))?;
    // Some file systems take the flag and refuse the access.
    let block = AlignedBuffer::new(BLOCK_BYTES / size_of::<f32>());
    if let Err(error) = file.write_all_at(block.bytes(), 0) {
        fcntl_setfl(file, flags).map_err(|errno| format!("O_DIRECT cannot be taken back: {errno}"))?;
        return Err(format!(
            "the file system refuses direct writes of {BLOCK_BYTES} bytes ({error})"
        ));
    }
    Ok(())
}
