//! Random orders as PyTorch makes them, so that a seed shuffles here as it shuffles there.

use rand_mt::Mt;

/// Below this number of samples PyTorch draws 32 bits for each, from it on 64.
const WIDE_DRAWS_FROM: usize = u32::MAX as usize / 20;

/// PyTorch's generator on the CPU: MT19937, which takes the lower 32 bits of the seed.
#[derive(Debug)]
pub(super) struct TorchGenerator(Mt);

impl TorchGenerator {
    pub(super) fn new(seed: u64) -> Self {
        Self(Mt::new(seed as u32))
    }

    fn next_u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        high << 32 | u64::from(self.next_u32())
    }

    /// Returns a number from 0 up to 1, 1 excluded, in steps of 2⁻⁵³.
    pub(super) fn next_f64(&mut self) -> f64 {
        const STEPS: u64 = 1 << 53;
        (self.next_u64() % STEPS) as f64 / STEPS as f64
    }
}

/// Returns the numbers below `count` in the order of `torch.randperm(count, generator=manual_seed(seed))` on the CPU.
///
/// Fisher and Yates from the front: place i is exchanged with one of the places from i on (`randperm_cpu` in ATen's
/// `TensorFactories.cpp`).
pub(super) fn permutation(count: usize, seed: u64) -> Vec<usize> {
    let mut generator = TorchGenerator::new(seed);
    let mut order: Vec<usize> = (0..count).collect();
    for at in 0..count.saturating_sub(1) {
        let draw = if count < WIDE_DRAWS_FROM {
            u64::from(generator.next_u32())
        } else {
            generator.next_u64()
        };
        order.swap(at, at + (draw % (count - at) as u64) as usize);
    }
    order
}
