//! In which order samples are seen, and by whom.
//!
//! The order is a function of (seed, epoch) alone, the same on all ranks. Batch `i` of the whole order goes to rank
//! `i mod world`, so ranks together see what one process would see.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// What decides which samples a rank sees.
#[derive(Debug, Clone, Copy)]
pub(super) struct Order {
    pub(super) samples: usize,
    pub(super) batch_size: usize,
    pub(super) shuffle: bool,
    /// Leaves out samples that do not fill a batch on every rank, instead of starting over from the first ones.
    pub(super) drop_last: bool,
    pub(super) seed: u64,
    pub(super) rank: usize,
    pub(super) world: usize,
}

impl Order {
    /// Returns the number of batches that every rank sees in an epoch.
    pub(super) fn batches(&self) -> usize {
        let together = self.batch_size * self.world;
        if self.drop_last {
            self.samples / together
        } else {
            self.samples.div_ceil(together)
        }
    }

    /// Returns the samples of this rank's batches in `epoch`.
    pub(super) fn of_epoch(&self, epoch: u64) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.samples).collect();
        if self.shuffle {
            let mut hasher = blake3::Hasher::new_derive_key("sconce shuffling 1");
            hasher.update(&self.seed.to_le_bytes());
            hasher.update(&epoch.to_le_bytes());
            order.shuffle(&mut ChaCha8Rng::from_seed(*hasher.finalize().as_bytes()));
        }
        let batch = |number: usize| {
            let start = (number * self.world + self.rank) * self.batch_size;
            (start..start + self.batch_size)
                .map(|at| order[at % self.samples])
                .collect()
        };
        (0..self.batches()).map(batch).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Order;

    fn order(samples: usize, batch_size: usize, world: usize, rank: usize) -> Order {
        Order {
            samples,
            batch_size,
            shuffle: false,
            drop_last: false,
            seed: 7,
            rank,
            world,
        }
    }

    #[test]
    fn ranks_take_turns_by_batch() {
        assert_eq!(order(8, 2, 2, 0).of_epoch(0), [[0, 1], [4, 5]]);
        assert_eq!(order(8, 2, 2, 1).of_epoch(0), [[2, 3], [6, 7]]);
    }

    #[test]
    fn a_short_end_is_filled_from_the_start_or_dropped() {
        assert_eq!(order(5, 2, 2, 0).of_epoch(0), [[0, 1], [4, 0]]);
        assert_eq!(order(5, 2, 2, 1).of_epoch(0), [[2, 3], [1, 2]]);
        let dropping = Order {
            drop_last: true,
            ..order(7, 2, 2, 1)
        };
        assert_eq!(dropping.of_epoch(0), [[2, 3]]);
    }

    #[test]
    fn shuffling_is_a_function_of_seed_and_epoch_and_covers_every_sample_once() {
        let of = |seed, epoch| {
            let rank = |rank| {
                Order {
                    shuffle: true,
                    seed,
                    ..order(12, 2, 3, rank)
                }
                .of_epoch(epoch)
            };
            (0..3).flat_map(rank).flatten().collect::<Vec<_>>()
        };
        assert_eq!(of(1, 0), of(1, 0));
        assert_ne!(of(1, 0), of(1, 1));
        assert_ne!(of(1, 0), of(2, 0));
        let mut all = of(1, 0);
        all.sort_unstable();
        assert_eq!(all, (0..12).collect::<Vec<_>>());
    }
}
