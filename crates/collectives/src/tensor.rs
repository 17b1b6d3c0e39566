//! Collectives on candle tensors: new tensors out, nothing recorded for backward.

use crate::{Communicator, Element, ElementType, Error, ReduceOp, Result};
use candle_core::{DType, Device, Tensor, WithDType};

macro_rules! by_dtype {
    ($tensor:expr, |$values:ident: Vec<$rust:ident>| $body:expr) => {
        match ElementType::try_from($tensor.dtype())? {
            ElementType::U8 => {
                type $rust = u8;
                let $values = flat::<u8>($tensor)?;
                $body
            }
            ElementType::U32 => {
                type $rust = u32;
                let $values = flat::<u32>($tensor)?;
                $body
            }
            ElementType::I64 => {
                type $rust = i64;
                let $values = flat::<i64>($tensor)?;
                $body
            }
            ElementType::F16 => {
                type $rust = half::f16;
                let $values = flat::<half::f16>($tensor)?;
                $body
            }
            ElementType::BF16 => {
                type $rust = half::bf16;
                let $values = flat::<half::bf16>($tensor)?;
                $body
            }
            ElementType::F32 => {
                type $rust = f32;
                let $values = flat::<f32>($tensor)?;
                $body
            }
            ElementType::F64 => {
                type $rust = f64;
                let $values = flat::<f64>($tensor)?;
                $body
            }
        }
    };
}

/// Collectives on tensors; all ranks give tensors of one dtype, and of one shape unless said otherwise.
///
/// Results are on the input's device and have no history for backward.
#[allow(
    clippy::missing_errors_doc,
    reason = "all share the errors of `Communicator::execute`"
)]
impl<'c> dyn Communicator + 'c {
    /// Returns the reduction of all ranks' tensors.
    pub fn all_reduce_tensor(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        by_dtype!(tensor, |values: Vec<T>| {
            let mut values: Vec<T> = values;
            self.all_reduce(&mut values, op)?;
            rebuild(values, tensor.dims(), tensor.device())
        })
    }

    /// Returns all ranks' tensors joined along dimension 0, in rank order; a scalar counts as one element.
    pub fn all_gather_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        by_dtype!(tensor, |values: Vec<T>| {
            let mut all: Vec<T> = vec![T::default(); values.len() * self.size()];
            self.all_gather(&values, &mut all)?;
            let mut shape = tensor.dims().to_vec();
            match shape.first_mut() {
                Some(first) => *first *= self.size(),
                None => shape.push(self.size()),
            }
            rebuild(all, &shape, tensor.device())
        })
    }

    /// Returns all ranks' rows, joined along dimension 0 in rank order; ranks may have different numbers of rows, or none,
    /// but must agree about the other dimensions.
    pub fn all_gather_rows(&self, tensor: &Tensor) -> Result<Tensor> {
        let shapes = self.all_gather_shapes(tensor)?;
        let row = tensor.dims().get(1..);
        if let Some(other) = shapes.iter().position(|shape| row.is_none() || shape.get(1..) != row) {
            let reason = format!(
                "this rank's tensor has shape {:?}, rank {other}'s {:?}; all ranks must give rows of one shape",
                tensor.dims(),
                shapes[other]
            );
            return Err(Error::Argument {
                rank: self.rank(),
                operation: "all_gather_rows",
                reason,
            });
        }
        let mut shape = tensor.dims().to_vec();
        let of_a_row: usize = shape[1..].iter().product();
        shape[0] = shapes.iter().map(|shape| shape[0]).sum();
        let counts: Vec<usize> = shapes.iter().map(|shape| shape[0] * of_a_row).collect();
        by_dtype!(tensor, |values: Vec<T>| {
            let mut all: Vec<T> = vec![T::default(); counts.iter().sum()];
            self.all_gather_v(&values, &mut all, &counts)?;
            rebuild(all, &shape, tensor.device())
        })
    }

    /// Returns the tensor of `root`; the others' give only shape and dtype.
    pub fn broadcast_tensor(&self, tensor: &Tensor, root: usize) -> Result<Tensor> {
        by_dtype!(tensor, |values: Vec<T>| {
            let mut values: Vec<T> = values;
            self.broadcast(&mut values, root)?;
            rebuild(values, tensor.dims(), tensor.device())
        })
    }

    /// Returns the shapes of all ranks' tensors, in rank order; they may differ in everything but the dtype.
    ///
    /// Ranks whose dtypes differ get [`Error::Argument`].
    pub fn all_gather_shapes(&self, tensor: &Tensor) -> Result<Vec<Vec<usize>>> {
        const MOST: usize = 16;
        let dims = tensor.dims();
        if dims.len() > MOST {
            let reason = format!("{} dimensions; at most {MOST} are supported", dims.len());
            return Err(Error::Argument {
                rank: self.rank(),
                operation: "all_gather_shapes",
                reason,
            });
        }
        let mut own = [0i64; MOST + 2];
        own[0] = ElementType::try_from(tensor.dtype())? as i64;
        own[1] = dims.len() as i64;
        own[2..]
            .iter_mut()
            .zip(dims)
            .for_each(|(slot, dim)| *slot = *dim as i64);
        let mut all = vec![0i64; own.len() * self.size()];
        self.all_gather(&own, &mut all)?;
        let rows: Vec<_> = all.chunks(own.len()).collect();
        if let Some(other) = rows.iter().position(|row| row[0] != own[0]) {
            let reason = format!(
                "this rank's tensor is {}, rank {other}'s is not; all ranks must give one dtype",
                tensor.dtype().as_str()
            );
            return Err(Error::Argument {
                rank: self.rank(),
                operation: "all_gather_shapes",
                reason,
            });
        }
        Ok(rows
            .iter()
            .map(|row| row[2..2 + row[1] as usize].iter().map(|dim| *dim as usize).collect())
            .collect())
    }
}

/// Returns a tensor's elements in row-major order.
fn flat<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    Ok(tensor.detach().to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<T>()?)
}

fn rebuild<T: WithDType + Element>(values: Vec<T>, shape: &[usize], device: &Device) -> Result<Tensor> {
    debug_assert_ne!(T::DTYPE, DType::F8E4M3);
    Ok(Tensor::from_vec(values, shape, device)?)
}
