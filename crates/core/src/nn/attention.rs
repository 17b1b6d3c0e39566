//! Attention with a backward, without its quadratic memory: causal, and of all to all.
//!
//! candle's `sdpa` and CPU flash attention have no backward, and composed of candle ops attention
//! keeps several `[batch, heads, sequence, sequence]` tensors until the backward pass. Here a block of
//! queries meets all keys it may see, at most [`QUERY_BLOCK`] rows of scores exist at a time per
//! thread, and two numbers per row are kept for the backward pass, which computes the scores again
//! (Dao, 2022, arXiv:2205.14135).

use std::ops::Range;
use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Result, Shape, Tensor, bail};
use multiversion::multiversion;
use rayon::prelude::*;
use sconce_zero::Autocast;

use super::arguments::{computed_in, expect_axes, expect_float, expect_like};
use super::causal_mask::CausalMask;
use super::element::{CpuTensor, Element, composition_dtype, has_kernel, is_on_cpu, tensor_like, with_element};
use super::exponential::exp;
use super::heads::{Heads, with_adjacent_elements};
use super::lanes;
use super::matrix_product::{Destination, Matrix, multiply};
use super::row_blocks;
use super::softmax::{RowStatistics, softmax};

/// Which keys a query sees.
#[derive(Debug, Clone)]
enum Mask {
    /// Some of those up to its own position.
    Causal(CausalMask),
    /// All.
    Open,
}

impl Mask {
    fn operation(&self) -> &'static str {
        match self {
            Self::Causal(_) => "causal_attention",
            Self::Open => "attention",
        }
    }

    /// Returns which of `sequence` keys each of these queries of a batch entry sees.
    fn seen(&self, entry: usize, queries: Range<usize>, sequence: usize) -> Vec<Range<usize>> {
        match self {
            Self::Causal(mask) => {
                let seen = |query| mask.first_seen(entry, query, sequence)..query + 1;
                queries.map(seen).collect()
            }
            Self::Open => vec![0..sequence; queries.len()],
        }
    }
}

/// The keys that a block of queries meets, and which of them each query sees.
struct Sight {
    keys: Range<usize>,
    /// Within `keys`.
    seen: Vec<Range<usize>>,
}

impl Sight {
    fn new(mask: &Mask, entry: usize, queries: Range<usize>, sequence: usize) -> Self {
        let mut seen = mask.seen(entry, queries, sequence);
        let first = seen.iter().map(|seen| seen.start).min().unwrap_or(0);
        let end = seen.iter().map(|seen| seen.end).max().unwrap_or(0);
        for seen in &mut seen {
            *seen = seen.start - first..seen.end - first;
        }
        Self { keys: first..end, seen }
    }
}

/// Queries that are scored at a time: enough to keep the matrix products efficient, few enough that
/// little is computed above the diagonal.
const QUERY_BLOCK: usize = 64;

/// Attends from each position to itself and those before it: `softmax(scale · q kᵀ + mask) v`.
///
/// `q` has shape `[batch, heads, sequence, head_dim]`; `k` and `v` have shape `[batch, kv_heads,
/// sequence, head_dim]`, where `heads` is a multiple of `kv_heads`: query head `i` reads key and value
/// head `i / (heads / kv_heads)` (grouped-query attention, arXiv:2305.13245). The result has the shape
/// and dtype of `q`. All three may be transposed views.
///
/// # Errors
///
/// Fails when shapes do not fit together, dtypes or devices differ, or the tensors hold integers.
pub fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<Tensor> {
    masked_attention(q, k, v, scale, &CausalMask::default())
}

/// Does what [`causal_attention`] does, where a position sees only some of those before it.
///
/// # Errors
///
/// As [`causal_attention`], and when the mask is made for another number of positions.
pub fn masked_attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, mask: &CausalMask) -> Result<Tensor> {
    if let (&[batch, _, sequence, _], Err(reason)) = (q.dims(), mask.check(q.dims())) {
        bail!("causal_attention: expected a mask for {batch} rows of {sequence} positions: {reason}");
    }
    attend_to(&Mask::Causal(mask.clone()), q, k, v, scale)
}

/// Attends from each position to all: `softmax(scale · q kᵀ) v`, with the shapes of [`causal_attention`].
///
/// # Errors
///
/// As [`causal_attention`].
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<Tensor> {
    attend_to(&Mask::Open, q, k, v, scale)
}

fn attend_to(mask: &Mask, q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<Tensor> {
    let operation = mask.operation();
    expect_float(operation, "q", q)?;
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        expect_axes(operation, name, tensor, &["batch", "heads", "sequence", "head_dim"])?;
        expect_like(operation, name, tensor, "q", q)?;
    }
    let (batch, heads, sequence, size) = q.dims4()?;
    let kv_heads = k.dims()[1];
    for (name, tensor) in [("k", k), ("v", v)] {
        if tensor.dims() != [batch, kv_heads, sequence, size] {
            bail!(
                "{operation}: expected {name} of shape [{batch}, {kv_heads}, {sequence}, {size}] beside q \
                 {:?} and k {:?}, got {:?}",
                q.dims(),
                k.dims(),
                tensor.dims()
            );
        }
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        bail!(
            "{operation}: expected the heads of q to be a multiple of those of k, got q {:?} and k {:?}",
            q.dims(),
            k.dims()
        );
    }
    if let Some(dtype) = Autocast::current().dtype()
        && q.dtype() == DType::F32
    {
        let [k, v] = [k.to_dtype(dtype)?, v.to_dtype(dtype)?];
        return Autocast::off().during(|| computed_in(dtype, q, |q| attend_to(mask, q, &k, &v, scale)));
    }
    if has_kernel(q) {
        let attention = Attention {
            mask: mask.clone(),
            scale: scale as f32,
            statistics: OnceLock::new(),
        };
        with_adjacent_elements(q)?.apply_op3(&with_adjacent_elements(k)?, &with_adjacent_elements(v)?, attention)
    } else {
        compose(mask, q, k, v, scale)
    }
}

fn compose(mask: &Mask, q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<Tensor> {
    let (batch, heads, sequence, size) = q.dims4()?;
    let kv_heads = k.dims()[1];
    let dtype = composition_dtype(q.dtype());
    // On a GPU products of 16 bits add up in f32, and are ten times as fast as those of f32.
    let factors = if is_on_cpu(q) { dtype } else { q.dtype() };
    let repeat = |tensor: &Tensor| {
        tensor
            .to_dtype(factors)?
            .unsqueeze(2)?
            .broadcast_as((batch, kv_heads, heads / kv_heads, sequence, size))?
            .reshape((batch, heads, sequence, size))
    };
    let scores = q
        .to_dtype(factors)?
        .contiguous()?
        .matmul(&repeat(k)?.transpose(D::Minus2, D::Minus1)?.contiguous()?)?
        .to_dtype(dtype)?;
    let scores = hide(mask, &(scores * scale)?)?;
    softmax(&scores)?
        .to_dtype(factors)?
        .matmul(&repeat(v)?)?
        .to_dtype(q.dtype())
}

/// Makes scores of keys that a query does not see minus infinity.
fn hide(mask: &Mask, scores: &Tensor) -> Result<Tensor> {
    let Mask::Causal(causal) = mask else {
        return Ok(scores.clone());
    };
    let (batch, _, sequence, _) = scores.dims4()?;
    // Documents differ by row; without any, one mask serves all.
    let entries = if causal.has_documents() { batch } else { 1 };
    let mut visible = vec![0u8; entries * sequence * sequence];
    if sequence > 0 {
        for (entry, plane) in visible.chunks_exact_mut(sequence * sequence).enumerate() {
            let seen = mask.seen(entry, 0..sequence, sequence);
            for (row, seen) in plane.chunks_exact_mut(sequence).zip(seen) {
                row[seen].fill(1);
            }
        }
    }
    let visible = Tensor::from_vec(visible, (entries, 1, sequence, sequence), scores.device())?;
    let hidden = Tensor::full(f32::NEG_INFINITY, (), scores.device())?
        .to_dtype(scores.dtype())?
        .broadcast_as(scores.shape())?;
    visible.broadcast_as(scores.shape())?.where_cond(scores, &hidden)
}

struct Attention {
    mask: Mask,
    scale: f32,
    /// Of each query, for the backward pass.
    statistics: OnceLock<Vec<RowStatistics>>,
}

/// Queries, keys and values as the kernels read them.
struct Inputs<'a, T> {
    queries: Heads<'a, T>,
    keys: Heads<'a, T>,
    values: Heads<'a, T>,
    batch: usize,
}

impl<T: Element> Inputs<'_, T> {
    /// Returns how many query heads share a key and value head.
    fn group(&self) -> usize {
        self.queries.heads / self.keys.heads
    }

    /// Returns the plane of keys and values that a plane of queries reads.
    fn shared_plane(&self, plane: usize) -> usize {
        // Planes are numbered batch first, and the heads of a batch entry are a multiple of the group.
        plane / self.group()
    }

    fn planes(&self) -> usize {
        self.batch * self.queries.heads
    }

    fn plane_elements(&self) -> usize {
        self.queries.sequence * self.queries.size
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        self.mask.operation()
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        with_element!(q.dtype(), self.name(), T => {
            let inputs = Inputs {
                queries: Heads::<T>::new(self.name(), q, q_layout)?,
                keys: Heads::<T>::new(self.name(), k, k_layout)?,
                values: Heads::<T>::new(self.name(), v, v_layout)?,
                batch: q_layout.dims()[0],
            };
            let (out, statistics) = attend(&inputs, &self.mask, self.scale);
            self.statistics.get_or_init(|| statistics);
            Ok((T::store(out), q_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(statistics) = self.statistics.get() else {
            bail!("{}: the backward pass ran before the forward pass", self.name());
        };
        let gradient = with_adjacent_elements(gradient)?;
        let locks = [q, k, v, &gradient].map(|tensor| CpuTensor::lock(self.name(), tensor));
        with_element!(q.dtype(), self.name(), T => {
            let inputs = Inputs {
                queries: Heads::<T>::of(self.name(), &locks[0])?,
                keys: Heads::<T>::of(self.name(), &locks[1])?,
                values: Heads::<T>::of(self.name(), &locks[2])?,
                batch: q.dims()[0],
            };
            let [dq, dk, dv] = gradients(&inputs, Heads::<T>::of(self.name(), &locks[3])?, statistics, &self.mask, self.scale);
            Ok((
                q.track_op().then(|| tensor_like(dq, q)).transpose()?,
                k.track_op().then(|| tensor_like(dk, k)).transpose()?,
                v.track_op().then(|| tensor_like(dv, v)).transpose()?,
            ))
        })
    }
}

/// Returns the attended values, row-major in the shape of the queries, and the statistics of each row
/// of scores.
fn attend<T: Element>(inputs: &Inputs<T>, mask: &Mask, scale: f32) -> (Vec<T>, Vec<RowStatistics>) {
    let Heads { sequence, size, .. } = inputs.queries;
    let mut out = bytemuck::zeroed_vec::<T>(inputs.planes() * inputs.plane_elements());
    let mut statistics = vec![RowStatistics::default(); inputs.planes() * sequence];
    if out.is_empty() {
        return (out, statistics);
    }
    out.par_chunks_mut(inputs.plane_elements())
        .zip(statistics.par_chunks_mut(sequence))
        .enumerate()
        .for_each(|(plane, (out, statistics))| {
            let shared = inputs.shared_plane(plane);
            let keys = inputs.keys.rows(shared, 0..sequence);
            let values = inputs.values.rows(shared, 0..sequence);
            out.par_chunks_mut(QUERY_BLOCK * size)
                .zip(statistics.par_chunks_mut(QUERY_BLOCK))
                .enumerate()
                .for_each(|(block, (out, statistics))| {
                    let first = block * QUERY_BLOCK;
                    let rows = first..first + statistics.len();
                    let queries = inputs.queries.rows(plane, rows.clone());
                    let sight = Sight::new(mask, plane / inputs.queries.heads, rows, sequence);
                    let elements = sight.keys.start * size..sight.keys.end * size;
                    let (keys, values) = (&keys[elements.clone()], &values[elements]);
                    attend_block(&queries, keys, values, &sight, scale, out, statistics);
                });
        });
    (out, statistics)
}

/// Attends from a block of queries to the keys that they meet.
fn attend_block<T: Element>(
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    sight: &Sight,
    scale: f32,
    out: &mut [T],
    statistics: &mut [RowStatistics],
) {
    let rows = statistics.len();
    let size = out.len() / rows;
    let visible = sight.keys.len();
    let keys = Matrix::new(keys, visible, size);
    let values = Matrix::new(values, visible, size);

    let mut scores = vec![0f32; rows * visible];
    let queries = Matrix::new(queries, rows, size);
    multiply(scale, queries, keys.transposed(), Destination::Overwrite, &mut scores);
    exponentiate_rows(&mut scores, visible, &sight.seen, statistics);

    let mut attended = vec![0f32; rows * size];
    let weights = Matrix::new(&scores, rows, visible);
    multiply(1.0, weights, values, Destination::Overwrite, &mut attended);
    for ((out, attended), statistics) in out
        .chunks_exact_mut(size)
        .zip(attended.chunks_exact(size))
        .zip(statistics.iter())
    {
        for (out, &attended) in out.iter_mut().zip(attended) {
            *out = T::round(attended * statistics.inverse_sum);
        }
    }
}

/// Returns the gradients of queries, keys and values, row-major in their shapes.
///
/// With `P` the probabilities and `G` the gradient of the result: `dV = Pᵀ G`, `dP = G Vᵀ`,
/// `dS = P (dP - Σ_j P_j dP_j)`, `dQ = scale · dS K`, `dK = scale · dSᵀ Q`.
fn gradients<T: Element>(
    inputs: &Inputs<T>,
    gradient: Heads<T>,
    statistics: &[RowStatistics],
    mask: &Mask,
    scale: f32,
) -> [Vec<T>; 3] {
    let sequence = inputs.queries.sequence;
    let plane_elements = inputs.plane_elements();
    let elements = inputs.planes() * plane_elements;
    let mut dq = bytemuck::zeroed_vec::<T>(elements);
    // Every query head has keys and values of its own here, so that heads of a group run in parallel.
    let mut dk = vec![0f32; elements];
    let mut dv = vec![0f32; elements];
    if elements > 0 {
        dq.par_chunks_mut(plane_elements)
            .zip(dk.par_chunks_mut(plane_elements))
            .zip(dv.par_chunks_mut(plane_elements))
            .enumerate()
            .for_each(|(plane, ((dq, dk), dv))| {
                let statistics = &statistics[plane * sequence..][..sequence];
                plane_gradients(inputs, &gradient, plane, statistics, mask, scale, dq, dk, dv);
            });
    }
    let group = inputs.group();
    let shared = |partials| T::round_all(sum_groups(partials, group, plane_elements));
    [dq, shared(dk), shared(dv)]
}

#[expect(
    clippy::too_many_arguments,
    reason = "three inputs, three outputs and where they lie"
)]
fn plane_gradients<T: Element>(
    inputs: &Inputs<T>,
    gradient: &Heads<T>,
    plane: usize,
    statistics: &[RowStatistics],
    mask: &Mask,
    scale: f32,
    dq: &mut [T],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    let Heads { sequence, size, .. } = inputs.queries;
    let shared = inputs.shared_plane(plane);
    let keys = inputs.keys.rows(shared, 0..sequence);
    let values = inputs.values.rows(shared, 0..sequence);
    let block_elements = QUERY_BLOCK.min(sequence) * sequence;
    let (mut scores, mut d_scores) = (vec![0f32; block_elements], vec![0f32; block_elements]);
    let mut d_queries = vec![0f32; QUERY_BLOCK.min(sequence) * size];

    let blocks = dq.chunks_mut(QUERY_BLOCK * size).zip(statistics.chunks(QUERY_BLOCK));
    for (block, (dq, statistics)) in blocks.enumerate() {
        let first = block * QUERY_BLOCK;
        let rows = statistics.len();
        let sight = Sight::new(mask, plane / inputs.queries.heads, first..first + rows, sequence);
        let visible = sight.keys.len();
        let elements = sight.keys.start * size..sight.keys.end * size;
        let queries = inputs.queries.rows(plane, first..first + rows);
        let gradient = gradient.rows(plane, first..first + rows);
        let queries = Matrix::new(&queries, rows, size);
        let gradient = Matrix::new(&gradient, rows, size);
        let keys = Matrix::new(&keys[elements.clone()], visible, size);
        let values = Matrix::new(&values[elements.clone()], visible, size);
        let scores = &mut scores[..rows * visible];
        let d_scores = &mut d_scores[..rows * visible];
        let d_queries = &mut d_queries[..rows * size];

        multiply(scale, queries, keys.transposed(), Destination::Overwrite, scores);
        multiply(1.0, gradient, values.transposed(), Destination::Overwrite, d_scores);
        differentiate_rows(scores, d_scores, visible, &sight.seen, statistics);

        let probabilities = Matrix::new(scores, rows, visible);
        let d_scores = Matrix::new(d_scores, rows, visible);
        multiply(
            1.0,
            probabilities.transposed(),
            gradient,
            Destination::Add,
            &mut dv[elements.clone()],
        );
        multiply(
            scale,
            d_scores.transposed(),
            queries,
            Destination::Add,
            &mut dk[elements],
        );
        multiply(scale, d_scores, keys, Destination::Overwrite, d_queries);
        for (dq, &value) in dq.iter_mut().zip(d_queries.iter()) {
            *dq = T::round(value);
        }
    }
}

/// Adds up the planes of each group of heads, in order.
fn sum_groups(planes: Vec<f32>, group: usize, plane_elements: usize) -> Vec<f32> {
    if group == 1 {
        return planes;
    }
    let mut sums = vec![0f32; planes.len() / group];
    row_blocks::for_each(&mut sums, plane_elements, |index, sum| {
        let group_elements = group * plane_elements;
        for plane in planes[index * group_elements..][..group_elements].chunks_exact(plane_elements) {
            for (sum, &x) in sum.iter_mut().zip(plane) {
                *sum += x;
            }
        }
    });
    sums
}

/// Turns scores into unnormalised probabilities; each row sees `seen` of the keys.
#[multiversion(targets = "simd")]
fn exponentiate_rows(scores: &mut [f32], visible: usize, seen: &[Range<usize>], statistics: &mut [RowStatistics]) {
    let rows = scores.chunks_exact_mut(visible).zip(seen);
    for ((row, range), statistics) in rows.zip(statistics) {
        let seen = &mut row[range.clone()];
        let maximum = lanes::maximum(seen);
        let sum = lanes::replace_and_sum(seen, |x| exp(x - maximum));
        hide_others(row, range);
        *statistics = RowStatistics {
            maximum,
            inverse_sum: 1.0 / sum,
        };
    }
}

/// Turns scores into probabilities, and the gradients of probabilities into those of scores.
#[multiversion(targets = "simd")]
fn differentiate_rows(
    scores: &mut [f32],
    d_scores: &mut [f32],
    visible: usize,
    seen: &[Range<usize>],
    statistics: &[RowStatistics],
) {
    let rows = scores.chunks_exact_mut(visible).zip(d_scores.chunks_exact_mut(visible));
    for ((row, d_row), (range, statistics)) in rows.zip(seen.iter().zip(statistics)) {
        let (seen, d_seen) = (&mut row[range.clone()], &mut d_row[range.clone()]);
        for x in seen.iter_mut() {
            *x = exp(*x - statistics.maximum) * statistics.inverse_sum;
        }
        let along = lanes::sum_pairs(seen, d_seen, |p, d| p * d);
        for (d, &p) in d_seen.iter_mut().zip(seen.iter()) {
            *d = p * (*d - along);
        }
        hide_others(row, range);
        hide_others(d_row, range);
    }
}

/// Makes what lies outside of the range 0.
#[inline(always)]
fn hide_others(row: &mut [f32], range: &Range<usize>) {
    row[..range.start].fill(0.0);
    row[range.end..].fill(0.0);
}
