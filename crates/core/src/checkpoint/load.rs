//! Reading a checkpoint: each rank what it holds, from whichever files have it.

use super::array_file::ArrayFiles;
use super::error::CheckpointError;
use super::folder;
use super::index::{Index, ModelEntry};
use crate::together::{on_main, together};
use crate::{Accelerator, Error, Result};
use sconce_zero::{Engine, EngineState, ParameterInfo, RandomState, StatePiece, StateSource};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// What loading may leave out.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Loads the values of parameters alone: no optimizer state, no counts, no loader's position.
    pub weights_only: bool,
    /// Lets parameters that are frozen here be absent: their values come from elsewhere, as those of a base model beside which
    /// adapters are trained. It is so without being asked for where the run that saved left them out
    /// ([`AcceleratorBuilder::save_frozen`](crate::AcceleratorBuilder::save_frozen)).
    pub without_frozen: bool,
    /// Takes what checkpoint and model have in common, instead of failing where they differ.
    pub partial: bool,
    /// The names that parameters have in the checkpoint, by their names in the model.
    pub renamed: BTreeMap<String, String>,
}

/// What was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// The checkpoint.
    pub folder: PathBuf,
    /// Newer ones that are not complete, and why.
    pub skipped: Vec<String>,
    /// What the checkpoint did not have, and so stayed as it was; but for frozen parameters that it need not have.
    pub missing: Vec<String>,
}

/// The arrays of one model in a checkpoint.
struct ModelSource<'a> {
    entry: &'a ModelEntry,
    files: ArrayFiles,
    options: &'a LoadOptions,
}

impl StateSource for ModelSource<'_> {
    fn read(
        &mut self,
        info: &ParameterInfo,
        what: &str,
        elements: Range<usize>,
        values: &mut [f32],
    ) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
        let name = self.options.saved_name(&info.name);
        let parameter = self.entry.parameters.get(name);
        let boxes = parameter.and_then(|parameter| parameter.arrays.get(what));
        let (Some(parameter), Some(boxes)) = (parameter, boxes) else {
            return Ok(false);
        };
        // Of another shape it is another parameter, which a load in part leaves alone.
        if parameter.shape != info.shape || parameter.shape_of(what).iter().product::<usize>() < elements.end {
            return Ok(false);
        }
        self.files.read(boxes, elements, values)?;
        Ok(true)
    }
}

/// Finds the checkpoint that `folder` is, or the newest in it; rank 0 decides for all.
pub(super) fn find(accelerator: &dyn Accelerator, folder: &Path) -> Result<(PathBuf, Index, Vec<String>)> {
    let group = &**accelerator.communicator();
    let found = on_main(group, || folder::locate(folder))?;
    let told = found
        .as_ref()
        .map(|(path, _, skipped)| (folder.to_owned(), path.clone(), skipped.clone()));
    let (of_main, mut path, skipped) = accelerator.broadcast_object(&told.unwrap_or_default(), 0)?;
    let on_each_node = accelerator.settings().saves_on_each_node;
    if on_each_node {
        // The same checkpoint of this host.
        path = match path.file_name() {
            Some(name) if path != of_main => folder.join(name),
            _ => folder.to_owned(),
        };
    }
    let index = match found {
        Some((_, index, _)) => Ok(index),
        None => Index::read(&path).map_err(|error| match on_each_node {
            true => CheckpointError::unusable(
                &path,
                format!("{error}; each host keeps its own: copy the folder from a host where it is whole"),
            ),
            false => error,
        }),
    };
    let index = together(group, index)?;
    Ok((path, index, skipped))
}

/// Loads a checkpoint into the models and objects of a loop; called by all ranks.
pub(super) fn load(accelerator: &dyn Accelerator, folder: &Path, options: &LoadOptions) -> Result<Loaded> {
    let group = &**accelerator.communicator();
    let (path, index, skipped) = find(accelerator, folder)?;
    let registry = accelerator.registry();
    let engines = registry.engines();
    let mut missing = Vec::new();
    let differences = differences(&index, &engines, options);
    if !differences.is_empty() && !options.partial {
        return Err(CheckpointError::AnotherModel { path, differences }.into());
    }
    missing.extend(differences);
    if !options.weights_only {
        registry.before_loading.run(group, "before loading", &path)?;
    }
    for (engine, entry) in engines.iter().zip(&index.models) {
        let nothing = EngineState::default();
        let state = if options.weights_only { &nothing } else { &entry.state };
        let mut source = ModelSource {
            entry,
            files: ArrayFiles::new(&path),
            options,
        };
        // A failure ends the group: the rank that has it tells it, and the others that it was that one.
        let lacks = engine.restore_state(state, &mut source)?;
        let may_be_absent = absent_frozen(entry, engine, options);
        let lacks = lacks.into_iter().filter(|_| !options.weights_only);
        let are_known = BTreeSet::from_iter(
            may_be_absent
                .iter()
                .map(|name| format!("{name} ({})", StatePiece::VALUE)),
        );
        missing.extend(lacks.filter(|lack| !are_known.contains(lack)));
    }
    if !options.weights_only {
        let restored = restore_objects(accelerator, &index, options.partial);
        missing.extend(together(group, restored)?);
        restore_random_state(accelerator, &index);
    }
    Ok(Loaded {
        folder: path,
        skipped,
        missing,
    })
}

fn restore_objects(accelerator: &dyn Accelerator, index: &Index, partial: bool) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    let objects = accelerator.registry().objects();
    for (name, object) in &objects {
        match index.objects.get(name) {
            Some(state) => object.restore(state.clone()).map_err(|source| Error::Stateful {
                name: name.clone(),
                source,
            })?,
            None => missing.push(name.clone()),
        }
    }
    let is_registered = |name: &&String| objects.iter().any(|(other, _)| other == *name);
    let left = index.objects.keys().filter(|name| !is_registered(name));
    missing.extend(left.map(|name| format!("{name} (nothing of this name is registered)")));
    if !missing.is_empty() && !partial {
        return Err(Error::Setting {
            setting: "load_state objects",
            value: missing.join(", "),
            expected: "the objects of the run that saved: prepare and register the same ones, or load partially".into(),
        });
    }
    Ok(missing)
}

/// Goes on with this rank's random state; a rank that the saving run did not have keeps its own.
fn restore_random_state(accelerator: &dyn Accelerator, index: &Index) {
    let own = index
        .ranks
        .get(accelerator.world().rank)
        .and_then(|rank| rank.get("random_state"));
    let number = |name: &str| own.and_then(|own| own[name].as_u64());
    if let (Some(seed), Some(draws)) = (number("seed"), number("draws")) {
        RandomState { seed, draws }.restore();
    }
}

/// Returns the names of this model's frozen parameters that the checkpoint does not have, where it need not.
fn absent_frozen(entry: &ModelEntry, engine: &Engine, options: &LoadOptions) -> BTreeSet<String> {
    if !entry.without_frozen && !options.without_frozen {
        return BTreeSet::new();
    }
    let names = engine.frozen_parameters().into_iter().map(|info| info.name.clone());
    names
        .filter(|name| !entry.parameters.contains_key(options.saved_name(name)))
        .collect()
}

impl LoadOptions {
    /// Returns the name that a parameter of the model has in the checkpoint.
    fn saved_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.renamed.get(name).map_or(name, String::as_str)
    }
}

/// Compares names and shapes of parameters, and which rule updates them.
fn differences(index: &Index, engines: &[std::sync::Arc<Engine>], options: &LoadOptions) -> Vec<String> {
    let mut found = Vec::new();
    if index.models.len() != engines.len() {
        found.push(format!(
            "{} models are saved, this program has {}",
            index.models.len(),
            engines.len()
        ));
    }
    for (entry, engine) in index.models.iter().zip(engines) {
        let mut taken = BTreeSet::new();
        let may_be_absent = absent_frozen(entry, engine, options);
        for info in engine.parameters() {
            let name = options.saved_name(&info.name);
            taken.insert(name.to_owned());
            match entry.parameters.get(name) {
                None if may_be_absent.contains(&info.name) => {}
                None => found.push(format!("{name} is not saved")),
                Some(saved) if saved.shape != info.shape => {
                    found.push(format!(
                        "{name} is saved as {:?}, here it is {:?}",
                        saved.shape, info.shape
                    ));
                }
                Some(_) => {}
            }
        }
        let others = entry.parameters.keys().filter(|name| !taken.contains(*name));
        found.extend(others.map(|name| format!("{name} is saved, this model has no such parameter")));
        let (saved, own) = (&entry.state.rule, engine.state().rule);
        if let (Some(saved), Some(own), false) = (saved, &own, options.weights_only)
            && saved != own
        {
            found.push(format!("its optimizer is {saved}, here it is {own}"));
        }
    }
    found
}
