//! Reading, updating and writing groups at once, with one buffer for each.
//!
//! Buffers go round: the reader fills one with a group and hands it to the caller's thread, which updates it and hands
//! it to the writer, which writes it and hands it to the reader for the next group that nobody has yet. The reader and
//! the writer are threads of their own; each has one queue, and takes groups in order.
//!
//! Whoever fails drops its ends of the queues. Then the others find theirs closed, finish what they have at hand and end
//! too: nobody waits for a buffer that does not come, and no access is under way when [`run`] returns.

use super::aligned_buffer::AlignedBuffer;
use super::state_file::StateFile;
use crate::{Error, Result};
use std::panic::resume_unwind;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, Scope, ScopedJoinHandle};

/// Where a group lies in the file, and how: one array after the other, each padded to whole blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Region {
    /// In bytes.
    pub(super) offset: u64,
    /// Of each array.
    pub(super) elements: usize,
    /// From one array's start to the next one's, in elements.
    pub(super) stride: usize,
    pub(super) arrays: usize,
}

impl Region {
    pub(super) fn bytes(&self) -> usize {
        self.arrays * self.stride * size_of::<f32>()
    }

    /// Returns the arrays of this group in a buffer that holds it.
    pub(super) fn arrays<'b>(&self, buffer: &'b AlignedBuffer) -> Vec<&'b [f32]> {
        let arrays = buffer.elements().chunks_exact(self.stride).take(self.arrays);
        arrays.map(|array| &array[..self.elements]).collect()
    }

    /// Returns the arrays of this group in a buffer that holds it, for changes.
    pub(super) fn arrays_mut<'b>(&self, buffer: &'b mut AlignedBuffer) -> Vec<&'b mut [f32]> {
        let arrays = buffer.elements_mut().chunks_exact_mut(self.stride).take(self.arrays);
        arrays.map(|array| &mut array[..self.elements]).collect()
    }

    pub(super) fn read(&self, file: &StateFile, buffer: &mut AlignedBuffer) -> Result<()> {
        file.read(self.offset, &mut buffer.bytes_mut()[..self.bytes()])
    }

    pub(super) fn write(&self, file: &StateFile, buffer: &AlignedBuffer) -> Result<()> {
        file.write(self.offset, &buffer.bytes()[..self.bytes()])
    }
}

/// A buffer on its way, and the group that it is for.
struct Piece {
    group: usize,
    buffer: AlignedBuffer,
}

/// Reads every group, has `work` change its arrays on this thread, and writes it back.
///
/// There are as many groups under way as there are `buffers`, which is not more than there are groups. After an error
/// some groups are changed, others not, and the buffers are gone.
///
/// # Errors
/// That of `work`, or else that of the file.
pub(super) fn run(
    file: &StateFile,
    regions: &[Region],
    buffers: &mut Vec<AlignedBuffer>,
    work: impl FnMut(usize, &mut [&mut [f32]]) -> Result<()>,
) -> Result<()> {
    let under_way = buffers.len();
    assert!(
        under_way > 0 || regions.is_empty(),
        "a pass without buffers would wait for ever"
    );
    let (empty, to_read) = mpsc::channel::<Piece>();
    let (read, to_change) = mpsc::channel::<Piece>();
    let (changed, to_write) = mpsc::channel::<Piece>();
    for (group, buffer) in buffers.drain(..).enumerate() {
        empty
            .send(Piece { group, buffer })
            .expect("the receiver is in this function");
    }
    thread::scope(|scope| {
        let reader = spawn(scope, "reading state from disk", move || {
            for mut piece in to_read {
                regions[piece.group].read(file, &mut piece.buffer)?;
                if read.send(piece).is_err() {
                    break;
                }
            }
            Ok(())
        })?;
        let writer = spawn(scope, "writing state to disk", move || {
            let mut done = Vec::new();
            for mut piece in to_write {
                regions[piece.group].write(file, &piece.buffer)?;
                piece.group += under_way;
                if piece.group >= regions.len() {
                    done.push(piece.buffer);
                } else if empty.send(piece).is_err() {
                    break;
                }
            }
            Ok(done)
        })?;
        let worked = change_all(regions, to_change, changed, work);
        let written = join(writer);
        let read = join(reader);
        worked?;
        read?;
        *buffers = written?;
        Ok(())
    })
}

/// Changes every group as it comes, and hands it on.
fn change_all(
    regions: &[Region],
    to_change: Receiver<Piece>,
    changed: Sender<Piece>,
    mut work: impl FnMut(usize, &mut [&mut [f32]]) -> Result<()>,
) -> Result<()> {
    for region in regions {
        // Closed queues mean that the thread at their other end failed, which it says itself.
        let Ok(mut piece) = to_change.recv() else { break };
        work(piece.group, &mut region.arrays_mut(&mut piece.buffer))?;
        if changed.send(piece).is_err() {
            break;
        }
    }
    Ok(())
}

fn spawn<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    purpose: &'static str,
    work: impl FnOnce() -> Result<R> + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, Result<R>>> {
    let thread = thread::Builder::new().name("sconce-disk".into());
    thread
        .spawn_scoped(scope, work)
        .map_err(|source| Error::Thread { purpose, source })
}

fn join<R>(thread: ScopedJoinHandle<'_, Result<R>>) -> Result<R> {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}
