//! What a checkpoint holds, and where each array's elements lie: by parameter and range, never by rank.

use super::error::CheckpointError;
use sconce_zero::{EngineState, PowerSgdState, StatePiece};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

/// Marks a file as one of ours.
const FORMAT: &str = "sconce checkpoint";
/// Raised when what is written can no longer be read by older programs.
const VERSION: u64 = 1;
/// How the file begins; the hash, blake3 in hexadecimal digits, and [`HASHED`] follow.
const BEGINNING: &str = "{\n  \"blake3\": \"";
/// What is between the hash and the text that it is of.
const HASHED: &str = "\",\n";
/// Longest index that is read.
const MOST_BYTES: u64 = 1 << 30;
/// Most steps that are believed.
const MOST_STEPS: u64 = 1 << 53;
/// Bytes of an array's box that one hash is of.
pub(super) const BLOCK: usize = 1 << 20;

/// The contents of index.json.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    format: String,
    version: u64,
    /// Ranks that saved.
    pub(super) world_size: usize,
    /// The files that hold arrays, with their lengths in bytes.
    pub(super) files: BTreeMap<String, u64>,
    /// The loop's models, in the order in which their accelerators were made.
    pub(super) models: Vec<ModelEntry>,
    /// What belongs to the run and not to a model or a rank, by name.
    pub(super) objects: BTreeMap<String, Value>,
    /// What belongs to each rank.
    pub(super) ranks: Vec<BTreeMap<String, Value>>,
    /// The run's settings in words, for people.
    pub(super) settings: BTreeMap<String, String>,
}

/// One model.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct ModelEntry {
    /// What its engine knows besides arrays.
    #[serde(flatten)]
    pub(super) state: EngineState,
    /// Whether frozen parameters were left out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) without_frozen: bool,
    pub(super) parameters: BTreeMap<String, ParameterEntry>,
}

/// One parameter.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct ParameterEntry {
    pub(super) shape: Vec<usize>,
    /// Of arrays that have another shape than the parameter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) shapes: BTreeMap<String, Vec<usize>>,
    /// By the array's name: its boxes in the order of their elements.
    pub(super) arrays: BTreeMap<String, Vec<BoxEntry>>,
}

/// Consecutive elements of one array.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct BoxEntry {
    pub(super) start: usize,
    pub(super) end: usize,
    /// `F32`, `BF16` or `F16`.
    pub(super) dtype: String,
    pub(super) file: String,
    /// The tensor in the file.
    pub(super) tensor: String,
    /// blake3, the first 16 digits, of every [`BLOCK`] bytes.
    pub(super) hashes: Vec<String>,
}

impl ParameterEntry {
    /// Returns the shape of an array.
    pub(super) fn shape_of(&self, what: &str) -> &[usize] {
        self.shapes.get(what).unwrap_or(&self.shape)
    }
}

impl BoxEntry {
    /// Returns how many elements it has.
    pub(super) fn elements(&self) -> usize {
        self.end - self.start
    }

    /// Returns how many bytes they take; a dtype that is none of the three is refused where values are read.
    pub(super) fn bytes(&self) -> usize {
        self.elements() * if self.dtype == "F32" { 4 } else { 2 }
    }
}

impl Index {
    pub(super) fn new(world_size: usize) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            world_size,
            files: BTreeMap::new(),
            models: Vec::new(),
            objects: BTreeMap::new(),
            ranks: Vec::new(),
            settings: BTreeMap::new(),
        }
    }

    /// Returns the text of the file.
    pub(super) fn text(&self) -> serde_json::Result<String> {
        let text = serde_json::to_string_pretty(self)?;
        let rest = text.strip_prefix("{\n").expect("an object with fields begins so");
        Ok(format!("{BEGINNING}{}{HASHED}{rest}", blake3::hash(rest.as_bytes())))
    }

    /// Writes the text of an index into `folder`, where it is on disk when this returns.
    pub(super) fn write(text: &str, folder: &Path) -> Result<(), CheckpointError> {
        let path = folder.join("index.json");
        // A hook may have taken the name.
        let written = File::create_new(&path).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        });
        written.map_err(|error| CheckpointError::unusable(&path, error))
    }

    /// Reads and checks the index of the checkpoint in `folder`, and the lengths of its files.
    pub(super) fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join("index.json");
        let refuse = |reason: String| CheckpointError::unusable(&path, reason);
        let text = read_text(&path).map_err(refuse)?;
        let value: Value = serde_json::from_str(&text).map_err(|error| refuse(format!("not whole: {error}")))?;
        if value["format"] != FORMAT {
            return Err(refuse("it is not the index of a Sconce checkpoint".into()));
        }
        match value["version"].as_u64() {
            Some(version) if version > VERSION => {
                return Err(refuse(format!(
                    "version {version} is newer than this program, which reads up to {VERSION}; use a newer Sconce"
                )));
            }
            Some(_) => {}
            None => return Err(refuse("it has no version".into())),
        }
        if value.get("blake3").is_some() && !has_its_hash(&text) {
            return Err(refuse(
                "its contents are not what was written: it is damaged, load another checkpoint (if it was edited on purpose, \
                 remove the line \"blake3\")"
                    .into(),
            ));
        }
        let index: Self = serde_json::from_value(value).map_err(|error| refuse(error.to_string()))?;
        index.check(folder).map_err(refuse)?;
        Ok(index)
    }

    /// Returns all boxes, in order of model, parameter, array and element.
    pub(super) fn boxes(&self) -> impl Iterator<Item = &BoxEntry> {
        let parameters = self.models.iter().flat_map(|model| model.parameters.values());
        parameters.flat_map(|parameter| parameter.arrays.values()).flatten()
    }

    /// Checks what a file from others may have wrong: paths, ranges, lengths.
    fn check(&self, folder: &Path) -> Result<(), String> {
        for (file, length) in &self.files {
            if !is_plain_name(file) {
                return Err(format!("file name {file:?} leaves the checkpoint's folder"));
            }
            match std::fs::metadata(folder.join(file)) {
                // A pipe would keep who opens it waiting.
                Ok(found) if !found.is_file() => return Err(format!("{file} is not a file")),
                Ok(found) if found.len() == *length => {}
                Ok(found) => {
                    return Err(format!(
                        "{file} has {} bytes, expected {length}: it is not whole",
                        found.len()
                    ));
                }
                Err(error) => return Err(format!("{file}: {error}")),
            }
        }
        self.models.iter().try_for_each(ModelEntry::check)?;
        for (name, parameter) in self.models.iter().flat_map(|model| &model.parameters) {
            let elements_of = |shape: &[usize]| {
                let mut sizes = shape.iter();
                let elements = sizes.try_fold(1usize, |product, size| product.checked_mul(*size));
                // So that no number of bytes overflows later.
                let elements = elements.filter(|elements| elements.checked_mul(4).is_some());
                elements.ok_or_else(|| format!("{name}: shape {shape:?} is too large"))
            };
            elements_of(&parameter.shape)?;
            if let Some(what) = parameter.shapes.keys().find(|what| *what != StatePiece::POWER_SGD_Q) {
                return Err(format!("{name} ({what}) has a shape of its own"));
            }
            for (what, boxes) in &parameter.arrays {
                let elements = elements_of(parameter.shape_of(what))?;
                let mut end = 0;
                for one in boxes {
                    let is_in_turn = one.start == end && one.end > one.start;
                    if !is_in_turn || one.end > elements || !self.files.contains_key(&one.file) {
                        return Err(format!(
                            "{name} ({what}): elements {}..{} are out of turn",
                            one.start, one.end
                        ));
                    }
                    end = one.end;
                }
                if end != elements {
                    return Err(format!("{name} ({what}): {end} of {elements} elements are there"));
                }
            }
        }
        Ok(())
    }
}

/// Reads a file of text, and nothing that would keep waiting who opens it, or never end.
fn read_text(path: &Path) -> Result<String, String> {
    let found = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("it is not a file".into());
    }
    if found.len() > MOST_BYTES {
        return Err(format!("it has {} bytes, expected {MOST_BYTES} at most", found.len()));
    }
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text));
    read.map_err(|error| error.to_string())?;
    Ok(text)
}

/// Says whether a text begins with the hash of its rest.
fn has_its_hash(text: &str) -> bool {
    let hashed = text.strip_prefix(BEGINNING).and_then(|text| text.split_once(HASHED));
    hashed.is_some_and(|(hash, rest)| blake3::hash(rest.as_bytes()).to_hex().as_str() == hash)
}

/// Says whether a name is that of a file in the folder itself.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!(parts.next(), Some(std::path::Component::Normal(_))) && parts.next().is_none() && !name.contains('\\')
}

impl ModelEntry {
    /// Checks that what is known of parameters is known of all that are trained: a part that is missing would begin anew.
    fn check(&self) -> Result<(), String> {
        let has_state = |parameter: &ParameterEntry| {
            parameter
                .arrays
                .keys()
                .any(|what| self.state.state_names.contains(what))
        };
        let stepped = self.parameters.iter().filter(|(_, parameter)| has_state(parameter));
        for (name, parameter) in stepped {
            if let Some(what) = self
                .state
                .state_names
                .iter()
                .find(|what| !parameter.arrays.contains_key(*what))
            {
                return Err(format!("{name} has no {what}"));
            }
            if !self.state.steps.contains_key(name) {
                return Err(format!("{name} has optimizer state and no count of steps"));
            }
        }
        let mut order = Vec::from_iter(&self.state.gradient_order);
        order.sort_unstable();
        order.dedup();
        let is_known = |name: &&String| self.parameters.contains_key(*name);
        if order.len() != self.state.gradient_order.len() || !order.iter().all(is_known) {
            return Err("the order of gradients names a parameter twice, or one that is not there".into());
        }
        let too_many = self.state.steps.iter().find(|(_, steps)| **steps > MOST_STEPS);
        too_many.map_or(Ok(()), |(name, steps)| Err(format!("{name} has taken {steps} steps")))?;
        self.state
            .power_sgd
            .as_ref()
            .map_or(Ok(()), |state| self.check_power_sgd(state))
    }

    /// Checks that errors are there of all ranks or of none: a part of them is not what training is owed.
    fn check_power_sgd(&self, state: &PowerSgdState) -> Result<(), String> {
        if state.iterations > MOST_STEPS {
            return Err(format!("PowerSGD has made {} iterations", state.iterations));
        }
        let ranks = state.error_ranks.unwrap_or(0);
        for (name, parameter) in &self.parameters {
            let is_error = |what: &&String| what.starts_with(StatePiece::POWER_SGD_ERROR);
            let found = parameter.arrays.keys().filter(is_error).count();
            let is_there = |rank| parameter.arrays.contains_key(&StatePiece::power_sgd_error(rank));
            if found > 0 && (found != ranks || !(0..ranks).all(is_there)) {
                return Err(format!(
                    "{name} has errors of PowerSGD of {found} ranks, expected {ranks}"
                ));
            }
        }
        Ok(())
    }

    /// Makes the entry of a model whose parameters are still to be told.
    pub(super) fn of(state: EngineState, without_frozen: bool) -> Self {
        Self {
            state,
            without_frozen,
            parameters: BTreeMap::new(),
        }
    }
}
