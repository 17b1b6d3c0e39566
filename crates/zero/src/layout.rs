//! Where gradients lie: buckets in the order in which gradients become ready.
//!
//! candle's backward visits nodes in the order of `Tensor::sorted_nodes`, so the order is known before the first
//! backward. Rank 0's order is used by all. Bucket sizes follow PyTorch DDP: the first is small, so that the first
//! reduction starts early.
//!
//! Every bucket has one part per rank, and every parameter in it is cut into as many chunks:
//!
//! ```text
//! bucket:  | part of rank 0          | part of rank 1          |
//!          | a[..2]  b[..3]  padding | a[2..]  b[3..]  padding |
//! ```
//!
//! Whatever is sharded is sharded by parts; what is replicated has the same layout, so that sums over it run in the same
//! order and come to the same bits.

use crate::Placement;
use crate::parameter::chunk_of;
use candle_core::DType;
use std::ops::Range;

/// Elements to which every chunk is aligned: one cache line of f32.
const ALIGNMENT: usize = 16;

/// Where one parameter's gradient lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The parameter's number.
    pub(crate) parameter: usize,
    /// Elements of the parameter.
    pub(crate) elements: usize,
    /// Parts that it is cut into; the last chunks may be shorter, or empty.
    parts: usize,
    /// Where its chunks begin within each part.
    offset: usize,
}

/// One bucket: parameters of one placement whose gradients are reduced together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BucketLayout {
    pub(crate) placement: Placement,
    /// Dtype of the parameters' values; gradients are f32 always.
    pub(crate) dtype: DType,
    pub(crate) slots: Vec<Slot>,
    pub(crate) parts: usize,
    /// Elements of each part, padding included.
    pub(crate) part_elements: usize,
}

impl Slot {
    /// Returns the parameter's elements that lie in `part`.
    pub(crate) fn chunk(&self, part: usize) -> Range<usize> {
        chunk_of(self.elements, part, self.parts)
    }

    /// Returns where they lie within the part.
    pub(crate) fn within_part(&self, part: usize) -> Range<usize> {
        self.offset..self.offset + self.chunk(part).len()
    }
}

impl BucketLayout {
    pub(crate) fn new(placement: Placement, dtype: DType, parts: usize) -> Self {
        Self {
            placement,
            dtype,
            slots: Vec::new(),
            parts,
            part_elements: 0,
        }
    }

    pub(crate) fn push(&mut self, parameter: usize, elements: usize) {
        self.slots.push(Slot {
            parameter,
            elements,
            parts: self.parts,
            offset: self.part_elements,
        });
        let chunk = chunk_of(elements, 0, self.parts).len();
        self.part_elements = (self.part_elements + chunk).next_multiple_of(ALIGNMENT);
    }

    /// Returns the elements of the whole bucket, padding included.
    pub(crate) fn elements(&self) -> usize {
        self.parts * self.part_elements
    }

    /// Returns a slot's elements in their order, of all parts.
    pub(crate) fn read(&self, slot: usize, elements: &[f32]) -> Vec<f32> {
        let slot = &self.slots[slot];
        let mut values = vec![0.0; slot.elements];
        let places = self.places(slot);
        places.for_each(|(place, chunk)| values[chunk].copy_from_slice(&elements[place]));
        values
    }

    /// Sets a slot's elements, in their order, in all parts.
    pub(crate) fn write(&self, slot: usize, values: &[f32], elements: &mut [f32]) {
        let places = self.places(&self.slots[slot]);
        places.for_each(|(place, chunk)| elements[place].copy_from_slice(&values[chunk]));
    }

    /// Returns a rank's part.
    pub(crate) fn part(&self, rank: usize) -> Range<usize> {
        rank * self.part_elements..(rank + 1) * self.part_elements
    }

    /// Returns where the elements of `slot` that lie in `part` are in the bucket.
    pub(crate) fn place(&self, slot: &Slot, part: usize) -> Range<usize> {
        let within = slot.within_part(part);
        let start = part * self.part_elements;
        start + within.start..start + within.end
    }

    /// Returns of every part where the elements of `slot` that lie in it are in the bucket, and which of the parameter's
    /// they are.
    pub(crate) fn places<'a>(&'a self, slot: &'a Slot) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + 'a {
        (0..self.parts).map(|part| (self.place(slot, part), slot.chunk(part)))
    }
}

/// Deals parameters out into buckets in the given order; a bucket is closed when it reaches its size in bytes. `about` says
/// of a parameter where its state lies, the dtype of its values, and its elements.
pub(crate) fn buckets(
    order: &[usize],
    about: impl Fn(usize) -> (Placement, DType, usize),
    parts: usize,
    first: usize,
    others: usize,
) -> Vec<BucketLayout> {
    let mut closed: Vec<BucketLayout> = Vec::new();
    let mut open: Vec<BucketLayout> = Vec::new();
    for &parameter in order {
        let (placement, dtype, elements) = about(parameter);
        let number = open
            .iter()
            .position(|bucket| (bucket.placement, bucket.dtype) == (placement, dtype))
            .unwrap_or_else(|| {
                open.push(BucketLayout::new(placement, dtype, parts));
                open.len() - 1
            });
        open[number].push(parameter, elements);
        let limit = if closed.is_empty() { first } else { others };
        if open[number].elements() * size_of::<f32>() >= limit {
            closed.push(open.remove(number));
        }
    }
    closed.extend(open);
    closed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Residence;

    const PLACEMENT: Placement = Placement {
        gradient: Residence::Sharded,
        optimizer_state: Residence::Sharded,
        ..Placement::REPLICATED
    };

    #[test]
    fn chunks_cover_every_element_once_and_do_not_overlap() {
        for (parts, sizes) in [(1, vec![5, 0, 40]), (3, vec![1, 2, 7, 100]), (4, vec![3, 33, 1, 16])] {
            let mut bucket = BucketLayout::new(PLACEMENT, DType::F32, parts);
            sizes
                .iter()
                .enumerate()
                .for_each(|(number, size)| bucket.push(number, *size));
            let mut taken = vec![false; bucket.elements()];
            for (slot, size) in bucket.slots.iter().zip(&sizes) {
                let mut covered = 0;
                for part in 0..parts {
                    assert_eq!(slot.chunk(part).start.min(*size), covered);
                    covered = slot.chunk(part).end;
                    let place = bucket.place(slot, part);
                    assert_eq!(place.len(), slot.chunk(part).len());
                    assert!(place.is_empty() || bucket.part(part).contains(&place.start));
                    assert!(place.end <= bucket.part(part).end);
                    taken[place]
                        .iter_mut()
                        .for_each(|taken| assert!(!std::mem::replace(taken, true)));
                }
                assert_eq!(covered, *size);
            }
        }
    }
}
