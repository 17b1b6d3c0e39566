//! What is asked of all ranks' gradients together: their norm, and whether they are finite.

use super::{Gradients, Phase};
use crate::Result;
use crate::norm::Norm;
use crate::overflow::own_part_is_finite;
use sconce_collectives::ReduceOp;

impl Gradients {
    /// Says whether the gradients of all ranks are finite; called by all ranks, after a backward that synchronised.
    pub(crate) fn are_finite(&self) -> Result<bool> {
        let (finiteness, communicator) = {
            let state = self.lock();
            (state.finiteness, state.shard_group())
        };
        let (None, Some(communicator)) = (finiteness.known(), communicator) else {
            return Ok(finiteness.known() != Some(false));
        };
        // What is not sharded is the same on all ranks, so that each need look at its own part only.
        let rank = communicator.rank();
        let own =
            self.with_held(|buckets, holds| own_part_is_finite(rank, buckets, holds, self.staging.any_gpu()))??;
        let mut overflow = [u8::from(!own || finiteness.had_overflow())];
        communicator.all_reduce(&mut overflow, ReduceOp::Max)?;
        let finite = overflow == [0];
        self.lock().finiteness.found(finite);
        Ok(finite)
    }

    /// Returns a norm of the gradients of all ranks together; padding and slots without gradient do not count.
    ///
    /// Each element counts once, whoever holds it. Contributions are joined parameter by parameter and part by part, in
    /// one order whatever is sharded, so the norm has the same bits under every strategy.
    pub(crate) fn norm(&self, norm: Norm) -> Result<f64> {
        let (communicator, scale, loss_scale, is_global) = {
            let state = self.lock();
            let is_global = state.phase == Phase::Synchronised;
            (state.shard_group(), state.scale, state.loss_scale, is_global)
        };
        let Some(communicator) = communicator else {
            return Ok(0.0);
        };
        let (rank, world) = (communicator.rank(), communicator.size());
        let (mut parts, exchange) = self.with_held(|held, holds| {
            let mut parts = vec![0.0; holds.len() * world];
            let (mut places, mut on_device) = (Vec::new(), Vec::new());
            for bucket in held {
                for slot in bucket.layout.slots.iter().filter(|slot| holds[slot.parameter]) {
                    let place = |part| slot.parameter * world + part;
                    if let Some(piece) = bucket.norm_piece(slot) {
                        places.extend(bucket.parts.clone().map(place));
                        on_device.push(piece);
                        continue;
                    }
                    for part in bucket.parts.clone() {
                        parts[place(part)] = norm.of_part(bucket.gradient(slot, part));
                    }
                }
            }
            if let Some(gpu) = self.staging.any_gpu().filter(|_| !places.is_empty()) {
                let found = gpu.norms(norm, &on_device)?;
                places
                    .into_iter()
                    .zip(found)
                    .for_each(|(place, found)| parts[place] = found);
            }
            Ok::<_, crate::Error>((parts, held.iter().any(|bucket| bucket.parts.len() < world)))
        })??;
        if exchange {
            let parameters = parts.len() / world;
            let own: Vec<f64> = parts.chunks(world).map(|parts| parts[rank]).collect();
            let mut all = vec![0.0; parts.len()];
            communicator.all_gather(&own, &mut all)?;
            for (position, part) in parts.iter_mut().enumerate() {
                *part = all[position % world * parameters + position / world];
            }
        }
        let joined = norm.join(parts.into_iter());
        if is_global {
            self.lock().finiteness.found_norm(joined);
        }
        Ok(norm.finish(joined) * f64::from(scale) / loss_scale)
    }
}
