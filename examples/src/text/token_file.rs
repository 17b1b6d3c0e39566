//! Reads a safetensors file of ready tokens: the exact batches of a run, in order.
//!
//! Such a file fixes which rows each step sees, so that two programs can be compared step by step.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors};

use super::TokenRows;

/// Reads `tokens` i64 [steps, global batch, sequence] and, where present, `labels` of the same shape, as
/// steps * global batch rows.
///
/// # Errors
/// If the file is truncated, malformed, or holds anything else. Every error names the file.
pub(super) fn read_token_file(path: &Path) -> Result<TokenRows> {
    let read = || -> Result<TokenRows> {
        let bytes = fs::read(path)?;
        let file = SafeTensors::deserialize(&bytes).context("is not a complete safetensors file")?;
        if let Some(other) = file
            .names()
            .into_iter()
            .filter(|name| !["tokens", "labels"].contains(name))
            .min()
        {
            bail!("holds a tensor `{other}`, expected `tokens` and perhaps `labels`");
        }
        let (tokens, shape) = read_i64(&file, "tokens")?;
        let labels = match file.names().contains(&"labels") {
            true => {
                let (labels, labels_shape) = read_i64(&file, "labels")?;
                ensure!(
                    labels_shape == shape,
                    "`labels` has the shape {labels_shape:?}, expected that of `tokens`, {shape:?}"
                );
                Some(labels)
            }
            false => None,
        };
        let [steps, global_batch, sequence_length] = shape;
        Ok(TokenRows {
            tokens,
            labels,
            sequence_length,
            rows: steps * global_batch,
            rows_per_step: Some(global_batch),
        })
    };
    read().with_context(|| format!("{}: cannot be used as a file of tokens", path.display()))
}

fn read_i64(file: &SafeTensors, name: &str) -> Result<(Vec<i64>, [usize; 3])> {
    let Ok(tensor) = file.tensor(name) else {
        bail!("has no tensor `{name}`, expected it as i64 [steps, global batch, sequence]");
    };
    let shape = match <[usize; 3]>::try_from(tensor.shape()) {
        Ok(shape) if tensor.dtype() == Dtype::I64 && !shape.contains(&0) => shape,
        _ => bail!(
            "`{name}` is {} {:?}, expected I64 [steps, global batch, sequence], none of them 0",
            tensor.dtype(),
            tensor.shape()
        ),
    };
    let (numbers, _) = tensor.data().as_chunks::<8>();
    Ok((numbers.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(), shape))
}
