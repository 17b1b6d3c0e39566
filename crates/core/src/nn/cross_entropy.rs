//! The loss of a language model as one op: composed of candle ops it keeps several `[n, vocab]`
//! tensors, the largest of the whole step, until the backward pass.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Tensor, bail};
use multiversion::multiversion;

use super::arguments::{expect_axes, expect_float, expect_shape};
use super::element::{CpuTensor, Element, composition_dtype, dense, has_kernel, tensor_like, with_element};
use super::exponential::exp;
use super::softmax::RowStatistics;
use super::{lanes, row_blocks};

const NAME: &str = "cross_entropy";

/// Averages the negative log-likelihood of the labels: the mean of `-log softmax(logits_i)[label_i]`
/// over all `i` whose label is not `ignore_index`.
///
/// `logits` has shape `[n, vocab]`, `labels` has shape `[n]` and dtype `i64` or `u32`. The result is an
/// `f32` scalar (`f64` for `f64` logits). When no label counts it is 0, with a gradient of zeros.
///
/// On a GPU the labels are copied to the host to check them, which waits for the work queued so far.
///
/// # Errors
///
/// Fails when shapes or dtypes are others, or when a label is neither `ignore_index` nor in `0..vocab`.
pub fn cross_entropy(logits: &Tensor, labels: &Tensor, ignore_index: i64) -> Result<Tensor> {
    expect_float(NAME, "logits", logits)?;
    expect_axes(NAME, "logits", logits, &["n", "vocab"])?;
    let (rows, vocab) = logits.dims2()?;
    expect_shape(NAME, "labels", labels, &[rows])?;
    if vocab == 0 {
        bail!(
            "{NAME}: expected logits over at least one class, got {:?}",
            logits.dims()
        );
    }
    let targets = targets(NAME, labels, vocab, ignore_index)?;
    if has_kernel(logits) {
        let count = targets.iter().flatten().count();
        logits.contiguous()?.apply_op1(CrossEntropy {
            targets,
            count,
            statistics: OnceLock::new(),
        })
    } else {
        compose(logits, &targets)
    }
}

/// Returns the labels in order, `None` for those to ignore.
pub(super) fn targets(operation: &str, labels: &Tensor, vocab: usize, ignore_index: i64) -> Result<Vec<Option<usize>>> {
    if !matches!(labels.dtype(), DType::U32 | DType::I64) {
        bail!(
            "{operation}: expected labels of dtype U32 or I64, got {:?}",
            labels.dtype()
        );
    }
    let numbers = labels.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    numbers
        .into_iter()
        .enumerate()
        .map(|(position, label)| match usize::try_from(label) {
            _ if label == ignore_index => Ok(None),
            Ok(target) if target < vocab => Ok(Some(target)),
            _ => bail!(
                "{operation}: expected labels below the vocabulary size {vocab} or equal to ignore_index \
                 {ignore_index}, got {label} at position {position}"
            ),
        })
        .collect()
}

fn compose(logits: &Tensor, targets: &[Option<usize>]) -> Result<Tensor> {
    let dtype = composition_dtype(logits.dtype());
    let wide = logits.to_dtype(dtype)?.contiguous()?;
    let counted = |choose: fn((usize, usize)) -> usize| {
        let numbers: Vec<u32> = targets
            .iter()
            .enumerate()
            .filter_map(|(row, target)| target.map(|target| choose((row, target)) as u32))
            .collect();
        Tensor::new(numbers, logits.device())
    };
    let rows = counted(|(row, _)| row)?;
    if rows.elem_count() == 0 {
        // A zero that the graph connects to the logits: they get a gradient of zeros.
        let none = Tensor::zeros(wide.dims(), DType::U8, wide.device())?;
        return none.where_cond(&wide, &wide.zeros_like()?)?.sum_all();
    }
    let labels = counted(|(_, target)| target)?;
    candle_nn::ops::log_softmax(&wide.index_select(&rows, 0)?, D::Minus1)?
        .gather(&labels.unsqueeze(1)?, 1)?
        .mean_all()?
        .neg()
}

struct CrossEntropy {
    targets: Vec<Option<usize>>,
    /// The labels that count.
    count: usize,
    /// Of each row, for the backward pass.
    statistics: OnceLock<Vec<RowStatistics>>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, vocab) = layout.shape().dims2()?;
        with_element!(logits.dtype(), NAME, T => {
            let logits = dense::<T>(NAME, logits, layout)?;
            let mut statistics = vec![RowStatistics::default(); rows];
            let block = row_blocks::independent(vocab);
            row_blocks::for_each(&mut statistics, block, |index, statistics| {
                let first = index * block;
                let rows = first..first + statistics.len();
                let logits = &logits[first * vocab..rows.end * vocab];
                measure_rows(logits, vocab, &self.targets[rows], statistics);
            });
            let mut sum = 0f64;
            for (row, target) in self.targets.iter().enumerate() {
                if let Some(target) = *target {
                    let RowStatistics { maximum, inverse_sum } = statistics[row];
                    let logit = logits[row * vocab + target].widen();
                    sum += f64::from(maximum) - f64::from(logit) - f64::from(inverse_sum).ln();
                }
            }
            let loss = sum / self.count.max(1) as f64;
            self.statistics.get_or_init(|| statistics);
            Ok((CpuStorage::F32(vec![loss as f32]), Shape::from(())))
        })
    }

    /// `d loss / d logits_ij = (softmax(logits_i)_j - [j = label_i]) / count`.
    fn bwd(&self, logits: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let (_, vocab) = logits.dims2()?;
        let Some(statistics) = self.statistics.get() else {
            bail!("{NAME}: the backward pass ran before the forward pass");
        };
        let scale = gradient.to_scalar::<f32>()? / self.count.max(1) as f32;
        let lock = CpuTensor::lock(NAME, logits);
        with_element!(logits.dtype(), NAME, T => {
            let elements = lock.elements::<T>()?;
            let mut out = bytemuck::zeroed_vec::<T>(elements.len());
            let block = row_blocks::independent(vocab);
            row_blocks::for_each(&mut out, block * vocab, |index, out| {
                let first = index * block;
                let rows = first..first + out.len() / vocab;
                let logits = &elements[first * vocab..][..out.len()];
                let statistics = &statistics[rows.clone()];
                gradient_rows(logits, vocab, &self.targets[rows], statistics, scale, out);
            });
            tensor_like(out, logits).map(Some)
        })
    }
}

#[multiversion(targets = "simd")]
fn measure_rows<T: Element>(logits: &[T], vocab: usize, targets: &[Option<usize>], statistics: &mut [RowStatistics]) {
    let rows = logits.chunks_exact(vocab).zip(targets).zip(statistics);
    for ((row, _), statistics) in rows.filter(|((_, target), _)| target.is_some()) {
        let maximum = lanes::maximum(row);
        let sum = lanes::sum(row, |x| exp(x.widen() - maximum));
        *statistics = RowStatistics {
            maximum,
            inverse_sum: 1.0 / sum,
        };
    }
}

/// Leaves the rows to ignore as they are: zero.
#[multiversion(targets = "simd")]
fn gradient_rows<T: Element>(
    logits: &[T],
    vocab: usize,
    targets: &[Option<usize>],
    statistics: &[RowStatistics],
    scale: f32,
    out: &mut [T],
) {
    let rows = logits.chunks_exact(vocab).zip(out.chunks_exact_mut(vocab));
    for ((logits, out), (target, statistics)) in rows.zip(targets.iter().zip(statistics)) {
        let Some(target) = *target else { continue };
        let RowStatistics { maximum, inverse_sum } = *statistics;
        for (out, &x) in out.iter_mut().zip(logits) {
            *out = T::round(exp(x.widen() - maximum) * (inverse_sum * scale));
        }
        let probability = exp(logits[target].widen() - maximum) * inverse_sum;
        out[target] = T::round((probability - 1.0) * scale);
    }
}
