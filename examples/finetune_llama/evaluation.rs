//! The loss on held-out data, and when training ends because it no longer falls.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use sconce_core::{Accelerator, PreparedLoader};
use sconce_examples::models::{Llama, Reading};
use sconce_examples::text::TrainingData;
use serde::{Deserialize, Serialize};

/// What an evaluation found.
pub(crate) struct Evaluation {
    /// The mean over all tokens that count, of all rows, each once.
    pub(crate) loss: f64,
    pub(crate) tokens: u64,
}

impl Evaluation {
    /// Returns among how many equally likely tokens the model would be as uncertain.
    pub(crate) fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Evaluates on held-out data; called by all ranks, which share the work.
pub(crate) fn evaluate(
    acc: &dyn Accelerator,
    model: &Llama,
    held_out: &mut PreparedLoader<TrainingData>,
) -> Result<Evaluation> {
    let (mut sum, mut count) = (0.0, 0.0);
    for batch in held_out {
        let batch = batch?;
        let reading = Reading {
            document_starts: batch.document_starts,
            ..Reading::default()
        };
        let losses = acc.autocast(|| model.row_losses(&batch.tokens, &batch.labels, &reading))?;
        let (sums, counts) = acc.gather_for_metrics(&losses)?;
        let total = |rows: &Tensor| -> Result<f64> { Ok(rows.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?) };
        sum += total(&sums)?;
        count += total(&counts)?;
    }
    ensure!(
        count > 0.0,
        "the held-out rows have no token to predict; give others or longer rows"
    );
    Ok(Evaluation {
        loss: sum / count,
        tokens: count as u64,
    })
}

/// Ends training when the loss on held-out data has not fallen for some evaluations. Its state belongs to checkpoints.
pub(crate) struct EarlyStopping {
    patience: Option<u64>,
    threshold: f64,
    state: Arc<Mutex<Progress>>,
}

/// How evaluations have gone so far.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Progress {
    best: Option<f64>,
    evaluations_since: u64,
}

impl EarlyStopping {
    pub(crate) fn new(patience: Option<u64>, threshold: f64) -> Self {
        Self {
            patience,
            threshold,
            state: Arc::default(),
        }
    }

    pub(crate) fn state(&self) -> Arc<Mutex<Progress>> {
        Arc::clone(&self.state)
    }

    /// Takes note of an evaluation.
    pub(crate) fn see(&self, loss: f64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.best.is_none_or(|best| loss < best - self.threshold) {
            *state = Progress {
                best: Some(loss),
                evaluations_since: 0,
            };
        } else {
            state.evaluations_since += 1;
        }
    }

    /// Says whether training is over.
    pub(crate) fn is_over(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.patience
            .is_some_and(|patience| state.evaluations_since >= patience)
    }
}
