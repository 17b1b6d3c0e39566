//! What is told of a run.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressStyle};
use sconce_core::Accelerator;
use sconce_examples::report;

use crate::evaluation::Evaluation;

/// The numbers of an optimizer step.
pub(crate) struct StepValues {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) lr: f64,
    /// Tokens that all ranks have read.
    pub(crate) tokens: u64,
}

/// Tells the user of the run, on rank 0: a progress bar on a terminal, lines elsewhere, JSON lines in a file.
pub(crate) struct Log {
    is_main: bool,
    bar: ProgressBar,
    metrics: Option<File>,
    steps: u64,
    every: u64,
    last: Instant,
    /// Time and tokens since the last printed line.
    since_line: (Duration, u64),
}

impl Log {
    pub(crate) fn new(acc: &dyn Accelerator, metrics: Option<File>, steps: u64, every: u64) -> Self {
        let is_main = acc.is_main_process();
        let bar = if is_main && std::io::stderr().is_terminal() {
            ProgressBar::new(steps)
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed}<{eta} {msg}") {
            bar.set_style(style);
        }
        let start = (Duration::ZERO, 0);
        Self {
            is_main,
            bar,
            metrics,
            steps,
            every,
            last: Instant::now(),
            since_line: start,
        }
    }

    /// Tells of an optimizer step, in which all ranks have read `tokens`.
    pub(crate) fn step(&mut self, acc: &dyn Accelerator, step: u64, values: &StepValues) -> Result<()> {
        let &StepValues {
            loss,
            grad_norm,
            lr,
            tokens,
        } = values;
        let took = self.last.elapsed();
        self.last = Instant::now();
        let tokens_per_second = tokens as f64 / took.as_secs_f64();
        let memory = acc.memory();
        let held = memory.parameters + memory.masters + memory.gradients + memory.optimizer_state + memory.buffers;
        let values = [
            ("loss", loss),
            ("grad_norm", grad_norm),
            ("lr", lr),
            ("tokens_per_second", tokens_per_second),
            ("memory_mib", held as f64 / f64::from(1 << 20)),
        ];
        acc.log(&values, step)?;
        report::tell_of_trackers(acc);
        self.write(&serde_json::json!({
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": tokens_per_second,
        }))?;
        if !self.is_main {
            return Ok(());
        }
        self.since_line = (self.since_line.0 + took, self.since_line.1 + tokens);
        self.bar.set_position(step + 1);
        if step.is_multiple_of(self.every) || step + 1 == self.steps {
            let tokens = self.since_line.1 as f64 / self.since_line.0.as_secs_f64();
            let line = format!(
                "step {step:>4}/{}  loss {loss:.4}  grad_norm {grad_norm:.3}  lr {lr:.2e}  {tokens:.0} tokens/s",
                self.steps
            );
            self.since_line = (Duration::ZERO, 0);
            self.print(&line);
        }
        Ok(())
    }

    /// Tells of an evaluation after a step.
    pub(crate) fn evaluation(&mut self, acc: &dyn Accelerator, step: u64, evaluation: &Evaluation) -> Result<()> {
        let (loss, perplexity) = (evaluation.loss, evaluation.perplexity());
        acc.log(&[("eval_loss", loss), ("perplexity", perplexity)], step)?;
        self.write(&serde_json::json!({"step": step, "eval_loss": loss, "perplexity": perplexity}))?;
        self.print(&format!(
            "step {step:>4}/{}  eval_loss {loss:.4}  perplexity {perplexity:.3}  over {} tokens",
            self.steps, evaluation.tokens
        ));
        // What an evaluation takes is no time of training.
        self.last = Instant::now();
        Ok(())
    }

    /// Tells what the model answers after a step.
    pub(crate) fn sample(&mut self, step: u64, prompt: &str, answer: &str) -> Result<()> {
        self.write(&serde_json::json!({"step": step, "prompt": prompt, "answer": answer}))?;
        self.print(&format!("step {step:>4}/{}  {prompt:?} -> {answer:?}", self.steps));
        self.last = Instant::now();
        Ok(())
    }

    fn write(&mut self, line: &serde_json::Value) -> Result<()> {
        match &mut self.metrics {
            Some(file) => writeln!(file, "{line}").context("writing --metrics_out"),
            None => Ok(()),
        }
    }

    /// Prints a line, on rank 0, above the bar if there is one.
    fn print(&self, line: &str) {
        if !self.is_main {
            return;
        }
        if self.bar.is_hidden() {
            // Whoever read it may be gone, which is no reason to stop.
            let _ = writeln!(std::io::stdout(), "{line}");
        } else {
            self.bar.println(line);
        }
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
