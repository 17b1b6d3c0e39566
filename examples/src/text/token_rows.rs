//! Rows of token ids of one length: what a training program puts into batches.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor};
use sconce_core::Dataset;

use super::TextEncoder;
use super::documents::read_samples;
use super::sample::Sample;
use super::token_file::read_token_file;

/// Tokens in a row of text where the user does not say.
pub const DEFAULT_SEQUENCE_LENGTH: usize = 128;

/// Label of a position that does not count in the loss.
pub(super) const IGNORED_LABEL: i64 = -100;

/// Token ids as `rows` rows of `sequence_length`, row after row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRows {
    /// Token ids, `rows` * `sequence_length`.
    pub tokens: Vec<i64>,
    /// Labels in the same layout, -100 where a position does not count; `None` where the labels are the tokens.
    pub labels: Option<Vec<i64>>,
    /// Tokens in a row.
    pub sequence_length: usize,
    /// Number of rows.
    pub rows: usize,
    /// Rows that belong to one optimizer step, where the file says so.
    pub rows_per_step: Option<usize>,
}

/// A batch of rows.
#[derive(Clone, Debug)]
pub struct TokenBatch {
    /// Token ids, i64 [batch, sequence].
    pub tokens: Tensor,
    /// Labels, i64 [batch, sequence], -100 where a position does not count.
    pub labels: Tensor,
    /// Where rows hold several documents: for each position, row after row, where its document begins in the row.
    pub document_starts: Option<Vec<u32>>,
    /// How many of the tokens are read, those not counted that fill up rows.
    pub tokens_read: usize,
}

impl Dataset for TokenRows {
    type Batch = TokenBatch;

    fn len(&self) -> usize {
        self.rows
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<TokenBatch, Box<dyn std::error::Error + Send + Sync>> {
        let shape = (rows.len(), self.sequence_length);
        let tokens: Vec<i64> = rows.iter().flat_map(|row| self.row(*row)).copied().collect();
        let labels: Vec<i64> = rows.iter().flat_map(|row| self.row_labels(*row)).copied().collect();
        Ok(TokenBatch {
            tokens: Tensor::from_vec(tokens, shape, device)?,
            labels: Tensor::from_vec(labels, shape, device)?,
            document_starts: None,
            tokens_read: rows.len() * self.sequence_length,
        })
    }
}

impl TokenRows {
    /// Takes every row of a text whose number `chosen` holds.
    pub(super) fn rows_where(&self, chosen: impl Fn(usize) -> bool) -> Self {
        let numbers = Vec::from_iter((0..self.rows).filter(|row| chosen(*row)));
        let of_rows = |values: &Vec<i64>| {
            numbers
                .iter()
                .flat_map(|row| &values[self.range(*row)])
                .copied()
                .collect()
        };
        Self {
            tokens: of_rows(&self.tokens),
            labels: self.labels.as_ref().map(of_rows),
            rows: numbers.len(),
            ..*self
        }
    }

    /// Reads training data from a file; what follows `path` describes the model.
    ///
    /// - `.safetensors`: `tokens` i64 [steps, global batch, sequence] and perhaps `labels`, taken in order.
    /// - `.jsonl` or `.json`: JSON lines, the text in the field `text`.
    /// - anything else: plain text.
    ///
    /// Text is encoded with `tokenizer` (a `tokenizer.json`) or as bytes, joined, and cut into rows of
    /// `sequence_length` or else [`DEFAULT_SEQUENCE_LENGTH`] tokens; what does not fill the last row is left out, as in
    /// transformers' `run_clm.py`.
    ///
    /// # Errors
    /// If the file is not of that form, is too short for one row, has another row length than asked for, or holds a
    /// token outside the vocabulary of `vocab_size` ids.
    pub fn read(
        path: &Path,
        tokenizer: Option<&Path>,
        vocab_size: usize,
        sequence_length: Option<usize>,
    ) -> Result<Self> {
        let rows = if path.extension().is_some_and(|extension| extension == "safetensors") {
            let rows = read_token_file(path)?;
            ensure!(
                sequence_length.is_none_or(|asked| asked == rows.sequence_length),
                "{}: has rows of {} tokens, and a sequence length of {} was asked for; leave that out for a file of \
                 tokens",
                path.display(),
                rows.sequence_length,
                sequence_length.unwrap_or_default()
            );
            rows
        } else {
            let documents = read_samples(path)?.into_iter().map(text_of).collect::<Result<Vec<_>>>();
            let documents = documents.with_context(|| path.display().to_string())?;
            let tokens = TextEncoder::new(tokenizer, vocab_size)
                .and_then(|encoder| encoder.encode(&documents))
                .with_context(|| format!("{}: cannot be turned into tokens", path.display()))?;
            Self::cut(tokens, sequence_length.unwrap_or(DEFAULT_SEQUENCE_LENGTH))
                .with_context(|| format!("{}: cannot be cut into rows", path.display()))?
        };
        rows.check_vocabulary(vocab_size)
            .with_context(|| format!("{}: does not fit the model", path.display()))?;
        Ok(rows)
    }

    /// Token ids of one row.
    ///
    /// # Panics
    /// If `index` is not below `rows`.
    pub fn row(&self, index: usize) -> &[i64] {
        &self.tokens[self.range(index)]
    }

    /// Labels of one row: the tokens themselves where there are no others.
    ///
    /// # Panics
    /// If `index` is not below `rows`.
    pub fn row_labels(&self, index: usize) -> &[i64] {
        &self.labels.as_ref().unwrap_or(&self.tokens)[self.range(index)]
    }

    fn range(&self, index: usize) -> Range<usize> {
        index * self.sequence_length..(index + 1) * self.sequence_length
    }

    /// Cuts a stream of tokens into rows.
    ///
    /// # Errors
    /// If it is too short for one.
    pub(super) fn cut(mut tokens: Vec<i64>, sequence_length: usize) -> Result<Self> {
        ensure!(
            sequence_length >= 2,
            "the sequence length is {sequence_length}, expected at least 2: one token to predict from, one to predict"
        );
        let rows = tokens.len() / sequence_length;
        ensure!(
            rows > 0,
            "the text has {} tokens, expected at least one row of {sequence_length}; give a longer text or a smaller \
             sequence length",
            tokens.len()
        );
        tokens.truncate(rows * sequence_length);
        Ok(Self {
            tokens,
            labels: None,
            sequence_length,
            rows,
            rows_per_step: None,
        })
    }

    /// An id outside the vocabulary would be a read out of bounds in the embedding, far from the file at fault.
    pub(super) fn check_vocabulary(&self, vocab_size: usize) -> Result<()> {
        let known = |id: i64| usize::try_from(id).is_ok_and(|id| id < vocab_size);
        for index in 0..self.rows {
            if let Some(id) = self.row(index).iter().find(|id| !known(**id)) {
                anyhow::bail!(
                    "row {index} holds the token id {id}, expected ids from 0 to {}",
                    vocab_size - 1
                );
            }
            if let Some(id) = self
                .row_labels(index)
                .iter()
                .find(|id| **id != IGNORED_LABEL && !known(**id))
            {
                anyhow::bail!(
                    "row {index} holds the label {id}, expected {IGNORED_LABEL} or ids from 0 to {}",
                    vocab_size - 1
                );
            }
        }
        Ok(())
    }
}

fn text_of(sample: Sample) -> Result<String> {
    match sample {
        Sample::Text(text) => Ok(text),
        _ => anyhow::bail!("holds questions and answers, expected text; read it as training data"),
    }
}
