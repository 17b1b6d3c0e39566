//! Writing a checkpoint: each rank its own arrays, rank 0 the index and the name.

use super::array_file::{ArrayWriter, bytes_of};
use super::error::CheckpointError;
use super::folder::{self, Draft};
use super::index::{BoxEntry, Index, ModelEntry, ParameterEntry};
use super::keepers::Keepers;
use crate::objects::{gather_objects, gather_objects_on_main};
use crate::together::{on_main, together};
use crate::{Accelerator, Error, Result};
use candle_core::DType;
use sconce_collectives::Communicator;
use sconce_zero::{Engine, PlannedPiece, RandomState};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Everything of a checkpoint that is not in arrays, as rank 0 knows it.
pub(super) struct Facts {
    pub(super) draft: Draft,
    pub(super) keepers: Keepers,
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
    /// The array's shape, where it is another than the parameter's.
    own_shape: Option<Vec<usize>>,
    entry: BoxEntry,
}

/// What is saved: what rank 0 writes besides arrays, this rank's boxes, and whose they are.
pub(super) struct State {
    pub(super) facts: Facts,
    pub(super) boxes: Boxes,
    pub(super) engines: Vec<Arc<Engine>>,
}

impl State {
    /// Begins the folder, lets hooks write into it, and asks everything that belongs to a checkpoint; called by all ranks.
    pub(super) fn begin(accelerator: &dyn Accelerator, target: PathBuf, limit: Option<usize>) -> Result<Self> {
        let (group, registry) = (&**accelerator.communicator(), accelerator.registry());
        let keepers = Keepers::new(accelerator.world(), accelerator.settings().saves_on_each_node);
        let begun = keepers.run(group, || Draft::begin(target.clone()))?;
        let draft = begun.unwrap_or_else(|| Draft::of_others(target));
        registry.before_saving.run(group, "before saving", &draft.path)?;
        let engines = registry.engines();
        Ok(Self {
            facts: facts(accelerator, &engines, (draft, keepers), limit)?,
            boxes: Boxes::plan(&engines, accelerator.world().rank, accelerator.settings().saves_frozen)?,
            engines,
        })
    }
}

/// One rank's boxes on their way into its file, in their order there.
pub(super) struct Boxes {
    told: Vec<Told>,
    /// Whether frozen parameters are among them.
    with_frozen: bool,
}

impl Boxes {
    /// Plans the boxes of all models on this rank.
    fn plan(engines: &[Arc<Engine>], rank: usize, with_frozen: bool) -> Result<Self> {
        let mut told = Vec::new();
        for (model, engine) in engines.iter().enumerate() {
            let box_of = |piece: PlannedPiece| BoxEntry {
                start: piece.elements.start,
                end: piece.elements.end,
                dtype: match piece.dtype {
                    DType::BF16 => "BF16".into(),
                    DType::F16 => "F16".into(),
                    _ => "F32".into(),
                },
                file: file_name(rank),
                tensor: format!("{model}/{}/{}/{}", piece.info.name, piece.what, piece.elements.start),
                hashes: Vec::new(),
            };
            let told_of = |piece: PlannedPiece| Told {
                model,
                name: piece.info.name.clone(),
                shape: piece.info.shape.clone(),
                what: piece.what.clone().into_owned(),
                own_shape: (piece.shape != piece.info.shape).then(|| piece.shape.clone()),
                entry: box_of(piece),
            };
            let plan = engine.state_plan()?.into_iter();
            told.extend(plan.filter(|piece| with_frozen || piece.is_trained).map(told_of));
        }
        Ok(Self { told, with_frozen })
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
                if !self.with_frozen && !piece.is_trained {
                    return Ok(());
                }
                let (dtype, bytes) = bytes_of(&piece.values);
                let told = self.told.get(number).map(|told| &told.entry);
                if !told.is_some_and(|entry| entry.dtype == dtype && entry.bytes() == bytes.len()) {
                    // The header says otherwise: nobody could read the file.
                    return Err(sconce_zero::Error::Order {
                        what: "saving while the state changes",
                        hint: "save between steps, from the thread that trains",
                    });
                }
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
        self.told.iter().map(|told| told.entry.bytes()).sum()
    }

    /// Writes this rank's file; `fill` hands over the bytes.
    pub(super) fn write(
        &mut self,
        path: &Path,
        fill: impl FnOnce(&Self, &mut dyn FnMut(usize, &[u8]) -> Result<(), CheckpointError>) -> Result<()>,
    ) -> Result<u64> {
        let mut writer = ArrayWriter::create(path, self.told.iter().map(|told| &told.entry))?;
        let mut hashes = vec![Vec::new(); self.told.len()];
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
        mut draft,
        keepers,
        limit,
        mut index,
    } = facts;
    let written = boxes.write(&draft.path.join(file_name(group.rank())), fill);
    let length = together(group, written)?;
    index.files = gather_objects_on_main(group, &[(file_name(group.rank()), length)])?
        .into_iter()
        .collect();
    for told in gather_objects_on_main(group, &boxes.told)? {
        let parameters = &mut index.models[told.model].parameters;
        let parameter = parameters.entry(told.name).or_insert_with(|| ParameterEntry {
            shape: told.shape,
            ..ParameterEntry::default()
        });
        if let Some(shape) = told.own_shape {
            parameter.shapes.insert(told.what.clone(), shape);
        }
        parameter.arrays.entry(told.what).or_default().push(told.entry);
    }
    let parameters = index.models.iter_mut().flat_map(|model| model.parameters.values_mut());
    let arrays = parameters.flat_map(|parameter| parameter.arrays.values_mut());
    arrays.for_each(|boxes| boxes.sort_by_key(|one| one.start));
    let mut text = on_main(group, || index.text())?.unwrap_or_default();
    let mut spread = Ok(());
    if keepers.on_each_node {
        let own = if group.rank() == 0 {
            vec![(text, index.files)]
        } else {
            Vec::new()
        };
        let told = gather_objects(group, &own)?.into_iter().next().unwrap_or_default();
        spread = keepers.spread(group, &told.1, &draft.path)?;
        text = told.0;
    }
    keepers.run(group, || {
        spread?;
        publish(&text, &mut draft, limit)
    })?;
    Ok(draft.target.clone())
}

fn publish(index: &str, draft: &mut Draft, limit: Option<usize>) -> Result<(), CheckpointError> {
    Index::write(index, &draft.path)?;
    draft.publish()?;
    match (limit, draft.target.parent()) {
        (Some(limit), Some(parent)) => folder::prune(parent, limit),
        _ => Ok(()),
    }
}

/// Returns what rank 0 writes besides arrays; called by all ranks, which tell it what is their own.
fn facts(
    accelerator: &dyn Accelerator,
    engines: &[Arc<Engine>],
    (draft, keepers): (Draft, Keepers),
    limit: Option<usize>,
) -> Result<Facts> {
    let group = &**accelerator.communicator();
    let mut index = Index::new(group.size());
    let without_frozen = !accelerator.settings().saves_frozen;
    let entries = engines
        .iter()
        .map(|engine| ModelEntry::of(engine.state(), without_frozen));
    index.models = entries.collect();
    let objects = accelerator
        .registry()
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
    index.ranks = gather_objects_on_main(group, &[own])?;
    index.settings = accelerator.settings().in_words();
    Ok(Facts {
        draft,
        keepers,
        limit,
        index,
    })
}
