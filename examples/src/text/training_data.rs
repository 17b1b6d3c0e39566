//! What `--data` names, and what of it is held out for evaluation.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use candle_core::Device;
use sconce_core::Dataset;

use super::documents::read_samples;
use super::example_rows::{ExampleEncoder, ExampleRows, RowShape};
use super::sample::Sample;
use super::token_rows::{DEFAULT_SEQUENCE_LENGTH, TokenBatch, TokenRows};

/// Rows to train on or to evaluate on.
#[derive(Clone, Debug)]
pub enum TrainingData {
    /// A stream of text, or of ready tokens, cut into rows.
    Text(TokenRows),
    /// Questions and answers.
    Examples(ExampleRows),
}

/// Training data and, if any, data held out from it.
#[derive(Debug)]
pub struct Divided {
    /// To train on.
    pub training: TrainingData,
    /// To evaluate on.
    pub held_out: Option<TrainingData>,
}

/// How data is read.
#[derive(Debug)]
pub struct DataOptions<'a> {
    /// What turns samples into token ids; files of ready tokens need none.
    pub examples: Option<ExampleEncoder<'a>>,
    /// The model's number of token ids.
    pub vocab_size: usize,
    /// Tokens of a row; the length of ready rows, or 128 of text and 512 of examples, where that is `None`.
    pub sequence_length: Option<usize>,
    /// Whether rows hold several examples.
    pub packing: bool,
    /// The part of text or samples that is held out, every n-th of them; at least 0 and below 1.
    pub held_out: f64,
}

/// Tokens in a row of examples where the user does not say.
const DEFAULT_EXAMPLE_LENGTH: usize = 512;

impl TrainingData {
    /// Reads a file.
    ///
    /// - `.safetensors`: `tokens` i64 [steps, global batch, sequence] and perhaps `labels`, taken in order.
    /// - `.jsonl`, `.json` or `.parquet`: a [`Sample`] a line or row; they are all text, or none is.
    /// - anything else: plain text.
    ///
    /// # Errors
    /// If the file is not of these forms or holds a token outside the vocabulary, or too little is left on one side.
    pub fn read(path: &Path, options: &DataOptions<'_>) -> Result<Divided> {
        ensure!(
            (0.0..1.0).contains(&options.held_out),
            "the part that is held out is {}, expected at least 0 and below 1",
            options.held_out
        );
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            ensure!(
                options.held_out == 0.0,
                "{}: a file of tokens says what every step reads, so that nothing can be held out from it; give \
                 evaluation data of its own",
                path.display()
            );
            let rows = TokenRows::read(path, None, options.vocab_size, options.sequence_length)?;
            return Ok(Divided {
                training: Self::Text(rows),
                held_out: None,
            });
        }
        let encoder = options.examples.as_ref();
        let encoder =
            encoder.with_context(|| format!("{}: is no file of tokens, and there is no tokenizer", path.display()))?;
        let samples = read_samples(path)?;
        let are_text = samples
            .iter()
            .filter(|sample| matches!(sample, Sample::Text(_)))
            .count();
        ensure!(
            are_text == 0 || are_text == samples.len(),
            "{}: {are_text} of {} samples are plain text and the others questions with answers; expected one kind",
            path.display(),
            samples.len()
        );
        ensure!(!samples.is_empty(), "{}: holds no samples", path.display());
        let divided = match are_text {
            0 => of_examples(samples, encoder, options),
            _ => of_text(samples, encoder, options),
        };
        divided.with_context(|| format!("{}: cannot be used", path.display()))
    }

    /// Says whether rows are those of given steps, in order.
    pub fn rows_per_step(&self) -> Option<usize> {
        match self {
            Self::Text(rows) => rows.rows_per_step,
            Self::Examples(_) => None,
        }
    }

    /// Returns the most tokens of a row.
    pub fn sequence_length(&self) -> usize {
        match self {
            Self::Text(rows) => rows.sequence_length,
            Self::Examples(rows) => rows.sequence_length(),
        }
    }

    /// Says whether these are questions and answers.
    pub fn is_of_examples(&self) -> bool {
        matches!(self, Self::Examples(_))
    }

    /// Returns what should be told of the data.
    pub fn notice(&self) -> Option<String> {
        match self {
            Self::Examples(rows) if rows.left_out > 0 => Some(format!(
                "{} samples have nothing to learn within {} tokens and are left out",
                rows.left_out,
                rows.sequence_length()
            )),
            _ => None,
        }
    }
}

/// Says which numbers are held out: one in every `1 / part`, spread evenly.
fn is_held_out(number: usize, part: f64) -> bool {
    ((number + 1) as f64 * part).floor() > (number as f64 * part).floor()
}

fn of_text(samples: Vec<Sample>, encoder: &ExampleEncoder<'_>, options: &DataOptions<'_>) -> Result<Divided> {
    let texts = samples.into_iter().filter_map(|sample| match sample {
        Sample::Text(text) => Some(text),
        _ => None,
    });
    let tokens = encoder.encoder.encode(&Vec::from_iter(texts))?;
    let rows = TokenRows::cut(tokens, options.sequence_length.unwrap_or(DEFAULT_SEQUENCE_LENGTH))?;
    rows.check_vocabulary(options.vocab_size)
        .context("does not fit the model")?;
    if options.held_out == 0.0 {
        return Ok(Divided {
            training: TrainingData::Text(rows),
            held_out: None,
        });
    }
    let held_out = rows.rows_where(|row| is_held_out(row, options.held_out));
    let training = rows.rows_where(|row| !is_held_out(row, options.held_out));
    check_division(training.rows, held_out.rows, options.held_out)?;
    Ok(Divided {
        training: TrainingData::Text(training),
        held_out: Some(TrainingData::Text(held_out)),
    })
}

fn of_examples(samples: Vec<Sample>, encoder: &ExampleEncoder<'_>, options: &DataOptions<'_>) -> Result<Divided> {
    let shape = RowShape {
        sequence_length: options.sequence_length.unwrap_or(DEFAULT_EXAMPLE_LENGTH),
        packing: options.packing,
    };
    let rows = |samples: &[Sample]| -> Result<TrainingData> {
        let rows = ExampleRows::new(samples, encoder, shape)?;
        for (number, example) in rows.examples().iter().enumerate() {
            let known = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < options.vocab_size);
            if let Some(id) = example.tokens.iter().find(|id| !known(id)) {
                anyhow::bail!(
                    "sample {} holds the token id {id}, and the model knows ids below {}: the tokenizer is another \
                     model's",
                    number + 1,
                    options.vocab_size
                );
            }
        }
        Ok(TrainingData::Examples(rows))
    };
    if options.held_out == 0.0 {
        return Ok(Divided {
            training: rows(&samples)?,
            held_out: None,
        });
    }
    let (mut training, mut held_out) = (Vec::new(), Vec::new());
    for (number, sample) in samples.into_iter().enumerate() {
        match is_held_out(number, options.held_out) {
            true => held_out.push(sample),
            false => training.push(sample),
        }
    }
    check_division(training.len(), held_out.len(), options.held_out)?;
    Ok(Divided {
        training: rows(&training)?,
        held_out: Some(rows(&held_out)?),
    })
}

fn check_division(training: usize, held_out: usize, part: f64) -> Result<()> {
    ensure!(
        training > 0 && held_out > 0,
        "a part of {part} held out leaves {training} rows to train on and {held_out} to evaluate on; give more data or \
         another part"
    );
    Ok(())
}

impl Dataset for TrainingData {
    type Batch = TokenBatch;

    fn len(&self) -> usize {
        match self {
            Self::Text(rows) => rows.len(),
            Self::Examples(rows) => rows.len(),
        }
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<TokenBatch, Box<dyn std::error::Error + Send + Sync>> {
        match self {
            Self::Text(own) => own.batch(rows, device),
            Self::Examples(own) => own.batch(rows, device),
        }
    }
}
