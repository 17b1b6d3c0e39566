//! This rank's part of a unit's sharded parameters.
//!
//! A shard holds the parameters of one unit that have one dtype and are trained alike. It has the layout of a bucket: one
//! part per rank, one chunk of every parameter in each part, of which this rank keeps its own. Where the backend shares
//! memory, the part lies there, and a gather reads it in place.

use crate::device::{DeviceStep, Filling, Gpu, ManagedTensor, StepTarget};
use crate::layout::BucketLayout;
use crate::parameter::Master;
use crate::release::release_buffer;
use crate::storage::ElementsMut;
use crate::{DiskValues, Placement, Result, Tier};
use candle_core::{DType, Storage, Tensor};
use half::{bf16, f16};
use sconce_collectives::{Buffer, Collective, Communicator, Element};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// One parameter of a shard to be.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) parameter: usize,
    pub(crate) tensor: ManagedTensor,
    /// The full parameter's elements.
    pub(crate) elements: usize,
    /// This rank's elements.
    pub(crate) values: Vec<f32>,
}

/// This rank's part of some parameters.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) layout: BucketLayout,
    /// The unit's name.
    unit: String,
    /// Told to peers in a gather, so that different units are not mistaken for each other.
    label: u32,
    dtype: DType,
    is_trained: bool,
    /// By slot.
    tensors: Vec<ManagedTensor>,
    rank: usize,
    memory: RwLock<Memory>,
}

#[derive(Debug)]
struct Memory {
    /// What peers gather, in the parameters' dtype.
    values: Share,
    /// What the optimizer updates, in f32, where that is not `values` itself.
    masters: Option<Buffer>,
}

#[derive(Debug)]
enum Share {
    InMemory(Buffer),
    OnDisk { disk: Arc<DiskShares>, offset: u64 },
}

/// The shares on disk of one rank, and memory that peers reach, through which they pass on their way to a gather.
#[derive(Debug)]
pub(crate) struct DiskShares {
    pub(crate) file: DiskValues,
    pub(crate) staging: Mutex<Buffer>,
}

impl Shard {
    /// Makes the shard of `unit`'s parameters; those trained in another dtype than f32 get f32 masters.
    pub(crate) fn new(
        unit: &str,
        placement: Placement,
        dtype: DType,
        is_trained: bool,
        chunks: Vec<Chunk>,
        (rank, world): (usize, usize),
    ) -> Result<Self> {
        let mut layout = BucketLayout::new(placement, dtype, world);
        chunks
            .iter()
            .for_each(|chunk| layout.push(chunk.parameter, chunk.elements));
        let has_masters = is_trained && dtype != DType::F32;
        let gpu = |tier| chunks.first().and_then(|chunk| chunk.tensor.gpu(tier));
        let allocate = |tier, size: usize| match gpu(tier) {
            Some(gpu) => gpu.allocate(layout.part_elements * size),
            None => Ok(Buffer::on_heap(layout.part_elements * size)),
        };
        let mut values = allocate(placement.parameter_tier, dtype.size_in_bytes())?;
        let mut masters = match has_masters {
            true => Some(allocate(placement.optimizer_state_tier, size_of::<f32>())?),
            false => None,
        };
        for (slot, chunk) in layout.slots.iter().zip(&chunks) {
            let within = slot.within_part(rank);
            typed(dtype, &mut values, within.clone()).round_from(&chunk.values);
            if let Some(masters) = &mut masters {
                masters.as_mut_slice::<f32>()[within].copy_from_slice(&chunk.values);
            }
        }
        let hash = blake3::hash(format!("{unit} {} {is_trained}", dtype.as_str()).as_bytes());
        let label = hash
            .as_bytes()
            .iter()
            .take(4)
            .fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        Ok(Self {
            layout,
            unit: unit.into(),
            label,
            dtype,
            is_trained,
            tensors: chunks.into_iter().map(|chunk| chunk.tensor).collect(),
            rank,
            memory: RwLock::new(Memory {
                values: Share::InMemory(values),
                masters,
            }),
        })
    }

    /// Moves what peers gather into memory that they reach; called by all ranks.
    pub(crate) fn share(&self, communicator: &dyn Communicator) -> Result<()> {
        let mut memory = self.write();
        if let Share::InMemory(values) = &mut memory.values
            && !values.is_unified()
        {
            let mut shared = communicator.allocate(values.len())?;
            shared.as_mut_slice::<u8>().copy_from_slice(values.as_slice());
            release_buffer(std::mem::replace(values, shared));
        }
        Ok(())
    }

    /// Moves what peers gather to disk, from byte `offset` on.
    pub(crate) fn move_to_disk(&self, disk: &Arc<DiskShares>, offset: u64) -> Result<()> {
        let mut memory = self.write();
        if let Share::InMemory(values) = &memory.values {
            disk.file.write(offset, values.as_slice())?;
            let disk = Arc::clone(disk);
            if let Share::InMemory(values) = std::mem::replace(&mut memory.values, Share::OnDisk { disk, offset }) {
                release_buffer(values);
            }
        }
        Ok(())
    }

    /// Fills the tensors with all ranks' chunks; called by all ranks.
    pub(crate) fn gather(&self, group: &dyn Communicator) -> Result<()> {
        match self.dtype {
            DType::F32 => self.gather_as::<f32>(group),
            DType::BF16 => self.gather_as::<bf16>(group),
            _ => self.gather_as::<f16>(group),
        }
    }

    fn gather_as<T: Element>(&self, group: &dyn Communicator) -> Result<()> {
        let memory = self.read();
        let mut staging;
        let values = match &memory.values {
            Share::InMemory(values) => values,
            Share::OnDisk { disk, offset } => {
                staging = disk.staging.lock().unwrap_or_else(PoisonError::into_inner);
                let bytes = &mut staging.as_mut_slice::<u8>()[..self.bytes_of_values()];
                if let Err(error) = disk.file.read(*offset, bytes) {
                    // Peers wait for this rank's values.
                    group.abort(&error.to_string());
                    return Err(error);
                }
                &*staging
            }
        };
        if values.is_unified() {
            return self.gather_on_gpu::<T>(values, group);
        }
        let values = &values.as_slice::<T>()[..self.layout.part_elements];
        let fillings = self.tensors.iter().map(ManagedTensor::fill);
        let mut fillings = match fillings.collect::<candle_core::Result<Vec<_>>>() {
            Ok(fillings) => fillings,
            Err(error) => {
                group.abort(&error.to_string());
                return Err(error.into());
            }
        };
        let mut outcome = Ok(());
        group.all_gather_each(values, self.label, |rank, part| {
            for (slot, filling) in self.layout.slots.iter().zip(&mut fillings) {
                let source = bytemuck::cast_slice(&part[slot.within_part(rank)]);
                let filled = filling.with_values(slot.chunk(rank), |chunk| chunk.into_bytes().copy_from_slice(source));
                if outcome.is_ok() {
                    outcome = filled;
                }
            }
        })?;
        outcome?;
        Ok(fillings.into_iter().try_for_each(Filling::finish)?)
    }

    /// Gathers through memory on the GPU: all ranks' parts come together there, and are copied to the tensors.
    fn gather_on_gpu<T: Element>(&self, values: &Buffer, group: &dyn Communicator) -> Result<()> {
        let (bytes, parts) = (self.bytes_of_values(), self.layout.parts);
        if parts == 1 {
            return self.fill_on_gpu(values);
        }
        let gpu = self.tensors.first().and_then(|tensor| tensor.gpu(Tier::Device));
        let prepared = gpu.ok_or_else(not_on_gpu).and_then(|gpu| {
            let mut whole = gpu.take(bytes * parts)?;
            gpu.copy(values, (&mut whole, bytes * self.rank), bytes)?;
            Ok((gpu, whole))
        });
        // Peers wait for this rank's values.
        let (gpu, mut whole) = prepared.inspect_err(|error| group.abort(&error.to_string()))?;
        let elements = &mut whole.for_peers::<T>()[..self.layout.elements()];
        group.all_gather_labelled(elements, self.layout.part_elements, self.label)?;
        self.fill_on_gpu(&whole)?;
        gpu.give_back(whole);
        Ok(())
    }

    /// Fills the tensors from memory on the GPU with all parts.
    fn fill_on_gpu(&self, whole: &Buffer) -> Result<()> {
        let size = self.dtype.size_in_bytes();
        for (slot, tensor) in self.layout.slots.iter().zip(&self.tensors) {
            let places = self.layout.places(slot);
            tensor.fill_from_buffer(whole, places.map(|(place, chunk)| (chunk, place.start * size)))?;
        }
        Ok(())
    }

    /// Has a kernel update some elements of this rank's chunk of a slot; `false`, and nothing is done, where not all of it
    /// lies on the GPU.
    pub(crate) fn step_on_gpu(
        &self,
        gpu: &Gpu,
        slot: usize,
        elements: Range<usize>,
        step: DeviceStep<'_>,
    ) -> Result<bool> {
        let chunk = self.layout.slots[slot].within_part(self.rank);
        let within = chunk.start + elements.start..chunk.start + elements.end;
        let mut memory = self.write();
        let Memory { values, masters } = &mut *memory;
        let Share::InMemory(values) = values else {
            return Ok(false);
        };
        let has_masters = self.dtype == DType::F32 || masters.as_ref().is_some_and(Buffer::is_unified);
        if !values.is_unified() || !has_masters {
            return Ok(false);
        }
        let target = StepTarget::Shard {
            values,
            masters: masters.as_mut(),
            dtype: self.dtype,
            within,
        };
        gpu.step(step, target).map(|()| true)
    }

    /// Returns the tensors that are gathered.
    pub(crate) fn tensors(&self) -> &[ManagedTensor] {
        &self.tensors
    }

    /// Runs `work` on some elements of this rank's chunk of a slot: the values the optimizer updates.
    pub(crate) fn with_master<R>(
        &self,
        slot: usize,
        elements: Range<usize>,
        work: impl FnOnce(Master<'_>) -> R,
    ) -> Result<R> {
        let mut memory = self.write();
        let chunk = self.layout.slots[slot].within_part(self.rank);
        let within = chunk.start + elements.start..chunk.start + elements.end;
        let Memory { values, masters } = &mut *memory;
        let masters = masters
            .as_mut()
            .map(|masters| &mut masters.as_mut_slice::<f32>()[within.clone()]);
        let master_of = |values| match masters {
            Some(masters) => Master::Apart { masters, copy: values },
            None => Master::Itself(values),
        };
        match values {
            Share::InMemory(values) => Ok(work(master_of(typed(self.dtype, values, within)))),
            Share::OnDisk { disk, offset } => {
                let size = self.dtype.size_in_bytes();
                let mut here = Buffer::on_heap(within.len() * size);
                let place = *offset + (within.start * size) as u64;
                disk.file.read(place, here.as_mut_slice())?;
                let outcome = work(master_of(typed(self.dtype, &mut here, 0..within.len())));
                disk.file.write(place, here.as_slice())?;
                Ok(outcome)
            }
        }
    }

    /// Forgets the masters, which are kept elsewhere from now on.
    pub(crate) fn drop_masters(&self) {
        self.write().masters = None;
    }

    /// Returns the name of the unit to which the parameters belong.
    pub(crate) fn unit(&self) -> &str {
        &self.unit
    }

    /// Returns how errors write the label of this shard's gathers.
    pub(crate) fn written_label(&self) -> String {
        Collective::written_label(self.label)
    }

    /// Says whether a tensor is one of the parameters, or a view of one.
    pub(crate) fn holds(&self, tensor: &Tensor) -> bool {
        self.tensors
            .iter()
            .any(|parameter| storage(parameter) == storage(tensor))
    }

    /// Says whether the parameters are trained, rather than frozen.
    pub(crate) fn is_trained(&self) -> bool {
        self.is_trained
    }

    /// Returns the elements of the gathered tensors.
    pub(crate) fn gathered_elements(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.elem_count()).sum()
    }

    /// Returns the bytes of the gathered tensors.
    pub(crate) fn gathered_bytes(&self) -> usize {
        self.gathered_elements() * self.dtype.size_in_bytes()
    }

    /// Returns the bytes of this rank's values, wherever they are.
    pub(crate) fn bytes_of_values(&self) -> usize {
        self.layout.part_elements * self.dtype.size_in_bytes()
    }

    /// Returns the bytes held in memory of the values that are gathered, and of masters.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let memory = self.read();
        let values = match &memory.values {
            Share::InMemory(values) => values.len(),
            Share::OnDisk { .. } => 0,
        };
        (values, memory.masters.as_ref().map_or(0, Buffer::len))
    }

    fn read(&self) -> RwLockReadGuard<'_, Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Memory> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_on_gpu() -> crate::Error {
    let message = "values on a GPU were to be gathered, and their tensors are not on it";
    candle_core::Error::msg(message).into()
}

/// Returns which storage a tensor has; for comparing only.
fn storage(tensor: &Tensor) -> *const Storage {
    std::ptr::from_ref(&*tensor.storage_and_layout().0)
}

fn typed(dtype: DType, buffer: &mut Buffer, within: Range<usize>) -> ElementsMut<'_> {
    match dtype {
        DType::F32 => ElementsMut::F32(&mut buffer.as_mut_slice()[within]),
        DType::BF16 => ElementsMut::Bf16(&mut buffer.as_mut_slice()[within]),
        _ => ElementsMut::F16(&mut buffer.as_mut_slice()[within]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Residence;
    use candle_core::Device;

    const PLACEMENT: Placement = Placement {
        parameter: Residence::Sharded,
        gradient: Residence::Sharded,
        optimizer_state: Residence::Sharded,
        ..Placement::REPLICATED
    };

    /// A rank's shard of parameters of these sizes, whose elements are their numbers; all tensors are released.
    fn shard(sizes: &[usize], dtype: DType, place: (usize, usize)) -> Shard {
        let chunk = |(parameter, elements): (usize, &usize)| {
            let own = crate::parameter::chunk_of(*elements, place.0, place.1);
            let tensor = Tensor::zeros(*elements, dtype, &Device::Cpu).unwrap();
            let tensor = ManagedTensor::new(tensor, &Arc::default());
            tensor.release().unwrap();
            Chunk {
                parameter,
                tensor,
                elements: *elements,
                values: own.map(|element| element as f32).collect(),
            }
        };
        let chunks = sizes.iter().enumerate().map(chunk).collect();
        Shard::new("unit", PLACEMENT, dtype, true, chunks, place).unwrap()
    }

    fn numbers(tensor: &Tensor) -> Vec<f32> {
        tensor.to_dtype(DType::F32).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn padding_and_other_ranks_memory_have_no_part_in_a_gather_or_an_update() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for world in 1..=4 {
                let sizes = [1, 2, 7, 100];
                let ranks = sconce_collectives::shm::threads(world, &sconce_collectives::Options::default()).unwrap();
                std::thread::scope(|scope| {
                    for group in ranks {
                        scope.spawn(move || {
                            let rank = group.rank();
                            let shard = shard(&sizes, dtype, (rank, world));
                            shard.share(&*group).unwrap();
                            let mut memory = shard.write();
                            let owned: Vec<_> = shard.layout.slots.iter().map(|slot| slot.within_part(rank)).collect();
                            let is_padding = |element: &usize| !owned.iter().any(|own| own.contains(element));
                            for element in (0..shard.layout.part_elements).filter(is_padding) {
                                let size = dtype.size_in_bytes();
                                let Share::InMemory(values) = &mut memory.values else {
                                    panic!("the share is in memory")
                                };
                                values.as_mut_slice::<u8>()[element * size..][..size].fill(0xff);
                                if let Some(masters) = &mut memory.masters {
                                    masters.as_mut_slice::<f32>()[element] = f32::NAN;
                                }
                            }
                            drop(memory);
                            for slot in 0..sizes.len() {
                                let own = 0..shard.layout.slots[slot].chunk(rank).len();
                                shard
                                    .with_master(slot, own, |master| match master {
                                        Master::Itself(ElementsMut::F32(values)) => {
                                            values.iter_mut().for_each(|v| *v += 1.0);
                                        }
                                        Master::Itself(_) => panic!("half precision has masters"),
                                        Master::Apart { masters, copy } => {
                                            masters.iter_mut().for_each(|value| *value += 1.0);
                                            copy.round_from(masters);
                                        }
                                    })
                                    .unwrap();
                            }
                            shard.gather(&*group).unwrap();
                            for (tensor, size) in shard.tensors.iter().zip(sizes) {
                                let expected: Vec<f32> = (1..=size).map(|element| element as f32).collect();
                                assert_eq!(numbers(tensor), expected, "{dtype:?}, world {world}");
                            }
                            shard.tensors.iter().for_each(|tensor| tensor.release().unwrap());
                            let released = shard.tensors.iter().map(|tensor| numbers(tensor));
                            released.for_each(|numbers| assert!(numbers[0].is_nan()));
                        });
                    }
                });
            }
        }
    }
}
