//! One rank's arrays in a safetensors file: written in one go, read block by block.

use super::error::CheckpointError;
use super::index::{BLOCK, BoxEntry};
use bytemuck::cast_slice;
use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use sconce_zero::Elements;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Bytes that the system is asked to read before they are needed.
const AHEAD: u64 = 32 << 20;

/// Longest header that is read.
const MOST_HEADER: u64 = 100 << 20;

/// Returns the dtype's name and the bytes of values.
pub(super) fn bytes_of<'a>(values: &Elements<'a>) -> (&'static str, &'a [u8]) {
    match values {
        Elements::F32(values) => ("F32", cast_slice(values)),
        Elements::Bf16(values) => ("BF16", cast_slice(values)),
        Elements::F16(values) => ("F16", cast_slice(values)),
    }
}

/// A file being written, whose boxes come in the order planned.
#[derive(Debug)]
pub(super) struct ArrayWriter {
    path: PathBuf,
    writer: BufWriter<File>,
    bytes: u64,
}

impl ArrayWriter {
    /// Begins a new file of these boxes.
    pub(super) fn create<'a>(path: &Path, boxes: impl Iterator<Item = &'a BoxEntry>) -> Result<Self, CheckpointError> {
        let mut header = Map::new();
        let mut offset = 0;
        for one in boxes {
            let end = offset + one.bytes();
            let entry = json!({"dtype": one.dtype, "shape": [one.elements()], "data_offsets": [offset, end]});
            header.insert(one.tensor.clone(), entry);
            offset = end;
        }
        let mut text = Value::Object(header).to_string();
        // So that the data begins at a multiple of 8, as readers that map it want it.
        text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
        let file = File::create_new(path).map_err(|error| CheckpointError::unusable(path, error))?;
        let mut writer = Self {
            path: path.into(),
            writer: BufWriter::with_capacity(BLOCK, file),
            bytes: 0,
        };
        writer.write_bytes(&(text.len() as u64).to_le_bytes())?;
        writer.write_bytes(text.as_bytes())?;
        Ok(writer)
    }

    /// Writes the next box; returns its hashes.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<Vec<String>, CheckpointError> {
        if bytes.len() <= BLOCK {
            self.write_bytes(bytes)?;
            return Ok(bytes.chunks(BLOCK).map(hash).collect());
        }
        // Hashing takes as long as writing, and needs nothing that writing needs. In a thread of its own, since the pool's
        // are training while this writes behind it.
        std::thread::scope(|scope| {
            let hashes = scope.spawn(|| bytes.chunks(BLOCK).map(hash).collect::<Vec<_>>());
            bytes.chunks(BLOCK).try_for_each(|block| self.write_bytes(block))?;
            Ok(hashes.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Ends the file, which is on disk when this returns; returns its length.
    pub(super) fn finish(mut self) -> Result<u64, CheckpointError> {
        let flushed = self.writer.flush().and_then(|()| self.writer.get_ref().sync_all());
        flushed.map_err(|error| CheckpointError::unusable(&self.path, error))?;
        Ok(self.bytes)
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.bytes += bytes.len() as u64;
        self.writer
            .write_all(bytes)
            .map_err(|error| CheckpointError::unusable(&self.path, error))
    }
}

/// The files of a checkpoint, opened as they are needed.
///
/// They are read, not mapped: a file that someone cuts off meanwhile is an error then, where a mapping would end the process.
#[derive(Debug)]
pub(super) struct ArrayFiles {
    folder: PathBuf,
    files: HashMap<String, OpenFile>,
    /// The block at hand.
    block: Vec<u8>,
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    /// Where the data begins.
    start: u64,
    header: Metadata,
    length: u64,
    /// Where the last block ended.
    next: u64,
    /// Where what the system was asked for ends.
    asked: u64,
    /// Where what it may be asked for ends.
    end: u64,
}

impl ArrayFiles {
    pub(super) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.into(),
            files: HashMap::new(),
            block: Vec::new(),
        }
    }

    /// Reads elements of an array, whose boxes these are, as f32, and checks the blocks in which they lie.
    pub(super) fn read(
        &mut self,
        boxes: &[BoxEntry],
        elements: Range<usize>,
        values: &mut [f32],
    ) -> Result<(), CheckpointError> {
        for one in boxes {
            let (start, end) = (elements.start.max(one.start), elements.end.min(one.end));
            if start < end {
                let target = &mut values[start - elements.start..end - elements.start];
                self.read_box(one, start - one.start..end - one.start, target)?;
            }
        }
        Ok(())
    }

    fn read_box(&mut self, entry: &BoxEntry, within: Range<usize>, values: &mut [f32]) -> Result<(), CheckpointError> {
        self.for_each_block(entry, within, |dtype, size, wanted, start, block| {
            let end = start + block.len();
            let part = wanted.start.max(start)..wanted.end.min(end);
            let target = (part.start - wanted.start) / size..(part.end - wanted.start) / size;
            convert(dtype, &block[part.start - start..part.end - start], &mut values[target]);
        })
    }

    /// Checks all blocks of a box; returns its bytes.
    pub(super) fn check(&mut self, entry: &BoxEntry) -> Result<u64, CheckpointError> {
        let mut bytes = 0;
        self.for_each_block(entry, 0..entry.elements(), |_, _, _, _, block| {
            bytes += block.len() as u64;
        })?;
        Ok(bytes)
    }

    /// Hands over the blocks of a box in which elements `within` lie, checked: with the dtype, bytes per element, the bytes
    /// wanted, and where the block begins among those of the box.
    fn for_each_block(
        &mut self,
        entry: &BoxEntry,
        within: Range<usize>,
        mut take: impl FnMut(Dtype, usize, &Range<usize>, usize, &[u8]),
    ) -> Result<(), CheckpointError> {
        let path = self.folder.join(&entry.file);
        let damaged = |reason: String| CheckpointError::Damaged {
            path: path.clone(),
            tensor: entry.tensor.clone(),
            reason,
        };
        let file = match self.files.entry(entry.file.clone()) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(new) => new.insert(OpenFile::open(&path)?),
        };
        let Some(info) = file.header.info(&entry.tensor) else {
            return Err(damaged("it is not in the file".into()));
        };
        let (elements, bytes) = (entry.elements(), info.data_offsets.1 - info.data_offsets.0);
        let (dtype, size) = match info.dtype {
            Dtype::F32 => ("F32", 4),
            Dtype::BF16 => ("BF16", 2),
            Dtype::F16 => ("F16", 2),
            other => return Err(damaged(format!("it is {other:?}; expected F32, BF16 or F16"))),
        };
        if dtype != entry.dtype || elements.checked_mul(size) != Some(bytes) {
            return Err(damaged(format!(
                "it has {bytes} bytes of {dtype}, expected {elements} elements of {}",
                entry.dtype
            )));
        }
        let wanted = within.start * size..within.end * size;
        let (stored, begin) = (info.dtype, file.start + info.data_offsets.0 as u64);
        let blocks = wanted.start / BLOCK..wanted.end.div_ceil(BLOCK);
        file.begin(begin + (blocks.start * BLOCK) as u64, begin + wanted.end as u64);
        for number in blocks {
            let whole = number * BLOCK..((number + 1) * BLOCK).min(bytes);
            self.block.resize(whole.len(), 0);
            let read = file.read(begin + whole.start as u64, &mut self.block);
            read.map_err(|error| damaged(error.to_string()))?;
            if entry
                .hashes
                .get(number)
                .is_none_or(|expected| *expected != hash(&self.block))
            {
                return Err(damaged(format!(
                    "bytes {} to {} are not what was written: the file is damaged, load another checkpoint",
                    whole.start, whole.end
                )));
            }
            take(stored, size, &wanted, whole.start, &self.block);
        }
        Ok(())
    }
}

impl OpenFile {
    /// Prepares for reading from `place` on, up to where what is wanted ends. Who goes on where the last reading ended will
    /// want what follows in the file, too.
    fn begin(&mut self, place: u64, end: u64) {
        if place == self.next {
            self.end = self.length;
        } else {
            (self.asked, self.end) = (place, end);
        }
    }

    /// Reads the next block, and asks the system for those after it, so that the disk works while this one is checked.
    fn read(&mut self, place: u64, block: &mut [u8]) -> std::io::Result<()> {
        let start = self.asked.max(place);
        let end = (place + AHEAD).min(self.end);
        if let Some(length) = NonZeroU64::new(end.saturating_sub(start)) {
            // Where the system cannot, reading waits for them.
            let _ = rustix::fs::fadvise(&self.file, start, Some(length), rustix::fs::Advice::WillNeed);
            self.asked = end;
        }
        self.next = place + block.len() as u64;
        self.file.read_exact_at(block, place)
    }

    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let refuse = |reason: String| CheckpointError::unusable(path, reason);
        let file = File::open(path).map_err(|error| CheckpointError::unusable(path, error))?;
        let length = file
            .metadata()
            .map_err(|error| CheckpointError::unusable(path, error))?
            .len();
        let mut size = [0; 8];
        file.read_exact_at(&mut size, 0)
            .map_err(|error| CheckpointError::unusable(path, error))?;
        let size = u64::from_le_bytes(size);
        if size > MOST_HEADER || size + 8 > length {
            return Err(refuse(format!(
                "a header of {size} bytes in a file of {length}: it is damaged, or not safetensors"
            )));
        }
        let mut text = vec![0; size as usize];
        file.read_exact_at(&mut text, 8)
            .map_err(|error| CheckpointError::unusable(path, error))?;
        let header = parse_header(&text).map_err(refuse)?;
        let start = size + 8;
        if start + header.data_len() as u64 != length {
            return Err(refuse(format!(
                "{length} bytes, expected {}: it is not whole",
                start + header.data_len() as u64
            )));
        }
        Ok(Self {
            file,
            start,
            header,
            length,
            next: start,
            asked: start,
            end: start,
        })
    }
}

/// Reads a header without the data; what overlaps or leaves gaps is refused.
fn parse_header(text: &[u8]) -> Result<Metadata, String> {
    let mut entries: Map<String, Value> =
        serde_json::from_slice(text).map_err(|error| format!("its header: {error}"))?;
    entries.remove("__metadata__");
    let parse = |(name, value)| match serde_json::from_value::<TensorInfo>(value) {
        Ok(info) => Ok((name, info)),
        Err(error) => Err(format!("its header, {name:?}: {error}")),
    };
    let mut tensors = entries.into_iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    Metadata::new(None, tensors).map_err(|error| format!("its header: {error}"))
}

fn convert(dtype: Dtype, bytes: &[u8], values: &mut [f32]) {
    match dtype {
        Dtype::BF16 => bytemuck::pod_collect_to_vec::<u8, bf16>(bytes).convert_to_f32_slice(values),
        Dtype::F16 => bytemuck::pod_collect_to_vec::<u8, f16>(bytes).convert_to_f32_slice(values),
        _ => bytemuck::cast_slice_mut(values).copy_from_slice(bytes),
    }
}

/// The first 16 hexadecimal digits of blake3.
fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..16].to_owned()
}
