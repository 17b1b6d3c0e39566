//! What PowerSGD keeps between steps, as pieces of parameters: Q, which all ranks have, and each rank's own errors.

use super::Compression;
use crate::engine::Reading;
use crate::gradients::{Gradients, State};
use crate::parameter::chunk_of;
use crate::{Elements, ParameterInfo, PlannedPiece, PowerSgdState, Result, StatePiece};
use candle_core::DType;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, MutexGuard, PoisonError};

/// A piece on its way out.
struct Piece<'a> {
    info: &'a Arc<ParameterInfo>,
    what: Cow<'static, str>,
    shape: Vec<usize>,
    elements: Range<usize>,
    values: &'a [f32],
}

impl Gradients {
    /// Returns how far compression is, if there is any.
    pub(crate) fn compression_state(&self) -> Option<PowerSgdState> {
        let state = self.lock();
        let (_, ranks) = state.place();
        let mut all: Option<PowerSgdState> = None;
        for compression in state.compressions() {
            let one = compression.state(ranks);
            all = Some(match all {
                // Buckets are at the same iteration; one without matrices has nothing else to tell.
                Some(all) => PowerSgdState {
                    matrix_rank: all.matrix_rank.or(one.matrix_rank),
                    error_ranks: all.error_ranks.or(one.error_ranks),
                    ..one
                },
                None => one,
            });
        }
        all
    }

    /// Hands `visit` what this rank saves of compression.
    pub(crate) fn visit_compression(&self, visit: &mut dyn FnMut(StatePiece<'_>) -> Result<()>) -> Result<()> {
        self.lock().for_each_piece(&mut |piece| {
            visit(StatePiece {
                info: piece.info,
                what: &piece.what,
                shape: &piece.shape,
                elements: piece.elements,
                values: Elements::F32(piece.values),
                is_trained: true,
            })
        })
    }

    /// Returns what [`Gradients::visit_compression`] would visit.
    pub(crate) fn plan_compression(&self) -> Vec<PlannedPiece> {
        let mut plan = Vec::new();
        let planned = self.lock().for_each_piece(&mut |piece| {
            plan.push(PlannedPiece {
                info: Arc::clone(piece.info),
                what: piece.what,
                shape: piece.shape,
                elements: piece.elements,
                dtype: DType::F32,
                is_trained: true,
            });
            Ok(())
        });
        debug_assert!(planned.is_ok(), "only what takes pieces can fail");
        plan
    }

    /// Goes on from what was saved; compression must have been laid out.
    pub(crate) fn restore_compression(&self, saved: &PowerSgdState, reading: &mut Reading<'_>) -> Result<()> {
        let state = self.lock();
        let place = state.place();
        for mut compression in state.compressions() {
            compression.restore(saved, place, &state.parameters, reading)?;
        }
        Ok(())
    }
}

impl State {
    /// Returns this rank's number among those whose gradients are averaged, and how many they are.
    fn place(&self) -> (usize, usize) {
        let world = self.mesh.as_ref().map(|mesh| &mesh.world);
        world.map_or((0, 1), |world| (world.rank(), world.size()))
    }

    pub(in crate::gradients) fn compressions(&self) -> impl Iterator<Item = MutexGuard<'_, Compression>> {
        let compressions = self.buckets.iter().filter_map(|bucket| bucket.compression.as_ref());
        compressions.map(|compression| compression.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn for_each_piece(&self, take: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        let place = self.place();
        self.compressions()
            .try_for_each(|compression| compression.for_each_piece(place, &self.parameters, take))
    }
}

impl Compression {
    fn state(&self, ranks: usize) -> PowerSgdState {
        let has_q = self.settings.warm_start && self.matrices.iter().any(|matrix| !matrix.q.is_empty());
        let has_errors = self.matrices.iter().any(|matrix| !matrix.error.is_empty());
        PowerSgdState {
            iterations: self.iterations,
            matrix_rank: has_q.then_some(self.settings.matrix_rank),
            error_ranks: has_errors.then_some(ranks),
        }
    }

    fn for_each_piece(
        &self,
        (rank, ranks): (usize, usize),
        parameters: &[Arc<ParameterInfo>],
        take: &mut dyn FnMut(Piece<'_>) -> Result<()>,
    ) -> Result<()> {
        for matrix in &self.matrices {
            let info = &parameters[self.layout.slots[matrix.slot].parameter];
            let own = chunk_of(matrix.q.len(), rank, ranks);
            if self.settings.warm_start && !own.is_empty() {
                take(Piece {
                    info,
                    what: StatePiece::POWER_SGD_Q.into(),
                    shape: vec![matrix.columns, self.settings.matrix_rank],
                    values: &matrix.q[own.clone()],
                    elements: own,
                })?;
            }
            if !matrix.error.is_empty() {
                take(Piece {
                    info,
                    what: StatePiece::power_sgd_error(rank).into(),
                    shape: info.shape.clone(),
                    elements: 0..matrix.error.len(),
                    values: &matrix.error,
                })?;
            }
        }
        Ok(())
    }

    fn restore(
        &mut self,
        saved: &PowerSgdState,
        (rank, ranks): (usize, usize),
        parameters: &[Arc<ParameterInfo>],
        reading: &mut Reading<'_>,
    ) -> Result<()> {
        self.iterations = saved.iterations;
        for matrix in &mut self.matrices {
            let info = &parameters[self.layout.slots[matrix.slot].parameter];
            matrix.q = Vec::new();
            // One of another width would not fit; it begins as at first.
            if self.settings.warm_start && saved.matrix_rank == Some(self.settings.matrix_rank) {
                let mut q = vec![0.0; matrix.columns * self.settings.matrix_rank];
                if reading.fill(info, StatePiece::POWER_SGD_Q, 0..q.len(), &mut q)? {
                    matrix.q = q;
                }
            }
            matrix.error = match saved.error_ranks.filter(|_| self.settings.use_error_feedback) {
                Some(saved) if saved == ranks => read_error(info, rank, reading)?.unwrap_or_default(),
                Some(saved) => mean_error(info, saved, reading)?,
                None => Vec::new(),
            };
        }
        Ok(())
    }
}

/// Returns what a rank owed, if that is there.
fn read_error(info: &ParameterInfo, rank: usize, reading: &mut Reading<'_>) -> Result<Option<Vec<f32>>> {
    let mut values = vec![0.0; info.elements()];
    let what = StatePiece::power_sgd_error(rank);
    let is_there = reading.fill(info, &what, 0..values.len(), &mut values)?;
    Ok(is_there.then_some(values))
}

/// Returns the mean of what so many ranks owed; nothing where one's is not there.
fn mean_error(info: &ParameterInfo, ranks: usize, reading: &mut Reading<'_>) -> Result<Vec<f32>> {
    let mut sums = vec![0.0; info.elements()];
    for rank in 0..ranks {
        let Some(values) = read_error(info, rank, reading)? else {
            return Ok(Vec::new());
        };
        let pairs = sums.iter_mut().zip(values);
        pairs.for_each(|(sum, value)| *sum += f64::from(value));
    }
    Ok(sums.into_iter().map(|sum| (sum / ranks as f64) as f32).collect())
}
