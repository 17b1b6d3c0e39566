//! The random state of a rank: what random layers draw from, small enough to be saved and put back.
//!
//! candle's generator on the CPU can neither be seeded nor saved. A forward pass that is run again, to recompute
//! activations or after a restart, must draw what it drew before, so random layers draw a key here and make everything
//! else from it.

use std::cell::Cell;

/// The state of this thread's generator: a counter-based one, so that its state is where it stands.
///
/// Every rank has a thread of its own, which runs the model forward and backward. A thread that nobody seeded begins as
/// `RandomState::seed(0)` does.
///
/// ```
/// use sconce_zero::RandomState;
///
/// RandomState::seed(42);
/// let before = RandomState::current();
/// let drawn = [RandomState::draw_key(), RandomState::draw_key()];
/// before.restore();
/// assert_eq!([RandomState::draw_key(), RandomState::draw_key()], drawn);
/// assert_ne!(drawn[0], drawn[1]);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RandomState {
    /// What the generator was seeded with.
    pub seed: u64,
    /// How many keys have been drawn since.
    pub draws: u64,
}

thread_local! {
    static STATE: Cell<RandomState> = const { Cell::new(RandomState { seed: 0, draws: 0 }) };
}

impl RandomState {
    /// Begins anew on this thread, from a seed.
    pub fn seed(seed: u64) {
        Self { seed, draws: 0 }.restore();
    }

    /// Returns the seed of a rank of a run: another for every rank, that of rank 0 is `seed` itself.
    pub fn seed_of_rank(seed: u64, rank: usize) -> u64 {
        seed.wrapping_add((rank as u64).wrapping_mul(GOLDEN_RATIO))
    }

    /// Returns this thread's state.
    pub fn current() -> Self {
        STATE.get()
    }

    /// Makes this the state of the thread: what is drawn next is what was drawn next where the state was taken.
    pub fn restore(self) {
        STATE.set(self);
    }

    /// Does `work` from this state on, then goes on with the thread's own.
    pub fn during<R>(self, work: impl FnOnce() -> R) -> R {
        let own = Self::current();
        self.restore();
        let result = work();
        own.restore();
        result
    }

    /// Returns the next key of this thread: no two of a seed's are equal.
    pub fn draw_key() -> u64 {
        let Self { seed, draws } = Self::current();
        Self {
            seed,
            draws: draws.wrapping_add(1),
        }
        .restore();
        mix(mix(seed).wrapping_add(draws.wrapping_mul(GOLDEN_RATIO)))
    }
}

/// 2⁶⁴ divided by the golden ratio, the increment of SplitMix64.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195): one to one.
fn mix(state: u64) -> u64 {
    let state = state.wrapping_add(GOLDEN_RATIO);
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_output_function_is_that_of_split_mix() {
        // The first outputs of Java's SplittableRandom and of Vigna's splitmix64.c for the seed 1234567.
        let outputs = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        for (number, output) in outputs.into_iter().enumerate() {
            assert_eq!(
                mix(1_234_567u64.wrapping_add((number as u64).wrapping_mul(GOLDEN_RATIO))),
                output
            );
        }
    }

    #[test]
    fn keys_of_neighbouring_seeds_and_ranks_all_differ() {
        let mut keys = BTreeSet::new();
        for seed in 0..10 {
            for rank in 0..10 {
                RandomState::seed(RandomState::seed_of_rank(seed, rank));
                keys.extend((0..100).map(|_| RandomState::draw_key()));
            }
        }
        assert_eq!(keys.len(), 10 * 10 * 100);
    }

    #[test]
    fn a_restored_state_draws_the_same_and_another_threads_is_its_own() {
        RandomState::seed(3);
        let drawn: Vec<u64> = (0..5).map(|_| RandomState::draw_key()).collect();
        RandomState { seed: 3, draws: 2 }.restore();
        assert_eq!([RandomState::draw_key(), RandomState::draw_key()], drawn[2..4]);
        let again = RandomState { seed: 3, draws: 1 }.during(RandomState::draw_key);
        assert_eq!((again, RandomState::draw_key()), (drawn[1], drawn[4]));
        let before = RandomState::current();
        let elsewhere = std::thread::spawn(|| {
            let fresh = RandomState::current();
            RandomState::draw_key();
            fresh
        });
        assert_eq!(elsewhere.join().unwrap(), RandomState::default());
        assert_eq!(RandomState::current(), before);
    }
}
