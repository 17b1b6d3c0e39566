//! The group's first failure, kept in the segment so that every rank reports the same cause.

use super::layout::{Control, MESSAGE};
use crate::Error;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

const NONE: u32 = 0;
const WRITING: u32 = 1;
const READABLE: u32 = 2;

/// Records a failure unless another rank was first.
pub(super) fn record(control: &Control, rank: usize, message: &str) {
    if control
        .failure
        .compare_exchange(NONE, WRITING, AcqRel, Acquire)
        .is_err()
    {
        return;
    }
    let mut end = message.len().min(MESSAGE);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    control.failed_rank.store(rank as u32, Relaxed);
    control.failure_length.store(end as u32, Relaxed);
    for (word, bytes) in control.failure_text.iter().zip(message.as_bytes()[..end].chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(padded), Relaxed);
    }
    control.failure.store(READABLE, Release);
}

/// Returns the recorded failure as this rank's error.
pub(super) fn recorded(control: &Control) -> Option<Error> {
    match control.failure.load(Acquire) {
        NONE => None,
        READABLE => {
            let length = (control.failure_length.load(Relaxed) as usize).min(MESSAGE);
            let words = control.failure_text.iter().take(length.div_ceil(8));
            let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
            bytes.truncate(length);
            Some(Error::Aborted {
                by: control.failed_rank.load(Relaxed) as usize,
                reason: String::from_utf8_lossy(&bytes).into_owned(),
            })
        }
        _ => Some(Error::Aborted {
            by: control.failed_rank.load(Relaxed) as usize,
            reason: "its message is still being written".into(),
        }),
    }
}
