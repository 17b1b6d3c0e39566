//! The last operations of a rank, written out when something fails.

use crate::Options;
use crate::collective::Signature;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How many operations are kept.
const KEPT: usize = 256;

/// A ring of the last operations on one communicator.
#[derive(Debug)]
pub(crate) struct FlightRecorder {
    entries: Vec<Entry>,
    recorded: usize,
    origin: Instant,
    told: bool,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    sequence: u64,
    signature: Signature,
    started: Instant,
    ended: bool,
}

impl FlightRecorder {
    pub(crate) fn new() -> Self {
        Self {
            entries: Vec::with_capacity(KEPT),
            recorded: 0,
            origin: Instant::now(),
            told: false,
        }
    }

    /// Notes that an operation begins.
    pub(crate) fn begin(&mut self, sequence: u64, signature: Signature) {
        let entry = Entry {
            sequence,
            signature,
            started: Instant::now(),
            ended: false,
        };
        if self.entries.len() < KEPT {
            self.entries.push(entry);
        } else {
            self.entries[self.recorded % KEPT] = entry;
        }
        self.recorded += 1;
    }

    /// Notes that the operation begun last has ended well.
    pub(crate) fn end(&mut self) {
        if let Some(last) = self.recorded.checked_sub(1) {
            self.entries[last % KEPT].ended = true;
        }
    }

    /// Writes the ring where the group's options say, the first time that something fails.
    pub(crate) fn tell(&mut self, options: &Options, group: &str, rank: usize, failure: &str) {
        let Some(directory) = options.flight_recorder.as_ref().filter(|_| !self.told) else {
            return;
        };
        self.told = true;
        match self.write(directory, &group.replace('/', "."), rank, failure) {
            Ok(path) => tracing::error!(rank, path = %path.display(), "wrote the flight recorder"),
            Err(error) => tracing::error!(rank, %error, "could not write the flight recorder"),
        }
    }

    /// Writes the ring as JSON lines into `directory`, oldest first, and returns the file.
    ///
    /// Each line has the group, rank, sequence number, operation, microseconds from the making of the group to
    /// its start, and whether it ended. The first line has the failure.
    fn write(&self, directory: &Path, group: &str, rank: usize, failure: &str) -> std::io::Result<PathBuf> {
        let path = directory.join(format!("sconce-flight-{group}-rank{rank}-{}.jsonl", std::process::id()));
        let mut text = format!(
            "{}\n",
            serde_json::json!({ "group": group, "rank": rank, "failure": failure })
        );
        for number in self.recorded.saturating_sub(KEPT)..self.recorded {
            let entry = &self.entries[number % KEPT];
            let line = serde_json::json!({
                "sequence": entry.sequence,
                "operation": entry.signature.to_string(),
                "start_us": entry.started.duration_since(self.origin).as_micros() as u64,
                "ended": entry.ended,
            });
            text.push_str(&format!("{line}\n"));
        }
        std::fs::create_dir_all(directory)?;
        std::fs::File::create_new(&path)?.write_all(text.as_bytes())?;
        Ok(path)
    }
}
