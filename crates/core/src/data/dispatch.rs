//! Batches that rank 0 makes for all ranks.
//!
//! In every step rank 0 tells all ranks how long their messages are, then hands each its own: a head, and the batch's
//! shapes, dtypes and data.
//! Only the loop's thread speaks with other ranks, so that reading ahead on rank 0 cannot put them out of step. A failure
//! of the data set, or a panic, takes the place of a batch on every rank. Nothing is sent behind the last batch.

use super::DataError;
use super::prefetch::Reader;
use super::reading::{BatchFacts, MadeBatch, MadeRounds};
use crate::nested::{Nested, Part, Parts};
use crate::{Error, Result};
use candle_core::Device;
use safetensors::SafeTensors;
use sconce_collectives::Communicator;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

/// How batches of a type become bytes, and bytes batches.
#[derive(Debug)]
pub(super) struct Wire<B> {
    encode: fn(&B) -> Result<Vec<u8>, DataError>,
    decode: fn(&[u8], &Device) -> Result<B, DataError>,
}

impl<B> Clone for Wire<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Wire<B> {}

/// The entry of the file's metadata that has the parts; a tensor is there as `null`.
const PARTS: &str = "parts";

impl<B: Nested> Wire<B> {
    pub(super) fn new() -> Self {
        Self {
            encode: |batch| {
                let mut parts = Vec::new();
                batch.take_apart(&mut parts);
                let mut tensors = Vec::new();
                let mut values = Vec::new();
                for part in parts {
                    values.push(match part {
                        Part::Value(value) => Some(value),
                        Part::Tensor(tensor) => {
                            tensors.push((values.len().to_string(), tensor.to_device(&Device::Cpu)?));
                            None
                        }
                    });
                }
                let values = HashMap::from([(PARTS.to_owned(), serde_json::to_string(&values)?)]);
                Ok(safetensors::serialize(tensors, Some(values))?)
            },
            decode: |bytes, device| {
                let (_, metadata) = SafeTensors::read_metadata(bytes)?;
                let values = metadata.metadata().as_ref().and_then(|entries| entries.get(PARTS));
                let values: Vec<Option<serde_json::Value>> = serde_json::from_str(values.ok_or("no parts")?)?;
                let mut tensors = candle_core::safetensors::load_buffer(bytes, device)?;
                let mut take = |(at, value): (usize, Option<serde_json::Value>)| match value {
                    Some(value) => Ok(Part::Value(value)),
                    None => tensors
                        .remove(&at.to_string())
                        .map(Part::Tensor)
                        .ok_or("a missing tensor"),
                };
                let parts = values
                    .into_iter()
                    .enumerate()
                    .map(&mut take)
                    .collect::<Result<_, _>>()?;
                Ok(B::put_together(&mut Parts::new(parts))?)
            },
        }
    }
}

/// A batch on its way to a rank.
type Encoded = MadeBatch<Vec<u8>>;

/// What stands before the bytes of a batch.
#[derive(Debug, Serialize, Deserialize)]
enum Head {
    /// The epoch has no more batches.
    End,
    /// A batch follows.
    Batch(BatchFacts),
    /// There is no batch in this step, and why.
    Failed(BatchFacts, String),
    /// Rank 0 panicked, with this message.
    Panicked(String),
}

/// One rank's end of dispatching.
#[derive(Debug)]
pub(super) struct Dispatch<B> {
    communicator: Arc<dyn Communicator>,
    /// On rank 0, which reads.
    reader: Option<Reader<Vec<Encoded>>>,
    wire: Wire<B>,
    device: Device,
}

/// Makes the batches ready to be sent.
pub(super) fn encode<B: 'static>(rounds: MadeRounds<B>, wire: Wire<B>) -> MadeRounds<Vec<u8>> {
    let encode = move |made: MadeBatch<B>| MadeBatch {
        batch: made.batch.and_then(|batch| (wire.encode)(&batch)),
        facts: made.facts,
    };
    Box::new(rounds.map(move |round| round.into_iter().map(encode).collect()))
}

impl<B> Dispatch<B> {
    pub(super) fn new(
        communicator: Arc<dyn Communicator>,
        reader: Option<Reader<Vec<Encoded>>>,
        wire: Wire<B>,
        device: Device,
    ) -> Self {
        Self {
            communicator,
            reader,
            wire,
            device,
        }
    }

    /// Returns this rank's next batch; called by all ranks.
    ///
    /// # Errors
    /// When the group fails.
    ///
    /// # Panics
    /// On rank 0 where the data set does, when the other ranks know.
    pub(super) fn next(&mut self) -> Result<Option<MadeBatch<B>>> {
        let (message, panic) = match &mut self.reader {
            None => (self.exchange(None)?, None),
            Some(reader) => {
                let (messages, panic) = Messages::of(reader.next(), self.communicator.size());
                (self.exchange(Some(messages))?, panic)
            }
        };
        if let Some(panic) = panic {
            std::panic::resume_unwind(panic);
        }
        let (head, bytes) = split(&message)?;
        Ok(match head {
            Head::End => None,
            Head::Batch(facts) => Some(MadeBatch {
                batch: (self.wire.decode)(bytes, &self.device),
                facts,
            }),
            Head::Failed(facts, message) => Some(MadeBatch {
                batch: Err(message.into()),
                facts,
            }),
            Head::Panicked(message) => {
                return Err(Error::Loader {
                    reason: format!("rank 0, which reads for all ranks, panicked: {message}"),
                });
            }
        })
    }

    /// Gives every rank its message, of which rank 0 has all.
    fn exchange(&self, messages: Option<Messages>) -> Result<Vec<u8>> {
        let mut lengths = vec![0i64; self.communicator.size()];
        if let Some(messages) = &messages {
            lengths.copy_from_slice(&messages.lengths);
        }
        self.communicator.broadcast(&mut lengths, 0)?;
        let lengths: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut own = vec![0; lengths[self.communicator.rank()]];
        let all = messages.as_ref().map(|messages| messages.bytes.as_slice());
        self.communicator.scatter_v(all, &mut own, &lengths, 0)?;
        Ok(own)
    }
}

/// The messages of a step to all ranks, one behind the other.
#[derive(Debug, Default)]
struct Messages {
    bytes: Vec<u8>,
    lengths: Vec<i64>,
}

impl Messages {
    /// Writes the messages of a step; also returns the panic that took its place.
    fn of(round: Option<thread::Result<Vec<Encoded>>>, ranks: usize) -> (Self, Option<Box<dyn std::any::Any + Send>>) {
        let mut messages = Self::default();
        let mut to_all = |head| (0..ranks).for_each(|_| messages.push(&head, &[]));
        match round {
            None => to_all(Head::End),
            Some(Err(panic)) => {
                let said = panic.downcast_ref::<&str>().map(ToString::to_string);
                let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
                to_all(Head::Panicked(said.unwrap_or_else(|| "(no message)".into())));
                return (messages, Some(panic));
            }
            Some(Ok(batches)) => {
                // One that fails fails the step: the others could not go on without that rank.
                let failure = batches
                    .iter()
                    .find_map(|made| made.batch.as_ref().err().map(ToString::to_string));
                for made in batches {
                    match &failure {
                        Some(failure) => messages.push(&Head::Failed(made.facts, failure.clone()), &[]),
                        None => messages.push(&Head::Batch(made.facts), &made.batch.unwrap_or_default()),
                    }
                }
            }
        }
        (messages, None)
    }

    /// Adds a message: the length of the head in 8 bytes, the head as JSON, then the bytes.
    fn push(&mut self, head: &Head, bytes: &[u8]) {
        let head = serde_json::to_vec(head).expect("a head has numbers and texts only");
        let before = self.bytes.len();
        self.bytes.extend((head.len() as u64).to_le_bytes());
        self.bytes.extend(head);
        self.bytes.extend(bytes);
        self.lengths.push((self.bytes.len() - before) as i64);
    }
}

fn split(message: &[u8]) -> Result<(Head, &[u8])> {
    let parts = message.split_first_chunk::<8>().and_then(|(length, rest)| {
        let (head, bytes) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
        Some((serde_json::from_slice(head).ok()?, bytes))
    });
    parts.ok_or_else(|| Error::Loader {
        reason: "rank 0 sent a batch in a form that this rank does not know; all ranks must run one program".into(),
    })
}
