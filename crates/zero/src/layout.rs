//! Where gradients lie: buckets in the order in which gradients become ready.
//!
//! candle's backward visits nodes in the order of [`Tensor::sorted_nodes`], so the order is known before the first
//! backward. Rank 0's order is used by all. Bucket sizes follow PyTorch DDP: the first is small, so that the first
//! reduction starts early.

use crate::parameters::Parameter;
use std::ops::Range;

/// Elements to which every slot is aligned: one cache line of f32.
const ALIGNMENT: usize = 16;

/// Where one parameter's gradient lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The parameter's number.
    pub(crate) parameter: usize,
    /// Elements within the bucket.
    pub(crate) range: Range<usize>,
}

/// One bucket: parameters whose gradients are reduced together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct BucketLayout {
    pub(crate) slots: Vec<Slot>,
    /// Elements, padding included.
    pub(crate) elements: usize,
}

/// Deals parameters out into buckets in the given order; a bucket is closed when it reaches its size in bytes.
pub(crate) fn buckets(order: &[usize], parameters: &[Parameter], first: usize, others: usize) -> Vec<BucketLayout> {
    let mut buckets: Vec<BucketLayout> = Vec::new();
    let mut open = BucketLayout::default();
    for &parameter in order {
        let elements = parameters[parameter].info.elements();
        let start = open.elements;
        open.slots.push(Slot {
            parameter,
            range: start..start + elements,
        });
        open.elements = (start + elements).next_multiple_of(ALIGNMENT);
        let limit = if buckets.is_empty() { first } else { others };
        if open.elements * size_of::<f32>() >= limit {
            buckets.push(std::mem::take(&mut open));
        }
    }
    if !open.slots.is_empty() {
        buckets.push(open);
    }
    buckets
}
