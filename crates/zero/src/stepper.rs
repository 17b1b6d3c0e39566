//! The update rule at work: what it keeps per element, in memory or on disk, and one step over all parameters.
//!
//! What this rank updates of a parameter is cut into *segments*, and segments lie together in *groups*, each with one
//! flat array per kind of state. State in memory has a group per gradient bucket. State on disk has groups of at most
//! [`DiskOptions::sub_group_elements`], which are brought in one after another; there f32 masters of bf16 and f16
//! parameters are state too.

mod checkpoint;

use crate::bucket::Held;
use crate::device::{DeviceStep, FlatMemory, Gpu, Intent, Spread};
use crate::optimizer::rules_at;
use crate::parameter::{Master, Parameter};
use crate::storage::ElementsMut;
use crate::{
    DiskOptions, DiskState, Error, Gradient, HalfMut, OptimizerRule, Result, StateSlices, Tier, Update, Values,
};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Once;

/// Elements updated by one task.
const BLOCK: usize = 1 << 15;

/// An update rule and its state on one rank.
#[derive(Debug)]
pub(crate) struct Stepper {
    rule: Box<dyn OptimizerRule>,
    /// The number of each parameter's group, by which its rule is chosen.
    groups: Vec<usize>,
    disk: Option<DiskOptions>,
    rank: usize,
    /// How often each parameter has been updated.
    steps: Vec<u64>,
    /// Known once the gradients' layout is.
    state: Option<State>,
}

#[derive(Debug)]
struct State {
    in_memory: Vec<(Group, [FlatMemory; StateSlices::MOST])>,
    on_disk: Vec<OnDisk>,
}

/// State of parameters that all have masters, or that all have none.
#[derive(Debug)]
struct OnDisk {
    groups: Vec<Group>,
    /// The rule's arrays, then masters if there are some.
    state: DiskState,
    has_masters: bool,
}

/// Segments whose state lies in the same arrays.
#[derive(Debug, Default)]
struct Group {
    segments: Vec<Segment>,
    elements: usize,
}

/// Some elements of one parameter's chunk in one part.
#[derive(Debug)]
struct Segment {
    bucket: usize,
    slot: usize,
    part: usize,
    /// Elements of the chunk.
    within: Range<usize>,
    /// Where their state begins in the group's arrays.
    offset: usize,
}

impl Stepper {
    /// Makes a stepper for parameters that belong to these groups of the rule.
    pub(crate) fn new(
        rule: Box<dyn OptimizerRule>,
        groups: Vec<usize>,
        disk: Option<DiskOptions>,
        rank: usize,
    ) -> Self {
        Self {
            rule,
            disk,
            rank,
            steps: vec![0; groups.len()],
            groups,
            state: None,
        }
    }

    /// Returns the bytes of state in memory, and on disk.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let Some(state) = &self.state else { return (0, 0) };
        let arrays = state.in_memory.iter().flat_map(|(_, arrays)| arrays);
        let in_memory: usize = arrays.map(|array| array.len() * size_of::<f32>()).sum();
        let buffers: u64 = state.on_disk.iter().map(|disk| disk.state.bytes_in_memory()).sum();
        let on_disk = state.on_disk.iter().map(|disk| disk.state.bytes_on_disk()).sum();
        (in_memory as u64 + buffers, on_disk)
    }

    /// Updates those elements whose reduced gradient this rank holds; `holds` says of which parameters there is one.
    pub(crate) fn step(
        &mut self,
        learning_rate: f64,
        gradient_scale: f32,
        buckets: &[Held<'_>],
        holds: &[bool],
        parameters: &[Parameter],
        gpu: Option<&Gpu>,
    ) -> Result<()> {
        let mut state = match self.state.take() {
            Some(state) => state,
            None => self.new_state(buckets, parameters, gpu)?,
        };
        let counted = self.steps.iter_mut().zip(holds);
        counted.for_each(|(steps, held)| *steps += u64::from(*held));
        let pass = Pass {
            rules: rules_at(&*self.rule, learning_rate),
            groups: &self.groups,
            gradient_scale,
            steps: &self.steps,
            buckets,
            holds,
            parameters,
        };
        let outcome = state.step(&pass, gpu);
        self.state = Some(state);
        outcome
    }

    /// `gpu` is where state of the device's tier lies, if it does on one.
    fn new_state(&self, buckets: &[Held<'_>], parameters: &[Parameter], gpu: Option<&Gpu>) -> Result<State> {
        let is_on_disk = |bucket: &Held<'_>| bucket.layout.placement.optimizer_state_tier == Tier::Disk;
        let numbered = || buckets.iter().enumerate();
        let in_memory = numbered()
            .filter(|(_, bucket)| !is_on_disk(bucket))
            .map(|(number, bucket)| {
                let group = Group::of_bucket(number, bucket);
                let is_on_gpu = bucket.layout.placement.optimizer_state_tier == Tier::Device;
                let arrays = self.new_arrays(group.elements, gpu.filter(|_| is_on_gpu))?;
                Ok((group, arrays))
            });
        let mut on_disk = Vec::new();
        for has_masters in [false, true] {
            let chosen =
                numbered().filter(|(_, bucket)| is_on_disk(bucket) && has_masters_apart(bucket) == has_masters);
            let segments: Vec<_> = chosen
                .flat_map(|(number, bucket)| Group::of_bucket(number, bucket).segments)
                .collect();
            if !segments.is_empty() {
                on_disk.push(self.new_on_disk(segments, has_masters, buckets, parameters)?);
            }
        }
        Ok(State {
            in_memory: in_memory.collect::<Result<_>>()?,
            on_disk,
        })
    }

    fn new_arrays(&self, elements: usize, gpu: Option<&Gpu>) -> Result<[FlatMemory; StateSlices::MOST]> {
        let (kept, initial) = (self.rule.state_names().len(), self.rule.initial_state());
        let mut arrays: [FlatMemory; StateSlices::MOST] = Default::default();
        for (array, value) in arrays.iter_mut().zip(initial).take(kept) {
            *array = FlatMemory::filled(gpu, value, elements)?;
        }
        Ok(arrays)
    }

    fn new_on_disk(
        &self,
        segments: Vec<Segment>,
        has_masters: bool,
        buckets: &[Held<'_>],
        parameters: &[Parameter],
    ) -> Result<OnDisk> {
        let Some(options) = &self.disk else {
            return Err(Error::Order {
                what: "optimizer state on disk",
                hint: "say where: set EngineOptions::disk to a folder",
            });
        };
        let groups = Group::pack(segments, options.sub_group_elements);
        let sizes: Vec<_> = groups.iter().map(|group| group.elements).collect();
        let kept = self.rule.state_names().len();
        let mut initial = self.rule.initial_state()[..kept].to_vec();
        initial.extend(has_masters.then_some(0.0));
        let mut state = DiskState::create(options, self.rank, &sizes, &initial)?;
        if has_masters {
            state.for_each_group(|number, arrays| {
                let (_, masters) = split_masters(arrays, has_masters);
                let masters = masters.unwrap_or_default();
                groups[number].segments.iter().try_for_each(|segment| {
                    let (parameter, chunk) = segment.of(buckets, parameters);
                    let place = segment.place();
                    parameter.with_master(Intent::Read, &chunk, segment.within.clone(), |master| {
                        master.read_into(&mut masters[place]);
                    })
                })
            })?;
            let moved = groups.iter().flat_map(|group| &group.segments);
            moved.for_each(|segment| segment.of(buckets, parameters).0.drop_masters());
        }
        Ok(OnDisk {
            groups,
            state,
            has_masters,
        })
    }
}

/// Splits a group's arrays on disk into the rule's and the masters.
fn split_masters<'a, 'b>(
    arrays: &'a mut [&'b mut [f32]],
    has_masters: bool,
) -> (&'a mut [&'b mut [f32]], Option<&'a mut [f32]>) {
    let (state, masters) = arrays.split_at_mut(arrays.len() - usize::from(has_masters));
    (state, masters.first_mut().map(|masters| &mut **masters))
}

fn has_masters_apart(bucket: &Held<'_>) -> bool {
    bucket.layout.dtype != candle_core::DType::F32
}

impl State {
    /// Updates all groups: by kernels what lies on the GPU and has some, by the host all else.
    fn step(&mut self, pass: &Pass<'_>, gpu: Option<&Gpu>) -> Result<()> {
        for (group, arrays) in &mut self.in_memory {
            // Slots of which a kernel has updated all parts at once.
            let mut whole = Vec::new();
            for segment in &group.segments {
                if whole.contains(&segment.slot) {
                    continue;
                }
                let parts = &pass.buckets[segment.bucket].parts;
                let is_all_here = parts.len() > 1;
                let is_done = match gpu {
                    Some(gpu) if !is_all_here || segment.part == parts.start => {
                        pass.update_on_gpu(gpu, segment, is_all_here, arrays)?
                    }
                    _ => false,
                };
                if !is_done {
                    pass.update(segment, &mut arrays.each_mut().map(FlatMemory::as_mut_slice), None)?;
                } else if is_all_here {
                    whole.push(segment.slot);
                }
            }
        }
        self.for_each_group_on_disk(|group, arrays, mut masters| {
            let mut segments = group.segments.iter();
            segments.try_for_each(|segment| pass.update(segment, arrays, masters.as_deref_mut()))
        })
    }

    /// Runs `work` on every group, with its arrays and the masters that lie beside them, if there are some.
    fn for_each_group(
        &mut self,
        mut work: impl FnMut(&Group, &mut [&mut [f32]], Option<&mut [f32]>) -> Result<()>,
    ) -> Result<()> {
        for (group, arrays) in &mut self.in_memory {
            work(group, &mut arrays.each_mut().map(FlatMemory::as_mut_slice), None)?;
        }
        self.for_each_group_on_disk(work)
    }

    fn for_each_group_on_disk(
        &mut self,
        mut work: impl FnMut(&Group, &mut [&mut [f32]], Option<&mut [f32]>) -> Result<()>,
    ) -> Result<()> {
        for OnDisk {
            groups,
            state,
            has_masters,
        } in &mut self.on_disk
        {
            state.for_each_group(|number, arrays| {
                let (state, masters) = split_masters(arrays, *has_masters);
                work(&groups[number], state, masters)
            })?;
        }
        Ok(())
    }
}

impl Group {
    /// Returns the group of all that this rank holds of a bucket; its arrays are laid out like the bucket.
    fn of_bucket(number: usize, bucket: &Held<'_>) -> Self {
        let slots = || bucket.layout.slots.iter().enumerate();
        let of_slot = |part| {
            slots().map(move |(slot, place)| Segment {
                bucket: number,
                slot,
                part,
                within: 0..place.chunk(part).len(),
                offset: bucket.place(place, part).start,
            })
        };
        Self {
            segments: bucket.parts.clone().flat_map(of_slot).collect(),
            elements: bucket.elements(),
        }
    }

    /// Packs segments into groups of at most `most` elements, cutting those that do not fit.
    fn pack(segments: Vec<Segment>, most: usize) -> Vec<Self> {
        let most = most.max(1);
        let mut groups = vec![Self::default()];
        for segment in segments {
            let mut rest = segment.within.clone();
            while !rest.is_empty() {
                if groups.last().is_some_and(|group| group.elements == most) {
                    groups.push(Self::default());
                }
                if let Some(group) = groups.last_mut() {
                    let fits = rest.len().min(most - group.elements);
                    let within = rest.start..rest.start + fits;
                    rest.start = within.end;
                    group.segments.push(Segment {
                        within,
                        offset: group.elements,
                        ..segment
                    });
                    group.elements += fits;
                }
            }
        }
        groups
    }
}

impl Segment {
    /// Returns where the state lies in the group's arrays.
    fn place(&self) -> Range<usize> {
        self.offset..self.offset + self.within.len()
    }

    /// Returns the parameter, and the chunk of it that `within` is part of.
    fn of<'p>(&self, buckets: &[Held<'_>], parameters: &'p [Parameter]) -> (&'p Parameter, Range<usize>) {
        let slot = &buckets[self.bucket].layout.slots[self.slot];
        (&parameters[slot.parameter], slot.chunk(self.part))
    }
}

/// One step.
struct Pass<'a> {
    /// By group, each with its learning rate.
    rules: Vec<(&'a dyn OptimizerRule, f64)>,
    groups: &'a [usize],
    gradient_scale: f32,
    steps: &'a [u64],
    buckets: &'a [Held<'a>],
    holds: &'a [bool],
    parameters: &'a [Parameter],
}

impl Pass<'_> {
    /// Updates a segment on the host; `masters` are those that lie beside the state.
    fn update(&self, segment: &Segment, state: &mut [&mut [f32]], masters: Option<&mut [f32]>) -> Result<()> {
        let Some((rule, update)) = self.rule_of(segment) else {
            return Ok(());
        };
        let bucket = &self.buckets[segment.bucket];
        let slot = &bucket.layout.slots[segment.slot];
        let place = segment.place();
        let mut given = state.iter_mut();
        let slices = std::array::from_fn(|_| {
            let array = given.next().map(|array| &mut **array).unwrap_or_default();
            array.get_mut(place.clone()).unwrap_or_default()
        });
        let gradient = &bucket.gradient(slot, segment.part)[segment.within.clone()];
        let masters = masters.map(|masters| &mut masters[place]);
        let (parameter, chunk) = segment.of(self.buckets, self.parameters);
        // Where masters are, the values that the model computes with are their copy.
        let intent = match masters {
            Some(_) => Intent::Overwrite,
            None => Intent::Change,
        };
        parameter.with_master(intent, &chunk, segment.within.clone(), |master| {
            if let Some(values) = values_of(master, masters) {
                update_values(rule, &update, values, gradient, StateSlices(slices));
            }
        })
    }

    /// Updates a segment by a kernel, or with `all_parts` the whole slot of which it is the first; `false`, and nothing is
    /// done, if there is none or not all lies on the GPU.
    fn update_on_gpu(
        &self,
        gpu: &Gpu,
        segment: &Segment,
        all_parts: bool,
        state: &mut [FlatMemory; StateSlices::MOST],
    ) -> Result<bool> {
        let Some((rule, update)) = self.rule_of(segment) else {
            return Ok(true);
        };
        let bucket = &self.buckets[segment.bucket];
        let slot = &bucket.layout.slots[segment.slot];
        let Some((memory, place)) = bucket.on_device(slot, segment.part) else {
            return Ok(false);
        };
        let Some(kernel) = rule.kernel(&update) else {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                tracing::warn!(
                    rule = rule.name(),
                    "this rule has no kernel for GPUs: the host steps it over the GPU's memory, which is slow"
                );
            });
            return Ok(false);
        };
        let (parameter, chunk) = segment.of(self.buckets, self.parameters);
        let (elements, spread) = match all_parts {
            true => (0..slot.elements, Spread::of(bucket.layout, slot)),
            false => (chunk, Spread::together(segment.within.len())),
        };
        let within = if all_parts {
            elements.clone()
        } else {
            segment.within.clone()
        };
        let step = DeviceStep {
            kernel,
            gradient: (memory, place.start + within.start),
            state: (state, segment.offset),
            spread,
        };
        parameter.step_on_gpu(gpu, &elements, within, step)
    }

    /// Returns the rule of a segment and what holds in this step; `None` if its parameter has no gradient.
    fn rule_of(&self, segment: &Segment) -> Option<(&dyn OptimizerRule, Update)> {
        let parameter = self.buckets[segment.bucket].layout.slots[segment.slot].parameter;
        let (rule, learning_rate) = self.rules[self.groups[parameter]];
        let update = Update {
            learning_rate,
            step: self.steps[parameter],
            gradient_scale: self.gradient_scale,
        };
        self.holds[parameter].then_some((rule, update))
    }
}

/// Returns what is updated; `masters` are those that lie in the state.
fn values_of<'a>(master: Master<'a>, masters: Option<&'a mut [f32]>) -> Option<Values<'a>> {
    let (masters, copy) = match (master, masters) {
        (Master::Itself(ElementsMut::F32(values)), _) => return Some(Values::F32(values)),
        (Master::Itself(copy), Some(masters)) | (Master::Apart { masters, copy }, _) => (masters, copy),
        (Master::Itself(_), None) => return None,
    };
    let copy = match copy {
        ElementsMut::Bf16(copy) => HalfMut::Bf16(copy),
        ElementsMut::F16(copy) => HalfMut::F16(copy),
        // f32 values are their own masters.
        ElementsMut::F32(_) => return None,
    };
    Some(Values::Masters { masters, copy })
}

/// Updates some elements, in parallel over pieces of fixed size.
fn update_values(
    rule: &dyn OptimizerRule,
    update: &Update,
    values: Values<'_>,
    gradient: &[f32],
    state: StateSlices<'_>,
) {
    let gradients = gradient.chunks(BLOCK).map(Gradient::F32);
    let pieces: Vec<_> = values.chunks(BLOCK).zip(gradients).zip(state.chunks(BLOCK)).collect();
    pieces
        .into_par_iter()
        .for_each(|((values, gradient), state)| rule.update_values(update, values, gradient, state));
}
