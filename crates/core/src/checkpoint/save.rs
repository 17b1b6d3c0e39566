//! Writing a checkpoint: each rank its own arrays, rank 0 the index and the name.

use super::array_file::{ArrayWriter, PlannedBox, bytes_of};
use super::error::CheckpointError;
use super::folder;
use super::index::{BoxEntry, Index, ModelEntry, ParameterEntry};
use crate::together::together;
use crate::{Accelerator, Error, Result};
use sconce_collectives::Communicator;
use sconce_zero::{Engine, RandomState};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Everything of a checkpoint that is not in arrays, as rank 0 knows it.
pub(super) struct Facts {
    pub(super) target: PathBuf,
    /// How many checkpoints the folder keeps; `None` leaves older ones alone.
    pub(super) limit: Option<usize>,
    pub(super) index: Index,
}

/// A box as its rank tells rank 0 of it.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    model: usize,
    name: String,
    shape: Vec<usize>,
    what: String,
    entry: BoxEntry,
}

/// One rank's boxes on their way into its file.
pub(super) struct Boxes {
    planned: Vec<PlannedBox>,
    told: Vec<Told>,
}

impl Boxes {
    /// Plans the boxes of all models on this rank.
    pub(super) fn plan(engines: &[Arc<Engine>], rank: usize) -> Result<Self> {
        let (mut planned, mut told) = (Vec::new(), Vec::new());
        for (model, engine) in engines.iter().enumerate() {
            for piece in engine.state_plan()? {
                let tensor = format!("{model}/{}/{}/{}", piece.info.name, piece.what, piece.elements.start);
                let dtype = match piece.dtype {
                    candle_core::DType::BF16 => "BF16",
                    candle_core::DType::F16 => "F16",
                    _ => "F32",
                };
                planned.push(PlannedBox {
                    tensor: tensor.clone(),
                    dtype,
                    elements: piece.elements.len(),
                });
                told.push(Told {
                    model,
                    name: piece.info.name.clone(),
                    shape: piece.info.shape.clone(),
                    what: piece.what.into(),
                    entry: BoxEntry {
                        start: piece.elements.start,
                        end: piece.elements.end,
                        dtype: dtype.into(),
                        file: file_name(rank),
                        tensor,
                        hashes: Vec::new(),
                    },
                });
            }
        }
        Ok(Self { planned, told })
    }

    /// Hands every box's bytes to `take`, in the order planned.
    pub(super) fn for_each(
        &self,
        engines: &[Arc<Engine>],
        mut take: impl FnMut(usize, &[u8]) -> Result<(), CheckpointError>,
    ) -> Result<()> {
        let mut number = 0;
        let mut failure = None;
        for engine in engines {
            let visited = engine.visit_state(&mut |piece| {
                let (dtype, bytes) = bytes_of(&piece.values);
                let is_planned = self
                    .planned
                    .get(number)
                    .is_some_and(|p| p.dtype == dtype && p.bytes() == bytes.len());
                debug_assert!(is_planned, "{} {}", piece.info.name, piece.what);
                if let Err(error) = take(number, bytes) {
                    failure = Some(error);
                    return Err(sconce_zero::Error::Order {
                        what: "saving",
                        hint: "the checkpoint could not be written",
                    });
                }
                number += 1;
                Ok(())
            });
            if let Some(error) = failure.take() {
                return Err(error.into());
            }
            visited?;
        }
        Ok(())
    }

    /// Returns the bytes of all boxes.
    pub(super) fn bytes(&self) -> usize {
        self.planned.iter().map(PlannedBox::bytes).sum()
    }

    /// Writes this rank's file; `fill` hands over the bytes.
    pub(super) fn write(
        &mut self,
        path: &Path,
        fill: impl FnOnce(&Self, &mut dyn FnMut(usize, &[u8]) -> Result<(), CheckpointError>) -> Result<()>,
    ) -> Result<u64> {
        let mut writer = ArrayWriter::create(path, &self.planned)?;
        let mut hashes = vec![Vec::new(); self.planned.len()];
        fill(self, &mut |number, bytes| {
            hashes[number] = writer.write(bytes)?;
            Ok(())
        })?;
        let told = self.told.iter_mut().zip(hashes);
        told.for_each(|(told, hashes)| told.entry.hashes = hashes);
        Ok(writer.finish()?)
    }
}

pub(super) fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// Writes and publishes a checkpoint; called by all ranks, which succeed or fail together.
pub(super) fn write(
    group: &dyn Communicator,
    facts: Facts,
    mut boxes: Boxes,
    fill: impl FnOnce(&Boxes, &mut dyn FnMut(usize, &[u8]) -> Result<(), CheckpointError>) -> Result<()>,
) -> Result<PathBuf> {
    let Facts {
        target,
        limit,
        mut index,
    } = facts;
    let is_main = group.rank() == 0;
    let begun = together(
        group,
        if is_main {
            folder::begin(&target).map(Some)
        } else {
            Ok(None)
        },
    )?;
    let partial = begun.unwrap_or_else(|| folder::partial(&target));
    let written = boxes.write(&partial.join(file_name(group.rank())), fill);
    let length = together(group, written).inspect_err(|_| {
        if is_main {
            // A disk may be full because of it. The failure that is told is the first.
            let _ = folder::remove(&partial);
        }
    })?;
    let files = gather_json(group, &(file_name(group.rank()), length))?;
    let told = gather_json(group, &boxes.told)?;
    let published = if is_main {
        index.files = parse::<(String, u64)>(files)?.into_iter().collect();
        for told in parse::<Vec<Told>>(told)?.into_iter().flatten() {
            let parameters = &mut index.models[told.model].parameters;
            let parameter = parameters.entry(told.name).or_insert_with(|| ParameterEntry {
                shape: told.shape,
                arrays: BTreeMap::new(),
            });
            parameter.arrays.entry(told.what).or_default().push(told.entry);
        }
        let parameters = index.models.iter_mut().flat_map(|model| model.parameters.values_mut());
        let arrays = parameters.flat_map(|parameter| parameter.arrays.values_mut());
        arrays.for_each(|boxes| boxes.sort_by_key(|one| one.start));
        publish(&index, &partial, &target, limit)
    } else {
        Ok(())
    };
    together(group, published)?;
    Ok(target)
}

fn publish(index: &Index, partial: &Path, target: &Path, limit: Option<usize>) -> Result<(), CheckpointError> {
    let text = serde_json::to_string_pretty(index).map_err(|error| CheckpointError::Unusable {
        path: partial.join("index.json"),
        reason: error.to_string(),
    })?;
    folder::write_file(&partial.join("index.json"), text.as_bytes())?;
    folder::publish(partial, target)?;
    match (limit, target.parent()) {
        (Some(limit), Some(parent)) => folder::prune(parent, limit),
        _ => Ok(()),
    }
}

/// Returns every rank's value as JSON, on rank 0; nothing on the others.
pub(super) fn gather_json(group: &dyn Communicator, value: &impl Serialize) -> Result<Vec<Vec<u8>>> {
    let bytes = serde_json::to_vec(value).map_err(|error| Error::Order {
        what: "telling rank 0 of a checkpoint",
        hint: error.to_string(),
    })?;
    let mut lengths = vec![0i64; group.size()];
    group.all_gather(&[bytes.len() as i64], &mut lengths)?;
    let counts = Vec::from_iter(lengths.iter().map(|length| *length as usize));
    if group.rank() != 0 {
        group.gather_v::<u8>(&bytes, None, &counts, 0)?;
        return Ok(Vec::new());
    }
    let mut all = vec![0u8; counts.iter().sum()];
    group.gather_v(&bytes, Some(&mut all), &counts, 0)?;
    let mut rest = &all[..];
    let split = counts.iter().map(|count| {
        let (own, others) = rest.split_at(*count);
        rest = others;
        own.to_vec()
    });
    Ok(split.collect())
}

fn parse<T: for<'d> Deserialize<'d>>(all: Vec<Vec<u8>>) -> Result<Vec<T>> {
    let parsed = all.iter().map(|bytes| serde_json::from_slice(bytes));
    parsed.collect::<Result<_, _>>().map_err(|error| Error::Order {
        what: "reading what ranks tell of a checkpoint",
        hint: error.to_string(),
    })
}

/// Returns what rank 0 writes besides arrays; called by all ranks, which tell it what is their own.
pub(super) fn facts(accelerator: &dyn Accelerator, target: PathBuf, limit: Option<usize>) -> Result<Facts> {
    let group = &**accelerator.communicator();
    let registry = accelerator.registry();
    let mut index = Index::new(group.size());
    index.models = registry
        .engines()
        .iter()
        .map(|engine| ModelEntry::of(engine.state()))
        .collect();
    let objects = registry
        .objects()
        .into_iter()
        .map(|(name, object)| match object.state() {
            Ok(state) => Ok((name, state)),
            Err(source) => Err(Error::Stateful { name, source }),
        });
    index.objects = together(group, objects.collect::<Result<BTreeMap<_, _>>>())?;
    let random = RandomState::current();
    let own: BTreeMap<String, Value> = BTreeMap::from([(
        "random_state".into(),
        json!({"seed": random.seed, "draws": random.draws}),
    )]);
    index.ranks = parse(gather_json(group, &own)?)?;
    index.settings = accelerator.settings().in_words();
    Ok(Facts { target, limit, index })
}
