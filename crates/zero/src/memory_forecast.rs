//! What a rank of an engine will hold, told without making one: for models too large to try.
//!
//! Everything is laid out by the code that lays out an engine's own memory; only gathers are played through here. The
//! forecast of a model is what [`Engine::memory`](crate::Engine::memory) reports of it after its first steps, but for
//! what is gathered and spare, where it is the most that comes to be.

use crate::disk::{BLOCK_BYTES, BUFFERS, WINDOW};
use crate::gradients::PASSING_BUFFERS;
use crate::layout::{BucketLayout, buckets};
use crate::parameter::chunk_of;
use crate::{BackwardPrefetch, EngineOptions, Gathering, MemoryReport, ParameterInfo, Placement, Residence, Tier};
use candle_core::DType;

const F32: usize = size_of::<f32>();

/// A parameter of a model that is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedParameter {
    /// Its name and full shape.
    pub info: ParameterInfo,
    /// What the model computes with.
    pub dtype: DType,
    /// Whether it is trained.
    pub is_trained: bool,
    /// The units that compute with it, numbered as they run in the forward; the first is that which creates it. In none, it
    /// is whole on every rank.
    pub units: Vec<usize>,
}

/// What a rank will hold, by where it lies; on the rank that holds most, which is the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryForecast {
    /// What is of the device's tier. A CPU is a device whose memory is the host's.
    pub device: MemoryReport,
    /// What is offloaded to the host, and the buffers through which state on disk passes.
    pub host: MemoryReport,
    /// Bytes of the largest shard when it is gathered: on a GPU it passes through as much memory again.
    pub largest_gather: u64,
}

impl MemoryForecast {
    /// Lays out a model's state on `ranks` ranks, for an update rule that keeps `state_arrays` numbers per element.
    ///
    /// Parameters are given in the order of their creation; that their gradients come in the opposite order is assumed,
    /// which matters to padding only. What `options` say of frozen parameters, of dtypes and of units is not looked at:
    /// the parameters say it.
    pub fn new(parameters: &[PlannedParameter], options: &EngineOptions, ranks: usize, state_arrays: usize) -> Self {
        let plan = Plan::new(parameters, options, ranks.max(1));
        let mut forecast = Self::default();
        plan.add_whole_parameters(&mut forecast);
        let shards = plan.shards();
        plan.add_shards(&shards, &mut forecast);
        plan.add_gathers(&shards, &mut forecast);
        let layouts = plan.buckets();
        plan.add_gradients(&layouts, &mut forecast);
        plan.add_optimizer(&layouts, state_arrays, &mut forecast);
        forecast
    }

    /// Returns what a rank holds that computes on the CPU.
    pub fn on_cpu(&self) -> MemoryReport {
        let (a, b) = (&self.device, &self.host);
        MemoryReport {
            parameters: a.parameters + b.parameters,
            masters: a.masters + b.masters,
            gradients: a.gradients + b.gradients,
            optimizer_state: a.optimizer_state + b.optimizer_state,
            on_disk: a.on_disk + b.on_disk,
            buffers: a.buffers + b.buffers,
            gathered: a.gathered + b.gathered,
            spare: a.spare + b.spare,
            gathered_peak: a.gathered_peak + b.gathered_peak,
        }
    }

    /// Returns what a rank holds on its GPU, and what on the host.
    pub fn on_gpu(&self) -> (MemoryReport, MemoryReport) {
        let device = MemoryReport {
            // Goes back to the device's own pool.
            spare: 0,
            buffers: self.device.buffers + self.largest_gather,
            ..self.device
        };
        (device, self.host)
    }

    /// Says whether any parameter is sharded, so that units hand on copies of what comes out of them.
    pub fn has_shards(&self) -> bool {
        self.device.gathered_peak > 0
    }

    fn at(&mut self, tier: Tier) -> &mut MemoryReport {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host | Tier::Disk => &mut self.host,
        }
    }
}

/// Parameters of one unit whose shares lie together, as in an engine's shard.
struct PlannedShard {
    layout: BucketLayout,
    is_trained: bool,
    /// All units that use it.
    units: Vec<usize>,
}

impl PlannedShard {
    fn gathered_elements(&self) -> usize {
        self.layout.slots.iter().map(|slot| slot.elements).sum()
    }

    fn gathered_bytes(&self) -> usize {
        self.gathered_elements() * self.layout.dtype.size_in_bytes()
    }

    fn share_bytes(&self) -> usize {
        self.layout.part_elements * self.layout.dtype.size_in_bytes()
    }
}

struct Plan<'a> {
    parameters: &'a [PlannedParameter],
    placements: Vec<Placement>,
    options: &'a EngineOptions,
    /// Ranks that shard together.
    parts: usize,
}

impl<'a> Plan<'a> {
    fn new(parameters: &'a [PlannedParameter], options: &'a EngineOptions, ranks: usize) -> Self {
        let place = |parameter: &PlannedParameter| {
            let mut placement = options.strategy.place(&parameter.info);
            if parameter.units.is_empty() {
                (placement.parameter, placement.parameter_tier) = (Residence::Replicated, Tier::Device);
            }
            placement
        };
        Self {
            placements: parameters.iter().map(place).collect(),
            parameters,
            options,
            parts: options.shard_group.unwrap_or(ranks),
        }
    }

    fn has_masters(dtype: DType, is_trained: bool) -> bool {
        is_trained && dtype != DType::F32
    }

    fn add_whole_parameters(&self, forecast: &mut MemoryForecast) {
        for (parameter, placement) in self.parameters.iter().zip(&self.placements) {
            if placement.parameter == Residence::Sharded {
                continue;
            }
            let elements = parameter.info.elements();
            forecast.device.parameters += (elements * parameter.dtype.size_in_bytes()) as u64;
            let held = match placement.optimizer_state {
                Residence::Replicated => elements,
                Residence::Sharded => chunk_of(elements, 0, self.parts).len(),
            };
            self.add_masters(placement, parameter.dtype, parameter.is_trained, held, forecast);
        }
    }

    /// Masters on disk are optimizer state.
    fn add_masters(
        &self,
        placement: &Placement,
        dtype: DType,
        is_trained: bool,
        elements: usize,
        forecast: &mut MemoryForecast,
    ) {
        let tier = placement.optimizer_state_tier;
        if Self::has_masters(dtype, is_trained) && tier != Tier::Disk {
            forecast.at(tier).masters += (elements * F32) as u64;
        }
    }

    fn shards(&self) -> Vec<PlannedShard> {
        let mut shards: Vec<PlannedShard> = Vec::new();
        for (number, (parameter, placement)) in self.parameters.iter().zip(&self.placements).enumerate() {
            if placement.parameter != Residence::Sharded {
                continue;
            }
            let is_it = |shard: &PlannedShard| {
                (shard.units.first(), shard.is_trained) == (parameter.units.first(), parameter.is_trained)
                    && (shard.layout.placement, shard.layout.dtype) == (*placement, parameter.dtype)
            };
            let place = shards.iter().position(is_it).unwrap_or_else(|| {
                shards.push(PlannedShard {
                    layout: BucketLayout::new(*placement, parameter.dtype, self.parts),
                    is_trained: parameter.is_trained,
                    units: parameter.units.clone(),
                });
                shards.len() - 1
            });
            let shard = &mut shards[place];
            shard.layout.push(number, parameter.info.elements());
            let others = parameter.units.iter().filter(|unit| !shard.units.contains(unit));
            let others = Vec::from_iter(others.copied());
            shard.units.extend(others);
        }
        shards
    }

    fn add_shards(&self, shards: &[PlannedShard], forecast: &mut MemoryForecast) {
        let (mut on_disk, mut largest_on_disk) = (0, 0);
        for shard in shards {
            let bytes = shard.share_bytes();
            match shard.layout.placement.parameter_tier {
                Tier::Disk => (on_disk, largest_on_disk) = (on_disk + bytes, largest_on_disk.max(bytes)),
                tier => forecast.at(tier).parameters += bytes as u64,
            }
            let layout = &shard.layout;
            let elements = layout.part_elements;
            self.add_masters(&layout.placement, layout.dtype, shard.is_trained, elements, forecast);
        }
        if on_disk > 0 {
            let file = on_disk.next_multiple_of(BLOCK_BYTES);
            // Every file has a block more than what is in it.
            forecast.host.on_disk += (file + BLOCK_BYTES) as u64;
            forecast.host.buffers += (largest_on_disk + file.min(WINDOW) + BLOCK_BYTES) as u64;
        }
    }

    fn add_gathers(&self, shards: &[PlannedShard], forecast: &mut MemoryForecast) {
        let mut gathers = Gathers::new(shards, &self.options.gathering);
        gathers.play();
        let bytes = || shards.iter().map(PlannedShard::gathered_bytes);
        let (all, largest) = (bytes().sum::<usize>(), bytes().max().unwrap_or(0));
        forecast.device.gathered = gathers.peak_bytes as u64;
        forecast.device.gathered_peak = gathers.peak_bytes as u64;
        // Spare memory is that of tensors that were gathered once: no more than there are.
        let most = (gathers.needed_bytes + largest).min(all).max(gathers.peak_bytes);
        forecast.device.spare = (most - gathers.peak_bytes) as u64;
        forecast.largest_gather = match self.parts {
            1 => 0,
            _ => largest as u64,
        };
    }

    fn buckets(&self) -> Vec<BucketLayout> {
        let trained = (0..self.parameters.len()).filter(|number| self.parameters[*number].is_trained);
        let order = Vec::from_iter(trained.rev());
        let about = |number: usize| {
            let parameter = &self.parameters[number];
            (self.placements[number], parameter.dtype, parameter.info.elements())
        };
        let (first, others) = (self.options.first_bucket_bytes, self.options.bucket_bytes);
        buckets(&order, about, self.parts, first, others)
    }

    fn add_gradients(&self, layouts: &[BucketLayout], forecast: &mut MemoryForecast) {
        let (mut passing, mut largest, mut tier) = (0, 0, Tier::Device);
        for layout in layouts {
            let elements = match layout.placement.gradient {
                Residence::Replicated => layout.elements(),
                Residence::Sharded => {
                    (passing, largest) = (passing + 1, largest.max(layout.elements()));
                    if layout.placement.optimizer_state_tier != Tier::Device {
                        tier = Tier::Host;
                    }
                    layout.part_elements
                }
            };
            forecast.at(layout.placement.optimizer_state_tier).gradients += (elements * F32) as u64;
        }
        forecast.at(tier).buffers += (passing.min(PASSING_BUFFERS) * largest * F32) as u64;
    }

    fn add_optimizer(&self, layouts: &[BucketLayout], arrays: usize, forecast: &mut MemoryForecast) {
        // Without masters beside the state, and with.
        let mut on_disk = [0; 2];
        for layout in layouts {
            let is_sharded = layout.placement.optimizer_state == Residence::Sharded;
            let parts = if is_sharded { 1 } else { layout.parts };
            match layout.placement.optimizer_state_tier {
                Tier::Disk => {
                    let slots = layout.slots.iter();
                    let chunks = slots.flat_map(|slot| (0..parts).map(|part| slot.chunk(part).len()));
                    on_disk[usize::from(layout.dtype != DType::F32)] += chunks.sum::<usize>();
                }
                tier => {
                    let elements = parts * layout.part_elements * arrays;
                    forecast.at(tier).optimizer_state += (elements * F32) as u64;
                }
            }
        }
        let most = self
            .options
            .disk
            .as_ref()
            .map_or(usize::MAX, |disk| disk.sub_group_elements)
            .max(1);
        for (masters, elements) in on_disk.into_iter().enumerate().filter(|(_, elements)| *elements > 0) {
            let region = |elements: usize| (arrays + masters) * elements.next_multiple_of(BLOCK_BYTES / F32) * F32;
            let (whole, rest) = (elements / most, elements % most);
            let rest_bytes = if rest > 0 { region(rest) } else { 0 };
            let largest = if whole > 0 { region(most) } else { rest_bytes };
            let groups = whole + usize::from(rest > 0);
            let file = whole.saturating_mul(if whole > 0 { region(most) } else { 0 }) + rest_bytes;
            forecast.host.on_disk += (file + BLOCK_BYTES) as u64;
            forecast.host.optimizer_state += (groups.min(BUFFERS) * (largest + BLOCK_BYTES)) as u64;
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

/// A forward and a backward of all units, of which the order is known: what [`units`](crate::units) does, counted.
struct Gathers<'a> {
    shards: &'a [PlannedShard],
    gathering: &'a Gathering,
    events: Vec<(usize, Pass)>,
    is_present: Vec<bool>,
    /// Of those present, gathered ahead of their unit.
    is_ahead: Vec<bool>,
    users: Vec<usize>,
    peak_bytes: usize,
    /// The most that was there when a unit began.
    needed_bytes: usize,
}

impl<'a> Gathers<'a> {
    fn new(shards: &'a [PlannedShard], gathering: &'a Gathering) -> Self {
        let mut units = Vec::from_iter(shards.iter().flat_map(|shard| shard.units.iter().copied()));
        units.sort_unstable();
        units.dedup();
        let forward = units.iter().map(|unit| (*unit, Pass::Forward));
        let backward = units.iter().rev().map(|unit| (*unit, Pass::Backward));
        Self {
            shards,
            gathering,
            events: forward.chain(backward).collect(),
            is_present: vec![false; shards.len()],
            is_ahead: vec![false; shards.len()],
            users: vec![0; shards.len()],
            peak_bytes: 0,
            needed_bytes: 0,
        }
    }

    fn play(&mut self) {
        for position in 0..self.events.len() {
            let (unit, pass) = self.events[position];
            let own = self.shards_of(unit);
            for shard in &own {
                self.is_present[*shard] = true;
                self.is_ahead[*shard] = false;
                self.users[*shard] += 1;
            }
            self.start_ahead(position + 1, true);
            let live = self.live_bytes();
            self.needed_bytes = self.needed_bytes.max(live);
            self.peak_bytes = self.peak_bytes.max(live);
            let runs_next = self.events.get(position + 1) == Some(&(unit, Pass::Backward));
            let stays = pass == Pass::Forward && (runs_next || !self.gathering.reshard_after_forward);
            for shard in own {
                self.users[shard] -= 1;
                self.is_present[shard] &= self.users[shard] > 0 || stays;
            }
            if pass == Pass::Backward {
                self.start_ahead(position + 1, false);
                self.peak_bytes = self.peak_bytes.max(self.live_bytes());
            }
        }
    }

    fn start_ahead(&mut self, from: usize, unit_begins: bool) {
        let (mut ahead, mut units) = (0, 0);
        for position in from..self.events.len() {
            let (unit, pass) = self.events[position];
            let goes_ahead = match (pass, self.gathering.backward_prefetch) {
                (Pass::Forward, _) => self.gathering.forward_prefetch && unit_begins,
                (Pass::Backward, BackwardPrefetch::Pre) => unit_begins,
                (Pass::Backward, BackwardPrefetch::Post) => !unit_begins,
                (Pass::Backward, BackwardPrefetch::None) => false,
            };
            if !goes_ahead {
                return;
            }
            let is_counted = |shard: &usize| !self.is_present[*shard] || self.is_ahead[*shard];
            let counted = Vec::from_iter(self.shards_of(unit).into_iter().filter(is_counted));
            if counted.is_empty() {
                continue;
            }
            if units == self.gathering.prefetch_units {
                return;
            }
            units += 1;
            for shard in counted {
                let elements = self.shards[shard].gathered_elements();
                if !self.is_present[shard] {
                    let live = self.live_elements().saturating_add(elements);
                    let sum: usize = ahead + elements;
                    if sum > self.gathering.prefetch_elements || live > self.gathering.max_live_elements {
                        return;
                    }
                    (self.is_present[shard], self.is_ahead[shard]) = (true, true);
                }
                ahead += elements;
            }
        }
    }

    fn shards_of(&self, unit: usize) -> Vec<usize> {
        let numbered = self.shards.iter().enumerate();
        let users = numbered.filter(|(_, shard)| shard.units.contains(&unit));
        users.map(|(number, _)| number).collect()
    }

    fn live(&self) -> impl Iterator<Item = &PlannedShard> {
        let present = self.shards.iter().zip(&self.is_present).filter(|(_, is)| **is);
        present.map(|(shard, _)| shard)
    }

    fn live_bytes(&self) -> usize {
        self.live().map(PlannedShard::gathered_bytes).sum()
    }

    fn live_elements(&self) -> usize {
        self.live().map(PlannedShard::gathered_elements).sum()
    }
}
