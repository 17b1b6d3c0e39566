//! Questions and answers as rows of token ids: one a row and filled up, or packed several into one.

use anyhow::{Context as _, Result, ensure};
use candle_core::{Device, Tensor};
use sconce_core::Dataset;

use super::prompt_format::PromptFormat;
use super::sample::Sample;
use super::special_tokens::SpecialTokens;
use super::text_encoder::TextEncoder;
use super::token_rows::{IGNORED_LABEL, TokenBatch};

/// One sample as token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// The ids.
    pub tokens: Vec<i64>,
    /// The same where a token is learnt, and -100 elsewhere.
    pub labels: Vec<i64>,
}

/// How long rows are, and what is in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// The most tokens of a row; what is longer is cut off.
    pub sequence_length: usize,
    /// Whether a row holds as many examples as fit, which do not see each other; else one.
    pub packing: bool,
}

/// A data set of examples.
#[derive(Clone, Debug)]
pub struct ExampleRows {
    examples: Vec<Example>,
    /// Numbers of the examples of each row.
    rows: Vec<Vec<usize>>,
    shape: RowShape,
    padding: i64,
    /// How many samples have nothing to learn within the length of a row, and are left out.
    pub left_out: usize,
}

/// What turns samples into examples.
#[derive(Debug)]
pub struct ExampleEncoder<'a> {
    /// How text becomes ids.
    pub encoder: &'a TextEncoder,
    /// How samples become text.
    pub format: &'a PromptFormat,
    /// What ends a text.
    pub special_tokens: &'a SpecialTokens,
}

impl ExampleEncoder<'_> {
    /// Encodes a sample. Behind an answer at the end of the text stands the token that ends texts, which is learnt, unless the
    /// format has written its own.
    ///
    /// # Errors
    /// As [`PromptFormat::write`], or if the tokenizer refuses the text.
    pub fn encode(&self, sample: &Sample) -> Result<Example> {
        let marked = self.format.write(sample)?;
        let (mut tokens, mut learnt) = self.encoder.encode_marked(&marked)?;
        if let Some(end) = self.special_tokens.end.filter(|_| !marked.has_special_tokens) {
            if tokens.last() == Some(&end) {
                // The tokenizer has written it.
                learnt.pop();
            } else {
                tokens.push(end);
            }
            learnt.push(true);
        }
        // Nothing stands before the first token from which it could be told.
        if let Some(first) = learnt.first_mut() {
            *first = false;
        }
        let labels = tokens.iter().zip(&learnt);
        let labels = labels.map(|(token, learnt)| if *learnt { *token } else { IGNORED_LABEL });
        Ok(Example {
            labels: labels.collect(),
            tokens,
        })
    }
}

impl ExampleRows {
    /// Makes rows of samples.
    ///
    /// # Errors
    /// If a sample cannot be encoded, which the error names by its number, or none has anything to learn.
    pub fn new(samples: &[Sample], encoder: &ExampleEncoder<'_>, shape: RowShape) -> Result<Self> {
        ensure!(
            shape.sequence_length >= 2,
            "the sequence length is {}, expected at least 2: one token to predict from, one to predict",
            shape.sequence_length
        );
        let mut examples = Vec::with_capacity(samples.len());
        for (number, sample) in samples.iter().enumerate() {
            let mut example = encoder
                .encode(sample)
                .with_context(|| format!("sample {}", number + 1))?;
            example.tokens.truncate(shape.sequence_length);
            example.labels.truncate(shape.sequence_length);
            if example.labels.iter().any(|label| *label != IGNORED_LABEL) {
                examples.push(example);
            }
        }
        ensure!(
            !examples.is_empty(),
            "none of {} samples has anything to learn within {} tokens; give others or a larger sequence length",
            samples.len(),
            shape.sequence_length
        );
        Ok(Self {
            rows: rows(&examples, shape),
            left_out: samples.len() - examples.len(),
            examples,
            shape,
            padding: encoder.special_tokens.padding,
        })
    }

    /// Returns the length of the rows' most.
    pub fn sequence_length(&self) -> usize {
        self.shape.sequence_length
    }

    /// Returns all examples, in the order of the samples.
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    fn width(&self, row: usize) -> usize {
        self.rows[row]
            .iter()
            .map(|example| self.examples[*example].tokens.len())
            .sum()
    }
}

/// Puts each example into the first of the latest rows that has room for it.
fn rows(examples: &[Example], shape: RowShape) -> Vec<Vec<usize>> {
    /// Rows that are looked at: many more would hardly be fuller.
    const OPEN: usize = 64;
    if !shape.packing {
        return (0..examples.len()).map(|example| vec![example]).collect();
    }
    let (mut rows, mut room) = (Vec::<Vec<usize>>::new(), Vec::<usize>::new());
    for (number, example) in examples.iter().enumerate() {
        let length = example.tokens.len();
        let first = rows.len().saturating_sub(OPEN);
        match (first..rows.len()).find(|row| room[*row] >= length) {
            Some(row) => {
                rows[row].push(number);
                room[row] -= length;
            }
            None => {
                rows.push(vec![number]);
                room.push(shape.sequence_length - length);
            }
        }
    }
    rows
}

impl Dataset for ExampleRows {
    type Batch = TokenBatch;

    fn len(&self) -> usize {
        self.rows.len()
    }

    /// Packed rows are filled up to the sequence length, others to the longest of the batch.
    fn batch(&self, rows: &[usize], device: &Device) -> Result<TokenBatch, Box<dyn std::error::Error + Send + Sync>> {
        let widths = rows.iter().map(|row| self.width(*row));
        let width = match self.shape.packing {
            true => self.shape.sequence_length,
            false => widths.clone().max().unwrap_or(0).max(2),
        };
        let tokens_read = widths.sum();
        let (mut tokens, mut labels, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for (number, row) in rows.iter().enumerate() {
            let begin = number * width;
            for example in self.rows[*row].iter().map(|example| &self.examples[*example]) {
                let start = (tokens.len() - begin) as u32;
                tokens.extend(&example.tokens);
                labels.extend(&example.labels);
                starts.resize(tokens.len(), start);
            }
            let end = tokens.len() - begin;
            tokens.resize(begin + width, self.padding);
            labels.resize(begin + width, IGNORED_LABEL);
            starts.resize(begin + width, end as u32);
        }
        let shape = (rows.len(), width);
        Ok(TokenBatch {
            tokens: Tensor::from_vec(tokens, shape, device)?,
            labels: Tensor::from_vec(labels, shape, device)?,
            // What fills up comes last, so that a row of one example needs no mask.
            document_starts: self.shape.packing.then_some(starts),
            tokens_read,
        })
    }
}
