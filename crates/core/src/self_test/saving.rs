//! Checkpoints: a run that stops and one that does not.

use super::small_model::{ROWS, managed, rule, weights};
use super::{CheckError, Checked, SelfTest, expect};
use crate::{AcceleratorBuilder, ZeroStage};
use candle_core::DType;
use std::path::{Path, PathBuf};

/// A folder that goes when the test ends; ranks of other hosts may not see it.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(super) fn resume(test: &SelfTest<'_>) -> Checked {
    let own = std::env::temp_dir().join(format!("sconce-self-test-{}", std::process::id()));
    let folder = PathBuf::from(test.acc.broadcast_object(&own.display().to_string(), 0)?);
    let _removed = (test.rank() == 0).then(|| Folder(folder.clone()));
    if test.acc.world().local_size < test.ranks() {
        return Ok("left out: hosts may not share a folder".into());
    }
    let whole = run(test, 0, 4, None, Some(&folder))?;
    let resumed = run(test, 2, 4, Some(&folder), None)?;
    test.acc.wait_for_everyone()?;
    expect("weights have the same bits", &(bits(&whole) == bits(&resumed)), &true)?;
    Ok(format!("{} weights, saved after 2 of 4 steps", whole.len()))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Trains from step `from` to `to` in stage 3; saves after the second step, or begins with what was saved.
fn run(
    test: &SelfTest<'_>,
    from: usize,
    to: usize,
    load: Option<&Path>,
    save: Option<&Path>,
) -> Result<Vec<f32>, CheckError> {
    let stage = ZeroStage::Three {
        persistence_threshold: 0,
    };
    let acc = test.new_accelerator(AcceleratorBuilder::default().strategy(stage))?;
    let model = managed(&*acc)?;
    let mut optimizer = acc.prepare_optimizer(Box::new(rule()))?;
    if let Some(folder) = load {
        acc.load_state(folder)?;
    }
    for step in from..to {
        let first = test.rank() * ROWS;
        acc.backward(&model.loss(step, first..first + ROWS, DType::F32, acc.device())?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if let Some(folder) = save.filter(|_| step == 1) {
            acc.save_state(folder)?;
        }
    }
    weights(&*acc)
}
