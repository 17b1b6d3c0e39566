//! The file of an offline run: records in the framing of LevelDB's log.
//!
//! Source: LevelDB's `doc/log_format.md`, and `core/pkg/leveldb` in Weights & Biases' client, which has another header and
//! the checksum of zlib.

use super::super::TrackerError;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

/// What a file begins with: its kind, a magic number and the version of the framing.
const BEGINNING: [u8; 7] = *b":W&B\xe1\xbe\0";
const BLOCK: u64 = 32768;
/// Checksum, length and type of a piece.
const HEAD: u64 = 7;

const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// A log whose last records may be written again.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    end: u64,
}

impl LogFile {
    /// Makes a new file.
    pub(super) fn create(path: PathBuf) -> Result<Self, TrackerError> {
        let open = || {
            let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            file.write_all_at(&BEGINNING, 0)?;
            Ok(file)
        };
        let file = open().map_err(TrackerError::at(&path))?;
        Ok(Self {
            path,
            file,
            end: BEGINNING.len() as u64,
        })
    }

    /// Returns where the next record will begin.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Writes records from `at` on, in one call of the system; what was there is gone.
    pub(super) fn write_at<R: AsRef<[u8]>>(&mut self, at: u64, records: &[R]) -> Result<(), TrackerError> {
        let mut bytes = Vec::new();
        for record in records {
            frame(record.as_ref(), at, &mut bytes);
        }
        let end = at + bytes.len() as u64;
        let written = self.file.write_all_at(&bytes, at);
        let written = written.and_then(|()| if end < self.end { self.file.set_len(end) } else { Ok(()) });
        self.end = end;
        written.map_err(TrackerError::at(&self.path))
    }
}

/// Adds a record to `bytes`, which will stand at `start` of the file. No piece of it crosses the end of a block, and a rest
/// of a block that has no place for a piece's head is zeros.
fn frame(mut data: &[u8], start: u64, bytes: &mut Vec<u8>) {
    let mut is_first = true;
    loop {
        let mut room = BLOCK - (start + bytes.len() as u64) % BLOCK;
        if room < HEAD {
            bytes.extend(&[0; HEAD as usize][..room as usize]);
            room = BLOCK;
        }
        let (piece, rest) = data.split_at(data.len().min((room - HEAD) as usize));
        let kind = match (is_first, rest.is_empty()) {
            (true, true) => FULL,
            (true, false) => FIRST,
            (false, false) => MIDDLE,
            (false, true) => LAST,
        };
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&[kind]);
        checksum.update(piece);
        bytes.extend(checksum.finalize().to_le_bytes());
        bytes.extend((piece.len() as u16).to_le_bytes());
        bytes.push(kind);
        bytes.extend(piece);
        (data, is_first) = (rest, false);
        if data.is_empty() {
            return;
        }
    }
}
