//! Sums and maxima over a slice, in a fixed order that vectorises.
//!
//! The compiler may not reorder floating-point additions, so a plain sum stays scalar. Here element
//! `i` goes to lane `i % LANES` and the lanes are folded pairwise at the end: the order, and so every
//! bit of the result, is the same for any vector width and any number of threads.

use super::element::Element;

/// Independent accumulators: one AVX-512 register, or two of AVX2.
const LANES: usize = 16;

/// Sums `term` over one slice.
#[inline(always)]
pub(super) fn sum<A: Copy>(a: &[A], term: impl Fn(A) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &a) in lanes.iter_mut().zip(block) {
            *lane += term(a);
        }
    }
    for (lane, &a) in lanes.iter_mut().zip(rest) {
        *lane += term(a);
    }
    fold(lanes, |x, y| x + y)
}

/// Sums `term` over two slices of the same length.
#[inline(always)]
pub(super) fn sum_pairs<A: Copy, B: Copy>(a: &[A], b: &[B], term: impl Fn(A, B) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += term(a, b);
        }
    }
    for ((lane, &a), &b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += term(a, b);
    }
    fold(lanes, |x, y| x + y)
}

/// Sums two terms over three slices of the same length, in one pass.
#[inline(always)]
pub(super) fn sum_triples<A: Copy, B: Copy, C: Copy>(
    a: &[A],
    b: &[B],
    c: &[C],
    terms: impl Fn(A, B, C) -> (f32, f32),
) -> (f32, f32) {
    let mut first = [0f32; LANES];
    let mut second = [0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    let (c_blocks, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a_blocks.iter().zip(b_blocks).zip(c_blocks) {
        for lane in 0..LANES {
            let (x, y) = terms(a[lane], b[lane], c[lane]);
            first[lane] += x;
            second[lane] += y;
        }
    }
    for (lane, ((&a, &b), &c)) in a_rest.iter().zip(b_rest).zip(c_rest).enumerate() {
        let (x, y) = terms(a, b, c);
        first[lane] += x;
        second[lane] += y;
    }
    (fold(first, |x, y| x + y), fold(second, |x, y| x + y))
}

/// Replaces each element by its `value` and returns the sum of the new ones.
#[inline(always)]
pub(super) fn replace_and_sum(a: &mut [f32], value: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = a.as_chunks_mut::<LANES>();
    for block in blocks {
        for (lane, a) in lanes.iter_mut().zip(block) {
            *a = value(*a);
            *lane += *a;
        }
    }
    for (lane, a) in lanes.iter_mut().zip(rest) {
        *a = value(*a);
        *lane += *a;
    }
    fold(lanes, |x, y| x + y)
}

/// Returns the largest element, or minus infinity for none; NaN is passed over.
#[inline(always)]
pub(super) fn maximum<T: Element>(a: &[T]) -> f32 {
    let larger = |x: f32, y: f32| if y > x { y } else { x };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &a) in lanes.iter_mut().zip(block) {
            *lane = larger(*lane, a.widen());
        }
    }
    for (lane, &a) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, a.widen());
    }
    fold(lanes, larger)
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_counted_once_at_every_length() {
        for length in 0..70u16 {
            let a: Vec<f32> = (0..length).map(f32::from).collect();
            let mut doubled = a.clone();
            let total = f32::from(length) * (f32::from(length) - 1.0) / 2.0;
            assert_eq!(sum(&a, |a| a), total);
            assert_eq!(sum_pairs(&a, &a, |a, b| 2.0 * a - b), total);
            assert_eq!(
                sum_triples(&a, &a, &a, |a, b, c| (a + b - c, 1.0)),
                (total, f32::from(length))
            );
            assert_eq!(replace_and_sum(&mut doubled, |a| 2.0 * a), 2.0 * total);
            assert!(doubled.iter().zip(&a).all(|(&d, &a)| d == 2.0 * a));
            assert_eq!(maximum(&a), a.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }

    #[test]
    fn the_maximum_is_found_in_every_lane() {
        for place in 0..40 {
            let mut a = [-2f32; 40];
            a[place] = -1.0;
            assert_eq!(maximum(&a), -1.0);
        }
    }
}
