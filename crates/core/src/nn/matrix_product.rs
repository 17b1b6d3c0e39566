//! Matrix products over slices: the one place where the layers leave checked code.
//!
//! # Safety
//!
//! `gemm::gemm` reads and writes through raw pointers by sizes and strides that it does not check.
//! [`multiply`] checks every matrix against its slice, so its callers cannot go wrong: a mistaken size
//! is a panic, never an access outside a slice.

use gemm::Parallelism;

/// A matrix stored row by row, or the transpose of one.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    elements: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Views `rows * columns` elements.
    pub(super) fn new(elements: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(elements.len(), rows * columns, "a matrix fills its slice");
        Self {
            elements,
            rows,
            columns,
            row_stride: columns,
            column_stride: 1,
        }
    }

    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// What becomes of the values that are in the destination.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Destination {
    Overwrite,
    Add,
}

/// Computes `scale * left * right` into a row-major matrix, on the calling thread.
///
/// # Panics
///
/// Panics when the sizes do not fit together.
pub(super) fn multiply(scale: f32, left: Matrix, right: Matrix, mode: Destination, destination: &mut [f32]) {
    multiply_by(Parallelism::None, scale, left, right, mode, destination);
}

/// Computes `left * right` into a row-major matrix, on the threads of the current pool; the bits do not depend on their number.
///
/// # Panics
///
/// As [`multiply`].
pub(super) fn multiply_on_all_threads(left: Matrix, right: Matrix, mode: Destination, destination: &mut [f32]) {
    let parallelism = match rayon::current_num_threads() {
        1 => Parallelism::None,
        _ => Parallelism::Rayon(0),
    };
    multiply_by(parallelism, 1.0, left, right, mode, destination);
}

fn multiply_by(
    parallelism: Parallelism,
    scale: f32,
    left: Matrix,
    right: Matrix,
    mode: Destination,
    destination: &mut [f32],
) {
    assert_eq!(left.columns, right.rows, "the inner sizes agree");
    assert_eq!(
        destination.len(),
        left.rows * right.columns,
        "the product fills the destination"
    );
    // SAFETY:
    // - Reads: `Matrix::new` is the only constructor and makes the slice exactly `rows * columns` long
    //   with strides `(columns, 1)`, so the largest offset is `(rows - 1) * columns + columns - 1`, the
    //   last element; `transposed` swaps sizes and strides together, which keeps the set of offsets.
    //   gemm reads `left.rows x left.columns` and `right.rows x right.columns` elements, the inner
    //   sizes being equal by the first assertion.
    // - Writes: the destination holds `left.rows * right.columns` elements by the second assertion and
    //   is addressed with strides `(right.columns, 1)`, by the same reasoning within its slice.
    // - Aliasing: `destination` is an exclusive borrow, so it overlaps neither input.
    // - Initialisation: slices of `f32` are initialised, and every bit pattern is a valid `f32`.
    unsafe {
        gemm::gemm(
            left.rows,
            right.columns,
            left.columns,
            destination.as_mut_ptr(),
            1,
            right.columns as isize,
            mode == Destination::Add,
            left.elements.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.elements.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_agree_with_the_definition_for_every_transposition() {
        let value = |row: usize, column: usize, salt: usize| ((row * 31 + column * 17 + salt * 7) % 13) as f32 - 6.0;
        let stored = |rows: usize, columns: usize, salt: usize, transposed: bool| -> Vec<f32> {
            if transposed {
                (0..rows * columns).map(|i| value(i % rows, i / rows, salt)).collect()
            } else {
                (0..rows * columns)
                    .map(|i| value(i / columns, i % columns, salt))
                    .collect()
            }
        };
        for (m, n, k) in [(1, 1, 1), (3, 5, 2), (17, 1, 33), (1, 9, 4), (64, 70, 31)] {
            for case in 0..8 {
                let (left_t, right_t, add) = (case & 1 != 0, case & 2 != 0, case & 4 != 0);
                let (left, right) = (stored(m, k, 1, left_t), stored(k, n, 2, right_t));
                let left = if left_t {
                    Matrix::new(&left, k, m).transposed()
                } else {
                    Matrix::new(&left, m, k)
                };
                let right = if right_t {
                    Matrix::new(&right, n, k).transposed()
                } else {
                    Matrix::new(&right, k, n)
                };
                let mode = if add { Destination::Add } else { Destination::Overwrite };
                let mut product = vec![1f32; m * n];
                multiply(0.5, left, right, mode, &mut product);
                for (i, &got) in product.iter().enumerate() {
                    let dot: f32 = (0..k).map(|j| value(i / n, j, 1) * value(j, i % n, 2)).sum();
                    let expected = 0.5 * dot + if add { 1.0 } else { 0.0 };
                    assert_eq!(got, expected, "{m}x{n}x{k}, case {case}, element {i}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "the product fills the destination")]
    fn a_short_destination_is_refused() {
        let matrix = Matrix::new(&[1.0; 4], 2, 2);
        multiply(1.0, matrix, matrix, Destination::Overwrite, &mut [0.0; 3]);
    }
}
