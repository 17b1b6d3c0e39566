//! Token embedding. `candle_nn::Embedding` has a backward, but one that adds up a bf16 table's gradient
//! in bf16, where the many small terms of a frequent token are lost; and it does not say which token id
//! is out of range.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Module, Result, Shape, Storage, Tensor, bail,
};
use candle_nn::{Init, VarBuilder};
use multiversion::multiversion;

use super::arguments::{expect_axes, expect_float};
use super::element::{CpuTensor, Element, composition_dtype, dense, has_kernel, is_on_cpu, tensor_like, with_element};
use super::row_blocks;

const NAME: &str = "embedding";

/// Looks up one row of a `[vocab, hidden]` table per token id.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Tensor,
    /// The dtype of results.
    dtype: DType,
}

/// Creates an [`Embedding`] of `vocab` rows of `hidden` elements from the parameter `weight`,
/// initially drawn from the standard normal distribution, as in PyTorch.
///
/// # Errors
///
/// Fails when `vb` has no such parameter of shape `[vocab, hidden]`.
pub fn embedding(vocab: usize, hidden: usize, vb: VarBuilder) -> Result<Embedding> {
    let normal = Init::Randn { mean: 0.0, stdev: 1.0 };
    let weight = vb.get_with_hints((vocab, hidden), "weight", normal)?;
    Ok(Embedding {
        weight,
        dtype: vb.dtype(),
    })
}

impl Embedding {
    /// Creates the layer from a table of shape `[vocab, hidden]`.
    pub fn new(weight: Tensor) -> Self {
        let dtype = weight.dtype();
        Self { weight, dtype }
    }

    /// Returns the table, of shape `[vocab, hidden]`; a tied output layer multiplies by its transpose.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    /// Returns the rows of `ids`: shape `[..]` gives `[.., hidden]` in the table's dtype, or, beside a table that is
    /// kept in f32, in that of the `VarBuilder` which the layer was made from.
    ///
    /// On a GPU the ids are copied to the host to check them, which waits for the work queued so far.
    ///
    /// # Errors
    ///
    /// Fails when an id is outside `0..vocab`, or `ids` is not `u8`, `u32` or `i64`.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        expect_float(NAME, "weight", &self.weight)?;
        expect_axes(NAME, "weight", &self.weight, &["vocab", "hidden"])?;
        let (vocab, hidden) = self.weight.dims2()?;
        let rows = row_numbers(ids, vocab)?;
        let mut shape = ids.dims().to_vec();
        shape.push(hidden);
        if has_kernel(&self.weight) {
            let lookup = Lookup {
                rows: rows.into(),
                shape: shape.into(),
            };
            self.weight.contiguous()?.apply_op1(lookup)?.to_dtype(self.dtype)
        } else {
            let ids = ids.to_device(self.weight.device())?.flatten_all()?.contiguous()?;
            let weight = self.weight.contiguous()?;
            // candle's ops on the GPU refuse no ids at all.
            let rows = if is_on_cpu(&weight) || rows.is_empty() {
                weight.index_select(&ids, 0)?
            } else {
                weight.apply_op1(LookupOnDevice { ids })?
            };
            rows.reshape(shape)?.to_dtype(self.dtype)
        }
    }
}

/// Returns the ids in row-major order, each checked against the number of rows.
fn row_numbers(ids: &Tensor, vocab: usize) -> Result<Vec<usize>> {
    if !matches!(ids.dtype(), DType::U8 | DType::U32 | DType::I64) {
        bail!(
            "{NAME}: expected ids of dtype U8, U32 or I64, got {:?} {:?}",
            ids.dtype(),
            ids.dims()
        );
    }
    let numbers = ids
        .to_device(&Device::Cpu)?
        .to_dtype(DType::I64)?
        .flatten_all()?
        .to_vec1::<i64>()?;
    numbers
        .into_iter()
        .enumerate()
        .map(|(place, id)| match usize::try_from(id) {
            Ok(row) if row < vocab => Ok(row),
            _ => bail!(
                "{NAME}: expected ids below the vocabulary size {vocab}, got {id} at element {place} \
                 of ids {:?}",
                ids.dims()
            ),
        })
        .collect()
}

struct Lookup {
    rows: Arc<[usize]>,
    shape: Shape,
}

impl CustomOp1 for Lookup {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, hidden) = layout.shape().dims2()?;
        with_element!(weight.dtype(), NAME, T => {
            let weight = dense::<T>(NAME, weight, layout)?;
            let mut out = bytemuck::zeroed_vec::<T>(self.rows.len() * hidden);
            let block = row_blocks::independent(hidden) * hidden;
            row_blocks::for_each(&mut out, block, |index, out| {
                let rows = &self.rows[index * block / hidden..];
                for (out, &row) in out.chunks_exact_mut(hidden).zip(rows) {
                    out.copy_from_slice(&weight[row * hidden..][..hidden]);
                }
            });
            Ok((T::store(out), self.shape.clone()))
        })
    }

    /// Adds each gradient row to the table row it was read from, in order of its place in `ids`. A
    /// block owns a range of table rows, so no two threads add to one row.
    fn bwd(&self, weight: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let (_, hidden) = weight.dims2()?;
        let mut places: Vec<usize> = (0..self.rows.len()).collect();
        places.sort_by_key(|&place| self.rows[place]);
        let gradient = gradient.contiguous()?;
        let gradient = CpuTensor::lock(NAME, &gradient);
        with_element!(weight.dtype(), NAME, T => {
            let gs = gradient.elements::<T>()?;
            let mut out = bytemuck::zeroed_vec::<T>(weight.elem_count());
            let block_rows = row_blocks::independent(hidden);
            row_blocks::for_each(&mut out, block_rows * hidden, |index, out| {
                let first = index * block_rows;
                let end = first + out.len() / hidden;
                let from = places.partition_point(|&place| self.rows[place] < first);
                let to = places.partition_point(|&place| self.rows[place] < end);
                let mut sum = vec![0f32; hidden];
                for same in places[from..to].chunk_by(|&a, &b| self.rows[a] == self.rows[b]) {
                    sum.fill(0.0);
                    for &place in same {
                        add_row(&mut sum, &gs[place * hidden..][..hidden]);
                    }
                    let row = self.rows[same[0]] - first;
                    round_row(&sum, &mut out[row * hidden..][..hidden]);
                }
            });
            tensor_like(out, weight).map(Some)
        })
    }
}

/// The lookup by candle's own op, whose backward would add up in the table's dtype.
struct LookupOnDevice {
    ids: Tensor,
}

impl CustomOp1 for LookupOnDevice {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let lock = CpuTensor::lock(NAME, &self.ids);
        let (ids, ids_layout) = lock.parts()?;
        let rows = weight.index_select(ids, layout, ids_layout, 0)?;
        Ok((rows, (self.ids.elem_count(), layout.dim(1)?).into()))
    }

    fn cuda_fwd(&self, weight: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (ids, ids_layout) = self.ids.storage_and_layout();
        let Storage::Cuda(ids) = &*ids else {
            bail!("{NAME}: expected ids on the device of the table");
        };
        let rows = weight.index_select(ids, layout, ids_layout, 0)?;
        Ok((rows, (self.ids.elem_count(), layout.dim(1)?).into()))
    }

    /// Adds each gradient row to the table row it was read from, in f32 at least.
    fn bwd(&self, weight: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let dtype = composition_dtype(weight.dtype());
        let sums = Tensor::zeros(weight.shape(), dtype, weight.device())?;
        let gradient = gradient.to_dtype(dtype)?.contiguous()?;
        let sums = sums.index_add(&self.ids, &gradient, 0)?;
        sums.to_dtype(weight.dtype()).map(Some)
    }
}

#[multiversion(targets = "simd")]
fn add_row<T: Element>(sum: &mut [f32], row: &[T]) {
    for (sum, x) in sum.iter_mut().zip(row) {
        *sum += x.widen();
    }
}

#[multiversion(targets = "simd")]
fn round_row<T: Element>(sum: &[f32], out: &mut [T]) {
    for (out, &sum) in out.iter_mut().zip(sum) {
        *out = T::round(sum);
    }
}
