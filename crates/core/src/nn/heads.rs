//! Strided access to `[batch, heads, sequence, head size]` tensors.
//!
//! Models get such tensors by transposing `[batch, sequence, heads, head size]`, which is a view.
//! Reading its rows in place saves the copy that a row-major layout would take.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::{CpuStorage, Layout, Result, Tensor};

use super::element::{CpuTensor, Element, expect_resident};

/// Makes the elements of a row adjacent in memory, by a copy where they are not.
pub(super) fn with_adjacent_elements(xs: &Tensor) -> Result<Tensor> {
    match (xs.dims().last(), xs.stride().last()) {
        (Some(&size), Some(&stride)) if size > 1 && stride != 1 => xs.contiguous(),
        _ => Ok(xs.clone()),
    }
}

/// The rows of such a tensor; a plane is the sequence of one batch entry and head.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a, T> {
    elements: &'a [T],
    start: usize,
    strides: [usize; 3],
    pub(super) heads: usize,
    pub(super) sequence: usize,
    pub(super) size: usize,
}

impl<'a, T: Element> Heads<'a, T> {
    /// # Errors
    ///
    /// Fails when the layout has not four dimensions, its rows are not adjacent elements, or the
    /// storage holds another element type or too few elements.
    pub(super) fn new(operation: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let (&[_, heads, sequence, size], &[batch_stride, head_stride, row_stride, element_stride]) =
            (layout.dims(), layout.stride())
        else {
            candle_core::bail!("{operation}: expected four dimensions, got {:?}", layout.dims());
        };
        if size > 1 && element_stride != 1 {
            return Err(candle_core::Error::RequiresContiguous { op: operation }.bt());
        }
        let elements = T::cpu_storage_as_slice(storage)?;
        if layout.shape().elem_count() > 0 {
            let last = layout
                .dims()
                .iter()
                .zip(layout.stride())
                .map(|(size, stride)| (size - 1) * stride);
            let end = layout.start_offset() + last.sum::<usize>() + 1;
            expect_resident(operation, elements, end, layout)?;
        }
        Ok(Self {
            elements,
            start: layout.start_offset(),
            strides: [batch_stride, head_stride, row_stride],
            heads,
            sequence,
            size,
        })
    }

    /// # Errors
    ///
    /// As [`new`](Self::new), and when the tensor lives on another device.
    pub(super) fn of(operation: &'static str, tensor: &'a CpuTensor<'_>) -> Result<Self> {
        let (storage, layout) = tensor.parts()?;
        Self::new(operation, storage, layout)
    }

    /// Returns the elements from the first of a plane on; its rows are [`row_stride`](Self::row_stride)
    /// apart.
    pub(super) fn plane(&self, plane: usize) -> &'a [T] {
        let (batch, head) = (plane / self.heads, plane % self.heads);
        &self.elements[self.start + batch * self.strides[0] + head * self.strides[1]..]
    }

    pub(super) fn row_stride(&self) -> usize {
        self.strides[2]
    }

    /// Returns rows of a plane as a row-major `f32` matrix, borrowed where the tensor is that already.
    pub(super) fn rows(&self, plane: usize, rows: Range<usize>) -> Cow<'a, [f32]> {
        let (size, stride) = (self.size, self.row_stride());
        let plane = self.plane(plane);
        if stride == size
            && let Some(plane) = T::as_f32(plane)
        {
            return Cow::Borrowed(&plane[rows.start * size..rows.end * size]);
        }
        let mut matrix = Vec::with_capacity(rows.len() * size);
        for row in rows {
            matrix.extend(plane[row * stride..][..size].iter().map(|x| x.widen()));
        }
        Cow::Owned(matrix)
    }
}
