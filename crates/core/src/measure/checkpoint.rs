//! Time of saving and loading a checkpoint, beside what the disk itself takes for as many bytes.

use super::MeasureError;
use crate::checkpoint::Checkpoints;
use crate::{Accelerator, AcceleratorBuilder, AdamW, Weights, ZeroStage, unit};
use sconce_collectives::measure::median;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::time::Instant;

const LAYERS: usize = 8;
/// Bytes that the bare file is written and read in.
const PIECE: usize = 1 << 20;

/// What is timed in each round, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointPart {
    /// Each rank writes as many bytes as its part of a checkpoint has, and waits until they are on disk.
    DiskWrite,
    /// Saving a checkpoint.
    Save,
    /// Each rank reads those bytes, which are not in the page cache.
    DiskRead,
    /// Loading the checkpoint, which is not there either.
    Load,
    /// Each rank copies as many bytes in memory.
    Memcpy,
    /// How long a save in the background keeps the training.
    Blocking,
}

impl CheckpointPart {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::DiskWrite,
        Self::Save,
        Self::DiskRead,
        Self::Load,
        Self::Memcpy,
        Self::Blocking,
    ];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::DiskWrite => "disk_write",
            Self::Save => "save",
            Self::DiskRead => "disk_read",
            Self::Load => "load",
            Self::Memcpy => "memcpy",
            Self::Blocking => "blocking",
        }
    }

    /// Returns the bare part that it is compared with.
    pub fn floor(self) -> Option<Self> {
        match self {
            Self::Save => Some(Self::DiskWrite),
            Self::Load => Some(Self::DiskRead),
            Self::Blocking => Some(Self::Memcpy),
            Self::DiskWrite | Self::DiskRead | Self::Memcpy => None,
        }
    }
}

/// Seconds of every part, by round.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointTimes {
    /// Bytes of the checkpoint, all ranks together.
    pub bytes: usize,
    seconds: [Vec<f64>; 6],
}

impl CheckpointTimes {
    /// Times everything in turn, over `rounds` after one that warms up; called by all ranks, which hold an even share of the
    /// state each (stage 3). `bytes` is about what the checkpoint has; `folder` is empty, and all ranks see it.
    ///
    /// # Errors
    /// Those of the disk and of the group.
    pub fn measure(
        builder: AcceleratorBuilder,
        folder: &Path,
        bytes: usize,
        rounds: usize,
    ) -> Result<Self, MeasureError> {
        let checkpoints = Checkpoints {
            folder: folder.join("numbered"),
            total_limit: Some(1),
        };
        let sharded = ZeroStage::Three {
            persistence_threshold: 0,
        };
        let acc = builder.checkpoints(checkpoints).strategy(sharded).build()?;
        let vb = acc.var_builder(Weights::Random { seed: 1 })?;
        // Values and two moments, f32.
        let rows = (bytes / 3 / 4 / LAYERS / 1024).max(1);
        let model = unit(vb, "model", |vb| {
            let layers = (0..LAYERS).map(|layer| vb.get((rows, 1024), &format!("layer{layer}")));
            layers.collect::<candle_core::Result<Vec<_>>>()
        })?;
        acc.prepare_optimizer(Box::new(AdamW::default()))?;
        let zero = candle_core::Tensor::zeros((), candle_core::DType::F32, acc.device())?;
        let loss = model.run(zero, |layers, zero| {
            let add = |loss: candle_core::Tensor, layer: &candle_core::Tensor| loss + layer.sqr()?.mean_all()?;
            layers.iter().try_fold(zero, add)
        })?;
        acc.backward(&loss)?;
        acc.engine().step(1e-3)?;
        acc.engine().zero_grad();
        drop(loss);

        let rank = acc.world().rank;
        let bytes = 3 * 4 * LAYERS * rows * 1024;
        let own = bytes / acc.world().size;
        let (mut source, mut target) = (vec![1u8; own], vec![0u8; own]);
        let numbered = source.iter_mut().enumerate();
        numbered.for_each(|(number, byte)| *byte = (number % 251) as u8);
        let plain = folder.join(format!("plain-{rank}"));
        let saved = folder.join("saved");
        let mut seconds: [Vec<f64>; 6] = Default::default();
        for number in 0..=rounds {
            let mut note = |part: CheckpointPart, start: Instant| {
                seconds[part as usize].extend((number > 0).then(|| start.elapsed().as_secs_f64()));
            };
            let start = together(&*acc)?;
            write(&plain, &source)?;
            together(&*acc)?;
            note(CheckpointPart::DiskWrite, start);
            let start = together(&*acc)?;
            acc.save_state(&saved)?;
            note(CheckpointPart::Save, start);
            forget(&plain)?;
            forget(&saved.join(format!("rank-{rank:05}.safetensors")))?;
            let start = together(&*acc)?;
            read(&plain, &mut target)?;
            together(&*acc)?;
            note(CheckpointPart::DiskRead, start);
            let start = together(&*acc)?;
            acc.load_state(&saved)?;
            note(CheckpointPart::Load, start);
            together(&*acc)?;
            if acc.is_main_process() {
                std::fs::remove_dir_all(&saved)?;
            }
            let start = together(&*acc)?;
            target.copy_from_slice(&source);
            together(&*acc)?;
            note(CheckpointPart::Memcpy, start);
            let start = together(&*acc)?;
            acc.save_checkpoint_in_background()?;
            note(CheckpointPart::Blocking, start);
            acc.finish_saving()?;
        }
        Ok(Self { bytes, seconds })
    }

    /// Returns the median seconds of a part.
    pub fn seconds(&self, part: CheckpointPart) -> f64 {
        median(self.seconds[part as usize].clone())
    }

    /// Returns the median of the rounds' ratios of a part to the bare part that it is compared with.
    pub fn ratio(&self, part: CheckpointPart) -> Option<f64> {
        let (own, floor) = (&self.seconds[part as usize], &self.seconds[part.floor()? as usize]);
        Some(median(own.iter().zip(floor).map(|(own, floor)| own / floor).collect()))
    }
}

fn together(acc: &dyn Accelerator) -> crate::Result<Instant> {
    acc.wait_for_everyone()?;
    Ok(Instant::now())
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    bytes.chunks(PIECE).try_for_each(|piece| file.write_all(piece))?;
    file.sync_all()
}

fn read(path: &Path, bytes: &mut [u8]) -> io::Result<()> {
    let mut file = File::open(path)?;
    bytes.chunks_mut(PIECE).try_for_each(|piece| file.read_exact(piece))
}

/// Drops a file from the page cache.
fn forget(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    #[cfg(target_os = "linux")]
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    drop(file);
    Ok(())
}
